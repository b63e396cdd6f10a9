"""FedAvg (McMahan et al. 2017): local SGD from the shared model, then the mean of the clients' models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, LocalModel, Method
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class FedAvg(Method):
    """Every client takes R steps of SGD on the batch's mean loss; the server averages the models."""

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""

    about = About(
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "one shared model, the mean of the clients' models",
    )

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return LocalModel(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))
