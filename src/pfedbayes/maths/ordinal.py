"""Ordered classes by cumulative logits (proportional odds)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.maths import metrics
from pfedbayes.maths.gaussian import sampled
from pfedbayes.maths.likelihoods import Classification, differentiate


@dataclass(frozen=True)
class Ordinal(Classification):
    """P(y <= j) = sigmoid(theta_j - f(x)) for ordered classes 0 ... C-1.

    Outputs (n, C) are f and C - 1 numbers t that are the same for every input. The thresholds theta increase: the first
    is logit(1/C) + t_1, and each further step is the one between equally probable classes, times exp(t_j).
    """

    classes: int = 2
    """The number C of classes."""

    task = "ordinal"

    @property
    def metrics(self) -> tuple[str, ...]:
        return metrics.METRICS["ordinal"]

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        return ()

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities (..., C) of the classes."""
        level, free = outputs[..., :1], outputs[..., 1:]
        equal = torch.logit(torch.arange(1, self.classes, dtype=torch.float64) / self.classes)
        equal = equal.to(outputs.device, outputs.dtype)
        steps = equal.diff() * free[..., 1:].clamp(-15, 15).exp()
        first = equal[:1] + free[..., :1]
        ends = torch.cat([first, first + steps.cumsum(-1)], -1) - level
        up, down = functional.logsigmoid(ends), functional.logsigmoid(-ends)
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b))
        inner = up[..., 1:] + down[..., :-1] + torch.log(-torch.expm1(-steps))
        return torch.cat([up[..., :1], inner, down[..., -1:]], -1)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-probability of each class."""
        return -self.logits(outputs).gather(-1, y[..., None]).squeeze(-1)

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of sampled outputs."""
        return self.nll(sampled(mean, variance, noise), y)

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return differentiate(self, mean, variance, y, noise)

    def gist(self, outputs: Tensor) -> Tensor:
        return metrics.log_average(self.logits(outputs))

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the metrics; the mean absolute error counts classes."""
        logits = self.logits(outputs)
        values = metrics.label_scores(logits, y)
        off = (metrics.log_average(logits).argmax(-1) - y).abs().to(values.dtype).mean(-1)
        return torch.cat([values[..., :4], off[..., None], values[..., 4:]], dim=-1)

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        return gist.new_empty(0)
