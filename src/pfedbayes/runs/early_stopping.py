"""Early stopping: keep the round with the smallest validation loss, and stop when it is long past."""

from __future__ import annotations

import math

import numpy as np

from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.runs.folder import Best
from pfedbayes.runs.sections import Evaluation


class EarlyStopping:
    """The best round so far, and whether to stop. Seeds that run together stop together, by their mean loss."""

    def __init__(self, patience: int, evaluation: Evaluation, best: Best | None = None) -> None:
        self._patience = patience
        self._evaluation = evaluation
        self.best = best

    def consider(self, federation: Federation) -> float:
        """Return the validation loss of the federation, and keep its state if the loss is the best so far."""
        loss = validation_loss(federation, self._evaluation)
        if math.isfinite(loss) and (self.best is None or loss < self.best.loss):
            tensors = {name: tensor.cpu() for name, tensor in federation.tensors().items()}
            self.best = Best(federation.round, loss, tensors)
        return loss

    def is_over(self, round: int) -> bool:
        """Return whether the best round is `patience` rounds ago."""
        return round - (self.best.round if self.best else 0) >= self._patience


def validation_loss(federation: Federation, evaluation: Evaluation) -> float:
    """Return the mean NLL over validation examples and seeds, of the personal models if the method has any."""
    headline = federation.headline(evaluation.samples)
    sizes = np.array([len(rows) for rows in federation.evaluation_sets("validation", evaluation.clients)])
    if not sizes.any():
        raise UserError(
            "no client has validation data for early stopping: leave training.patience out, or hold out some"
        )
    scores = federation.evaluate(
        evaluation.samples, "validation", False, (headline,), evaluation.sampling, evaluation.clients
    )
    nll = np.array(scores[federation.models()[0]][headline]["nll"])
    return float(np.average(nll[:, sizes > 0], axis=1, weights=sizes[sizes > 0]).mean())
