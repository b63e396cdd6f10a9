"""First-order optimizers as functions on tensors, for one model or a batch of models.

They are pure, except `adam_of` with `reuse=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam as fused_adam


def sgd(theta: Tensor, grad: Tensor, rate: float) -> Tensor:
    """Return theta - rate * grad."""
    return theta - rate * grad


class Momentum(NamedTuple):
    """The decaying sum of past gradients."""

    velocity: Tensor


def momentum_init(theta: Tensor) -> Momentum:
    """Return the momentum before the first step."""
    return Momentum(torch.zeros_like(theta))


def momentum(theta: Tensor, grad: Tensor, state: Momentum, rate: float, decay: float) -> tuple[Tensor, Momentum]:
    """Take one step of gradient descent with heavy-ball momentum."""
    velocity = decay * state.velocity + grad
    return theta - rate * velocity, Momentum(velocity)


Moments = TypeVar("Moments", Tensor, tuple[Tensor, ...])


class Adam(NamedTuple, Generic[Moments]):
    """The state of Adam."""

    mean: Moments
    """Running mean of the gradient."""
    square: Moments
    """Running mean of the squared gradient."""
    mean_weight: Tensor
    """Total weight 1 - beta1^t in `mean`."""
    square_weight: Tensor
    """Total weight 1 - beta2^t in `square`."""


def adam_init(theta: Tensor) -> Adam[Tensor]:
    """Return the state of Adam before the first step."""
    # The weights are in double precision: single precision would lose digits of 1 - beta2 = 0.001.
    nothing = torch.zeros((), dtype=torch.float64, device=theta.device)
    return Adam(torch.zeros_like(theta), torch.zeros_like(theta), nothing, nothing)


_without_fused_adam = ContextVar("_without_fused_adam", default=False)


@contextmanager
def without_fused_adam() -> Iterator[None]:
    """Compute `adam` by plain operations inside this block, for a compiler to fuse."""
    token = _without_fused_adam.set(True)
    try:
        yield
    finally:
        _without_fused_adam.reset(token)


def adam(
    theta: Tensor,
    grad: Tensor,
    state: Adam[Tensor],
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[Tensor, Adam[Tensor]]:
    """Take one step of Adam (Kingma & Ba 2015), with eps outside the root as in torch.optim.Adam."""
    alone = Adam((state.mean,), (state.square,), state.mean_weight, state.square_weight)
    (moved,), after = adam_of((theta,), (grad,), alone, rate, beta1, beta2, eps)
    return moved, Adam(after.mean[0], after.square[0], after.mean_weight, after.square_weight)


def adam_of(
    thetas: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    state: Adam[tuple[Tensor, ...]],
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    reuse: bool = False,
) -> tuple[tuple[Tensor, ...], Adam[tuple[Tensor, ...]]]:
    """Take one step of `adam` on several tensors that share the step count.

    The bias corrections are running means of 1 instead of powers, since compiled code repeats them for every entry.
    reuse: allow overwriting the tensors and the state. On a CPU this takes one pass over memory instead of seven.
    """
    dtype = thetas[0].dtype
    mean_weight = beta1 * state.mean_weight + (1 - beta1)
    square_weight = beta2 * state.square_weight + (1 - beta2)
    root = square_weight.to(dtype).sqrt()
    rate_now, eps_now = rate * root / mean_weight.to(dtype), eps * root
    if reuse and thetas[0].device.type == "cpu" and not _without_fused_adam.get():
        torch.ops.pfedbayes.adam_(thetas, grads, state.mean, state.square, rate_now, eps_now, beta1, beta2)
        return thetas, Adam(state.mean, state.square, mean_weight, square_weight)
    moved, means, squares = [], [], []
    for theta, grad, old_mean, old_square in zip(thetas, grads, state.mean, state.square, strict=True):
        mean = torch.lerp(old_mean, grad, 1 - beta1)
        square = torch.addcmul(beta2 * old_square, grad, grad, value=1 - beta2)
        moved.append(torch.addcdiv(theta, rate_now * mean, square.sqrt() + eps_now, value=-1))
        means.append(mean)
        squares.append(square)
    return tuple(moved), Adam(tuple(means), tuple(squares), mean_weight, square_weight)


class Ivon(NamedTuple):
    """The state of IVON: a Gaussian N(m, 1 / (lambda (h + delta))) over the weights, and a running mean gradient."""

    mean: Tensor
    """m (T,)."""
    hessian: Tensor
    """h (T,), the running diagonal Hessian of the mean loss."""
    gradient: Tensor
    """Running mean of the gradient."""
    weight: Tensor
    """Total weight 1 - beta1^t in `gradient`."""


def ivon_init(mean: Tensor, hessian: Tensor) -> Ivon:
    """Return the state of IVON before the first step."""
    return Ivon(mean, hessian, torch.zeros_like(mean), mean.new_zeros(()))


def ivon_hessian(hessian: Tensor, estimate: Tensor, delta: Tensor | float, beta2: float) -> Tensor:
    """Return h + (1 - beta2) (hhat - h) + (1/2) (1 - beta2)^2 (h - hhat)^2 / (h + delta).

    With x = (1 - beta2) (hhat - h) / (h + delta), h + delta is multiplied by 1 + x + x^2/2 >= 1/2. So h + delta stays
    positive for any estimate hhat; h itself may become negative.
    """
    change = (1 - beta2) * (estimate - hessian)
    return hessian + change + 0.5 * change.square() / (hessian + delta)


def ivon(
    state: Ivon,
    grad: Tensor,
    estimate: Tensor,
    rate: float,
    delta: Tensor | float,
    centre: Tensor | float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    first: float = 1.0,
    clip: float | None = None,
) -> Ivon:
    """Take one step of IVON (Shen et al. 2024) on the mean loss, under the prior N(centre, 1 / (lambda delta)).

    grad and estimate: means over draws theta ~ N(m, sigma^2) of the gradient, and of gradient * (theta - m) / sigma^2,
    which estimates the diagonal Hessian. first: h0 + delta0; the rate is rate * first, so that the first step is one of
    SGD. clip: largest magnitude of the preconditioned gradient.
    """
    gradient = beta1 * state.gradient + (1 - beta1) * grad
    weight = beta1 * state.weight + (1 - beta1)
    hessian = ivon_hessian(state.hessian, estimate, delta, beta2)
    direction = (gradient / weight + delta * (state.mean - centre)) / (hessian + delta)
    if clip is not None:
        direction = direction.clamp(-clip, clip)
    return Ivon(state.mean - rate * first * direction, hessian, gradient, weight)


def _adam_in_place(
    thetas: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    rate: Tensor,
    eps: Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """Run torch's fused step on one or many models; rate and eps have the leading axes of stacked models."""
    for parts in zip(thetas, grads, means, squares, strict=True):
        if len({part.shape for part in parts}) > 1:  # torch would read beyond the end of the shorter tensors
            raise ValueError(f"Adam needs tensors of one shape, got {[tuple(part.shape) for part in parts]}")
    rates, all_eps = (each.expand_as(rate + eps).flatten().tolist() for each in (rate, eps))
    count = 1 if len({*rates}) == len({*all_eps}) == 1 else len(rates)
    thetas, means, squares = ([each.view(count, -1) for each in group] for group in (thetas, means, squares))
    grads = [each.reshape(count, -1) for each in grads]
    for k in range(count):
        fused_adam(
            params=[each[k] for each in thetas],
            grads=[each[k] for each in grads],
            exp_avgs=[each[k] for each in means],
            exp_avg_sqs=[each[k] for each in squares],
            max_exp_avg_sqs=[],
            state_steps=[torch.tensor(1e9) for _ in thetas],  # after this many steps, torch's bias corrections are 1
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rates[k],
            weight_decay=0.0,
            eps=all_eps[k],
            maximize=False,
        )


def _of_many(info: Any, axes: tuple[Any, ...], *arguments: Any) -> tuple[None, None]:
    """Map `adam_` over models. It is elementwise, so they count as one long model."""

    def first(tensor: Tensor, axis: int | None) -> Tensor:
        return tensor.movedim(axis or 0, 0)

    groups = (list(map(first, *each)) for each in zip(arguments[:4], axes[:4], strict=True))
    torch.ops.pfedbayes.adam_(*groups, *map(first, arguments[4:6], axes[4:6]), *arguments[6:])
    return None, None


# A custom operator, because vmap cannot map torch's fused step.
torch.library.define(
    "pfedbayes::adam_",
    "(Tensor(a!)[] thetas, Tensor[] grads, Tensor(b!)[] means, Tensor(c!)[] squares, Tensor rate, Tensor eps, "
    "float beta1, float beta2) -> ()",
)
torch.library.impl("pfedbayes::adam_", "cpu", _adam_in_place)
torch.library.register_vmap("pfedbayes::adam_", _of_many)
