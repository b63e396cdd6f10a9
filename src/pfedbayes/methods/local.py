"""Local training: every client learns from its own data only. The baseline that any federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, State
from pfedbayes.nets import Batch, Model


@dataclass(frozen=True)
class Local(Method):
    """Every client takes R steps of SGD per round on the batch's mean loss and uploads nothing."""

    eta: NonNegative[float] = 0.01
    """Learning rate of the SGD steps."""

    about = About(
        "Local",
        "baseline: no communication",
        "a model per client, from its own data only",
        personal=True,
        shared=False,
        averages=False,
    )
    habits = Habits(trains="all")

    def aggregate(self, server: Tensor, uploads: State, sizes: Tensor, clients: Tensor) -> Tensor:
        """Return the common initial model unchanged: there are no uploads."""
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
