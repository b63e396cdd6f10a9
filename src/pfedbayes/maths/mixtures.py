"""Mixtures of Student's distributions, one component per weight draw, as points of equal weight.

A component contributes its quantiles at a few levels, which are shifted from component to component. So many nearly
equal components act like one with many levels, and a single component has many levels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

POINTS = 2000  # of a mixture that is predicted, at least
SCORED = 400  # of a mixture that is scored
GOLDEN = 0.6180339887498949
GRID = 65  # values of 1/freedom between 0 and 1/2 for which quantiles are computed
AT_ONCE = 2**22  # points that are sorted in one pass
TERMS = 200  # of the continued fraction
NEWTON_STEPS = 4


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return the regularised incomplete beta function I_x(a, b) by its continued fraction (modified Lentz)."""
    x = x.double() + 0 * (a + b)
    a, b = a.double().expand_as(x), b.double().expand_as(x)
    swap = x > (a + 1) / (a + b + 2)
    a, b, x = torch.where(swap, b, a), torch.where(swap, a, b), torch.where(swap, 1 - x, x)
    tiny = 1e-300
    front = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + torch.xlogy(a, x) + torch.xlogy(b, 1 - x)

    def kept(value: Tensor) -> Tensor:
        return torch.where(value.abs() < tiny, tiny, value)

    c, d = torch.ones_like(x), 1 / kept(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / kept(1 + term * d), kept(1 + term / c)
            fraction = fraction * c * d
        if m % 10 == 0 and bool(((c * d - 1).abs() < 1e-14).all()):
            break
    value = (front.exp() * fraction / a).clamp(0, 1)
    return torch.where(swap, 1 - value, value)


def student_cdf(t: Tensor, freedom: Tensor) -> Tensor:
    """Return the distribution function of Student's distribution; freedom may be infinite."""
    t, freedom = t.double(), freedom.double()
    finite = torch.where(freedom.isinf(), 1.0, freedom)
    tail = 0.5 * incomplete_beta(finite / 2, torch.full_like(finite, 0.5), finite / (finite + t.square()))
    return torch.where(freedom.isinf(), torch.special.ndtr(t), torch.where(t > 0, 1 - tail, tail))


def student_density(t: Tensor, freedom: Tensor) -> Tensor:
    """Return the density of Student's distribution in double precision; freedom may be infinite."""
    finite = torch.where(freedom.isinf(), 1.0, freedom)
    height = torch.lgamma((finite + 1) / 2) - torch.lgamma(finite / 2) - 0.5 * torch.log(finite * math.pi)
    log_density = height - (finite + 1) / 2 * torch.log1p(t.square() / finite)
    return torch.where(freedom.isinf(), -0.5 * (t.square() + math.log(2 * math.pi)), log_density).exp()


@cache
def _quantile_table(count: int, levels: int) -> Tensor:
    """Return asinh of Student's quantiles (GRID, count, levels) for 1/freedom = 0 ... 1/2.

    Newton's method finds them from the logarithm of the tail, which is nearly linear in asinh t: all degrees of freedom
    start from the Gaussian quantile.
    """
    shift = ((torch.arange(count, dtype=torch.float64) + 0.5) * GOLDEN) % 1
    if count == 1:
        shift = torch.tensor([0.5], dtype=torch.float64)
    level = (torch.arange(levels) + shift[:, None]) / levels
    freedom = (1 / torch.linspace(0, 0.5, GRID, dtype=torch.float64))[:, None, None]
    tail = torch.minimum(level, 1 - level).expand(GRID, -1, -1)
    place = torch.special.ndtri(tail).asinh()
    for _ in range(NEWTON_STEPS):
        below = student_cdf(place.sinh(), freedom)
        slope = student_density(place.sinh(), freedom) * place.cosh() / below
        place = (place - (below / tail).log() / slope).clamp(max=0)
    return torch.where(level < 0.5, place, -place)


def student_quantiles(freedom: Tensor, levels: int) -> Tensor:
    """Return quantiles (..., K, levels) of components with these degrees of freedom (..., K), at least 2."""
    table = _quantile_table(freedom.shape[-1], levels).to(freedom.device)
    place = (2 * (GRID - 1) / freedom.double()).clamp(0, GRID - 1)
    left = place.floor().long().clamp(max=GRID - 2)
    component = torch.arange(freedom.shape[-1], device=freedom.device)
    low, high = table[left, component], table[left + 1, component]
    return torch.lerp(low, high, (place - left)[..., None]).sinh().to(freedom.dtype)


def sorted_points(
    location: Tensor, log_scale: Tensor, freedom: Tensor, size: int = POINTS
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with the sorted points (..., rows, P) of mixtures.

    location, log_scale: (..., K, n) of the components. freedom: (..., K), the same for all rows. size: points at least.
    """
    draws = location.shape[-2]
    levels = -(-size // draws)
    quantiles = student_quantiles(freedom, levels)[..., None, :]
    step = max(1, AT_ONCE // max(1, location[..., 0].numel() * levels))
    for start in range(0, location.shape[-1], step):
        rows = slice(start, start + step)
        points = location[..., rows, None] + log_scale[..., rows, None].exp() * quantiles
        yield rows, _sorted(points.transpose(-3, -2).flatten(-2))


def _sorted(values: Tensor) -> Tensor:
    """Return values (..., P) in ascending order. On a CPU, NumPy sorts many times as fast as torch."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))


def quantile(points: Tensor, level: float) -> Tensor:
    """Return the quantile (...) of sorted points (..., P), linear between the middles of their steps."""
    place = min(max(level * points.shape[-1] - 0.5, 0.0), points.shape[-1] - 1.0)
    left = min(int(place), points.shape[-1] - 2)
    return torch.lerp(points[..., left], points[..., left + 1], place - left)


def crps(points: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of sorted points (..., P) for y (...): E|X-y| - E|X-X'|/2."""
    size = points.shape[-1]
    weight = (2 * torch.arange(1, size + 1, device=points.device) - size - 1).to(points.dtype) / size**2
    return (points - y[..., None]).abs().mean(-1) - (points * weight).sum(-1)
