"""pFedMe (T Dinh et al. 2020): personal models from the Moreau envelopes of the clients' losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.methods.base import About, Habits, Method, Shard
from pfedbayes.nets import Batch, Model


class Client(NamedTuple):
    """A client's models, during a round and after it."""

    theta: Tensor
    """The personal model."""
    w: Tensor
    """The localized global model."""


@dataclass(frozen=True)
class PFedMe(Method):
    """Training is stable if eta_personal * prox and eta * prox are well below 2.

    The personal model is theta. In the authors' code it shares its memory with w by mistake, so the published personal
    accuracies are those of w. The view "local" is w.
    """

    eta_personal: NonNegative[float] = 0.01
    """Learning rate of theta."""
    eta: NonNegative[float] = 0.01
    """Learning rate of w."""
    prox: NonNegative[float] = 15.0
    """Weight lambda of the term that ties theta to w."""
    inner_steps: Count = 5
    """Steps on theta per batch."""
    weight_decay: NonNegative[float] = 0.001
    """Weight decay mu of theta."""
    beta: NonNegative[float] = 1.0
    """Server mixing."""

    about = About(
        "pFedMe",
        "T Dinh et al., NeurIPS 2020",
        "a model per client, and a shared one that they are held near",
        personal=True,
    )
    habits = Habits(trains="all")

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """w <- (1 - beta) w + beta mean of the w_i of S^t, weighted by their numbers of examples."""
        return torch.lerp(server, weighted_mean(uploads, sizes), self.beta)

    def enrol(self, received: Tensor) -> Client:
        return Client(received, received)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Client:
        """Start both models at the received one."""
        return Client(received, received)

    def step(self, model: Model, local: Client, batches: tuple[Batch, ...], noise: Tensor) -> Client:
        """theta <- theta - eta_personal [grad CE(theta; B) + lambda (theta - w) + mu theta], `inner_steps` times on
        one batch, then w <- w - eta lambda (w - theta). theta continues with the next batch."""
        (batch,) = batches
        theta, w = local
        for _ in range(self.inner_steps):
            grad = model.grad_loss(theta, batch)
            theta = sgd(theta, grad + self.prox * (theta - w) + self.weight_decay * theta, self.eta_personal)
        return Client(theta, sgd(w, self.prox * (w - theta), self.eta))

    def end(self, local: Client) -> tuple[Client, Tensor]:
        """Keep both models and upload the localized global one."""
        return local, local.w

    def views(self, client: Client, received: Tensor) -> dict[str, Client]:
        return {"local": client._replace(theta=client.w)}
