"""FedBABU (Oh, Kim and Yun 2022): train the body only, under a random last layer, and fine-tune for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pfedbayes.constraints import CountOrZero, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Adaptation, LocalModel, Method, State
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class FedBABU(Method):
    """The shared model keeps its first, random last layer for ever. Clients upload their bodies.

    Deviations from the authors' code: no momentum, no schedule of the learning rate, and a server mean weighted by
    numbers of examples.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""
    eta_personal: NonNegative[float] = 0.01
    """Learning rate of fine-tuning."""
    tune_steps: CountOrZero = 20
    """Number of fine-tuning steps."""
    tune: Literal["all", "head", "body"] = "all"
    """Which layers are fine-tuned."""

    about = About(
        "FedBABU",
        "Oh et al., ICLR 2022",
        "a shared body under a random last layer, fine-tuned on the client's training data when it predicts",
        personal=True,
    )

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """Return the mean of the uploads; what no client has changed, such as the last layer, stays to the last bit."""
        return torch.where((uploads == server).all(0), server, weighted_mean(uploads, sizes))

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B), except for the last layer."""
        (batch,) = batches
        moved = sgd(local.theta, model.grad_loss(local.theta, batch), self.eta)
        return LocalModel(model.net.join(moved, local.theta))

    def prepare(self, data: Adaptation) -> Batch:
        """Return the batches of all steps, (tune_steps, b, ...)."""
        return data.batches(self.tune_steps)

    def adapt(self, model: Model, client: State, received: Tensor, prepared: Batch) -> Tensor:
        """theta_i <- theta_i - eta_personal grad CE(theta_i; B), `tune_steps` times from the shared model."""
        theta = received
        for k in range(self.tune_steps):
            moved = sgd(theta, model.grad_loss(theta, pick(prepared, k)), self.eta_personal)
            parts = {"all": (moved, moved), "head": (theta, moved), "body": (moved, theta)}
            theta = model.net.join(*parts[self.tune])
        return theta
