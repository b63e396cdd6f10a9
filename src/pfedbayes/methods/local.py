"""Local training: every client learns from its own data alone, which any federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, State, require
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class Local(Method):
    """eta: rate of the SGD steps on the mean loss of a batch."""

    eta: float = 0.01

    about = About(
        "Local",
        "a yardstick: no communication",
        "a model per client from its own data alone",
        personal=True,
        shared=False,
        averages=False,
    )
    habits = Habits(trains="all")

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    def aggregate(self, server: Tensor, uploads: State, sizes: Tensor, clients: Tensor) -> Tensor:
        """Nothing is uploaded: the server only hands out the common start."""
        return server

    def enrol(self, received: Tensor) -> Tensor:
        return received

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> Tensor:
        return client

    def step(self, model: Model, local: Tensor, batches: tuple[Batch, ...], noise: Tensor) -> Tensor:
        """theta_i <- theta_i - eta grad CE(theta_i; B)."""
        (batch,) = batches
        return sgd(local, model.grad_loss(local, batch), self.eta)

    def end(self, local: Tensor) -> tuple[Tensor, State]:
        return local, ()
