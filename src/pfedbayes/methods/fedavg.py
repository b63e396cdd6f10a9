"""FedAvg (McMahan et al. 2017): local SGD from the shared model, then the mean of the clients' models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Local, Method, require
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class FedAvg(Method):
    """eta: rate of the local SGD steps on the mean loss of a batch."""

    eta: float = 0.01

    about = About(
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "one shared model, the mean of the clients' models",
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return Local(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))
