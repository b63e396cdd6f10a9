"""Dealing the pool to the clients: the paper's protocol and the other rules."""

import dataclasses
import hashlib
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfedbayes.data import DataConfig, Pool, Shards, load_shards, partition
from pfedbayes.data.partition import client_labels
from pfedbayes.errors import UserError

SIZES = ("small", "medium", "large")
COUNTS = {
    "small": (50, 950),
    "medium": (200, 800),
    "large": (900, 300),
}  # the paper: per client and label, (train, test)


def toy_pool(per_class: int = 60, classes: int = 10, seed: int = 0) -> Pool:
    """Images of 2 x 2 random pixels, classes mixed in the file order."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(classes), per_class))
    x = rng.integers(0, 256, (len(y), 1, 2, 2), dtype=np.uint8)
    return Pool(torch.from_numpy(x), torch.from_numpy(y), classes, len(y))


def parts(shards: Shards) -> list[Tensor]:
    return [*shards.train, *shards.test, *shards.validation]


def assert_disjoint(shards: Shards) -> None:
    rows = torch.cat(parts(shards))
    assert len(rows.unique()) == len(rows)


def same(a: Shards, b: Shards) -> bool:
    return all(torch.equal(one, other) for one, other in zip(parts(a), parts(b), strict=True))


def images(shards: Shards, rows: Tensor) -> Counter[tuple[bytes, int]]:
    """What a client holds, whatever the rows are called."""
    return Counter((x.tobytes(), int(y)) for x, y in zip(shards.x[rows].numpy(), shards.y[rows].numpy(), strict=True))


@pytest.fixture(scope="module")
def paper(mnist: Pool) -> dict[str, Shards]:
    return {size: partition(mnist, DataConfig(size=size)) for size in SIZES}


class TestStratified:
    @pytest.mark.parametrize("size", SIZES)
    def test_exact_counts_of_five_labels(self, size: str, paper: dict[str, Shards]) -> None:
        shards = paper[size]
        train, test = COUNTS[size]
        assert len(shards.train) == 10
        for i in range(10):
            own = range(5) if i % 2 == 0 else range(5, 10)
            assert Counter(shards.y[shards.train[i]].tolist()) == dict.fromkeys(own, train)
            assert Counter(shards.y[shards.test[i]].tolist()) == dict.fromkeys(own, test)
            assert len(shards.validation[i]) == 0

    @pytest.mark.parametrize("size", SIZES)
    def test_nobody_shares_an_image(self, size: str, paper: dict[str, Shards]) -> None:
        assert_disjoint(paper[size])

    def test_even_and_odd_clients_are_complementary(self, paper: dict[str, Shards]) -> None:
        held = [set(paper["small"].y[rows].tolist()) for rows in paper["small"].train]
        assert all(held[i] | held[i + 1] == set(range(10)) and not held[i] & held[i + 1] for i in range(0, 10, 2))

    def test_training_sets_are_nested(self, paper: dict[str, Shards]) -> None:
        for small, medium, large in zip(*(paper[size].train for size in SIZES), strict=True):
            assert set(small.tolist()) < set(medium.tolist()) < set(large.tolist())

    def test_images_stay_bytes(self, paper: dict[str, Shards], mnist: Pool) -> None:
        assert paper["small"].x is mnist.x
        assert paper["small"].x.dtype == torch.uint8

    def test_train_and_test_files_are_pooled(self, paper: dict[str, Shards], mnist: Pool) -> None:
        """The 6,000 images of digit 5 that large needs are more than the training file has."""
        official = mnist.y[: mnist.official_train_count].bincount()
        assert int(official[5]) == 5421
        rows = torch.cat([*paper["large"].train, *paper["large"].test])
        assert int((mnist.y[rows] == 5).sum()) == 6000

    def test_same_seed_same_rows_and_another_seed_others(self, paper: dict[str, Shards], mnist: Pool) -> None:
        assert same(paper["small"], partition(mnist, DataConfig(size="small")))
        other = partition(mnist, DataConfig(size="small", seed=2))
        for mine, others in zip(paper["small"].train, other.train, strict=True):
            assert len(set(mine.tolist()) & set(others.tolist())) < 50  # of 250; about 2 are expected

    def test_training_order_is_mixed(self, paper: dict[str, Shards]) -> None:
        labels = paper["small"].y[paper["small"].train[0]]
        assert not torch.equal(labels, labels.sort().values)

    @settings(max_examples=20, deadline=None)
    @given(order=st.randoms(use_true_random=False), labels=st.sampled_from(["two-block", "random", "dirichlet", "iid"]))
    def test_the_order_of_the_pool_does_not_matter(self, order: Any, labels: Any) -> None:
        pool = toy_pool(per_class=20)
        rows = list(range(len(pool.x)))
        order.shuffle(rows)
        shuffled = Pool(pool.x[rows], pool.y[rows], pool.num_classes, pool.official_train_count)
        counts = {"train_per_label": 2, "test_per_label": 1} if labels in ("two-block", "random") else {}
        config = DataConfig(labels=labels, clients=10, validation=0.3, **counts)
        one, other = partition(pool, config), partition(shuffled, config)
        for mine, others in zip(parts(one), parts(other), strict=True):
            assert images(one, mine) == images(other, others)

    def test_the_order_of_mnist_does_not_matter(self, paper: dict[str, Shards], mnist: Pool) -> None:
        rows = torch.from_numpy(np.random.default_rng(3).permutation(len(mnist.x)))
        shuffled = Pool(mnist.x[rows], mnist.y[rows], mnist.num_classes, mnist.official_train_count)
        again = partition(shuffled, DataConfig(size="small"))
        for mine, others in zip(paper["small"].train, again.train, strict=True):
            assert torch.equal(paper["small"].x[mine], again.x[others])

    @pytest.mark.parametrize("size", SIZES)
    def test_cifar_counts(self, size: str) -> None:
        """20 clients, half the counts: 10 clients share a class of 6,000, so large uses it up exactly."""
        pool = toy_pool(per_class=6000)
        shards = partition(pool, DataConfig(name="cifar10", size=size))
        assert len(shards.train) == 20
        train, test = (count // 2 for count in COUNTS[size])
        for rows, count in [(rows, train) for rows in shards.train] + [(rows, test) for rows in shards.test]:
            assert list(Counter(shards.y[rows].tolist()).values()) == [count] * 5
        assert_disjoint(shards)

    @settings(max_examples=40, deadline=None)
    @given(
        clients=st.integers(1, 8),
        labels_per_client=st.integers(1, 10),
        train=st.integers(1, 4),
        test=st.integers(0, 3),
        labels=st.sampled_from(["two-block", "sliding", "random"]),
        seed=st.integers(0, 2**63 - 1),
    )
    def test_any_counts(
        self, clients: int, labels_per_client: int, train: int, test: int, labels: Any, seed: int
    ) -> None:
        config = DataConfig(
            clients=clients,
            labels=labels,
            labels_per_client=labels_per_client,
            train_per_label=train,
            test_per_label=test,
            seed=seed,
        )
        shards = partition(toy_pool(), config)
        assert len(shards.names) == clients
        for own_train, own_test in zip(shards.train, shards.test, strict=True):
            counts = Counter(shards.y[own_train].tolist())
            assert len(counts) == labels_per_client
            assert set(counts.values()) == {train}
            assert Counter(shards.y[own_test].tolist()) == {label: test for label in counts if test}
        assert_disjoint(shards)

    def test_more_images_than_there_are(self, mnist: Pool) -> None:
        """Eleven clients: six hold class 0, and 6 x 1200 = 7200 > 6903."""
        with pytest.raises(UserError, match="class 0 has 6903 images, but 6 clients with 1200 each need 7200"):
            partition(mnist, DataConfig(clients=11))

    def test_more_labels_than_classes(self) -> None:
        with pytest.raises(UserError, match="labels_per_client = 11, but the data have 10 classes"):
            partition(toy_pool(), DataConfig(labels_per_client=11))


class TestLabels:
    def table(self, **fields: Any) -> list[list[int]]:
        return client_labels(DataConfig(**fields), 10).tolist()

    def test_two_block(self) -> None:
        assert self.table(clients=3) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
        assert self.table(clients=3, labels_per_client=4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]

    def test_sliding(self) -> None:
        assert self.table(clients=2, labels="sliding", labels_per_client=3) == [[0, 1, 2], [1, 2, 3]]
        assert self.table(clients=10, labels="sliding", labels_per_client=2)[9] == [9, 0]

    @given(clients=st.integers(1, 20), k=st.integers(1, 10), seed=st.integers(0, 1000))
    def test_random_is_without_repeats_and_in_even_demand(self, clients: int, k: int, seed: int) -> None:
        table = client_labels(DataConfig(clients=clients, labels="random", labels_per_client=k, seed=seed), 10)
        assert all(len(set(own)) == k for own in table.tolist())
        holders = np.bincount(table.reshape(-1), minlength=10)
        assert holders.max() - holders.min() <= 1

    def test_random_depends_on_the_seed(self) -> None:
        assert self.table(labels="random", seed=1) != self.table(labels="random", seed=2)

    def test_random_labels_fit_the_papers_sizes(self, mnist: Pool) -> None:
        assert_disjoint(partition(mnist, DataConfig(labels="random", size="large")))


class TestShuffle:
    def test_class_shares_of_the_probable_original(self, mnist: Pool) -> None:
        """Seed 1, medium: the class shares of the pooled test sets in per cent, as the public generator has them."""
        shards = partition(mnist, DataConfig(size="medium", split="shuffle"))
        labels = shards.y[torch.cat(shards.test)]
        shares = (100 * labels.bincount() / len(labels)).tolist()
        expected = [10.0775, 9.9375, 9.9025, 10.0025, 10.08, 9.90, 10.05, 10.0725, 10.03, 9.9475]
        assert shares == pytest.approx(expected, abs=1e-5)
        assert [len(rows) for rows in shards.train] == [1000] * 10
        assert [len(rows) for rows in shards.test] == [4000] * 10
        assert_disjoint(shards)

    def test_blocks_are_consecutive_in_the_file(self, mnist: Pool) -> None:
        shards = partition(mnist, DataConfig(size="medium", split="shuffle"))
        zeros = torch.nonzero(mnist.y == 0)[:, 0]
        for position, i in enumerate(range(0, 10, 2)):
            rows = torch.cat([shards.train[i], shards.test[i]])
            own = rows[mnist.y[rows] == 0].sort().values
            assert torch.equal(own, zeros[1000 * position : 1000 * (position + 1)])

    def test_small_and_medium_never_touch_the_test_file(self, mnist: Pool) -> None:
        for size in ("small", "medium"):
            shards = partition(mnist, DataConfig(size=size, split="shuffle"))
            assert max(int(rows.max()) for rows in parts(shards) if len(rows)) < mnist.official_train_count


class TestOverlap:
    """Every client draws from all images, and so one is tested on what others train on."""

    def test_a_client_has_the_papers_numbers_and_no_image_twice(self, mnist: Pool) -> None:
        shards = partition(mnist, DataConfig(size="large", split="overlap"))
        for i in range(10):
            own = range(5 * (i % 2), 5 * (i % 2) + 5)
            assert Counter(shards.y[shards.train[i]].tolist()) == dict.fromkeys(own, 900)
            assert Counter(shards.y[shards.test[i]].tolist()) == dict.fromkeys(own, 300)
            assert len(torch.cat([shards.train[i], shards.test[i]]).unique()) == 6000

    def test_as_many_tests_as_chance_says_are_in_the_training_of_others(self, mnist: Pool) -> None:
        """A test image of a label with m images is in none of four other clients' n with (1 - n / m) ** 4."""
        shards = partition(mnist, DataConfig(size="large", split="overlap"))
        trained = torch.cat(shards.train)
        for label, size in enumerate(mnist.y.bincount().tolist()):
            tests = torch.cat([rows[shards.y[rows] == label] for rows in shards.test])
            share = float(torch.isin(tests, trained).float().mean())
            assert share == pytest.approx(1 - (1 - 900 / size) ** 4, abs=0.04)

    def test_depends_on_the_seed_and_not_on_other_clients(self) -> None:
        few = DataConfig(clients=4, train_per_label=3, test_per_label=3, split="overlap")
        many = dataclasses.replace(few, clients=20)  # 10 clients of a label and 6 images each: as many as there are
        one, other = partition(toy_pool(), few), partition(toy_pool(), many)
        assert all(torch.equal(a, b) for a, b in zip(one.train, other.train[:4], strict=True))
        assert not same(one, partition(toy_pool(), dataclasses.replace(few, seed=2)))

    def test_more_images_than_there_are(self) -> None:
        partition(toy_pool(), DataConfig(clients=1, train_per_label=30, test_per_label=30, split="overlap"))
        with pytest.raises(UserError, match="class 0 has 60 images, but a client needs 61"):
            partition(toy_pool(), DataConfig(clients=1, train_per_label=31, test_per_label=30, split="overlap"))


class TestIidAndDirichlet:
    def test_iid_deals_everything_evenly(self) -> None:
        shards = partition(toy_pool(), DataConfig(labels="iid", clients=7, test_fraction=0.25))
        sizes = [len(a) + len(b) for a, b in zip(shards.train, shards.test, strict=True)]
        assert sum(sizes) == 600
        assert max(sizes) - min(sizes) == 1
        assert [len(rows) for rows in shards.test] == [22 if size == 86 else 21 for size in sizes]  # 21.5 and 21.25
        assert_disjoint(shards)

    def test_dirichlet_gives_unequal_sizes_and_mixtures(self) -> None:
        shards = partition(toy_pool(), DataConfig(labels="dirichlet", clients=8, alpha=0.3))
        sizes = [len(a) + len(b) for a, b in zip(shards.train, shards.test, strict=True)]
        assert sum(sizes) == 600
        assert len(set(sizes)) > 4
        assert_disjoint(shards)

    def test_alpha_goes_from_one_label_to_all(self) -> None:
        def largest_share(alpha: float) -> float:
            shards = partition(toy_pool(), DataConfig(labels="dirichlet", clients=5, alpha=alpha))
            counts = [shards.y[rows].bincount(minlength=10) for rows in shards.train]
            return float(torch.stack([count.max() / count.sum() for count in counts]).mean())

        assert largest_share(0.05) > 0.3
        assert largest_share(100.0) < 0.2

    @settings(max_examples=40, deadline=None)
    @given(
        clients=st.integers(1, 300),
        alpha=st.floats(0.001, 100),
        labels=st.sampled_from(["iid", "dirichlet"]),
        test_fraction=st.floats(0.01, 0.99),
        validation=st.sampled_from([0.0, 0.1, 0.9]),
        seed=st.integers(0, 100),
    )
    def test_everyone_can_train_and_test(
        self, clients: int, alpha: float, labels: Any, test_fraction: float, validation: float, seed: int
    ) -> None:
        """600 examples for up to 300 clients: two each, at the least."""
        config = DataConfig(
            labels=labels,
            clients=clients,
            alpha=alpha,
            test_fraction=test_fraction,
            validation=validation,
            seed=seed,
        )
        shards = partition(toy_pool(), config)
        assert min(len(rows) for rows in shards.train) >= 1
        assert min(len(rows) for rows in shards.test) >= 1
        assert sum(len(rows) for rows in parts(shards)) == 600
        assert_disjoint(shards)

    @pytest.mark.parametrize("labels", ["iid", "dirichlet"])
    def test_a_given_number_of_examples(self, labels: Any) -> None:
        shards = partition(toy_pool(), DataConfig(labels=labels, clients=6, examples=30))
        assert sum(len(rows) for rows in parts(shards)) == 180

    def test_the_test_cut_follows_the_labels(self) -> None:
        shards = partition(toy_pool(), DataConfig(labels="dirichlet", clients=4, alpha=0.5, test_fraction=0.25))
        for train, test in zip(shards.train, shards.test, strict=True):
            held = shards.y[test].bincount(minlength=10)
            own = shards.y[train].bincount(minlength=10) + held
            exact = own * len(test) / int(own.sum())
            assert float((held - exact).abs().max()) < 1

    def test_without_a_test_fraction_there_is_no_test(self) -> None:
        shards = partition(toy_pool(), DataConfig(labels="iid", clients=4, test_fraction=0.0))
        assert [len(rows) for rows in shards.test] == [0] * 4

    def test_more_examples_than_there_are(self) -> None:
        with pytest.raises(UserError, match="301 clients with 2 examples need 602, but there are 600"):
            partition(toy_pool(), DataConfig(labels="dirichlet", clients=301))
        with pytest.raises(UserError, match="10 clients with 100 examples need 1000, but there are 600"):
            partition(toy_pool(), DataConfig(labels="iid", clients=10, examples=100))


class TestValidation:
    @pytest.mark.parametrize("split", ["stratified", "shuffle"])
    def test_held_out_of_training_alone(self, split: Any, mnist: Pool) -> None:
        config = DataConfig(split=split)
        without, with_it = partition(mnist, config), partition(mnist, dataclasses.replace(config, validation=0.2))
        for i in range(10):
            assert torch.equal(without.test[i], with_it.test[i])
            assert len(with_it.validation[i]) == 50
            joined = torch.cat([with_it.train[i], with_it.validation[i]])
            assert torch.equal(joined.sort().values, without.train[i].sort().values)
        assert_disjoint(with_it)

    def test_the_same_number_of_each_label(self, mnist: Pool) -> None:
        shards = partition(mnist, DataConfig(validation=0.2))
        for rows in shards.validation:
            assert set(Counter(shards.y[rows].tolist()).values()) == {10}
        assert same(shards, partition(mnist, DataConfig(validation=0.2)))
        assert not same(shards, partition(mnist, DataConfig(validation=0.2, seed=2)))

    def test_the_odd_one_is_not_always_the_same_label(self) -> None:
        """One of five training images, one per label: over 40 clients all five labels should be hit."""
        config = DataConfig(clients=40, labels_per_client=5, train_per_label=1, test_per_label=0, validation=0.1)
        shards = partition(toy_pool(), config)
        assert [len(rows) for rows in shards.validation] == [1] * 40
        assert {int(shards.y[rows]) for rows in shards.validation} == set(range(10))

    def test_a_single_training_example_is_kept(self) -> None:
        config = DataConfig(clients=2, labels_per_client=1, train_per_label=1, test_per_label=1, validation=0.5)
        shards = partition(toy_pool(), config)
        assert [len(rows) for rows in shards.train] == [1, 1]


FEW = {"train_per_label": 4, "test_per_label": 3}
HELD_OUT = {"validation": 0.25, "certify": 0.5}


def digest(shards: Shards) -> str:
    """The rows of all clients and their order in one number."""
    rows = [[own.tolist() for own in part] for part in (shards.train, shards.test, shards.validation, shards.certify)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"labels_per_client": 3, **FEW, **HELD_OUT},
            "ecdfaaca632f",
        ),
        ({"labels": "sliding", "labels_per_client": 2, **FEW}, "55fc133f4dbe"),
        ({"labels": "random", "labels_per_client": 2, **FEW}, "cc0ce7404db2"),
        (
            {
                "split": "shuffle",
                "labels_per_client": 3,
                "train_per_label": 4,
                "test_per_label": 3,
                "validation": 0.25,
                "certify": 0.5,
            },
            "978a849e55f0",
        ),
        ({"split": "overlap", "labels_per_client": 3, **FEW}, "b4191ccbd9e8"),
        ({"labels": "iid", **HELD_OUT}, "6022004ae9dc"),
        ({"labels": "iid", "examples": 20}, "52ce6602d2e4"),
        ({"labels": "dirichlet", "alpha": 0.3, **HELD_OUT}, "baae752bd8fd"),
        ({"labels": "dirichlet", "alpha": 0.01}, "8662fcb88386"),
    ],
)
def test_a_seed_deals_the_same_rows_in_every_version(settings: dict[str, Any], expected: str) -> None:
    """Runs are resumed, repeated and published by seed: neither the rows below nor their order ever change."""
    assert digest(partition(toy_pool(), DataConfig(clients=6, seed=5, **settings))) == expected


def test_published_data_are_looked_for_where_the_caller_or_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*arguments: Any, **options: Any) -> Pool:
        asked.append((arguments, options))
        return toy_pool()

    monkeypatch.setattr(sys.modules["pfedbayes.data.partition"], "load_published", load)
    config = DataConfig(clients=2, dir="there", train_per_label=3, test_per_label=2)
    load_shards(config, progress=print)
    load_shards(config, "here")
    assert asked == [(("mnist", "there"), {"progress": print}), (("mnist", "here"), {"progress": None})]


class TestSynthetic:
    def test_blobs_follow_the_label_rule(self) -> None:
        shards = load_shards(DataConfig(name="blobs", clients=3, examples=50, features=6))
        assert shards.x.shape[1] == 6
        assert [len(rows) for rows in shards.train] == [40] * 3
        assert [len(rows) for rows in shards.test] == [10] * 3
        assert [set(shards.y[rows].tolist()) for rows in shards.train] == [
            set(range(5)),
            set(range(5, 10)),
            set(range(5)),
        ]
        assert_disjoint(shards)

    def test_blobs_of_unequal_size(self) -> None:
        config = DataConfig(name="blobs", labels="dirichlet", clients=5, examples=30, classes=3)
        shards = load_shards(config)
        assert sum(len(rows) for rows in parts(shards)) == 150
        assert len({len(rows) for rows in shards.train}) > 1
        assert shards.num_classes == 3

    def test_regression_rows_stay_with_their_client(self) -> None:
        shards = load_shards(DataConfig(name="regression", clients=3, examples=20, validation=0.25))
        assert shards.num_classes is None
        for i in range(3):
            own = torch.cat([shards.train[i], shards.test[i], shards.validation[i]])
            assert own.sort().values.tolist() == list(range(20 * i, 20 * (i + 1)))
            assert (len(shards.train[i]), len(shards.test[i]), len(shards.validation[i])) == (12, 4, 4)

    def test_defaults(self) -> None:
        for name in ("blobs", "regression"):
            shards = load_shards(DataConfig(name=name))
            assert [len(rows) for rows in shards.train] == [160] * 10
            assert [len(rows) for rows in shards.test] == [40] * 10
