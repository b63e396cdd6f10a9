"""Split-conformal prediction: sets of labels, or intervals, that contain the truth with a chosen probability.

A nonconformity score measures how unusual a target looks to a model. The threshold is slightly above the (1 - alpha)
quantile of the scores of n calibration examples that the model was not trained on. A new example exceeds it with
probability at most alpha, for any model and any data, if the new example and the calibration examples are exchangeable
(Vovk et al. 2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pfedbayes.maths.intervals import at_most
from pfedbayes.maths.metrics import Gaussians


@dataclass(frozen=True)
class Calibration:
    """A calibrated threshold on the score.

    If size < 1/alpha - 1, no finite threshold guarantees coverage 1 - alpha. The threshold is then infinite, and every
    set contains all labels.
    """

    threshold: float
    alpha: float
    """Probability with which a set may miss the truth."""
    size: int
    """Number of calibration examples."""
    whose: Literal["client", "federation"] = "client"
    """Whose examples calibrate it, and to whom the guarantee applies."""

    @property
    def is_trivial(self) -> bool:
        """Whether there are too few examples, so that every set contains all labels."""
        return math.isinf(self.threshold)

    def coverage_with(self, confidence: float = 0.95) -> float:
        """Return a lower bound on the coverage of this calibration, with this confidence over its examples.

        For scores without ties the coverage has the distribution Beta(k, size + 1 - k) of the k-th smallest of `size`
        uniform numbers; its quantile is found through the binomial: P(Beta <= c) = P(Binomial(size, c) >= k).
        """
        if self.is_trivial:
            return 1.0
        k = rank(self.size, self.alpha)
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            below = 1 - at_most(k - 1, self.size, middle)
            low, high = (middle, high) if below <= 1 - confidence else (low, middle)
        return low

    def statement(self) -> str:
        """Return the guarantee as a sentence."""
        wanted = f"{1 - self.alpha:.0%}"
        if self.is_trivial:
            needed = math.ceil(1 / self.alpha - 1 - 1e-9)
            return (
                f"{self.size} calibration examples are too few for {wanted}: at least {needed} are needed, "
                "so every set contains all labels"
            )
        of = "of this client" if self.whose == "client" else "of all clients together, not of each of them"
        return (
            f"sets contain the truth for at least {wanted} of new examples {of}, on average over calibration sets of "
            f"{self.size}; with this calibration set they cover at least {self.coverage_with():.1%} with 95% confidence"
        )


def rank(size: int, alpha: float) -> int:
    """Return the rank of the threshold among the sorted scores: ceil((size + 1)(1 - alpha)), at most size + 1."""
    return min(size + 1, math.ceil((size + 1) * (1 - alpha) - 1e-9))


def calibrate(scores: Tensor, alpha: float = 0.1, whose: Literal["client", "federation"] = "client") -> Calibration:
    """Return the threshold from calibration scores (n,)."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    k = rank(len(scores), alpha)
    threshold = math.inf if k > len(scores) else float(scores.sort().values[k - 1])
    return Calibration(threshold, alpha, len(scores), whose)


def calibrate_clients(scores: Sequence[Tensor], alpha: float = 0.1) -> list[Calibration]:
    """Return a threshold for every client.

    It comes from the client's own scores if there are enough (Mondrian), with a guarantee for this client. Otherwise it
    comes from the scores of all clients, with a guarantee for the federation as a whole.
    """
    of_all = calibrate(torch.cat(list(scores)), alpha, "federation")
    own = [calibrate(each, alpha) for each in scores]
    return [of_all if each.is_trivial else each for each in own]


def label_scores(log_probs: Tensor, u: Tensor | None = None) -> Tensor:
    """Return the nonconformity score of each label, (..., C), for log-probabilities (..., C).

    Without u: LAC (Sadinle et al. 2019), 1 - p(label), which gives the smallest sets on average. With uniform numbers u
    (...,): APS (Romano et al. 2020), the probability of all more probable labels plus the share u of the label's own.
    Its sets grow with the uncertainty about an example.

    The most probable label has the score 0, so that no set is empty. This is a score like any other, so the guarantee
    holds unchanged.
    """
    probs = log_probs.exp()
    top = log_probs.argmax(-1, keepdim=True)
    if u is None:
        return (1 - probs).scatter(-1, top, 0.0)
    ordered, order = probs.sort(-1, descending=True)
    above = ordered.cumsum(-1) - ordered
    scores = torch.empty_like(probs).scatter(-1, order, above + u[..., None] * ordered)
    return scores.scatter(-1, top, 0.0)


def true_scores(label_scores: Tensor, y: Tensor) -> Tensor:
    """Return the scores of the true labels, (..., n) from (..., n, C)."""
    return label_scores.gather(-1, y[..., None]).squeeze(-1)


def label_sets(label_scores: Tensor, calibration: Calibration) -> Tensor:
    """Return which labels are in the set, (..., C) booleans."""
    return label_scores <= calibration.threshold


def residuals(predicted: Gaussians, y: Tensor) -> Tensor:
    """Return the scores of a regression (..., n): the largest |y - mean| / deviation over the d target dimensions."""
    return ((y - predicted.mean).abs() / predicted.deviation).amax(-1)


def interval(predicted: Gaussians, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return lower and upper ends (..., n, d): mean -+ threshold * deviation, valid for all d dimensions at once."""
    half = calibration.threshold * predicted.deviation
    return predicted.mean - half, predicted.mean + half
