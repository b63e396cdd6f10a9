"""Split-conformal prediction: sets of labels, or intervals, that contain the truth with a chosen probability.

A nonconformity score measures how unusual a target looks to a model. The threshold is slightly above the (1 - alpha)
quantile of the scores of n calibration examples that the model was not trained on. A new example exceeds it with
probability at most alpha, for any model and any data, if the new example and the calibration examples are exchangeable
(Vovk et al. 2005).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.intervals import at_most
from pfedbayes.maths.metrics import Gaussians

PENALTY, KEPT = 0.05, 2  # of RAPS: what each label beyond the KEPT most probable ones adds to the score
BAND = 0.9  # coverage of the model's own interval whose ends are the quantiles of `Band`


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


@dataclass(frozen=True)
class ClassCalibration:
    """Thresholds for each label: sets contain the truth with the chosen probability whatever the true label is."""

    labels: tuple[Calibration, ...]
    """The calibration from the examples of each label, of this client or of all."""

    @property
    def threshold(self) -> Tensor:
        """The thresholds (C,)."""
        return torch.tensor([each.threshold for each in self.labels], dtype=torch.float64)

    def statement(self) -> str:
        """Return the guarantee as a sentence."""
        own = sum(each.whose == "client" and not each.is_trivial for each in self.labels)
        pooled = sum(each.whose == "federation" and not each.is_trivial for each in self.labels)
        trivial = sum(each.is_trivial for each in self.labels)
        always = f"; {trivial} with too few of them are in every set" if trivial else ""
        return (
            f"sets contain the truth for at least {1 - self.labels[0].alpha:.0%} of new examples of each label, on "
            f"average over calibration sets: {own} labels by examples of this client, {pooled} by those of all clients "
            f"together{always}"
        )


def calibrate_classes(
    own: Tensor, own_y: Tensor, of_all: Tensor, all_y: Tensor, alpha: float, classes: int
) -> ClassCalibration:
    """Return a threshold for each label, from scores (n,) of true labels (n,).

    A label has that of the client's own examples if there are enough, else that of all clients' examples of the label.
    """
    found = []
    for k in range(classes):
        calibration = calibrate(own[own_y == k], alpha)
        if calibration.is_trivial and int((all_y == k).sum()) > calibration.size:
            calibration = calibrate(of_all[all_y == k], alpha, "federation")
        found.append(calibration)
    return ClassCalibration(tuple(found))


def weighted_threshold(scores: Tensor, weights: Tensor, new_weight: float, alpha: float) -> float:
    """Return the threshold for a new example under covariate shift (Tibshirani et al. 2019).

    scores, weights: (n,) of calibration examples; new_weight: of the new example. A weight is proportional to the ratio
    of the new examples' density to that of the calibration examples. With equal weights it is that of `calibrate`.
    """
    order = scores.argsort()
    below = weights[order].double().cumsum(0) / (weights.double().sum() + new_weight)
    place = int((below < 1 - alpha - 1e-12).sum())
    return float(scores[order[place]]) if place < len(scores) else math.inf


def label_scores(log_probs: Tensor, u: Tensor | None = None, penalty: float = 0.0) -> Tensor:
    """Return the nonconformity score of each label, (..., C), for log-probabilities (..., C).

    Without u: LAC (Sadinle et al. 2019), 1 - p(label), which gives the smallest sets on average. With uniform numbers u
    (...,): APS (Romano et al. 2020), the probability of all more probable labels plus the share u of the label's own.
    Its sets grow with the uncertainty about an example. With a penalty for each label beyond the KEPT most probable
    ones it is RAPS (Angelopoulos et al. 2021), which makes large sets rare.

    The most probable label has the score 0, so that no set is empty. This is a score like any other, so the guarantee
    holds unchanged.
    """
    probs = log_probs.exp()
    top = log_probs.argmax(-1, keepdim=True)
    if u is None:
        return (1 - probs).scatter(-1, top, 0.0)
    ordered, order = probs.sort(-1, descending=True)
    above = ordered.cumsum(-1) - ordered
    ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
    scores = above + u[..., None] * ordered + penalty * (ranks - KEPT).clamp_min(0)
    scores = torch.empty_like(probs).scatter(-1, order, scores)
    return scores.scatter(-1, top, 0.0)


def true_scores(label_scores: Tensor, y: Tensor) -> Tensor:
    """Return the scores of the true labels, (..., n) from (..., n, C)."""
    return label_scores.gather(-1, y[..., None]).squeeze(-1)


def label_sets(label_scores: Tensor, calibration: Calibration | ClassCalibration) -> Tensor:
    """Return which labels are in the set, (..., C) booleans."""
    threshold = torch.as_tensor(calibration.threshold, dtype=label_scores.dtype)
    return (label_scores <= threshold) | (label_scores == 0)


def uniforms(x: Tensor) -> Tensor:
    """Return a uniform number (n,) for each input (n, ...), which the input names: APS and RAPS draw it.

    So an example has the same set in every file, on every day.
    """
    rows = x.detach().cpu().contiguous().flatten(1).numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=6).digest() for row in rows]
    return torch.tensor([(int.from_bytes(each, "little") + 0.5) / 2**48 for each in digests], dtype=torch.float64)


def residuals(predicted: Gaussians, y: Tensor) -> Tensor:
    """Return the scores of a regression (..., n): the largest |y - mean| / deviation over the d target dimensions."""
    return ((y - predicted.mean).abs() / predicted.deviation).amax(-1)


class Band(NamedTuple):
    """Quantiles of a prediction, each (..., n, d)."""

    low: Tensor
    middle: Tensor
    high: Tensor

    def arms(self) -> tuple[Tensor, Tensor]:
        """Return the distances of the ends from the middle; none is 0."""
        least = 1e-3 * (self.high - self.low).clamp_min(1e-6)
        return torch.maximum(self.middle - self.low, least), torch.maximum(self.high - self.middle, least)


def band_scores(band: Band, y: Tensor) -> Tensor:
    """Return scores (..., n) from quantiles (CQR-m, Kivaranovic et al. 2020), the largest over the d target dimensions.

    It is the distance from the median in units of the arm on that side, so intervals may be asymmetric.
    """
    below, above = band.arms()
    off = y - band.middle
    return torch.where(off < 0, -off / below, off / above).amax(-1)


def band_interval(band: Band, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return lower and upper ends (..., n, d): both arms times the threshold."""
    below, above = band.arms()
    return band.middle - calibration.threshold * below, band.middle + calibration.threshold * above


def interval(predicted: Gaussians, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return lower and upper ends (..., n, d): mean -+ threshold * deviation, valid for all d dimensions at once."""
    half = calibration.threshold * predicted.deviation
    return predicted.mean - half, predicted.mean + half
