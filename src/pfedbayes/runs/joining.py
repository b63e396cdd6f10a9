"""What joining bought each client of a run: the models of the federation against those that clients train alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.runs.copies import fold_indices, fold_rows, trains_alone
from pfedbayes.runs.experiment import Experiment
from pfedbayes.runs.schema import JoiningRecord
from pfedbayes.trust.calibration import DRAWS
from pfedbayes.trust.joining import PairedLosses, Verdict, judge


def judge_joining(federation: Federation, experiment: Experiment) -> list[JoiningRecord] | None:
    """Return a record per client with rows to judge by: left-out folds, else validation rows; None without any.

    Clients use their model of the federation, or the shared one if the method has no personal models.
    """
    shards, seeds = federation.shards, len(federation.seeds)
    if not trains_alone(experiment, shards):
        return None
    folds = fold_rows(experiment, shards)
    joined = list(fold_indices(experiment, shards, seeds)) or [0]
    alone = list(fold_indices(experiment, shards, seeds, alone=True)) or [seeds + len(folds)]
    held: Sequence[Sequence[Tensor]] = folds or [shards.validation]
    verdicts = _verdicts(federation, held, joined, alone)
    if not verdicts:
        return None
    tests = _verdicts(federation, [shards.test], [0], [seeds + len(folds)])
    return [JoiningRecord(verdict, tests.get(name)) for name, verdict in verdicts.items()]


def _verdicts(
    federation: Federation, folds: Sequence[Sequence[Tensor]], joined: Sequence[int], alone: Sequence[int]
) -> dict[str, Verdict]:
    """Return verdicts by client. folds: each client's rows; joined, alone: the federations that left them out."""
    several = len(folds) > 1
    clients = []
    for i, name in enumerate(federation.shards.names):
        own = [sets[i] for sets in folds]
        numbers = np.repeat(np.arange(len(own)), [len(rows) for rows in own])
        of_alone, of_joined = (
            np.concatenate([_losses(federation, i, *each) for each in zip(indices, own, strict=True)])
            for indices in (alone, joined)
        )
        clients.append(PairedLosses(name, of_alone, of_joined, numbers if several else None))
    return {verdict.client: verdict for verdict in judge(clients)}


def _losses(federation: Federation, client: int, index: int, rows: Tensor) -> NDArray[np.float64]:
    """Return the negative log-likelihood (n,) of the averaged prediction of a client's model for these rows."""
    if not len(rows):
        return np.empty(0)
    batch, likelihood = federation.batch_of(rows), federation.model.likelihood
    which: Which = "personal" if federation.method.about.personal else "shared"
    outputs = trained_model(federation, which, client, index).outputs(DRAWS)(batch.x)
    nll = torch.stack([likelihood.nll(draw, batch.y) for draw in outputs])
    losses: NDArray[np.float64] = (
        (math.log(len(nll)) - torch.logsumexp(-nll, 0) + likelihood.offset).double().numpy(force=True)
    )
    return losses
