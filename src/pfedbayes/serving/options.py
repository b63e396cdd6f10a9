"""The settings of a prediction, and which of them go together."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Likelihood
from pfedbayes.serving.times import require_options
from pfedbayes.trust.calibration import DRAWS, SetKind


class Options(NamedTuple):
    """Settings of a prediction."""

    samples: int = DRAWS
    """Weight draws that are averaged."""
    coverage: float = 0.9
    """Probability with which conformal sets and intervals contain the truth."""
    error: float | None = None
    """Largest error rate among the answers; the client abstains on the other rows. Default for labels: see
    `Menu.default`."""
    abstain_at: float | None = None
    """Abstain below this probability of the label, or above this standard deviation, instead of by `error`."""
    at: tuple[float, ...] = ()
    """For survival, the times whose probabilities to survive are predicted. Default: three quarter points."""
    others: float | None = None
    """Share of the new rows whose labels the client has no rows of, for gated predictions; None to estimate it from the
    rows that are predicted together."""
    sets: SetKind = "lac"
    """How sets of labels are made, see `conformal.label_scores`."""
    class_conditional: bool = False
    """Whether sets of labels cover each label as often as all of them."""
    intervals: Literal["normalised", "quantile"] = "normalised"
    """How intervals are made: mean -+ a multiple of the deviation, or from the quantiles of the prediction."""


def require(options: Options, likelihood: Likelihood, gated: bool) -> None:
    """Refuse settings that exclude each other or do not fit what is predicted; gated: by the shared model."""
    require_options(likelihood, options.error, options.abstain_at, options.at)
    labels = likelihood.predicts == "labels"
    if not labels and options.error is not None:
        raise UserError(
            "--error bounds the share of wrong labels, but this model predicts numbers: leave --error out, or use "
            "--abstain-at with a standard deviation"
        )
    if options.error is not None and options.abstain_at is not None:
        raise UserError("--error and --abstain-at both set the threshold for abstaining: leave one of them out")
    if options.abstain_at is not None and not 0 < options.abstain_at < (1 if labels else math.inf):
        raise UserError(
            f"--abstain-at is {options.abstain_at}: give a probability, or for numbers a standard deviation"
        )
    if options.others is not None and not 0 <= options.others <= 1:
        raise UserError(f"--others is {options.others}: give a share between 0 and 1, e.g. 0.1")
    of_sets = options.sets != "lac" or options.class_conditional
    if of_sets and not labels:
        raise UserError(
            "--sets and --class-conditional are for labels, but this model predicts numbers: leave them out"
        )
    if of_sets and gated:
        raise UserError(
            "--sets and --class-conditional are not for gated predictions: leave them out, or add --model personal"
        )
    if options.intervals != "normalised" and likelihood.predicts != "numbers":
        raise UserError("--intervals is for numbers, which this model does not predict: leave it out")
