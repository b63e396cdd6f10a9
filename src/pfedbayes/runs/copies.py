"""The federations that train beside those of a run: cross-validation folds, and clients alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.data.splits import SplitPurpose, folds_of
from pfedbayes.engine.setup import Copy

if TYPE_CHECKING:
    from pfedbayes.runs.experiment import Experiment


def make_copies(experiment: Experiment, shards: Shards) -> tuple[Copy, ...]:
    """Return the folds, then the clients alone, then their folds, as far as the experiment asks for them."""
    folds = fold_rows(experiment, shards)
    joined = tuple(Copy(left_out) for left_out in folds)
    if not trains_alone(experiment, shards):
        return joined
    return (*joined, Copy(alone=True), *(Copy(left_out, alone=True) for left_out in folds))


def trains_alone(experiment: Experiment, shards: Shards) -> bool:
    """Return whether clients also train alone: if asked for, and if that differs from the method itself."""
    method = experiment.method
    federated = method.about.shared and not (method.needs.pooled_data or method.needs.all_clients)
    return experiment.evaluation.alone and federated and len(shards.train) > 1


def fold_rows(experiment: Experiment, shards: Shards) -> list[tuple[Tensor, ...]]:
    """Return for each fold the pool rows that each client leaves out; none if the run has validation rows.

    A client with a single training row leaves nothing out, since it would have nothing to train on.
    """
    count = experiment.evaluation.folds
    if not count or any(len(rows) for rows in shards.validation):
        return []
    numbers = []
    for i, rows in enumerate(shards.train):
        labels = shards.y[rows].numpy() if shards.num_classes else None
        numbers.append(folds_of(labels, len(rows), count, SplitPurpose.FOLDS.stream(i), experiment.data.seed))
    return [
        tuple(
            rows[torch.from_numpy(np.flatnonzero((own == k) & (len(rows) > 1)))]
            for rows, own in zip(shards.train, numbers, strict=True)
        )
        for k in range(count)
    ]


def fold_indices(experiment: Experiment, shards: Shards, num_seeds: int, alone: bool = False) -> Iterator[int]:
    """Yield the index of each fold among the federations of a run."""
    count = len(fold_rows(experiment, shards))
    start = num_seeds + (count + 1) * alone
    yield from range(start, start + count)
