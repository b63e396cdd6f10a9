import numpy as np
import pytest

from pfedbayes.data.splits import SplitPurpose, folds_of

STREAM = SplitPurpose.FOLDS.stream(3)


@pytest.mark.parametrize(("size", "count"), [(1, 5), (4, 5), (5, 5), (23, 5), (100, 7)])
def test_folds_are_of_nearly_equal_size(size, count):
    fold = folds_of(None, size, count, STREAM, seed=1)
    sizes = np.bincount(fold, minlength=count)
    assert fold.shape == (size,)
    assert len(sizes) == count
    assert sizes.max() - sizes.min() <= 1


def test_folds_have_nearly_equal_shares_of_every_label():
    labels = np.repeat([0, 1, 2], [31, 8, 3])
    labels = labels[np.random.default_rng(0).permutation(len(labels))]
    fold = folds_of(labels, len(labels), 5, STREAM, seed=1)
    for label in range(3):
        shares = np.bincount(fold[labels == label], minlength=5)
        assert shares.max() - shares.min() <= 1
    sizes = np.bincount(fold, minlength=5)
    assert sizes.max() - sizes.min() <= 1


def test_folds_depend_on_seed_and_client_alone():
    first = folds_of(None, 40, 5, STREAM, seed=1)
    assert (folds_of(None, 40, 5, STREAM, seed=1) == first).all()
    assert (folds_of(None, 40, 5, STREAM, seed=2) != first).any()
    assert (folds_of(None, 40, 5, SplitPurpose.FOLDS.stream(4), seed=1) != first).any()


def test_single_rows_of_clients_fall_into_every_fold():
    found = {int(folds_of(None, 1, 5, SplitPurpose.FOLDS.stream(i), seed=1)[0]) for i in range(60)}
    assert found == set(range(5))


def test_folds_mix_the_order_of_rows():
    fold = folds_of(None, 200, 2, STREAM, seed=1)
    runs = np.count_nonzero(np.diff(fold)) + 1
    assert 70 < runs < 130  # of random labels: 100.5, with a standard deviation of 7
