"""Shards: checks, and shards of your own arrays."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfedbayes.data import Shards, TaskShape
from pfedbayes.errors import UserError


def tensors(*rows: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(own, dtype=torch.int64) for own in rows)


class TestShards:
    def build(self, **fields: Any) -> Shards:
        valid: dict[str, Any] = {
            "x": torch.zeros(6, 2),
            "y": torch.tensor([0, 1, 2, 0, 1, 2]),
            "train": tensors([0, 1], [3]),
            "test": tensors([2], [4]),
            "validation": tensors([], [5]),
            "names": ("a", "b"),
            "num_classes": 3,
        }
        return Shards(**(valid | fields))

    def test_valid(self) -> None:
        assert self.build().task_shape == TaskShape((2,), num_classes=3, num_targets=1)
        self.build(test=tensors([2], [1]))  # clients may overlap
        regression = self.build(y=torch.zeros(6, 4), num_classes=None)
        assert regression.task_shape == TaskShape((2,), num_classes=None, num_targets=4, unit=1.0)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"train": tensors([0, 6], [3])}, "a: indices must lie between 0 and 5"),
            ({"test": tensors([2], [-1])}, "b: indices must lie between 0 and 5"),
            ({"test": tensors([1], [4])}, "a has an example twice"),
            ({"validation": tensors([], [4])}, "b has an example twice"),
            ({"train": tensors([0, 0], [3])}, "a has an example twice"),
            ({"train": tensors([0], [])}, "b has no training examples"),
            ({"train": (torch.tensor([0.0]), torch.tensor([3]))}, "a: indices must be one-dimensional int64"),
            ({"test": tensors([2])}, "give one of each for every client"),
            ({"names": ("a", "b", "c")}, "give one of each for every client"),
            ({"x": torch.zeros(5, 2)}, "x has 5 rows and y has 6"),
            ({"num_classes": 2}, "labels run from 0 to 2, but num_classes = 2 allows 0 to 1"),
            ({"num_classes": None}, "y is not a floating-point tensor"),
            ({"y": torch.zeros(6, 1)}, "y is not an int64 tensor"),
        ],
    )
    def test_invalid(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            self.build(**fields)
        assert "\n" not in str(error.value)


class TestFromArrays:
    def test_classification_with_unequal_clients(self) -> None:
        train = [(np.ones((3, 2)), np.array([0, 1, 4])), (torch.zeros(1, 2), torch.tensor([2]))]
        test = [(np.full((2, 2), 7.0), [1, 1]), (np.empty((0, 2)), [])]
        shards = Shards.from_arrays(train, test, names=["a", "b"])
        assert shards.num_classes == 5
        assert shards.x.dtype == torch.float32
        assert [len(rows) for rows in shards.train] == [3, 1]
        assert [len(rows) for rows in shards.test] == [2, 0]
        assert [len(rows) for rows in shards.validation] == [0, 0]
        assert shards.y[shards.train[0]].tolist() == [0, 1, 4]
        assert shards.x[shards.test[0]].tolist() == [[7.0, 7.0], [7.0, 7.0]]
        assert shards.names == ("a", "b")
        rows = torch.cat([*shards.train, *shards.test, *shards.validation])
        assert len(rows.unique()) == len(rows)

    def test_without_test_data(self) -> None:
        shards = Shards.from_arrays([(np.zeros((2, 1)), np.array([0, 1]))] * 2, num_classes=7)
        assert [len(rows) for rows in shards.test] == [0, 0]
        assert shards.test[0].dtype == torch.int64
        assert (shards.names, shards.num_classes) == (("client 0", "client 1"), 7)

    def test_regression(self) -> None:
        one = Shards.from_arrays([(np.zeros((2, 3)), np.array([0.5, 1.5]))])
        two = Shards.from_arrays([(np.zeros((2, 3)), np.ones((2, 2), np.float16))])
        assert (one.num_classes, one.y.shape, two.y.shape) == (None, (2, 1), (2, 2))
        assert one.y.dtype == two.y.dtype == torch.float32

    def test_images_stay_bytes_and_other_integers_do_not(self) -> None:
        y = np.array([0, 1])
        assert Shards.from_arrays([(np.zeros((2, 1, 4, 4), np.uint8), y)]).x.dtype == torch.uint8
        assert Shards.from_arrays([(np.zeros((2, 3), np.int32), y)]).x.dtype == torch.float32

    def test_arrays_are_copied(self) -> None:
        """Also arrays that must not be written to, which torch would warn about."""
        x = np.zeros((2, 1), np.float32)
        x.flags.writeable = False
        shards = Shards.from_arrays([(x, np.array([0, 1]))])
        shards.x[0] = 5
        assert x.max() == 0

    @settings(deadline=None)
    @given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6))
    def test_everyone_gets_their_own(self, sizes: list[tuple[int, int]]) -> None:
        def pairs(counts: list[int], offset: float) -> list[tuple[Any, Any]]:
            return [(np.full((n, 2), i + offset), np.full(n, i)) for i, n in enumerate(counts)]

        shards = Shards.from_arrays(pairs([a for a, _ in sizes], 0.0), pairs([b for _, b in sizes], 0.5))
        for i, (train, test) in enumerate(sizes):
            assert shards.x[shards.train[i]].tolist() == [[i, i]] * train
            assert shards.x[shards.test[i]].tolist() == [[i + 0.5, i + 0.5]] * test
            assert shards.y[shards.train[i]].tolist() == [i] * train

    good = (np.zeros((2, 3)), np.array([0, 1]))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"train": []}, "no clients"),
            ({"train": [good], "test": [good, good]}, "1 training pairs but 2 test pairs"),
            ({"train": [good], "names": ["a", "b"]}, "2 names for 1 clients"),
            ({"train": [good, (np.zeros((3, 3)), np.array([0, 1]))]}, "client 1, train: x has 3 examples and y has 2"),
            ({"train": [(np.full((2, 3), np.nan), np.array([0, 1]))]}, "client 0, train: x holds NaN"),
            ({"train": [(np.zeros((2, 3)), np.array([0.0, np.inf]))]}, "client 0, train: y holds NaN or infinity"),
            ({"train": [good], "test": [(np.full((1, 3), np.nan), [0])]}, "client 0, test: x holds NaN"),
            ({"train": [good, (np.zeros((0, 3)), np.zeros(0, int))]}, "client 1 has no training examples"),
            ({"train": [(np.zeros((2, 3)), np.array([0, -1]))]}, "not negative"),
            ({"train": [(np.zeros((2, 3)), np.array([[0], [1]]))]}, "one-dimensional"),
            ({"train": [(np.zeros((2, 3)), np.zeros((2, 1, 1)))]}, r"y must have shape \(n,\) or \(n, d\)"),
            ({"train": [good, (np.zeros((2, 4)), np.array([0, 1]))]}, "examples of x have the shapes"),
            ({"train": [good, (np.zeros((2, 3)), np.array([0.5, 1]))]}, "examples of y have the shapes"),
            ({"train": [good, (np.zeros((2, 3), np.uint8), np.array([0, 1]))]}, "x is uint8"),
            ({"train": [(np.array([["a"], ["b"]]), np.array([0, 1]))]}, "x must be an array of numbers"),
            ({"train": [(1.0, 2)]}, "x must be an array of numbers"),
            ({"train": [(np.zeros((2, 3)),)]}, "not a pair of arrays"),
            ({"train": [([[1], [1, 2]], [0, 1])]}, "not a pair of arrays"),
            ({"train": [good], "num_classes": 1}, "labels run from 0 to 1, but num_classes = 1"),
            ({"train": [(np.zeros((2, 3)), np.zeros(2))], "num_classes": 2}, "y is not an int64 tensor"),
        ],
    )
    def test_invalid(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            Shards.from_arrays(**arguments)
        assert "\n" not in str(error.value)
