"""FedALA (Zhang et al. 2023): before it trains, a client mixes its last layer with the received one, entry by entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import CountOrZero, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard
from pfedbayes.nets import Batch, Model


class Client(NamedTuple):
    """What a client keeps."""

    theta: Tensor
    """Its model after its last local training."""
    mixing: Tensor
    """The weights W (T,) of the received model, each in [0, 1]; they are 1 below the last layer."""
    rounds: Tensor
    """Number of rounds that it has taken part in."""


class Mixing(NamedTuple):
    """The state of a round."""

    theta: Tensor
    """The model in training."""
    old: Tensor
    """The client's model of its last round, theta_i."""
    received: Tensor
    """The received model w."""
    mixing: Tensor
    rounds: Tensor
    steps: Tensor
    """Number of steps taken in this round."""


@dataclass(frozen=True)
class FedALA(Method):
    """The first `mix_steps` steps of a round learn the mixing weights, except in a client's first round.

    All other steps are FedAvg's.
    The authors pass through 80 % of the client's data for the weights, the first time until their loss is steady. Here
    the number of steps is fixed, and they are taken from the R local steps. The personal model is the client's, after
    its last training.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the SGD steps."""
    eta_mixing: NonNegative[float] = 1.0
    """Learning rate of the mixing weights."""
    mix_steps: CountOrZero = 2
    """Steps on the mixing weights in a round."""

    about = About(
        "FedALA",
        "Zhang et al., AAAI 2023",
        "one shared model, and a model per client that starts each round from a learned mixture of both",
        personal=True,
    )

    def enrol(self, received: Tensor) -> Client:
        return Client(received, torch.ones_like(received), _zero(received))

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Mixing:
        """Start at theta_i + W (w - theta_i), which is w below the last layer, where W stays 1."""
        theta = torch.lerp(client.theta, received, client.mixing)
        return Mixing(theta, client.theta, received, client.mixing, client.rounds, _zero(received))

    def step(self, model: Model, local: Mixing, batches: tuple[Batch, ...], noise: Tensor) -> Mixing:
        """W <- clip(W - eta_mixing grad CE(theta; B) (w - theta_i), 0, 1), and later theta <- theta - eta grad."""
        (batch,) = batches
        theta, old, received, mixing, rounds, steps = local
        grad = model.grad_loss(theta, batch)
        moved = sgd(mixing, grad * (received - old), self.eta_mixing).clamp(0, 1)
        mixes = (rounds > 0) & (steps < self.mix_steps)
        mixing = torch.where(mixes, model.net.join(mixing, moved), mixing)
        theta = torch.where(mixes, torch.lerp(old, received, mixing), sgd(theta, grad, self.eta))
        return Mixing(theta, old, received, mixing, rounds, steps + 1)

    def end(self, local: Mixing) -> tuple[Client, Tensor]:
        return Client(local.theta, local.mixing, local.rounds + 1), local.theta


def _zero(like: Tensor) -> Tensor:
    """Return a count of 0."""
    return torch.zeros((), dtype=torch.int64, device=like.device)
