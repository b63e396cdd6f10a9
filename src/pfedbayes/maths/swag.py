"""SWAG (Maddox et al. 2019): a Gaussian from the iterates of SGD, with a diagonal and a low-rank part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """The moments of the iterates theta (T,) that have been collected."""

    models: Tensor
    """Number of iterates; 0 as long as only the last model is kept."""
    mean: Tensor
    """Their mean (T,)."""
    variance: Tensor
    """Their variances (T,)."""
    last: Tensor
    """The last M differences of an iterate from the mean at that time, (M, T)."""


def no_moments(theta: Tensor, rank: int) -> Moments:
    """Return the moments of a single model, of which none is collected yet; rank: the number M."""
    count = torch.zeros((), dtype=torch.int64, device=theta.device)
    nothing = torch.zeros_like(theta)
    return Moments(count, theta, nothing, nothing.expand(rank, -1))


def collected(moments: Moments, theta: Tensor, collects: Tensor) -> Moments:
    """Return the moments with one more iterate, or those of theta alone as long as nothing is collected.

    The mean and the variance are running ones. The difference takes the place of the oldest.
    """
    count = moments.models + collects
    share = 1 / count.clamp_min(1).to(theta.dtype)
    before = torch.where(moments.models > 0, moments.mean, theta)
    mean = torch.lerp(before, theta, share)
    variance = torch.lerp(moments.variance, (theta - before) * (theta - mean), share)
    place = torch.arange(len(moments.last), device=theta.device) == moments.models % max(1, len(moments.last))
    last = torch.where((place & collects)[:, None], theta - mean, moments.last)
    return Moments(count, mean, variance, last)


def draws(moments: Moments, noise: Tensor) -> Tensor:
    """Return models (K, T) from standard normal noise (K, T + M).

    theta = mean + (1/sqrt 2) deviation z_1 + D z_2 / sqrt(2 (M - 1)), where D are the last M differences. This is the
    paper's covariance; the authors' code has it with scale 0.5. M counts the differences collected so far. Without a
    low-rank part (fewer than 2), the diagonal has the whole variance.
    """
    size, rank = len(moments.mean), len(moments.last)
    used = moments.models.clamp_max(rank)
    low_rank = used > 1
    share = torch.where(low_rank, 0.5, 1.0).to(noise.dtype)
    deviation = (share * moments.variance).clamp_min(0).sqrt()
    columns = low_rank * (2 * (used - 1).clamp_min(1).to(noise.dtype)).rsqrt()
    return moments.mean + deviation * noise[:, :size] + columns * noise[:, size:] @ moments.last
