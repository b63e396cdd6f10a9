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
from pfedbayes.maths.likelihoods import Likelihood
from pfedbayes.runs.experiment import Experiment, copies_of_run
from pfedbayes.runs.schema import JoiningRecord
from pfedbayes.trust.calibration import DRAWS, Fold
from pfedbayes.trust.joining import PairedLosses, Verdict, judge


def judge_joining(federation: Federation, experiment: Experiment) -> list[JoiningRecord] | None:
    """Return a record per client with rows to judge by: left-out folds, else validation rows; None without any.

    Clients use their model of the federation, or the shared one if the method has no personal models.
    """
    shards = federation.shards
    copies = copies_of_run(experiment, shards, len(federation.seeds))
    if copies.alone is None:
        return None
    joined = copies.folds() or [(0, shards.validation)]
    alone = copies.folds(alone=True) or [(copies.alone, shards.validation)]
    verdicts = _verdicts(federation, joined, alone)
    if not verdicts:
        return None
    tests = _verdicts(federation, [(0, shards.test)], [(copies.alone, shards.test)])
    return [JoiningRecord(verdict, tests.get(name)) for name, verdict in verdicts.items()]


def _verdicts(federation: Federation, joined: Sequence[Fold], alone: Sequence[Fold]) -> dict[str, Verdict]:
    """Return verdicts by client, from the rows that the joined federations and those of clients alone left out."""
    clients = []
    for i, name in enumerate(federation.shards.names):
        numbers = np.repeat(np.arange(len(joined)), [len(sets[i]) for _, sets in joined])
        of_alone, of_joined = (
            np.concatenate([row_losses(federation, i, index, sets[i]) for index, sets in folds])
            for folds in (alone, joined)
        )
        clients.append(PairedLosses(name, of_alone, of_joined, numbers if len(joined) > 1 else None))
    return {verdict.client: verdict for verdict in judge(clients)}


def row_losses(federation: Federation, client: int, index: int, rows: Tensor) -> NDArray[np.float64]:
    """Return the negative log-likelihood (n,) of the averaged prediction of a client's model for these rows."""
    if not len(rows):
        return np.empty(0)
    batch, likelihood = federation.batch_of(rows), federation.model.likelihood
    which: Which = "personal" if federation.method.about.personal else "shared"
    return losses_of(likelihood, trained_model(federation, which, client, index).outputs(DRAWS)(batch.x), batch.y)


def losses_of(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> NDArray[np.float64]:
    """Return the negative log-likelihood (n,) of the averaged prediction of outputs (K, n, ...) for targets y."""
    targets = y.expand(len(outputs), *y.shape)
    nll = likelihood.nll(outputs.flatten(0, 1), targets.flatten(0, 1)).view(len(outputs), -1)
    losses: NDArray[np.float64] = (
        (math.log(len(nll)) - torch.logsumexp(-nll, 0) + likelihood.offset).double().numpy(force=True)
    )
    return losses
