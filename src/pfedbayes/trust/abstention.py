"""When to say nothing: a threshold on confidence such that the answers given are wrong at most so often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pfedbayes.maths.intervals import at_most

STEPS = 10  # the shares of examples answered that are considered: more of them would each have to be surer


@dataclass(frozen=True)
class Abstention:
    """Answer where the score exceeds the threshold; else abstain.

    With probability at least 1 - delta over the `size` calibration examples, the error rate among new examples that are
    answered is at most `target`. An infinite threshold abstains on everything: nothing better could be promised.
    answered, wrong: how many calibration examples the threshold answers, and how many of them wrongly. whose: "client"
    or "federation" is whose examples these were, and to whom the promise is made.
    """

    threshold: float
    target: float
    delta: float
    size: int
    answered: int
    wrong: int
    whose: Literal["client", "federation"] = "client"

    def answers(self, score: Tensor) -> Tensor:
        """Which examples are answered, from scores as those calibrated with."""
        return score > self.threshold

    def statement(self) -> str:
        """What is guaranteed, in words."""
        sure = f"{1 - self.delta:.0%} confidence"
        if self.answered:
            share = f"{self.answered / self.size:.0%} of {self.size} calibration examples are answered"
            given = "the answers" if self.whose == "client" else "the answers to all clients together"
            right = f"at most {self.target:.2%} of {given} are wrong, with {sure}"
            return f"{right}; {share}, {self.wrong} of them wrongly"
        needed = smallest_sample(self.target, self.delta)
        if self.size < needed:
            return (
                f"{self.size} calibration examples cannot show an error of {self.target:.2%} with {sure} (at least "
                f"{needed} are needed), so it abstains on everything"
            )
        return f"no threshold was seen to keep the error at {self.target:.2%} with {sure}, so it abstains on everything"


def calibrate(
    score: Tensor,
    wrong: Tensor,
    target: float = 0.01,
    delta: float = 0.05,
    whose: Literal["client", "federation"] = "client",
) -> Abstention:
    """The threshold that answers most, among those which are shown to keep the error rate.

    score (n,): larger is surer; wrong (n,): whether the prediction is wrong; both on data not trained on. Candidates
    answer the best 1/10, 2/10, ... of the examples. Those above the (k+1)-th score are independent draws from all that
    exceed it, so a candidate's errors are binomial with its error rate, and P(so few | rate = target) is a p-value. The
    candidates that are large enough to pass at all share delta.
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
    """How many right answers without a wrong one show that the error rate is at most `target`."""
    return math.ceil(math.log(delta) / math.log1p(-target) - 1e-9)
