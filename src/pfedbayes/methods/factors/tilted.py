"""The local fit of FedEP and FedSEP: mean and precision of the tilted distribution p(D_i | theta) * cavity."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.gaussian import MeanField, natural
from pfedbayes.maths.optim import Momentum, momentum, momentum_init
from pfedbayes.nets import Batch, Model

Projection = Literal["laplace", "identity"]


class Tilted(NamedTuple):
    """The state of a round."""

    theta: Tensor
    velocity: Momentum
    mean: Tensor
    """Sum of the iterates (T,)."""
    fisher: Tensor
    """Sum of the estimated Fisher information per example (T,)."""
    steps: Tensor
    cavity: Tensor
    """Natural parameters (2, T)."""
    size: Tensor


def begin_fit(theta: Tensor, cavity: Tensor, size: Tensor) -> Tilted:
    """Return the state before the first step, at theta (T,)."""
    zero = torch.zeros_like(theta)
    return Tilted(theta, momentum_init(theta), zero, zero, torch.zeros_like(size), cavity, size)


def fit_step(model: Model, local: Tilted, batch: Batch, noise: Tensor, rate: float, decay: float) -> Tilted:
    """Take a step of SGD with momentum on the energy of the tilted distribution per example,

    CE(theta; B) + sum [lambda_c theta^2 / 2 - eta_c theta] / n, and add to the means over steps. noise: (b,).
    """
    eta, precision = local.cavity
    grad = model.grad_loss(local.theta, batch) + (precision * local.theta - eta) / local.size
    theta, velocity = momentum(local.theta, grad, local.velocity, rate, decay)
    return local._replace(
        theta=theta,
        velocity=velocity,
        mean=local.mean + theta,
        fisher=local.fisher + model.fisher(local.theta, batch, noise),
        steps=local.steps + 1,
    )


def fitted(local: Tilted, projection: Projection, scale: float, curvature: float) -> Tensor:
    """Return the natural parameters (2, T) of the tilted distribution.

    Its mean is the mean of the iterates. Its precision is that of the cavity plus scale * n times the Fisher
    information per example ("laplace") or a constant ("identity").
    """
    steps = local.steps.clamp(min=1)
    information = local.fisher / steps if projection == "laplace" else torch.full_like(local.fisher, curvature)
    precision = (local.cavity[1] + scale * local.size * information).clamp(min=1e-6)
    return natural(MeanField(local.mean / steps, precision.rsqrt()))
