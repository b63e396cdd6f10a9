"""First-order optimisers as pure functions on tensors, for one model or a batch of models alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def sgd(theta: Tensor, grad: Tensor, rate: float) -> Tensor:
    """theta - rate * grad."""
    return theta - rate * grad


class Momentum(NamedTuple):
    """The decaying sum of past steps."""

    velocity: Tensor


def momentum_init(theta: Tensor) -> Momentum:
    """Momentum before its first step."""
    return Momentum(torch.zeros_like(theta))


def momentum(theta: Tensor, grad: Tensor, state: Momentum, rate: float, decay: float) -> tuple[Tensor, Momentum]:
    """One step of gradient descent with heavy-ball momentum."""
    velocity = decay * state.velocity + grad
    return theta - rate * velocity, Momentum(velocity)


class Adam(NamedTuple):
    """Running means of the gradient and of its square, and the total weight 1 - beta^t that each has given so far."""

    mean: Tensor
    square: Tensor
    mean_weight: Tensor
    square_weight: Tensor


def adam_init(theta: Tensor) -> Adam:
    """Adam before its first step."""
    # The weights are in double precision: 1 - beta2 is 0.001, of which single precision would lose digits.
    nothing = torch.zeros((), dtype=torch.float64, device=theta.device)
    return Adam(torch.zeros_like(theta), torch.zeros_like(theta), nothing, nothing)


def adam(
    theta: Tensor,
    grad: Tensor,
    state: Adam,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[Tensor, Adam]:
    """One step of Adam (Kingma & Ba), with eps outside the root as in torch.optim.Adam.

    The corrections are running means of 1 rather than powers: a compiler repeats them for every entry of theta.
    """
    mean = torch.lerp(state.mean, grad, 1 - beta1)
    square = torch.addcmul(beta2 * state.square, grad, grad, value=1 - beta2)
    mean_weight = beta1 * state.mean_weight + (1 - beta1)
    square_weight = beta2 * state.square_weight + (1 - beta2)
    root = square_weight.to(theta.dtype).sqrt()
    rate_now = rate * root / mean_weight.to(theta.dtype)
    moved = torch.addcdiv(theta, rate_now * mean, square.sqrt() + eps * root, value=-1)
    return moved, Adam(mean, square, mean_weight, square_weight)
