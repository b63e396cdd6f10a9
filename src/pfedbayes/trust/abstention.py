"""Abstention: a threshold on the confidence that bounds the error rate among the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pfedbayes.maths.intervals import at_most

STEPS = 10  # candidate thresholds; with more of them, each would need more evidence


@dataclass(frozen=True)
class Abstention:
    """Answer if the score exceeds the threshold; otherwise abstain.

    With probability at least 1 - delta over the calibration examples, the error rate among new examples that are
    answered is at most `target`. An infinite threshold abstains on everything, because the examples show no more.
    """

    threshold: float
    target: float
    """Largest error rate among the answers."""
    delta: float
    """Probability with which the guarantee may fail."""
    size: int
    """Number of calibration examples."""
    answered: int
    """Calibration examples that the threshold answers."""
    wrong: int
    """Wrong answers among them."""
    whose: Literal["client", "federation"] = "client"
    """Whose examples calibrate it, and to whom the guarantee applies."""
    estimated: bool = False
    """Whether the error rate is only estimated, without a guarantee."""
    needed: int | None = None
    """For an estimate: about how many calibration examples would guarantee it; None if that is not known."""

    def answers(self, score: Tensor) -> Tensor:
        """Return which examples are answered, from scores of the same kind as in the calibration."""
        return score > self.threshold

    def statement(self) -> str:
        """Return the guarantee as a sentence."""
        sure = f"{1 - self.delta:.0%} confidence"
        if self.answered:
            share = f"{self.answered / self.size:.0%} of {self.size} calibration examples are answered"
            given = "the answers" if self.whose == "client" else "the answers to all clients together"
            if self.estimated:
                cost = (
                    "" if self.needed is None else f" (about {self.needed:,} calibration examples would guarantee it)"
                )
                hope = f"by estimate at most {self.target:.2%} of {given} are wrong, without a guarantee{cost}"
                return f"{hope}; {share}, {self.wrong} of them wrongly"
            right = f"at most {self.target:.2%} of {given} are wrong, with {sure}"
            return f"{right}; {share}, {self.wrong} of them wrongly"
        needed = smallest_sample(self.target, self.delta)
        if self.size < needed:
            return (
                f"{self.size} calibration examples cannot show an error of {self.target:.2%} with {sure} (at least "
                f"{needed} are needed), so it abstains on everything"
            )
        return f"no threshold keeps the error at {self.target:.2%} with {sure}, so it abstains on everything"


def calibrate(
    score: Tensor,
    wrong: Tensor,
    target: float = 0.01,
    delta: float = 0.05,
    whose: Literal["client", "federation"] = "client",
) -> Abstention:
    """Return the threshold that answers most examples among those shown to keep the error rate.

    score (n,): confidence, larger is more confident. wrong (n,): whether the prediction is wrong. Both come from data
    that the model was not trained on.

    Candidates answer the most confident 1/10, 2/10, ... of the examples. The examples above the (k+1)-th score are
    independent draws from all that exceed it. The errors of a candidate are therefore binomial with its error rate, and
    P(at most this many errors | rate = target) is a p-value. The candidates that are large enough to pass share delta.
    """
    if not 0 < target < 1:
        raise ValueError(f"target must be between 0 and 1, got {target}")
    size = len(score)
    counts = sorted({size * step // STEPS for step in range(1, STEPS + 1)}, reverse=True)
    able = [count for count in counts if count >= smallest_sample(target, delta)]
    while able and able[-1] < smallest_sample(target, delta / len(able)):
        able.pop()
    ordered = score.sort(descending=True).values
    for count in able:
        threshold = float(ordered[count]) if count < size else -math.inf
        chosen = score > threshold
        answered, errors = int(chosen.sum()), int(wrong[chosen].sum())
        if answered and at_most(errors, answered, target) <= delta / len(able):
            return Abstention(threshold, target, delta, size, answered, errors, whose)
    return Abstention(math.inf, target, delta, size, 0, 0, whose)


def smallest_sample(target: float, delta: float) -> int:
    """Return how many right answers, without a wrong one, show that the error rate is at most `target`."""
    return math.ceil(math.log(delta) / math.log1p(-target) - 1e-9)
