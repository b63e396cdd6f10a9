"""First-order optimisers as functions on tensors, for one model or a batch of them; pure unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as fused_adam


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


_in_pieces = ContextVar("_in_pieces", default=False)


@contextmanager
def in_pieces() -> Iterator[None]:
    """Here `adam` is made of plain operations, which a compiler joins better than anybody."""
    token = _in_pieces.set(True)
    try:
        yield
    finally:
        _in_pieces.reset(token)


def adam(
    theta: Tensor,
    grad: Tensor,
    state: Adam,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    reuse: bool = False,
) -> tuple[Tensor, Adam]:
    """One step of Adam (Kingma & Ba), with eps outside the root as in torch.optim.Adam.

    The corrections are running means of 1 rather than powers: a compiler repeats them for every entry of theta.
    reuse: theta and the state are not needed any more, so that a CPU can do in one pass what else takes seven.
    """
    mean_weight = beta1 * state.mean_weight + (1 - beta1)
    square_weight = beta2 * state.square_weight + (1 - beta2)
    root = square_weight.to(theta.dtype).sqrt()
    rate_now, eps_now = rate * root / mean_weight.to(theta.dtype), eps * root
    if reuse and theta.device.type == "cpu" and not _in_pieces.get():
        torch.ops.pfedbayes.adam_(theta, grad, state.mean, state.square, rate_now, eps_now, beta1, beta2)
        return theta, state._replace(mean_weight=mean_weight, square_weight=square_weight)
    mean = torch.lerp(state.mean, grad, 1 - beta1)
    square = torch.addcmul(beta2 * state.square, grad, grad, value=1 - beta2)
    moved = torch.addcdiv(theta, rate_now * mean, square.sqrt() + eps_now, value=-1)
    return moved, Adam(mean, square, mean_weight, square_weight)


def _adam_in_place(
    theta: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rate: Tensor, eps: Tensor, beta1: float, beta2: float
) -> None:
    """torch's own step in one pass, of one model or of many: rate and eps have the leading axes of stacked models."""
    if not theta.shape == grad.shape == mean.shape == square.shape:  # torch would read on beyond the shorter ones
        raise ValueError(f"Adam needs tensors of one shape, got {[tuple(each.shape) for each in (theta, grad, mean)]}")
    rates, all_eps = rate.flatten().tolist(), eps.flatten().tolist()
    parts = 1 if len({*rates}) == len({*all_eps}) == 1 else len(rates)
    models = [each.view(parts, -1) for each in (theta, grad.contiguous(), mean, square)]
    for k in range(parts):
        own_theta, own_grad, own_mean, own_square = ([each[k]] for each in models)
        fused_adam(
            own_theta,
            own_grad,
            own_mean,
            own_square,
            [],
            [torch.tensor(1e9)],  # so many steps that its own corrections are 1
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rates[k],
            weight_decay=0.0,
            eps=all_eps[k],
            maximize=False,
        )


def _of_many(info: Any, axes: tuple[int | None, ...], *arguments: Any) -> tuple[None, None]:
    """The same of models that are mapped over: elementwise, so that they are one long model."""
    tensors = (each.movedim(axis or 0, 0) for each, axis in zip(arguments[:6], axes[:6], strict=True))
    torch.ops.pfedbayes.adam_(*tensors, *arguments[6:])
    return None, None


# An operator of its own because the one pass of torch cannot be mapped over clients.
torch.library.define(
    "pfedbayes::adam_",
    "(Tensor(a!) theta, Tensor grad, Tensor(b!) mean, Tensor(c!) square, Tensor rate, Tensor eps, "
    "float beta1, float beta2) -> ()",
)
torch.library.impl("pfedbayes::adam_", "cpu", _adam_in_place)
torch.library.register_vmap("pfedbayes::adam_", _of_many)
