"""What a client gains from the federation: its joined model against one that it trains alone.

Every row of a client has two losses: that of the joined model and that of the model the client trains alone. The mean
difference of a client is uncertain: it has few rows, and losses have heavy tails. So all clients are judged together.

1. A client's variance of single rows is averaged with that of the federation (Smyth 2004). This gives a standard error,
   a t-statistic and a z-score, also for a client of one row.
2. The expected difference of a client is ζ standard errors. Over the clients, ζ has a Student-t prior with location m
   and scale τ. Gains and standard errors both fall like 1/n, so large and small clients can share it. Its heavy tails
   let a client differ from all others. m and τ are integrated out; folds that share training rows widen τ.
3. Cross-validation scores the training procedure. The final pair of models differs from its expectation by chance,
   which the folds do not show (Bengio and Grandvalet 2004). So the posterior is widened by `FINAL_MODELS`.

The client's default is the model with the lower posterior mean loss. Before any evidence that is the joined model,
because the prior of m expects that joining helps by half a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr

CONFIDENCE = 0.95  # posterior probability from which a client is told that joining is better, or worse
LARGEST_LOSS = 1e6  # replaces a loss that is larger or not a number
PRIOR_ROWS = 4.0  # rows for which the variance of the federation counts in that of a client
TAILS = 2.0  # degrees of freedom of the prior of ζ
HOPE = -0.5  # prior mean of m; its standard deviation is 1
FINAL_MODELS = 0.5  # standard deviation by which final models differ from their expectation, in standard errors
LIMIT = 12.0  # z-scores beyond it are not shrunk further

_STEP = 0.05
_ZETA = _STEP * np.arange(-360, 361)
_M, _TAU = (grid.reshape(-1, 1) for grid in np.meshgrid(np.linspace(-4, 4, 33), np.geomspace(0.1, 6.4, 13)))

Floats = NDArray[np.float64]
Conclusion = Literal["better", "worse", "no difference shown"]


class _Zeta(NamedTuple):
    """Posterior of a difference in standard errors."""

    mean: float
    low: float
    high: float
    better: float
    """Probability that it is below 0."""


class PairedLosses(NamedTuple):
    """The losses of both models on the same rows of a client, which neither model was trained on."""

    client: str
    alone: Floats
    """Loss (n,) of the model that the client trains alone."""
    joined: Floats
    """Loss (n,) of the client's model from the federation."""
    fold: NDArray[np.int64] | None = None
    """Cross-validation fold (n,) of each row; None for test rows, which one pair of models predicts."""


@dataclass(frozen=True)
class Verdict:
    """What joining bought a client, by the losses on one set of rows. Differences are joined minus alone."""

    client: str
    rows: int
    alone: float
    """Mean loss of the model that the client trains alone."""
    joined: float
    """Mean loss of the joined model."""
    difference: float
    """Posterior mean of the difference; below 0, joining is better."""
    low: float
    """Lower end of the central 90 % posterior interval of the difference."""
    high: float
    """Upper end."""
    probability: float
    """Posterior probability that joining is better."""
    conclusion: Conclusion
    use: Literal["joined", "alone"]
    """The model to use by default: "alone" if the posterior mean of the difference is above 0, else "joined"."""

    def sentence(self, metric: str = "NLL") -> str:
        """Return the verdict as a sentence without a full stop."""
        if self.conclusion == "no difference shown":
            return f"{self.client}: {self.finding}"
        return f"{self.client}: {metric} {self.change}, {self.finding}"

    @property
    def finding(self) -> str:
        """The conclusion in words, with the model to use."""
        if self.conclusion == "worse":
            return f"{self.evidence}: use its own model"
        unclear = self.conclusion == "no difference shown" and self.use == "alone"
        return f"{self.evidence}; by default it uses its own model" if unclear else self.evidence

    @property
    def evidence(self) -> str:
        """The conclusion in words."""
        if self.conclusion == "no difference shown":
            return f"no difference that {self.rows:,} row{'s' * (self.rows != 1)} could show"
        probability = self.probability if self.conclusion == "better" else 1 - self.probability
        return f"{self.conclusion} with {_percent(probability)} confidence"

    @property
    def change(self) -> str:
        """Both mean losses, with as many decimals as tell them apart."""
        texts = [f"{self.alone:.{places}f} → {self.joined:.{places}f}" for places in (2, 3, 4)]
        return next((text for text in texts if len(set(text.split(" → "))) > 1), texts[0])


def judge(clients: Sequence[PairedLosses], confidence: float = CONFIDENCE) -> list[Verdict]:
    """Return the verdict on each client that has rows. All clients have losses from folds, or none has.

    confidence: posterior probability from which a difference counts as shown. The intervals have the level
    2 * confidence - 1, so a difference is shown if its interval excludes 0.
    """
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be between 0.5 and 1, got {confidence}")
    clients = [_finite(each) for each in clients if len(each.alone)]
    if not clients:
        return []
    score, error = _z_scores(clients)
    widened_by = FINAL_MODELS if clients[0].fold is not None else 0.0
    posterior = _posterior(score, widened_by, confidence)
    return [_verdict(*each, confidence) for each in zip(clients, error.tolist(), posterior, strict=True)]


def _verdict(losses: PairedLosses, error: float, zeta: _Zeta, confidence: float) -> Verdict:
    better = zeta.better if error > 0 else 0.5
    conclusion: Conclusion = "no difference shown"
    if max(better, 1 - better) >= confidence:
        conclusion = "better" if better > 0.5 else "worse"
    return Verdict(
        client=losses.client,
        rows=len(losses.alone),
        alone=float(losses.alone.mean()),
        joined=float(losses.joined.mean()),
        difference=error * zeta.mean,
        low=error * zeta.low,
        high=error * zeta.high,
        probability=better,
        conclusion=conclusion,
        use="alone" if error * zeta.mean > 0 else "joined",
    )


def _finite(losses: PairedLosses) -> PairedLosses:
    """Return the losses in double precision; none is larger than LARGEST_LOSS."""
    alone, joined = (
        np.nan_to_num(np.asarray(each, np.float64), nan=LARGEST_LOSS).clip(-LARGEST_LOSS, LARGEST_LOSS)
        for each in (losses.alone, losses.joined)
    )
    return losses._replace(alone=alone, joined=joined)


def _z_scores(clients: Sequence[PairedLosses]) -> tuple[Floats, Floats]:
    """Return the z-score of each client's mean difference, and the standard error that goes with it.

    The z-score has the p-value of the t-statistic. The standard error is the mean over the z-score: with few rows it is
    larger than that of the t-statistic.
    """
    n = np.array([len(each.alone) for each in clients])
    differences = [each.joined - each.alone for each in clients]
    mean = np.array([each.mean() for each in differences])
    squares = np.array([np.square(each - each.mean()).sum() for each in differences])
    # The variance about 0, not about the mean: it is positive for a single row too.
    about_zero = np.array([np.square(each).mean() for each in differences])
    typical = float(np.median(n * about_zero)) / n
    variance = (PRIOR_ROWS * typical + squares) / (PRIOR_ROWS + n - 1)
    error = np.sqrt(variance / n)
    t = np.divide(mean, error, out=np.zeros_like(mean), where=error > 0)
    # The lower tail keeps its precision where the upper one would round to 1.
    z = -np.sign(t) * ndtri(stdtr(PRIOR_ROWS + n - 1, -np.abs(t)).clip(1e-300))
    return z, np.divide(mean, z, out=error, where=np.abs(z) > 1e-3)


def _posterior(score: Floats, widened_by: float, confidence: float) -> list[_Zeta]:
    """Return the posterior of ζ given each client's z-score."""
    clipped = score.clip(-LIMIT, LIMIT)
    cells, cell = np.unique(np.round(clipped / _STEP), return_inverse=True)
    likelihood = np.exp(-0.5 * np.square(_STEP * cells[:, None] - _ZETA))
    prior = np.power(1 + np.square((_ZETA - _M) / _TAU) / TAILS, -(TAILS + 1) / 2)
    prior /= prior.sum(1, keepdims=True)
    evidence = likelihood @ prior.T  # (cells, hyper-parameters)
    log_weight = np.bincount(cell, minlength=len(cells)) @ np.log(evidence) - 0.5 * np.square(_M[:, 0] - HOPE)
    weight = np.exp(log_weight - log_weight.max())
    density = likelihood * ((weight / weight.sum() / evidence) @ prior)
    if widened_by:
        kernel = np.exp(-0.5 * np.square(_ZETA[np.abs(_ZETA) <= 4 * widened_by] / widened_by))
        density = np.stack([np.convolve(each, kernel, "same") for each in density])
    density /= density.sum(1, keepdims=True)
    below = density.cumsum(1)
    low, high = (_ZETA[(below < level).sum(1)] for level in (1 - confidence, confidence))
    zero = len(_ZETA) // 2
    better = (below[:, zero] - density[:, zero] / 2).clip(0, 1)  # sums of many cells can exceed 1 by rounding
    found = np.stack([density @ _ZETA, low, high, better])[:, cell]
    found[:3] += score - clipped
    return [_Zeta(*each) for each in found.T.tolist()]


def _percent(probability: float) -> str:
    """Return a probability as a percentage, rounded down to whole numbers and, close to certainty, to tenths."""
    places = 1 if probability >= 0.99 else 0
    return f"{math.floor(100 * min(probability, 0.999) * 10**places + 1e-9) / 10**places:.{places}f} %"
