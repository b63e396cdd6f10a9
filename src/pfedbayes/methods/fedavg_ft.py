"""FedAvg with fine-tuning: each client trains FedAvg's shared model a little further before it predicts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.constraints import CountOrZero, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Adaptation, LocalModel, Method, State
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class FedAvgFT(Method):
    """The server never sees the fine-tuned models: the shared model is FedAvg's."""

    eta: NonNegative[float] = 0.01
    """Learning rate of FedAvg's local SGD steps."""
    eta_personal: NonNegative[float] = 0.01
    """Learning rate of fine-tuning."""
    steps: CountOrZero = 20
    """Number of fine-tuning steps."""

    about = About(
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017; Yu et al., 2020",
        "one shared model, fine-tuned on the client's training data when it predicts",
        personal=True,
    )

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return LocalModel(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))

    def prepare(self, data: Adaptation) -> Batch:
        """Return the batches of all steps, (steps, b, ...)."""
        return data.batches(self.steps)

    def adapt(self, model: Model, client: State, received: Tensor, prepared: Batch) -> Tensor:
        """theta_i <- theta_i - eta_personal grad CE(theta_i; B), `steps` times from the shared model."""
        theta = received
        for k in range(self.steps):
            theta = sgd(theta, model.grad_loss(theta, pick(prepared, k)), self.eta_personal)
        return theta
