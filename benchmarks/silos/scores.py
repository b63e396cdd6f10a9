"""Scores of predictions, over all test rows and as means over clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import rankdata

LEAST_PROBABILITY = 1e-6
BINS = 10
REACH = 1.6448536269514722  # deviations on each side of the mean in a central 90 % interval of a Gaussian
Scores = dict[str, float]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Labels:
    """Predicted class probabilities of n test rows."""

    probabilities: Floats
    """(n, C)."""
    y: Ints
    """True labels (n,)."""
    client: NDArray[Any]
    """The client of each row (n,)."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Predicted distributions of n test rows of a regression, in the units of the target."""

    mean: Floats
    """(n,)."""
    deviation: Floats
    """(n,)."""
    y: Floats
    """True targets (n,)."""
    client: NDArray[Any]
    """The client of each row (n,)."""
    nll: Floats | None = None
    """Negative log-density of each row (n,); None if the predicted distribution is a Gaussian."""


Predictions = Labels | Numbers


class NotFitted(Exception):
    """A model that cannot be fitted, with the reason."""


class Measured(NamedTuple):
    """What a job of a protocol with newcomers measures."""

    scores: Scores
    """Over all rows, or means."""
    by_client: Scores
    """Means over clients."""
    seconds: float
    per_client: dict[str, Scores]
    """Scores of each client."""


def score(predictions: Predictions) -> tuple[Scores, Scores]:
    """Return the scores over all rows, and their means over the clients for which they are defined."""
    rows = np.arange(len(predictions.y))
    by_client = [_scores(predictions, rows[predictions.client == one]) for one in np.unique(predictions.client)]
    pooled = _scores(predictions, rows)
    return pooled, {name: float(np.mean([one[name] for one in by_client if name in one])) for name in pooled}


def _scores(predictions: Predictions, rows: NDArray[np.intp]) -> Scores:
    if isinstance(predictions, Labels):
        return label_scores(predictions.probabilities[rows], predictions.y[rows])
    nll = None if predictions.nll is None else predictions.nll[rows]
    return number_scores(predictions.mean[rows], predictions.deviation[rows], predictions.y[rows], nll)


def label_scores(probabilities: Floats, y: Ints) -> Scores:
    """Return the scores of class probabilities (n, C); AUROC only for two classes that both occur."""
    p = np.clip(probabilities, LEAST_PROBABILITY, 1)
    p = p / p.sum(1, keepdims=True)
    right = p.argmax(1) == y
    found = {
        "nll": float(-np.log(p[np.arange(len(y)), y]).mean()),
        "accuracy": 100 * float(right.mean()),
        "balanced_accuracy": 100 * float(np.mean([right[y == label].mean() for label in np.unique(y)])),
        "ece": calibration_error(p, y),
    }
    if p.shape[1] == 2 and len(np.unique(y)) == 2:
        found["auroc"] = auroc(p[:, 1], y == 1)
    return found


def auroc(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the share of pairs in which the positive row has the higher score; equal scores count half."""
    m, n = int(positive.sum()), int((~positive).sum())
    return float((rankdata(score)[positive].sum() - m * (m + 1) / 2) / (m * n))


def calibration_error(p: Floats, y: Ints) -> float:
    """Return the expected calibration error of class probabilities p (n, C) in ten bins of equal width."""
    confidence, right = p.max(1), p.argmax(1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(confidence[bins == k].sum() - right[bins == k].sum()) for k in range(BINS)]
    return float(sum(gaps) / len(y))


def number_scores(mean: Floats, deviation: Floats, y: Floats, nll: Floats | None = None) -> Scores:
    """Return the scores of predicted distributions with these means and deviations (n,).

    nll: negative log-densities (n,); those of Gaussians if not given. CRPS and coverage are those of Gaussians.
    """
    z = (y - mean) / deviation
    if nll is None:
        nll = 0.5 * z**2 + np.log(deviation) + 0.5 * math.log(2 * math.pi)
    return {
        "nll": float(nll.mean()),
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "crps": float(gaussian_crps(mean, deviation, y).mean()),
        "coverage": 100 * float((abs(z) <= REACH).mean()),
    }


def gaussian_crps(mean: Floats, deviation: Floats, y: Floats) -> Floats:
    """Return the continuous ranked probability score (n,) of N(mean, deviation²) (Gneiting and Raftery 2007)."""
    z = (y - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    crps: Floats = deviation * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return crps
