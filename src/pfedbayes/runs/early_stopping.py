"""Early stopping: keep the round with the smallest validation loss, and stop when it is long past."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import EstimatorSpec
from pfedbayes.maths.likelihoods import Likelihood, is_of_labels
from pfedbayes.maths.metrics import log_average
from pfedbayes.runs.folder import Best
from pfedbayes.runs.sections import Evaluation

WORST = 50.0  # largest loss of a label that the pseudo-row may have


class EarlyStopping:
    """The best round so far, and whether to stop. Seeds that run together stop together, by their mean loss.

    A round becomes the best one if its smoothed loss is lower than that of the best one by more than the standard error
    of the difference, row by row. So of rounds that the validation rows cannot tell apart, the earliest is kept.
    """

    def __init__(self, patience: int, evaluation: Evaluation, best: Best | None = None) -> None:
        self._patience = patience
        self._evaluation = evaluation
        self.best = best

    def consider(self, federation: Federation) -> float:
        """Return the validation loss of the federation, and keep its state if it is the best so far."""
        plain, smoothed = row_losses(federation, self._evaluation)
        loss = float(plain.mean())
        if math.isfinite(loss) and (self.best is None or _is_better(smoothed, self.best)):
            tensors = {name: tensor.cpu() for name, tensor in federation.tensors().items()}
            self.best = Best(federation.round, loss, tensors, smoothed)
        return loss

    def is_over(self, round: int) -> bool:
        """Return whether the best round is `patience` rounds ago."""
        return round - (self.best.round if self.best else 0) >= self._patience


def _is_better(smoothed: Tensor, best: Best) -> bool:
    """Return whether losses (S, n) of rows are lower than those of the best round, beyond their noise."""
    if best.row_losses is None or best.row_losses.shape != smoothed.shape:  # from an early version
        return float(smoothed.mean()) < best.loss
    gain = (best.row_losses - smoothed).mean(0)  # seeds share the rows
    return float(gain.mean()) > float(gain.std(correction=0)) / math.sqrt(len(gain))


def validation_loss(federation: Federation, evaluation: Evaluation) -> float:
    """Return the mean NLL over validation examples and seeds, of the personal models if the method has any."""
    return float(row_losses(federation, evaluation)[0].mean())


def row_losses(federation: Federation, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """Return the NLL (S, n) of each validation row for each seed, and the smoothed one.

    The smoothed loss adds a pseudo-row to the n rows, whose label is any other than the true one. By Laplace's rule a
    new row may be wrong with probability of about 1 / n even if no validation row is; an over-confident model that has
    been lucky on a handful of rows pays for it.
    """
    headline, likelihood = federation.headline(evaluation.samples), federation.model.likelihood
    spec = EstimatorSpec(evaluation.samples, (headline,), evaluation.sampling)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for block in federation.blocks(federation.models()[0], "validation", spec, evaluation.clients):
        own, other = (each.double().cpu() for each in _losses(likelihood, block.outputs[headline], block.y))
        for seed, *pair in zip(block.seeds, *(each.chunk(len(block.seeds)) for each in (own, other)), strict=True):
            found.setdefault(seed, []).append((pair[0].flatten(), pair[1].flatten()))
    if not found:
        raise UserError(
            "no client has validation data for early stopping: leave training.patience out, or hold out some"
        )
    plain, other = (
        torch.stack([torch.cat([pair[k] for pair in found[seed]]) for seed in sorted(found)]) for k in (0, 1)
    )
    size = plain.shape[1]
    return plain, (size * plain + other) / (size + 1)


def _losses(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (m, n) of outputs (m, K, n, ...): for the true targets, and for other labels, on average."""
    if not is_of_labels(likelihood):
        nll = torch.stack([likelihood.nll(draw, y) for draw in outputs.unbind(1)])
        loss = math.log(len(nll)) - torch.logsumexp(-nll, 0) + y.shape[-1] * likelihood.offset
        return loss, loss
    log_probs = log_average(likelihood.logits(outputs))
    own = -log_probs.gather(-1, y[..., None]).squeeze(-1)
    rest = (-log_probs).clamp(max=WORST).sum(-1) - own.clamp(max=WORST)
    return own, rest / max(1, log_probs.shape[-1] - 1)
