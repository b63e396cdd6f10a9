"""pFedMe (T Dinh et al. 2020): personal models in the Moreau envelopes of the clients' losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, require, weighted_mean
from pfedbayes.nets import Batch, Model


class Client(NamedTuple):
    """What a client ends a round with: the personal model theta and the localized global model w."""

    theta: Tensor
    w: Tensor


@dataclass(frozen=True)
class PFedMe(Method):
    """eta_personal: rate of the steps on theta; eta: rate of the steps on w; prox: weight lambda that ties them;
    inner_steps: steps on theta per batch; weight_decay: mu, part of the steps on theta; beta: server mixing.

    Stability asks for eta_personal * prox and eta * prox well below 2.

    The personal model is theta. In the authors' code it shares its memory with w by mistake, so that the published
    personal accuracies are those of w: it has a column of its own, "local".
    """

    eta_personal: float = 0.01
    eta: float = 0.01
    prox: float = 15.0
    inner_steps: int = 5
    weight_decay: float = 0.001
    beta: float = 1.0

    about = About(
        "pFedMe",
        "T Dinh et al., NeurIPS 2020",
        "a model per client, and a shared one that they are held near",
        personal=True,
    )
    habits = Habits(trains="all")

    def __post_init__(self) -> None:
        require(self.eta_personal >= 0, f"eta_personal must not be negative, got {self.eta_personal}")
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.prox >= 0, f"prox must not be negative, got {self.prox}")
        require(self.inner_steps >= 1, f"inner_steps must be at least 1, got {self.inner_steps}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        require(self.beta >= 0, f"beta must not be negative, got {self.beta}")

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """w <- (1 - beta) w + beta mean of the w_i of S^t, weighted by their numbers of examples."""
        return torch.lerp(server, weighted_mean(uploads, sizes), self.beta)

    def enrol(self, received: Tensor) -> Client:
        return Client(received, received)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Client:
        """Both models start at the received one."""
        return Client(received, received)

    def step(self, model: Model, local: Client, batches: tuple[Batch, ...], noise: Tensor) -> Client:
        """theta <- theta - eta_personal [grad CE(theta; B) + lambda (theta - w) + mu theta], `inner_steps` times on
        one batch, then w <- w - eta lambda (w - theta); theta goes on from there with the next batch."""
        (batch,) = batches
        theta, w = local
        for _ in range(self.inner_steps):
            grad = model.grad_loss(theta, batch)
            theta = sgd(theta, grad + self.prox * (theta - w) + self.weight_decay * theta, self.eta_personal)
        return Client(theta, sgd(w, self.prox * (w - theta), self.eta))

    def end(self, local: Client) -> tuple[Client, Tensor]:
        """The localized global model goes to the server; the personal one stays."""
        return local, local.w

    def views(self, client: Client, received: Tensor) -> dict[str, Client]:
        return {"local": client._replace(theta=client.w)}
