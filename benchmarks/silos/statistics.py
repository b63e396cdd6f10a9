"""Comparisons over repeated splits: corrected intervals, ranks, and the counts that the page opens with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, t

MARGIN = 0.01  # nats by which the default method may be above the best local rival
DECIMALS = 3  # of the scores that are ranked


class Difference(NamedTuple):
    """A mean paired difference with its 95 % interval."""

    mean: float
    low: float
    """NaN if there are fewer than two splits."""
    high: float
    splits: int

    @property
    def word(self) -> str:
        """Whether the first of the two methods has the lower score."""
        if math.isnan(self.low):
            return "not tested"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "indistinguishable"


def corrected_interval(differences: Sequence[float], test_share: float, confidence: float = 0.95) -> Difference:
    """Return the corrected resampled t interval of a mean difference over J random splits (Nadeau and Bengio 2003).

    The splits share rows, so the variance of the mean is (1/J + n_test/n_train) s² instead of s²/J.

    test_share: n_test/n_train.
    """
    splits, mean = len(differences), float(np.mean(differences))
    if splits < 2:
        return Difference(mean, math.nan, math.nan, splits)
    error = math.sqrt((1 / splits + test_share) * float(np.var(differences, ddof=1)))
    reach = float(t.ppf(0.5 + confidence / 2, splits - 1)) * error
    return Difference(mean, mean - reach, mean + reach, splits)


def paired(ours: Sequence[float | None], theirs: Sequence[float | None], test_share: float) -> Difference | None:
    """Return the interval of ours - theirs over the splits that both have; None if there is none."""
    both = [a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return corrected_interval(both, test_share) if both else None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean over the splits that have a value; None if there is none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the rank of each name, 1 for the lowest score. Scores equal in three decimals share their mean rank."""
    found = rankdata(np.round(list(scores.values()), DECIMALS), method="average")
    return dict(zip(scores, map(float, found), strict=True))


@dataclass(frozen=True)
class Comparison:
    """The default method on one table, against the best local rival and pooled boosting."""

    table: str
    ours: float
    """Mean NLL of the default method."""
    rival: str
    """The local rival with the lowest mean NLL."""
    theirs: float
    """Its mean NLL."""
    to_rival: Difference
    boosting: float | None
    """Mean NLL of pooled boosting."""
    to_boosting: Difference | None

    @property
    def close(self) -> bool:
        """Whether the default method is at most `MARGIN` above the best local rival."""
        return self.to_rival.mean <= MARGIN

    @property
    def below(self) -> bool:
        """Whether the whole interval of the difference to the best local rival is below 0."""
        return self.to_rival.high < 0

    @property
    def reaches_boosting(self) -> bool:
        """Whether the default method is at or below pooled boosting."""
        return self.to_boosting is not None and self.to_boosting.mean <= 0

    @property
    def misses(self) -> bool:
        """Whether the table misses the goal for local rivals or that for pooled boosting."""
        return not (self.close and self.reaches_boosting)


def compare(
    table: str,
    nll: Mapping[str, Sequence[float | None]],
    default: str,
    local: Sequence[str],
    boosting: str,
    test_share: float,
) -> Comparison | None:
    """Compare the default method with its rivals on one table; None while it or all local rivals are missing.

    nll: per method the NLL of each split, None where it is missing. Only splits of the default method count.
    """
    done = [value is not None for value in nll.get(default, ())]
    nll = {name: [value for value, kept in zip(values, done, strict=False) if kept] for name, values in nll.items()}
    means = {name: mean for name in local if name in nll and (mean := mean_of(nll[name])) is not None}
    ours = mean_of(nll.get(default, ()))
    if ours is None or not means:
        return None
    rival = min(means, key=lambda name: means[name])
    to_rival = paired(nll[default], nll[rival], test_share)
    if to_rival is None:
        return None
    pooled = nll.get(boosting, [None] * len(nll[default]))
    return Comparison(
        table, ours, rival, means[rival], to_rival,
        mean_of(pooled), paired(nll[default], pooled, test_share),
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """On how many tables the default method reaches its goals."""

    tables: int
    close: int
    """Mean NLL at most `MARGIN` above the best local rival."""
    below: int
    """Interval of the difference to the best local rival below 0."""
    boosting: int
    """At or below pooled boosting."""


def verdict(comparisons: Sequence[Comparison]) -> Verdict:
    """Count the tables on which the default method reaches its goals."""
    return Verdict(
        len(comparisons),
        sum(one.close for one in comparisons),
        sum(one.below for one in comparisons),
        sum(one.reaches_boosting for one in comparisons),
    )
