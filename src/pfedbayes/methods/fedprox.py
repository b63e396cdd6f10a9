"""FedProx (Li et al. 2020): FedAvg with a proximal term that keeps the local model close to the received one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State, is_used
from pfedbayes.nets import Batch, Model


class AnchoredModel(NamedTuple):
    """The state of a round."""

    theta: Tensor
    anchor: Tensor
    """The model that the proximal term pulls towards."""


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx anchors the proximal term at the received model."""

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""
    prox: NonNegative[float] = 0.001
    """Weight lambda of the proximal term."""
    anchor: Literal["received", "first"] = "received"
    """Centre of the proximal term. "first" is the first model that a client ever received. This is not FedProx, but
    close to the numbers of the pFedBayes paper (docs/results/reasons.md)."""

    about = About(
        "FedProx",
        "Li et al., MLSys 2020",
        "one shared model; clients are held near it while they train",
    )

    def enrol(self, received: Tensor) -> State:
        return received if self.anchor == "first" else ()

    def begin(self, client: State, received: Tensor, shard: Shard) -> AnchoredModel:
        return AnchoredModel(received, anchor=client if self.anchor == "first" else received)

    def step(self, model: Model, local: AnchoredModel, batches: tuple[Batch, ...], noise: Tensor) -> AnchoredModel:
        """theta <- theta - eta [grad CE(theta; B) + lambda (theta - anchor)]."""
        (batch,) = batches
        grad = model.grad_loss(local.theta, batch)
        if is_used(self.prox):  # at lambda = 0 this is FedAvg to the last bit
            grad = grad + self.prox * (local.theta - local.anchor)
        return AnchoredModel(sgd(local.theta, grad, self.eta), local.anchor)

    def end(self, local: AnchoredModel) -> tuple[State, Tensor]:
        return local.anchor if self.anchor == "first" else (), local.theta
