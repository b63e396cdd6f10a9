"""Split-conformal prediction: sets of labels, or intervals, that hold the truth with a chosen probability.

A score says how odd a target looks to a model. Its (1 - alpha) quantile over n calibration examples that the model was
not trained on, taken a little higher, is exceeded by a new example with probability at most alpha, whatever the model
and the data are, as long as the new example and the calibration examples are exchangeable (Vovk et al. 2005).
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
    """A threshold on a score, from `size` examples; "client" or "federation" is whose examples these were.

    Where size < 1/alpha - 1 no finite threshold can promise 1 - alpha: it is infinite, and a set holds everything.
    """

    threshold: float
    alpha: float
    size: int
    whose: Literal["client", "federation"] = "client"

    @property
    def is_trivial(self) -> bool:
        """Whether there were too few examples, so that every set is the full one."""
        return math.isinf(self.threshold)

    def coverage_with(self, confidence: float = 0.95) -> float:
        """What this very calibration covers at least, with this confidence over the draw of its examples.

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
        """What is guaranteed, in words."""
        wanted = f"{1 - self.alpha:.0%}"
        if self.is_trivial:
            needed = math.ceil(1 / self.alpha - 1 - 1e-9)
            return (
                f"{self.size} calibration examples are too few for {wanted}: at least {needed} are needed, "
                "so every set holds everything"
            )
        of = "of this client" if self.whose == "client" else "of all clients together, not of each of them"
        return (
            f"sets hold the truth for at least {wanted} of new examples {of}, on average over calibration sets of "
            f"{self.size}; this very one makes them cover at least {self.coverage_with():.1%} with 95% confidence"
        )


def rank(size: int, alpha: float) -> int:
    """Which of the sorted scores is the threshold: ceil((size + 1)(1 - alpha)); size + 1 if none is high enough."""
    return min(size + 1, math.ceil((size + 1) * (1 - alpha) - 1e-9))


def calibrate(scores: Tensor, alpha: float = 0.1, whose: Literal["client", "federation"] = "client") -> Calibration:
    """The threshold from calibration scores (n,)."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    k = rank(len(scores), alpha)
    threshold = math.inf if k > len(scores) else float(scores.sort().values[k - 1])
    return Calibration(threshold, alpha, len(scores), whose)


def calibrate_clients(scores: Sequence[Tensor], alpha: float = 0.1) -> list[Calibration]:
    """A threshold for every client: from its own scores where they are enough (Mondrian), so that the promise is made
    to each client, else from the scores of all, so that it is made to the federation as a whole."""
    of_all = calibrate(torch.cat(list(scores)), alpha, "federation")
    own = [calibrate(each, alpha) for each in scores]
    return [of_all if each.is_trivial else each for each in own]


def label_scores(log_probs: Tensor, u: Tensor | None = None) -> Tensor:
    """How odd each label looks, (..., C), for log-probabilities (..., C).

    Without u LAC (Sadinle et al. 2019): 1 - p(label), which gives the smallest sets on average. With uniform numbers u
    (...,) APS (Romano et al. 2020): the probability of all more probable labels and a random part u of its own, whose
    sets grow with the doubt about an example.
    """
    probs = log_probs.exp()
    if u is None:
        return 1 - probs
    ordered, order = probs.sort(-1, descending=True)
    above = ordered.cumsum(-1) - ordered
    return torch.empty_like(probs).scatter(-1, order, above + u[..., None] * ordered)


def true_scores(label_scores: Tensor, y: Tensor) -> Tensor:
    """The scores of the true labels: (..., n) from (..., n, C)."""
    return label_scores.gather(-1, y[..., None]).squeeze(-1)


def label_sets(label_scores: Tensor, calibration: Calibration) -> Tensor:
    """Which labels are in the set, (..., C) booleans."""
    return label_scores <= calibration.threshold


def residuals(predicted: Gaussians, y: Tensor) -> Tensor:
    """Scores of a regression (..., n): the largest of |y - mean| / deviation over the d target dimensions."""
    return ((y - predicted.mean).abs() / predicted.deviation).amax(-1)


def interval(predicted: Gaussians, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Lower and upper ends (..., n, d): mean -+ threshold * deviation, for all d dimensions together."""
    half = calibration.threshold * predicted.deviation
    return predicted.mean - half, predicted.mean + half
