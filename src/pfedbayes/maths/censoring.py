"""Estimates from censored times without a model, and the scores of survival curves that rest on them.

All functions accept leading axes. Times are (..., n), and events (..., n) are 1, or 0 where a time is censored. At
equal times, events come before censored rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _product_limit(time: Tensor, event: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted times (..., n), the product-limit estimate after each (..., n), and the order of the rows.

    counts: which rows (..., n) leave by what is estimated; the others are only at risk until their times.
    """
    by_event = event.argsort(dim=-1, descending=True, stable=True)
    order = by_event.gather(-1, time.gather(-1, by_event).argsort(dim=-1, stable=True))
    size = time.shape[-1]
    at_risk = torch.arange(size, 0, -1, dtype=torch.float64, device=time.device)
    factors = torch.where(counts.gather(-1, order), 1 - 1 / at_risk, 1.0)
    return time.gather(-1, order), factors.cumprod(-1), order


def kaplan_meier(time: Tensor, event: Tensor, at: Tensor) -> Tensor:
    """Return the Kaplan-Meier estimate (..., G) of no event until each of the times (G,)."""
    return _at(*_product_limit(time, event, event > 0)[:2], at)


def _at(ordered: Tensor, after: Tensor, at: Tensor) -> Tensor:
    """Return an estimate (..., G) at times (G,)."""
    start = torch.ones_like(after[..., :1])
    places = torch.searchsorted(ordered.contiguous(), at.expand(*ordered.shape[:-1], -1).contiguous(), right=True)
    return torch.cat([start, after], -1).gather(-1, places)


def integrated_brier(curves: Tensor, at: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Return the Brier score (...,) of survival curves (..., n, G), averaged over the times (G,).

    Rows that are censored before a time count in those that are not, with the inverse probability of not being censored
    (Graf et al. 1999), by the Kaplan-Meier estimate of censoring among the same rows. Times at which no row is observed
    any more are left out; NaN if these are all.
    """
    ordered, after, order = _product_limit(time, event, event <= 0)
    before = torch.cat([torch.ones_like(after[..., :1]), after[..., :-1]], -1)
    uncensored = torch.empty_like(before).scatter(-1, order, before)  # just before the own time
    known = (event > 0).double() / uncensored
    free, size = _at(ordered, after, at), time.shape[-1]
    total = torch.zeros(time.shape[:-1], dtype=torch.float64, device=time.device)
    number = torch.zeros_like(total)
    for k, moment in enumerate(at):
        chance, later = curves[..., k].double(), time > moment
        past = torch.where(later, 0.0, chance.square() * known).sum(-1)
        ahead = torch.where(later, (1 - chance).square(), 0.0).sum(-1) / free[..., k]
        observed = later.any(-1)
        total += torch.where(observed, (past + ahead) / size, 0.0)
        number += observed
    return (total / number).to(curves.dtype)
