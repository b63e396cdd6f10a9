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
    """Running moments of the gradient and the number of steps taken."""

    step: Tensor
    mean: Tensor
    square: Tensor


def adam_init(theta: Tensor) -> Adam:
    """Adam before its first step."""
    return Adam(
        torch.zeros((), dtype=torch.int64, device=theta.device),
        torch.zeros_like(theta),
        torch.zeros_like(theta),
    )


def adam(
    theta: Tensor,
    grad: Tensor,
    state: Adam,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[Tensor, Adam]:
    """One step of Adam (Kingma & Ba), with eps outside the root as in torch.optim.Adam."""
    step = state.step + 1
    mean = torch.lerp(state.mean, grad, 1 - beta1)
    square = beta2 * state.square + (1 - beta2) * grad.square()
    # 1 - beta2 is 0.001: the corrections are formed in double precision, where 1 - beta2**step keeps its digits.
    power = step.to(torch.float64)
    rate_now = (rate / (1 - beta1**power)).to(theta.dtype)
    root_now = (1 - beta2**power).sqrt().to(theta.dtype)
    return theta - rate_now * mean / (square.sqrt() / root_now + eps), Adam(step, mean, square)
