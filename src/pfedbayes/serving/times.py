"""Predictions of times to an event."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data.own.columns import as_number, as_text
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Likelihood, TimeLikelihood, is_of_times
from pfedbayes.trust.conformal import Calibration

KIND = "lower bounds of the time, which count a censored time as that of an event"
MOST_TIMES = 100


def require_options(
    likelihood: Likelihood, error: float | None, abstain_at: float | None, at: tuple[float, ...]
) -> None:
    """Refuse options that do not fit the likelihood."""
    if not is_of_times(likelihood):
        if at:
            raise UserError("--at names times of a survival curve, but this model predicts no times: leave --at out")
        return
    if error is not None or abstain_at is not None:
        raise UserError("this model predicts times, which it does not abstain from: leave --error and --abstain-at out")
    last = likelihood.edges[-1]
    if odd := [time for time in at if not 0 < time <= last]:
        raise UserError(
            f"--at has the time {odd[0]:g}: give times above 0 and up to {last:g}, where the training data have events"
        )
    if len(at) > MOST_TIMES:
        raise UserError(f"--at has {len(at)} times: give at most {MOST_TIMES}")


def parse_times(text: str | None) -> tuple[float, ...]:
    """Return the times in a text such as "365,730"."""
    found = [as_number(part.strip()) for part in (text or "").split(",")] if text is not None else []
    times = tuple(time for time in found if time is not None)
    if len(times) < len(found):
        raise UserError(f"--at is {text!r:.80}: give times such as 365,730")
    return times


def columns(
    likelihood: TimeLikelihood, outputs: Tensor, coverage: float, at: tuple[float, ...], bounds: Calibration
) -> dict[str, NDArray[Any]]:
    """Return the columns of a prediction from outputs (K, n, O), in the units of the times.

    risk: the mean probability of an event over all times up to the last edge, which orders the rows. median, and the
    central interval from lower to upper: of the time of the event; inf beyond the last edge. survival_TIME: the
    probability of no event until then. conformal_lower: a guaranteed lower bound of the time.
    """
    found = {"risk": likelihood.risk(likelihood.gist(outputs))}
    levels = {"median": 0.5, "lower": (1 - coverage) / 2, "upper": (1 + coverage) / 2}
    found |= {name: likelihood.quantile(outputs, level) for name, level in levels.items()}
    moments = at or quarters(likelihood.edges)
    curves = likelihood.curve(outputs, outputs.new_tensor(moments))
    found |= {f"survival_{as_text(time)}": curves[:, k] for k, time in enumerate(moments)}
    found["conformal_lower"] = lower_bound(likelihood, outputs, bounds)
    return {name: values.cpu().numpy() for name, values in found.items()}


def lower_bound(likelihood: TimeLikelihood, outputs: Tensor, bounds: Calibration) -> Tensor:
    """Return the time until which the mixture survives with the probability of the threshold, at most the last edge.

    The score of a row is its predicted probability to survive the time it was observed for, which is at most the time
    of its event. So the bound, valid for the observed time, is valid for the time of the event too.
    """
    if bounds.threshold >= 1:
        return torch.zeros_like(outputs[0, :, 0])
    return likelihood.quantile(outputs, 1 - bounds.threshold).clamp(max=likelihood.edges[-1])


def quarters(edges: tuple[float, ...]) -> tuple[float, ...]:
    """Return about the quartiles of the times of events, with three digits."""
    ends = (0.0, *edges)
    levels = np.linspace(0, 1, len(ends))
    return tuple(float(f"{time:.3g}") for time in np.interp((0.25, 0.5, 0.75), levels, ends))
