"""FedRep (Collins et al. 2021): a shared body and a last layer of each client's own, trained in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, State, require
from pfedbayes.nets import Batch, Model


class Local(NamedTuple):
    """A round under way, as two models of which one part each is in use: the body of w and the head of theta; and
    the number of steps taken in this round."""

    w: Tensor
    theta: Tensor
    steps: Tensor


class Personal(NamedTuple):
    """A personal model made for prediction: theta, and the one that local training ended with."""

    theta: Tensor
    local: Tensor


@dataclass(frozen=True)
class FedRep(Method):
    """eta: rate of the SGD steps; head_steps, body_steps: a round takes so many steps on the head alone, then so many
    on the body alone, and begins again where R leaves room.

    The paper has one such turn in a round, of ten epochs for the head and one or five for the body: that is
    head_steps + body_steps = R. The defaults give each part half of the steps, whatever R is.

    A client keeps its model theta_i and uploads its body with the head that it received, so that the server's head
    remains the first one: nothing of a client's head is sent. The personal model is the server's body with the
    client's head; "local" is the model that the client's last local training ended with.
    """

    eta: float = 0.01
    head_steps: int = 1
    body_steps: int = 1

    about = About(
        "FedRep",
        "Collins et al., ICML 2021",
        "a shared body and a last layer per client, trained in turn",
        personal=True,
        shared=False,
    )

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.head_steps >= 0, f"head_steps must not be negative, got {self.head_steps}")
        require(self.body_steps >= 1, f"body_steps must be at least 1, got {self.body_steps}")

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> Local:
        return Local(received, client, torch.zeros((), dtype=torch.int64, device=received.device))

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B) in the part whose turn it is, from the body of w and the head of
        theta_i; the other part stays."""
        (batch,) = batches
        theta = model.net.join(local.w, local.theta)
        moved = sgd(theta, model.grad_loss(theta, batch), self.eta)
        head_turn = local.steps % (self.head_steps + self.body_steps) < self.head_steps
        theta = torch.where(head_turn, model.net.join(theta, moved), model.net.join(moved, theta))
        return Local(model.net.join(theta, local.w), theta, local.steps + 1)

    def end(self, local: Local) -> tuple[Tensor, Tensor]:
        """The body goes to the server, the whole model stays."""
        return local.theta, local.w

    def adapt(self, model: Model, client: Tensor, received: Tensor, prepared: State) -> Personal:
        """The server's body with the client's head."""
        return Personal(model.net.join(received, client), client)

    def views(self, client: Personal, received: Tensor) -> dict[str, Personal]:
        return {"local": client._replace(theta=client.local)}
