"""The federations that train beside those of a run: cross-validation folds, and clients alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.data.splits import SplitPurpose, folds_of
from pfedbayes.engine.setup import Copy
from pfedbayes.methods import Method
from pfedbayes.runs.sections import Evaluation
from pfedbayes.trust.calibration import Fold


class Copies(NamedTuple):
    """The federations behind those of a run's seeds: the folds, then the clients alone, then their folds."""

    num_seeds: int
    left_out: list[tuple[Tensor, ...]]
    """For each fold, the pool rows that each client leaves out."""
    trains_alone: bool
    """Whether clients also train alone."""

    @property
    def federations(self) -> tuple[Copy, ...]:
        """What the engine trains."""
        joined = tuple(Copy(rows) for rows in self.left_out)
        alone = (Copy(alone=True), *(Copy(rows, alone=True) for rows in self.left_out))
        return (*joined, *alone) if self.trains_alone else joined

    @property
    def alone(self) -> int | None:
        """The index of the federation in which clients train alone, on all their rows; None if there is none."""
        return self.num_seeds + len(self.left_out) if self.trains_alone else None

    def folds(self, alone: bool = False) -> list[Fold]:
        """Return each fold with the index of its federation: the joined one, or that of clients alone."""
        start = self.num_seeds + (len(self.left_out) + 1) * alone
        return [(start + k, rows) for k, rows in enumerate(self.left_out)]


def copies_of(evaluation: Evaluation, method: Method, shards: Shards, num_seeds: int, seed: int) -> Copies:
    """Return the federations that a run trains besides those of its seeds. seed: that of the folds.

    There are no folds if the run has validation rows. Clients train alone where that differs from the method itself.
    """
    federated = method.about.shared and not (method.needs.pooled_data or method.needs.all_clients)
    folds = 0 if any(map(len, shards.validation)) else evaluation.folds
    alone = evaluation.alone and federated and len(shards.train) > 1
    return Copies(num_seeds, left_out(shards, folds, seed) if folds else [], alone)


def left_out(shards: Shards, count: int, seed: int) -> list[tuple[Tensor, ...]]:
    """Return the rows of each fold. A client with a single row leaves none out: it would have nothing to train on."""
    folds: list[list[Tensor]] = [[] for _ in range(count)]
    for i, rows in enumerate(shards.train):
        own = folds_of(shards.strata(rows), len(rows), count, SplitPurpose.FOLDS.stream(i), seed)
        for k, fold in enumerate(folds):
            fold.append(rows[torch.from_numpy(np.flatnonzero((own == k) & (len(rows) > 1)))])
    return [tuple(fold) for fold in folds]
