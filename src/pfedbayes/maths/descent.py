"""Gradient descent on a Gaussian v = (mu, rho), laid out in memory for speed.

During a round the two rows of v and of Adam's moments are separate contiguous tensors. A step then reads and writes
each of them once: a compiler does not fuse operations across a `torch.stack`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.gaussian import MeanField, grad_in_rho, sigma
from pfedbayes.maths.optim import Adam, adam_of, sgd


class MovingGaussian(NamedTuple):
    """A Gaussian during descent; every tensor belongs to it alone."""

    mu: Tensor
    """Means (T,)."""
    rho: Tensor
    """rho (T,) of the standard deviations."""
    sigma: Tensor
    """softplus(rho)."""
    adam: Adam[tuple[Tensor, ...]]
    """Adam's moments of mu and of rho."""


def split_rows(v: Tensor, state: Adam[Tensor]) -> MovingGaussian:
    """Return copies of the rows of v (2, T) and of its Adam state; `descend` changes them in place."""

    def rows(stacked: Tensor) -> tuple[Tensor, ...]:
        return tuple(row.clone(memory_format=torch.contiguous_format) for row in stacked.unbind(-2))

    mu, rho = rows(v)
    moments = Adam(rows(state.mean), rows(state.square), state.mean_weight, state.square_weight)
    return MovingGaussian(mu, rho, sigma(rho), moments)


def join_rows(moving: MovingGaussian) -> tuple[Tensor, Adam[Tensor]]:
    """Return v (2, T) and its Adam state; the inverse of `split_rows`."""
    mean, square, *weights = moving.adam
    return torch.stack([moving.mu, moving.rho]), Adam(torch.stack(mean), torch.stack(square), *weights)


def descend(
    moving: MovingGaussian, grad: MeanField, rate: float, optimizer: Literal["adam", "sgd"] = "adam"
) -> MovingGaussian:
    """Take one step against the gradient in (mu, sigma). Adam overwrites the memory of `moving`."""
    mu, rho, _, state = moving
    grad_rho = grad_in_rho(grad.sigma, rho)
    if optimizer == "sgd":
        mu, rho = sgd(mu, grad.mu, rate), sgd(rho, grad_rho, rate)
    else:
        (mu, rho), state = adam_of((mu, rho), (grad.mu, grad_rho), state, rate, reuse=True)
    return MovingGaussian(mu, rho, sigma(rho), state)
