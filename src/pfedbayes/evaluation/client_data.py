"""The clients' data on the device that computes, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import EvaluationSplit
from pfedbayes.maths.metrics import log_label_prior
from pfedbayes.maths.random import choose
from pfedbayes.methods.base import Method
from pfedbayes.nets import Batch


class Group(NamedTuple):
    """Clients that can be evaluated together: all have n examples."""

    clients: list[int]
    rows: Tensor
    """Pool rows of their examples: (clients, n)."""
    distinct: Tensor
    """The different rows among them."""
    place: Tensor
    """The place of each example among the distinct rows: (clients, n)."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of all clients, as one pool of examples on the device."""

    shards: Shards
    train_sets: Sequence[Tensor]
    """Pool rows of each member's training set. Member s * num_clients + i is client i of federation s."""
    num_clients: int
    """The number N of clients that train; a method that pools the data has one."""
    numbers: NDArray[np.int64]
    """The numbers under which the clients draw random numbers."""
    sizes: NDArray[np.int64]
    """The size n of each training set."""
    batch_sizes: NDArray[np.int64]
    """The size of each member's mini-batches."""
    x: Tensor
    """The inputs of the pool, on the device."""
    y: Tensor
    """The targets of the pool, on the device."""
    dtype: torch.dtype
    """The type of floating-point numbers."""
    by_training_size: bool
    """Whether only clients with training sets of one size may be evaluated together."""
    _groups: dict[tuple[EvaluationSplit, int | None], list[Group]] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        shards: Shards,
        method: Method,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        numbers: Sequence[int] | None = None,
        left_out: Sequence[Sequence[Tensor] | None] = (None,),
    ) -> ClientData:
        """Copy the data to the device.

        numbers: see above; 0, 1, … if not given. left_out: for each federation, the pool rows of each client that it
        does not train on, or None.
        """
        whole = (torch.cat(shards.train),) if method.needs.pooled_data else shards.train
        if not all(map(len, whole)):
            empty = next(name for name, rows in zip(shards.names, whole, strict=False) if not len(rows))
            raise UserError(f"client {empty!r} has no training data: leave it out or give it some")
        train_sets = [own for held in left_out for own in (whole if held is None else _without(whole, held))]
        sizes = np.array([len(rows) for rows in train_sets])
        return cls(
            shards=shards,
            train_sets=train_sets,
            num_clients=len(whole),
            numbers=np.arange(len(shards.names)) if numbers is None else np.array(numbers),
            sizes=sizes,
            batch_sizes=sizes if method.needs.full_batch else sizes.clip(max=batch_size),
            x=_to_device(shards.x, device, dtype),
            y=_to_device(shards.y, device, dtype),
            dtype=dtype,
            by_training_size=method.needs.keeps_examples,
        )

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.x.device

    @property
    def num_evaluated(self) -> int:
        """The number of clients that are evaluated, also where the training data are pooled."""
        return len(self.shards.names)

    @cached_property
    def label_priors(self) -> Tensor:
        """Log prior (clients, C) over labels from the training labels of each client."""
        counts = torch.stack([self.count_labels(rows) for rows in self.shards.train])
        return log_label_prior(counts.to(self.device, self.dtype))

    @cached_property
    def padded_rows(self) -> NDArray[np.int64]:
        """The training sets as (members, largest size); smaller ones are filled up with their first row."""
        rows = np.empty((len(self.train_sets), int(self.sizes.max())), dtype=np.int64)
        for padded, own in zip(rows, self.train_sets, strict=True):
            padded[: len(own)], padded[len(own) :] = own, own[0]
        return rows

    def count_labels(self, rows: Tensor) -> Tensor:
        """Count the labels (C,) of these pool rows; empty in regression."""
        classes = self.shards.num_classes
        return torch.bincount(self.shards.y[rows], minlength=classes) if classes else torch.empty(0)

    def to_device(self, values: Tensor) -> Tensor:
        """Copy inputs to the device; floating-point numbers get the type of the plan."""
        return _to_device(values, self.device, self.dtype)

    def batch_of(self, rows: Tensor) -> Batch:
        """Return all examples at these pool rows (..., n) as one batch."""
        rows = rows.to(self.device)
        weight = torch.ones(rows.shape, dtype=self.dtype, device=self.device)
        return Batch(take(self.x, rows), take(self.y, rows), weight)

    def evaluation_sets(self, split: EvaluationSplit, seed: int, clients: int | None = None) -> list[Tensor]:
        """Return the pool rows on which each client is scored.

        With `clients`, only that many clients keep their rows: they are drawn from those that have any, once per seed.
        """
        sets = list(getattr(self.shards, split))
        able = np.array([i for i, rows in enumerate(sets) if len(rows)], dtype=np.int64)
        if clients is None or clients >= len(able):
            return sets
        # Training draws for rounds 1, 2, …: round 0 is free.
        drawn = set(able[choose(seed, 0, len(able), clients)].tolist())
        return [rows if i in drawn else rows[:0] for i, rows in enumerate(sets)]

    def evaluation_groups(self, split: EvaluationSplit, seed: int, clients: int | None) -> list[Group]:
        """Group the evaluated clients by the number of their examples, and by training size where that is needed."""
        if (split, clients) not in self._groups:
            by_size: dict[tuple[int, int], list[int]] = {}
            sets = self.evaluation_sets(split, seed, clients)
            for i, rows in enumerate(sets):
                if len(rows):
                    training_size = int(self.sizes[i]) if self.by_training_size else 0
                    by_size.setdefault((len(rows), training_size), []).append(i)
            known = self._groups[split, clients] = []
            for ids in by_size.values():
                rows = torch.stack([sets[i] for i in ids])
                distinct, place = torch.unique(rows, return_inverse=True)
                known.append(Group(ids, *(tensor.to(self.device) for tensor in (rows, distinct, place))))
        return self._groups[split, clients]


def _without(whole: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of each training set that are not held out."""
    out = torch.cat(tuple(held))
    return [rows[~torch.isin(rows, out)] for rows in whole]


def take(pool: Tensor, rows: Tensor) -> Tensor:
    """Return the examples at these rows of a pool, in the shape of the rows."""
    return pool.index_select(0, rows.flatten()).view(*rows.shape, *pool.shape[1:])


def _to_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return values.to(device, dtype if values.is_floating_point() else None)
