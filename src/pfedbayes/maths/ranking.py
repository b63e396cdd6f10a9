"""Scores of rankings: how well probabilities separate the classes, and risks the times.

All functions accept leading axes, so that they can score many models at once. Scores that the rows do not define are
NaN, such as the AUROC of rows of one class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AT_ONCE = 2**22  # numbers that are sorted or compared in one pass


def tied_ranks(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean rank 1 ... n of each group of equal scores, and the group of each sorted score (..., n)."""
    changes = (ordered[..., 1:] != ordered[..., :-1]).long()
    group = torch.cat([torch.zeros_like(ordered[..., :1], dtype=torch.int64), changes.cumsum(-1)], -1)
    place = torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device).expand_as(ordered)
    total = torch.zeros_like(ordered).scatter_add(-1, group, place)
    count = torch.zeros_like(ordered).scatter_add(-1, group, torch.ones_like(ordered))
    return total / count, group


def auroc(negative: Tensor, positive: Tensor) -> Tensor:
    """Return the probability that a positive score (..., m) exceeds a negative one (..., n); ties count half."""
    which = torch.cat([torch.zeros_like(negative), torch.ones_like(positive)], -1)
    return area_under_roc(torch.cat([negative, positive], -1), which == 1)


def area_under_roc(score: Tensor, positive: Tensor) -> Tensor:
    """Return the AUROC of scores (..., n), of which `positive` (..., n) says which should be high."""
    ascending, order = score.double().sort(-1)
    mean_rank, group = tied_ranks(ascending)
    high = positive.gather(-1, order).double()
    m = high.sum(-1)
    return ((mean_rank.gather(-1, group) * high).sum(-1) - m * (m + 1) / 2) / ((high.shape[-1] - m) * m)


def average_precision(score: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the precision-recall curve, as a sum of steps; NaN for rows of one class.

    Equal scores enter together: they share the precision among all scores that are at least as high.
    """
    descending, order = score.double().sort(-1, descending=True)
    _, group = tied_ranks(descending)
    high = positive.gather(-1, order).double()
    hits = torch.zeros_like(descending).scatter_add(-1, group, high).cumsum(-1)
    count = torch.zeros_like(descending).scatter_add(-1, group, torch.ones_like(high)).cumsum(-1)
    m = high.sum(-1)
    area = ((hits / count).gather(-1, group) * high).sum(-1) / m
    return torch.where(m < high.shape[-1], area, torch.nan)


def one_vs_rest(curve: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, y: Tensor) -> Tensor:
    """Return an area for log-probabilities (..., n, C) and labels (..., n).

    Of two classes, the second one is positive. Of more, it is the mean over the classes that the rows define, each
    against all others (macro average).
    """
    classes = log_probs.shape[-1]
    if classes == 2:
        return curve(log_probs[..., 1] - log_probs[..., 0], y == 1).to(log_probs.dtype)
    step = max(1, AT_ONCE // max(1, y.numel()))
    areas = []
    for start in range(0, classes, step):
        labels = torch.arange(start, min(start + step, classes), device=y.device)
        score = log_probs[..., labels].transpose(-1, -2)
        areas.append(curve(score, y[..., None, :] == labels[:, None]))
    return torch.cat(areas, -1).nanmean(-1).to(log_probs.dtype)


def balanced_accuracy(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the mean percentage of right predictions over the classes that occur among the labels (..., n)."""
    right = (log_probs.argmax(-1) == y).to(log_probs.dtype)
    shape = (*y.shape[:-1], log_probs.shape[-1])
    hits = log_probs.new_zeros(shape).scatter_add(-1, y, right)
    count = log_probs.new_zeros(shape).scatter_add(-1, y, torch.ones_like(right))
    return 100 * (hits / count).nanmean(-1)


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Return Harrell's C-index of risks (..., n) for times and events (..., n); NaN if no pair can be compared.

    A pair can be compared if the earlier time is an event; at equal times, if one of the two is an event and the other
    is censored, and so lasted longer. Equal risks count half.
    """
    size = risk.shape[-1]
    step = max(1, AT_ONCE // max(1, risk.numel()))
    good = torch.zeros(risk.shape[:-1], dtype=torch.float64, device=risk.device)
    pairs = torch.zeros_like(good)
    for start in range(0, size, step):
        own = slice(start, start + step)
        earlier = time[..., own, None] < time[..., None, :]
        tied = (time[..., own, None] == time[..., None, :]) & (event[..., None, :] == 0)
        comparable = (event[..., own, None] > 0) & (earlier | tied)
        difference = risk[..., own, None] - risk[..., None, :]
        wins = (difference > 0).double() + 0.5 * (difference == 0).double()
        good += (wins * comparable).sum((-2, -1))
        pairs += comparable.double().sum((-2, -1))
    return (good / pairs).to(risk.dtype)
