"""The stream of batches: complete, keyed, and the same however it is cut."""

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pfedbayes.data import positions

sizes = st.integers(1, 40)
starts = st.integers(0, 500)
counts = st.integers(0, 200)


@given(seed=st.integers(0, 2**63 - 1), client=st.integers(0, 2**32 - 1), size=sizes, epoch=st.integers(0, 10**9))
def test_every_epoch_is_a_permutation(seed: int, client: int, size: int, epoch: int) -> None:
    assert sorted(positions(seed, client, size, epoch * size, size).tolist()) == list(range(size))


@given(size=sizes, start=starts, counts=st.lists(counts, max_size=5))
def test_the_stream_does_not_depend_on_how_it_is_cut(size: int, start: int, counts: list[int]) -> None:
    whole = positions(3, 7, size, start, sum(counts))
    cursors = np.cumsum([start, *counts])
    pieces = [positions(3, 7, size, int(cursor), count) for cursor, count in zip(cursors, counts, strict=False)]
    assert whole.dtype == np.int64
    assert np.concatenate([np.empty(0, np.int64), *pieces]).tolist() == whole.tolist()


def test_a_batch_across_the_end_of_an_epoch_is_full() -> None:
    stream = positions(1, 0, 5, 0, 15)
    batch = positions(1, 0, 5, 3, 4)
    assert batch.tolist() == [*stream[3:5], *stream[5:7]]


def test_seed_client_and_epoch_each_change_the_order() -> None:
    orders = {
        tuple(positions(seed, client, 50, 50 * epoch, 50).tolist())
        for seed in range(3)
        for client in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 27


def test_every_example_is_equally_likely_at_every_place() -> None:
    """2,000 permutations of 5: each (place, example) count is binomial(2000, 1/5), mean 400 and deviation 17.9."""
    table = positions(11, 4, 5, 0, 10_000).reshape(-1, 5)
    counts = np.stack([np.bincount(table[:, place], minlength=5) for place in range(5)])
    assert np.abs(counts - 400).max() < 5 * 17.9


def test_the_order_is_the_same_on_every_machine() -> None:
    """Derived independently: the ranks of the upper halves of Philox's raw words at this key and epoch 2's counter."""
    key, counts_each = (9 << 64) | 5, 2  # 7 examples need two counts of four words
    words = np.random.Philox(key=key, counter=2 * counts_each).random_raw(7)
    assert positions(5, 9, 7, 14, 7).tolist() == sorted(range(7), key=lambda place: int(words[place]) >> 32)


def test_hundreds_of_permutations_cost_little() -> None:
    """About 5 µs each for 250 examples; the bound leaves room for a busy machine."""
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        for client in range(50):
            positions(1, client, 250, 0, 2000)
        best = min(best, time.perf_counter() - begin)
    assert best / (50 * 8) < 50e-6
