"""FedRep (Collins et al. 2021): a shared body, and a last layer for each client, trained alternately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, CountOrZero, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State
from pfedbayes.nets import Batch, Model


class AlternatingModel(NamedTuple):
    """The state of a round: the model in training is the body of w with the head of theta."""

    w: Tensor
    theta: Tensor
    steps: Tensor
    """Number of steps taken in this round."""


class Personal(NamedTuple):
    """A personal model at prediction time."""

    theta: Tensor
    local: Tensor
    """The client's model after its last local training."""


@dataclass(frozen=True)
class FedRep(Method):
    """A round takes head_steps steps on the head alone, then body_steps on the body alone, and repeats this up to R.

    The paper runs one such cycle per round: ten epochs for the head, then one or five for the body. This is
    head_steps + body_steps = R. The defaults give each part half of the steps, for any R.

    A client keeps its model theta_i. It uploads its body with the head that it received, so the server never sees a
    client's head and keeps the initial one. The personal model is the server's body with the client's head. The view
    "local" is the client's model after its last local training.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the SGD steps."""
    head_steps: CountOrZero = 1
    """Steps on the head in one cycle."""
    body_steps: Count = 1
    """Steps on the body in one cycle."""

    about = About(
        "FedRep",
        "Collins et al., ICML 2021",
        "a shared body and a last layer per client, trained alternately",
        personal=True,
        shared=False,
    )

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> AlternatingModel:
        return AlternatingModel(received, client, torch.zeros((), dtype=torch.int64, device=received.device))

    def step(
        self, model: Model, local: AlternatingModel, batches: tuple[Batch, ...], noise: Tensor
    ) -> AlternatingModel:
        """theta <- theta - eta grad CE(theta; B) in the head or in the body; the other part does not change.

        The gradient is taken at the body of w with the head of theta_i.
        """
        (batch,) = batches
        theta = model.net.join(local.w, local.theta)
        moved = sgd(theta, model.grad_loss(theta, batch), self.eta)
        head_turn = local.steps % (self.head_steps + self.body_steps) < self.head_steps
        theta = torch.where(head_turn, model.net.join(theta, moved), model.net.join(moved, theta))
        return AlternatingModel(model.net.join(theta, local.w), theta, local.steps + 1)

    def end(self, local: AlternatingModel) -> tuple[Tensor, Tensor]:
        """Keep the whole model and upload the body."""
        return local.theta, local.w

    def adapt(self, model: Model, client: Tensor, received: Tensor, prepared: State) -> Personal:
        """Join the server's body and the client's head."""
        return Personal(model.net.join(received, client), client)

    def views(self, client: Personal, received: Tensor) -> dict[str, Personal]:
        return {"local": client._replace(theta=client.local)}
