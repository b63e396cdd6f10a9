"""FedAvg (McMahan et al. 2017): local SGD from the shared model, then the mean of the clients' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedbayes.methods.base import Method, Shard, State, require
from pfedbayes.nets import Batch, Model
from pfedbayes.optim import sgd


class Local(NamedTuple):
    theta: Tensor


@dataclass(frozen=True)
class FedAvg(Method):
    """eta: rate of the local SGD steps on the mean loss of a batch."""

    eta: float = 0.01

    title = "FedAvg"
    reference = "McMahan et al., AISTATS 2017"
    learns = "one shared model, the mean of the clients' models"

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    def begin(self, client: State, received: Tensor, shard: Shard) -> Local:
        return Local(received)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return Local(sgd(local.theta, model.grad_nll(local.theta, batch) / batch.size, self.eta))

    def end(self, local: Local) -> tuple[State, Tensor]:
        return (), local.theta
