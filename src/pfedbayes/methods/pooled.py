"""Pooled training: one model on everybody's data in one place, which a federation gives up for privacy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Local, Method, Needs, require
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class Pooled(Method):
    """eta: rate of the SGD steps on the mean loss of a batch.

    A round is R steps on batches of the pooled data, while in a round of FedAvg each of the S clients takes R steps.
    """

    eta: float = 0.01

    about = About(
        "Pooled",
        "a yardstick: all data in one place",
        "one shared model from everybody's data",
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    @property
    def needs(self) -> Needs:
        return Needs(pooled_data=True)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return Local(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))
