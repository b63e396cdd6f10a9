"""APFL (Deng, Kamani and Mahdavi 2020): a client's model mixes an own model with its copy of the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Interval, NonNegative
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Shard, is_used
from pfedbayes.nets import Batch, Model


class Client(NamedTuple):
    """What a client keeps."""

    v: Tensor
    """Its own model."""
    w: Tensor
    """Its copy of the shared model, after its last local training."""
    alpha: Tensor
    """The weight of v in the mixture."""


class Local(NamedTuple):
    """The state of a round."""

    v: Tensor
    w: Tensor
    alpha: Tensor
    steps: Tensor
    """Number of steps taken in this round."""


@dataclass(frozen=True)
class APFL(Method):
    """The personal model has the weights alpha v + (1 - alpha) w, or it mixes the outputs of the networks v and w.

    The shared model is FedAvg's. alpha is learned once per round, on the first batch; that timing rests on memory of
    the paper. The authors' code mixes outputs. The view "server" mixes v with the received w.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the copy of the shared model."""
    eta_personal: NonNegative[float] = 0.01
    """Learning rate of v."""
    alpha: Annotated[float, Interval(at_least=0, at_most=1)] = 0.5
    """Weight of v in the mixture before training."""
    eta_alpha: NonNegative[float] = 0.01
    """Learning rate of alpha; 0 keeps it."""
    mix: Literal["parameters", "outputs"] = "parameters"
    """Mix the weights of the networks v and w, as the paper does, or their outputs."""

    about = About(
        "APFL",
        "Deng et al., 2020",
        "one shared model as FedAvg does, and a mixture of it with an own model for each client",
        personal=True,
    )

    def enrol(self, received: Tensor) -> Client:
        return Client(received, received, received.new_zeros(()) + self.alpha)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Local:
        return Local(client.v, received, client.alpha, torch.zeros((), dtype=torch.int64, device=received.device))

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """w <- w - eta grad CE(w; B), v <- v - eta_personal d/dv CE(mixture; B) and, on the first batch of a round,
        alpha <- clip(alpha - eta_alpha d/dalpha CE(mixture; B), 0, 1).

        With mixed parameters, d/dv = alpha grad CE(mixture; B) and d/dalpha = <grad CE(mixture; B), v - w>.
        """
        (batch,) = batches
        v, w, alpha, steps = local

        def mixed_nll(v: Tensor, alpha: Tensor) -> Tensor:
            outputs = self._outputs(model, Client(v, w, alpha), batch.x)
            return (batch.weight * model.likelihood.nll(outputs, batch.y)).sum()

        in_v, in_alpha = torch.func.grad(mixed_nll, argnums=(0, 1))(v, alpha)
        if is_used(self.eta_alpha):
            moved = sgd(alpha, in_alpha / batch.size, self.eta_alpha).clamp(0, 1)
            alpha = torch.where(steps == 0, moved, alpha)
        v = sgd(v, in_v / batch.size, self.eta_personal)
        return Local(v, sgd(w, model.grad_loss(w, batch), self.eta), alpha, steps + 1)

    def end(self, local: Local) -> tuple[Client, Tensor]:
        """Keep both models and alpha, and upload the copy of the shared model."""
        return Client(local.v, local.w, local.alpha), local.w

    def views(self, client: Client, received: Tensor) -> dict[str, Client]:
        return {"server": client._replace(w=received)}

    def posterior(self, state: Client | Tensor) -> MeanField | None:
        if isinstance(state, Tensor):
            return super().posterior(state)
        return super().posterior(_mixture(state)) if self.mix == "parameters" else None

    def predict(self, model: Model, state: Client | Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
        return (model.outputs(state, x) if isinstance(state, Tensor) else self._outputs(model, state, x))[None]

    def _outputs(self, model: Model, client: Client, x: Tensor) -> Tensor:
        """Return the outputs (n, ...) of the personal model."""
        if self.mix == "parameters":
            return model.outputs(_mixture(client), x)
        return client.alpha * model.outputs(client.v, x) + (1 - client.alpha) * model.outputs(client.w, x)


def _mixture(client: Client) -> Tensor:
    return client.alpha * client.v + (1 - client.alpha) * client.w
