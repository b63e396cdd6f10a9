"""The data of all clients: one pool of examples, and per client the rows that belong to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pfedbayes.data.own.describing import ColumnUse
from pfedbayes.data.own.preprocessing import Preprocessing
from pfedbayes.data.own.target import Target
from pfedbayes.errors import UserError

Examples = tuple[ArrayLike | Tensor, ArrayLike | Tensor]


@dataclass(frozen=True)
class TaskShape:
    """What a network must know of the data: the shapes of inputs and targets."""

    inputs: tuple[int, ...]
    """The shape of one input."""
    num_classes: int | None
    """Number of classes; None for a regression."""
    num_targets: int
    """Target dimensions d of a regression; 1 for labels and for survival."""
    unit: float = 1.0
    """The standard deviation by which the targets of a regression were divided."""
    pieces: int = 0
    """Number of piecewise-linear inputs of tables, which are the last ones."""
    target: Target | None = None
    """How the target is encoded, if the data are the user's own."""


@dataclass(frozen=True, eq=False)
class Shards:
    """One pool of examples and, per client, indices into it.

    Nothing is copied or padded: images stay uint8 in the pool, and a batch is gathered when it is needed. The parts of
    one client are disjoint. Different clients may share rows.
    """

    x: Tensor
    """Inputs (M, ...): uint8 images or floating-point features."""
    y: Tensor
    """Labels (M,) as int64, or floating-point targets (M, d); for survival times and events (M, 2)."""
    train: tuple[Tensor, ...]
    """Training rows: one int64 index vector per client."""
    test: tuple[Tensor, ...]
    """Test rows per client, which may be empty."""
    validation: tuple[Tensor, ...]
    """Validation rows per client, which may be empty."""
    names: tuple[str, ...]
    """Names of the clients."""
    num_classes: int | None
    """Number of classes; None for a regression."""
    preprocessing: Preprocessing | None = None
    """How x and y were encoded, if they come from your own tables or images."""
    certify: tuple[Tensor, ...] = ()
    """Rows per client that are withheld from the federation for a certificate; empty if there are none."""
    columns: tuple[ColumnUse, ...] = ()
    """What each column of your own tables was taken for."""
    notes: tuple[str, ...] = ()
    """What the readers did to your own tables that you should know."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise UserError(f"x has {len(self.x)} rows and y has {len(self.y)}: give one target for each example")
        self._check_targets()
        if not len(self.train) == len(self.test) == len(self.validation) == len(self.names) > 0:
            raise UserError(
                f"{len(self.train)} train, {len(self.test)} test and {len(self.validation)} validation vectors for "
                f"{len(self.names)} names: give one of each for every client, and at least one client"
            )
        if self.certify and len(self.certify) != len(self.names):
            raise UserError(
                f"{len(self.certify)} certify vectors for {len(self.names)} names: give one for every client"
            )
        parts = [part for part in (self.train, self.test, self.validation, self.certify) if part]
        for name, *indices in zip(self.names, *parts, strict=True):
            self._check_indices(name, indices)

    def __repr__(self) -> str:
        """Return a short description."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation, "certify": self.certify}
        rows = ", ".join(f"{sum(map(len, part)):,} {name}" for name, part in parts.items() if any(map(len, part)))
        target = "numbers" if self.num_classes is None else f"{self.num_classes} classes"
        return f"Shards({len(self.names)} clients, rows: {rows}, inputs {tuple(self.x.shape[1:])}, {target})"

    def _check_targets(self) -> None:
        if self.num_classes is None:
            if not self.y.is_floating_point() or self.y.ndim != 2:
                raise UserError("y is not a floating-point tensor (M, d): convert it, or give num_classes for labels")
            return
        if self.y.dtype != torch.int64 or self.y.ndim != 1:
            raise UserError("y is not an int64 tensor (M,): convert it, or leave num_classes out for a regression")
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.num_classes:
            raise UserError(
                f"labels run from {int(self.y.min())} to {int(self.y.max())}, but num_classes = {self.num_classes} "
                f"allows 0 to {self.num_classes - 1}: renumber the labels or raise num_classes"
            )

    def _check_indices(self, name: str, indices: list[Tensor]) -> None:
        if any(index.dtype != torch.int64 or index.ndim != 1 for index in indices):
            raise UserError(f"{name}: indices must be one-dimensional int64 vectors")
        if not len(indices[0]):
            raise UserError(f"{name} has no training examples: leave the client out or give it some")
        rows = torch.cat(indices)
        if not 0 <= int(rows.min()) <= int(rows.max()) < len(self.x):
            raise UserError(f"{name}: indices must lie between 0 and {len(self.x) - 1}, the rows of the pool")
        if len(torch.unique(rows)) < len(rows):
            raise UserError(f"{name} has an example twice: its parts must not overlap")

    @property
    def task_shape(self) -> TaskShape:
        """The shapes of inputs and targets, for which a network is built."""
        num_targets = self.y.shape[1] if self.num_classes is None else 1
        if self.preprocessing is not None and self.preprocessing.target.event is not None:
            num_targets = 1
        shape = tuple(self.x.shape[1:])
        if self.preprocessing is None:
            return TaskShape(shape, self.num_classes, num_targets)
        target = self.preprocessing.target
        return TaskShape(shape, self.num_classes, num_targets, target.deviation, self.preprocessing.pieces, target)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the labels 0, 1, ..., if they are known."""
        return self.preprocessing.target.classes if self.preprocessing else None

    def strata(self, rows: Tensor) -> NDArray[np.int64] | None:
        """Return the labels or events of these rows of the pool, by which they are split; None for other numbers."""
        if self.preprocessing is not None:
            return self.preprocessing.target.strata(self.y[rows])
        return self.y[rows].numpy() if self.num_classes else None

    def fingerprint(self) -> str:
        """Return a checksum of the data and of the rows of each client."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for tensor in (self.x, self.y, *self.train, *self.test, *self.validation, *self.certify):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        test: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
        num_classes: int | None = None,
    ) -> Shards:
        """Return shards of one `torch` Dataset per client, or of any sequence of pairs (x, y); see `from_arrays`."""
        tests = None if test is None else [_collect(dataset) for dataset in test]
        return cls.from_arrays([_collect(dataset) for dataset in train], tests, names, num_classes)

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[Examples],
        test: Sequence[Examples] | None = None,
        names: Sequence[str] | None = None,
        num_classes: int | None = None,
    ) -> Shards:
        """Return shards of your own arrays: per client a pair (x, y) for training and, optionally, one for test.

        x: (n, ...); examples of all clients have the same shape, n may differ. uint8 arrays are images; all other
        types become torch's default floating-point type.
        y: (n,) integers 0, 1, ... for classification; (n,) or (n, d) floating-point numbers for regression.
        names: of the clients. num_classes: by default the largest label plus one.
        """
        if not train:
            raise UserError("there are no clients: give one pair (x, y) per client")
        if test is not None and len(test) != len(train):
            raise UserError(f"{len(train)} training pairs but {len(test)} test pairs: give one test pair per client")
        if names is None:
            names = client_names(len(train))
        if len(names) != len(train):
            raise UserError(f"{len(names)} names for {len(train)} clients: give one name per client")

        train_arrays = [_check_pair(pair, f"{name}, train") for name, pair in zip(names, train, strict=True)]
        test_arrays = []
        if test is not None:
            test_arrays = [_check_pair(pair, f"{name}, test") for name, pair in zip(names, test, strict=True)]
        for name, (x, _) in zip(names, train_arrays, strict=True):
            if not len(x):
                raise UserError(f"{name} has no training examples: leave the client out or give it some")
        # An empty array adds no rows, and its type and shape may be arbitrary.
        filled = [(x, y) for x, y in train_arrays + test_arrays if len(x)]
        pool_x, pool_y = _pool([x for x, _ in filled], [y for _, y in filled])

        ends = np.cumsum([len(x) for x, _ in train_arrays + test_arrays])
        rows = tuple(torch.from_numpy(own) for own in np.split(np.arange(len(pool_x)), ends[:-1]))
        empty = tuple(torch.empty(0, dtype=torch.int64) for _ in names)
        if not pool_y.is_floating_point() and num_classes is None:
            num_classes = int(pool_y.max()) + 1
        return cls(
            x=pool_x,
            y=pool_y,
            train=rows[: len(names)],
            test=rows[len(names) :] or empty,
            validation=empty,
            names=tuple(names),
            num_classes=num_classes,
        )


def _collect(dataset: Any) -> Examples:
    """Return all examples of a dataset as one pair of arrays."""
    pairs = [dataset[k] for k in range(len(dataset))]
    try:
        x, y = (np.stack([np.asarray(value) for value in values]) for values in zip(*pairs, strict=True))
    except (TypeError, ValueError) as error:
        raise UserError(f"a dataset has no pairs (x, y) of one shape ({error}): wrap it in one that does") from None
    return x, y


def client_names(count: int) -> tuple[str, ...]:
    """Return default names of clients."""
    return tuple(f"client {i}" for i in range(count))


def _check_pair(pair: Examples, whose: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return x (n, ...) and y (n,) or (n, d) as NumPy arrays, checked to be finite and of equal length."""
    try:
        x, y = (a.detach().cpu().numpy() if isinstance(a, Tensor) else np.asarray(a) for a in pair)
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose}: not a pair of arrays x, y ({error})") from error
    for letter, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "biuf" or not array.ndim:
            raise UserError(f"{whose}: {letter} must be an array of numbers, not {array.dtype} of shape {array.shape}")
        if not np.isfinite(array).all():
            raise UserError(f"{whose}: {letter} holds NaN or infinity: remove or replace those examples")
    if len(x) != len(y):
        raise UserError(f"{whose}: x has {len(x)} examples and y has {len(y)}: give one target for each example")
    if y.dtype.kind != "f" and (y.ndim != 1 or (len(y) and y.min() < 0)):
        raise UserError(f"{whose}: integer y are class labels, so they must be one-dimensional and not negative")
    if y.ndim > 2:
        raise UserError(f"{whose}: y must have shape (n,) or (n, d), not {y.shape}")
    return x, y.reshape(len(y), -1) if y.dtype.kind == "f" and len(y) else y


def _pool(xs: list[NDArray[Any]], ys: list[NDArray[Any]]) -> tuple[Tensor, Tensor]:
    """Return all examples as one pool, x (M, ...) and y (M,) or (M, d)."""
    for letter, arrays in (("x", xs), ("y", ys)):
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            raise UserError(f"examples of {letter} have the shapes {shapes}: use one shape for all clients")
    if len({x.dtype == np.uint8 for x in xs}) > 1:
        raise UserError("x is uint8 (images) for some clients and not for others: use one type for all")
    if len({y.dtype.kind == "f" for y in ys}) > 1:
        raise UserError("y is integer (labels) for some clients and floating-point for others: use one type for all")
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    floating = torch.get_default_dtype()
    return (
        x if x.dtype == torch.uint8 else x.to(floating),
        y.to(floating if y.is_floating_point() else torch.int64),
    )
