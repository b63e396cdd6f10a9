"""Pooled training: one model on the data of all clients in one place. It shows what federated learning gives up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, LocalModel, Method, Needs
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class Pooled(Method):
    """A round is R steps of SGD on batches of the pooled data.

    In a round of FedAvg, each of the S clients takes R steps.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the SGD steps on the batch's mean loss."""

    about = About(
        "Pooled",
        "baseline: all data in one place",
        "one shared model, from the data of all clients",
    )

    @property
    def needs(self) -> Needs:
        return Needs(pooled_data=True)

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return LocalModel(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))
