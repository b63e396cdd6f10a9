"""FedProx (Li et al. 2020): FedAvg whose local loss holds the model near the one received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State, require
from pfedbayes.nets import Batch, Model


class Local(NamedTuple):
    theta: Tensor
    anchor: Tensor


@dataclass(frozen=True)
class FedProx(Method):
    """eta: rate of the local SGD steps; prox: weight lambda of the proximal term.

    anchor: what the term holds the model near, the one "received" in this round or the "first" that a client has ever
    received. The latter is no FedProx, but close to the figures of the pFedBayes paper (docs/results/reasons.md).
    """

    eta: float = 0.01
    prox: float = 0.001
    anchor: Literal["received", "first"] = "received"

    about = About(
        "FedProx",
        "Li et al., MLSys 2020",
        "one shared model; clients are held near it while they train",
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.prox >= 0, f"prox must not be negative, got {self.prox}")

    def enrol(self, received: Tensor) -> State:
        return received if self.anchor == "first" else ()

    def begin(self, client: State, received: Tensor, shard: Shard) -> Local:
        return Local(received, anchor=client if self.anchor == "first" else received)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta [grad CE(theta; B) + lambda (theta - anchor)]."""
        (batch,) = batches
        grad = model.grad_loss(local.theta, batch)
        if self.prox:  # at lambda = 0 this is FedAvg to the last bit
            grad = grad + self.prox * (local.theta - local.anchor)
        return Local(sgd(local.theta, grad, self.eta), local.anchor)

    def end(self, local: Local) -> tuple[State, Tensor]:
        return local.anchor if self.anchor == "first" else (), local.theta
