"""Ditto (Li et al. 2021): FedAvg, and beside it a model per client that is held near the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, require
from pfedbayes.nets import Batch, Model


class Local(NamedTuple):
    """A round under way: the copy theta of the shared model, the personal model v, and the received model w."""

    theta: Tensor
    v: Tensor
    anchor: Tensor


@dataclass(frozen=True)
class Ditto(Method):
    """eta, eta_personal: rates of the SGD steps on the shared and the personal model; prox: weight lambda of the
    pull towards the shared one (the authors run 1 and let clients choose among 0.1, 1 and 2).

    As in the authors' code both models take a step on each batch, so that the personal model has R steps a round,
    and only those who take part train it.
    """

    eta: float = 0.01
    eta_personal: float = 0.01
    prox: float = 1.0

    about = About(
        "Ditto",
        "Li et al., ICML 2021",
        "one shared model as FedAvg does, and a model per client held near it",
        personal=True,
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.eta_personal >= 0, f"eta_personal must not be negative, got {self.eta_personal}")
        require(self.prox >= 0, f"prox must not be negative, got {self.prox}")

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> Local:
        """The copy starts at the received model; the personal model goes on from where it was."""
        return Local(received, client, anchor=received)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B) and v <- v - eta_personal [grad CE(v; B) + lambda (v - w)]."""
        (batch,) = batches
        theta, v, anchor = local
        grad_theta, grad_v = model.grad_loss(theta, batch), model.grad_loss(v, batch)
        pull = self.prox * (v - anchor)
        return Local(sgd(theta, grad_theta, self.eta), sgd(v, grad_v + pull, self.eta_personal), anchor)

    def end(self, local: Local) -> tuple[Tensor, Tensor]:
        """The copy goes to the server; the personal model stays."""
        return local.v, local.theta
