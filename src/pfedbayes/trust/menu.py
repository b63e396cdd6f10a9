"""A menu of error rates: what share of the rows a model may answer at each of them.

All offers of a menu hold at once. Each candidate threshold gets an upper bound on the error rate among its answers, and
the bounds of all candidates hold together with probability 1 - delta, whatever level is then chosen, for whatever
reason. So you may look at the menu first. A level that is fixed beforehand can share delta among fewer candidates
(`abstention.calibrate`), and sometimes answers more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pfedbayes.maths.intervals import at_most
from pfedbayes.trust.abstention import STEPS, Abstention, smallest_sample

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2)
ENOUGH = 0.5  # the default is the smallest error rate at which this share of the rows is answered
MOST_ROWS = 10_000_000  # more calibration rows than this are not asked for


class _Candidate(NamedTuple):
    """A threshold, and how the calibration rows above it fared."""

    threshold: float
    answered: int
    wrong: int
    bounded: bool
    """Whether it is large enough to be given a bound."""

    @property
    def estimate(self) -> float:
        """The error rate by Laplace's rule of succession, which no small sample puts at 0."""
        return (self.wrong + 1) / (self.answered + 2)


@dataclass(frozen=True)
class Offer:
    """What can be had at an error rate."""

    guaranteed: Abstention
    """The most generous threshold whose error rate is bounded by the target; it answers nothing if there is none."""
    estimated: Abstention
    """The most generous threshold whose error rate is at most the target by estimate, without a guarantee."""
    needed: int | None
    """About how many calibration rows would guarantee the estimated share; None if it has one, or if none would."""

    @property
    def target(self) -> float:
        """Largest error rate among the answers."""
        return self.guaranteed.target

    def describe(self) -> str:
        """Return the offer in a few words."""
        promised, hoped = (_share(rule) for rule in (self.guaranteed, self.estimated))
        guess = f" (estimated {hoped})" if self.estimated.answered > self.guaranteed.answered else ""
        return f"{self.target:.0%} wrong: {promised}{guess}"

    def as_json(self) -> dict[str, Any]:
        """Return the offer as a JSON object."""
        kinds = {"guaranteed": self.guaranteed, "estimated": self.estimated}
        shares = {name: rule.answered / rule.size if rule.size else 0.0 for name, rule in kinds.items()}
        return {"error": self.target, **shares, "rows_to_guarantee_estimated": self.needed}


@dataclass(frozen=True)
class Menu:
    """The offers at all LEVELS from the calibration rows of one client, or of all clients together."""

    offers: tuple[Offer, ...]
    size: int
    """Number of calibration rows."""
    whose: Literal["client", "federation"]

    def default(self) -> Abstention:
        """Return the rule to use if nobody asks for an error rate.

        It has the smallest error rate at which at least half of the calibration rows are answered: with a guarantee, or
        if there is none, by estimate. If no error rate allows it, it has the largest one.
        """
        for kind in ("guaranteed", "estimated"):
            for offer in self.offers:
                rule: Abstention = getattr(offer, kind)
                if rule.answered >= max(1, ENOUGH * self.size):
                    return rule
        last = self.offers[-1]
        return last.guaranteed if last.guaranteed.answered else last.estimated

    def statement(self) -> str:
        """Return the menu as a sentence."""
        of = "this client" if self.whose == "client" else "all clients together"
        shares = "; ".join(offer.describe() for offer in self.offers)
        return f"share answered by {self.size:,} calibration rows of {of}, at most {shares}"


def menu(score: Tensor, wrong: Tensor, delta: float = 0.05, whose: Literal["client", "federation"] = "client") -> Menu:
    """Return the menu from the confidence (n,) of calibration rows, and whether their predictions are wrong."""
    size = len(score)
    counts = sorted({size * step // STEPS for step in range(1, STEPS + 1)} - {0}, reverse=True)
    # Small candidates that could not be bounded by the largest level, even without an error, do not share delta.
    able = list(counts)
    while able and able[-1] < smallest_sample(LEVELS[-1], delta / len(able)):
        able.pop()
    ordered = score.sort(descending=True).values
    candidates = []
    for count in counts:
        threshold = float(ordered[count]) if count < size else -math.inf
        chosen = score > threshold
        answered, errors = int(chosen.sum()), int(wrong[chosen].sum())
        if answered:
            candidates.append(_Candidate(threshold, answered, errors, count in able))
    offers = tuple(_offer(candidates, level, delta, size, whose, max(1, len(able))) for level in LEVELS)
    return Menu(offers, size, whose)


def _offer(
    candidates: list[_Candidate],
    target: float,
    delta: float,
    size: int,
    whose: Literal["client", "federation"],
    tests: int,
) -> Offer:
    nothing = Abstention(math.inf, target, delta, size, 0, 0, whose)

    def rule(candidate: _Candidate) -> Abstention:
        return Abstention(candidate.threshold, target, delta, size, candidate.answered, candidate.wrong, whose)

    def is_shown(candidate: _Candidate) -> bool:
        # The Clopper-Pearson bound is at most the target.
        return candidate.bounded and at_most(candidate.wrong, candidate.answered, target) <= delta / tests

    guaranteed = next((rule(each) for each in candidates if is_shown(each)), nothing)
    likely = next((each for each in candidates if each.estimate <= target), None)
    if likely is None or likely.answered <= guaranteed.answered:
        return Offer(guaranteed, guaranteed, None)
    needed = _needed(likely, size, target, delta / tests)
    return Offer(guaranteed, replace(rule(likely), estimated=True, needed=needed), needed)


def _needed(candidate: _Candidate, size: int, target: float, delta: float) -> int | None:
    """Return about how many calibration rows would bound the estimated error rate by the target (normal approximation).

    Return None if none would, or absurdly many.
    """
    share, rate = candidate.answered / size, candidate.estimate
    if rate >= target:
        return None
    reach = NormalDist().inv_cdf(1 - delta) * math.sqrt(target * (1 - target)) / (target - rate)
    answered = max(reach**2, smallest_sample(target, delta))
    return math.ceil(answered / share) if answered / share <= MOST_ROWS else None


def _share(rule: Abstention) -> str:
    return f"{rule.answered / rule.size:.0%}" if rule.answered else "nothing"
