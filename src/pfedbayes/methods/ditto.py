"""Ditto (Li et al. 2021): FedAvg, and a personal model per client that is held near the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard
from pfedbayes.nets import Batch, Model


class SharedAndPersonal(NamedTuple):
    """The state of a round."""

    theta: Tensor
    """The local copy of the shared model."""
    v: Tensor
    """The personal model."""
    anchor: Tensor
    """The received model w."""


@dataclass(frozen=True)
class Ditto(Method):
    """As in the authors' code, both models take a step on each batch, so the personal model takes R steps per round.

    Only clients that take part train their personal model.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the copy of the shared model."""
    eta_personal: NonNegative[float] = 0.01
    """Learning rate of the personal model."""
    prox: NonNegative[float] = 1.0
    """Weight lambda of the pull towards the shared model. The authors run 1, or let clients choose among 0.1, 1, 2."""

    about = About(
        "Ditto",
        "Li et al., ICML 2021",
        "one shared model as FedAvg does, and a model per client held near it",
        personal=True,
    )

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> SharedAndPersonal:
        """Start the copy at the received model; the personal model continues from the client's last round."""
        return SharedAndPersonal(received, client, anchor=received)

    def step(
        self, model: Model, local: SharedAndPersonal, batches: tuple[Batch, ...], noise: Tensor
    ) -> SharedAndPersonal:
        """theta <- theta - eta grad CE(theta; B) and v <- v - eta_personal [grad CE(v; B) + lambda (v - w)]."""
        (batch,) = batches
        theta, v, anchor = local
        grad_theta, grad_v = model.grad_loss(theta, batch), model.grad_loss(v, batch)
        pull = self.prox * (v - anchor)
        return SharedAndPersonal(sgd(theta, grad_theta, self.eta), sgd(v, grad_v + pull, self.eta_personal), anchor)

    def end(self, local: SharedAndPersonal) -> tuple[Tensor, Tensor]:
        """Keep the personal model and upload the copy of the shared one."""
        return local.v, local.theta
