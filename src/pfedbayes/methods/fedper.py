"""FedPer (Arivazhagan et al. 2019): a shared body and, on top of it, a last layer of each client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State, require
from pfedbayes.nets import Batch, Model


class Local(NamedTuple):
    """A round under way, as two models of which one part each is in use: the body of w and the head of theta."""

    w: Tensor
    theta: Tensor


class Personal(NamedTuple):
    """A personal model made for prediction: theta, and the one that local training ended with."""

    theta: Tensor
    local: Tensor


@dataclass(frozen=True)
class FedPer(Method):
    """eta: rate of the SGD steps, which train body and head together.

    A client keeps its model theta_i and uploads its body with the head that it received, so that the server's head
    remains the first one: nothing of a client's head is sent. The personal model is the server's body with the
    client's head; "local" is the model that the client's last local training ended with.
    """

    eta: float = 0.01

    about = About(
        "FedPer",
        "Arivazhagan et al., 2019",
        "a shared body and a last layer per client, trained together",
        personal=True,
        shared=False,
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> Local:
        return Local(received, client)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B), from the body of w and the head of theta_i."""
        (batch,) = batches
        theta = model.net.join(local.w, local.theta)
        theta = sgd(theta, model.grad_loss(theta, batch), self.eta)
        return Local(model.net.join(theta, local.w), theta)

    def end(self, local: Local) -> tuple[Tensor, Tensor]:
        """The body goes to the server, the whole model stays."""
        return local.theta, local.w

    def adapt(self, model: Model, client: Tensor, received: Tensor, prepared: State) -> Personal:
        """The server's body with the client's head."""
        return Personal(model.net.join(received, client), client)

    def views(self, client: Personal, received: Tensor) -> dict[str, Personal]:
        return {"local": client._replace(theta=client.local)}
