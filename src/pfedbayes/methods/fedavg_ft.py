"""FedAvg with fine-tuning: the shared model of FedAvg, trained a little further by each client before it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Adaptation, Local, Method, State, require
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class FedAvgFT(Method):
    """eta: rate of the local SGD steps of FedAvg; steps, eta_personal: number and rate of the steps of fine-tuning.

    Fine-tuning never comes back to the server: the shared model is that of FedAvg.
    """

    eta: float = 0.01
    eta_personal: float = 0.01
    steps: int = 20

    about = About(
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017; Yu et al., 2020",
        "one shared model, fine-tuned on the client's training data when it predicts",
        personal=True,
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.eta_personal >= 0, f"eta_personal must not be negative, got {self.eta_personal}")
        require(self.steps >= 0, f"steps must not be negative, got {self.steps}")

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return Local(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))

    def prepare(self, data: Adaptation) -> Batch:
        """The batches of all steps, (steps, b, ...)."""
        batches: Batch = pick(data.train, self.batches(data))
        return batches

    def adapt(self, model: Model, client: State, received: Tensor, prepared: Batch) -> Tensor:
        """theta_i <- theta_i - eta_personal grad CE(theta_i; B), `steps` times from the shared model."""
        theta = received
        for k in range(self.steps):
            theta = sgd(theta, model.grad_loss(theta, pick(prepared, k)), self.eta_personal)
        return theta

    def batches(self, data: Adaptation) -> Tensor:
        """Rows (steps, b) of the training data: epochs in random order, each filling up the last batch before it."""
        size, count = len(data.train.weight), self.steps * data.batch_size
        generator = torch.Generator().manual_seed(data.seed)
        epochs = [torch.randperm(size, generator=generator) for _ in range(0, count, size)]
        order = torch.cat([torch.empty(0, dtype=torch.int64), *epochs])[:count]
        return order.view(self.steps, data.batch_size).to(data.train.weight.device)
