"""FedPer (Arivazhagan et al. 2019): a shared body, and a last layer for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State
from pfedbayes.nets import Batch, Model


class BodyAndHead(NamedTuple):
    """The state of a round: the model in training is the body of w with the head of theta."""

    w: Tensor
    theta: Tensor


class Personal(NamedTuple):
    """A personal model at prediction time."""

    theta: Tensor
    local: Tensor
    """The client's model after its last local training."""


@dataclass(frozen=True)
class FedPer(Method):
    """SGD trains body and head together.

    A client keeps its model theta_i. It uploads its body with the head that it received, so the server never sees a
    client's head and keeps the initial one. The personal model is the server's body with the client's head. The view
    "local" is the client's model after its last local training.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the SGD steps."""

    about = About(
        "FedPer",
        "Arivazhagan et al., 2019",
        "a shared body and a last layer per client, trained together",
        personal=True,
        shared=False,
    )

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> BodyAndHead:
        return BodyAndHead(received, client)

    def step(self, model: Model, local: BodyAndHead, batches: tuple[Batch, ...], noise: Tensor) -> BodyAndHead:
        """theta <- theta - eta grad CE(theta; B), from the body of w and the head of theta_i."""
        (batch,) = batches
        theta = model.net.join(local.w, local.theta)
        theta = sgd(theta, model.grad_loss(theta, batch), self.eta)
        return BodyAndHead(model.net.join(theta, local.w), theta)

    def end(self, local: BodyAndHead) -> tuple[Tensor, Tensor]:
        """Keep the whole model and upload the body."""
        return local.theta, local.w

    def adapt(self, model: Model, client: Tensor, received: Tensor, prepared: State) -> Personal:
        """Join the server's body and the client's head."""
        return Personal(model.net.join(received, client), client)

    def views(self, client: Personal, received: Tensor) -> dict[str, Personal]:
        return {"local": client._replace(theta=client.local)}
