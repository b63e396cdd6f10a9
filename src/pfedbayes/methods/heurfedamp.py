"""HeurFedAMP (Huang et al. 2021): for every client, the server mixes a model from the most similar ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Interval, NonNegative, Positive
from pfedbayes.errors import UserError
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, is_used
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """What the server holds for each client."""

    models: Tensor
    """The client's last upload w_i, (N, T)."""
    clouds: Tensor
    """The cloud model u_i that the server mixes for the client, (N, T)."""


class Client(NamedTuple):
    """A client's model w_i (T,)."""

    theta: Tensor


class ModelAndCloud(NamedTuple):
    """The state of a round: the client's model and its received cloud model."""

    theta: Tensor
    cloud: Tensor


@dataclass(frozen=True)
class HeurFedAMP(Method):
    """The weight of the proximal term is prox / alpha."""

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""
    self_weight: Annotated[float, Interval(at_least=0, at_most=1)] = 0.5
    """Weight xi_ii of a client's model in its own cloud model."""
    sharpness: NonNegative[float] = 25.0
    """Factor sigma of the cosine similarities; 0 weights all other clients equally."""
    prox: NonNegative[float] = 1.0
    """lambda."""
    alpha: Positive[float] = 1e4
    """alpha_k."""
    attention: Literal["cosine", "fedamp"] = "cosine"
    """How the server weights other clients: by cosine similarity (HeurFedAMP) or by distance (FedAMP, same paper).
    FedAMP needs alpha <= width / (N - 1): a client's weight on its own model must not be negative."""
    width: Positive[float] = 25.0
    """FedAMP's sigma."""

    about = About(
        "HeurFedAMP",
        "Huang et al., AAAI 2021",
        "a model per client, drawn towards the models most like it",
        personal=True,
        shared=False,
        averages=False,
    )
    habits = Habits(trains="all")

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return theta as the model and as the cloud model of every client."""
        # The weights on others are largest for equal models, as at the start: alpha A'(0) = alpha / width.
        if self.attention == "fedamp" and self.alpha * (num_clients - 1) > self.width:
            largest = self.width / (num_clients - 1)
            raise UserError(
                f"FedAMP with {num_clients} clients would give a client a negative weight on its own model: "
                f"set method.alpha to at most {largest:.4g} (method.width / {num_clients - 1})"
            )
        models = theta.repeat(num_clients, 1)
        return Server(models, models.clone())

    def download(self, server: Server, clients: Tensor) -> Tensor:
        """Return each client's cloud model u_i."""
        return server.clouds[clients.to(server.clouds.device)]

    def aggregate(self, server: Server, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Server:
        """u_i = sum_j xi_ij w_j, where w_j is the last upload of client j."""
        models = server.models.index_copy(0, clients.to(uploads.device), uploads)
        weights = self.cosine_weights(models) if self.attention == "cosine" else self.fedamp_weights(models)
        return Server(models, clouds=weights @ models)

    def cosine_weights(self, models: Tensor) -> Tensor:
        """Return xi (N, N): xi_ii is the self weight, and the other clients share the rest,

        xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)).
        """
        own = torch.eye(len(models), dtype=models.dtype, device=models.device)
        if len(models) == 1:
            return own
        directions = torch.nn.functional.normalize(models, dim=1)
        scores = self.sharpness * (directions @ directions.T)
        others = scores.masked_fill(own.bool(), -torch.inf).softmax(1)  # subtracts the maximum first
        return self.self_weight * own + (1 - self.self_weight) * others

    def fedamp_weights(self, models: Tensor) -> Tensor:
        """Return xi (N, N): xi_ij = alpha_k A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), xi_ii the rest."""
        distances = torch.stack([(models - model).square().sum(1) for model in models])
        others = self.alpha / self.width * torch.exp(-distances / self.width)
        others = others - others.diagonal().diag()
        return others + (1 - others.sum(1)).diag()

    def enrol(self, received: Tensor) -> Client:
        return Client(received)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> ModelAndCloud:
        """Start at the cloud model: the proximal term alone is too weak to transfer the other models."""
        return ModelAndCloud(received, cloud=received)

    def step(self, model: Model, local: ModelAndCloud, batches: tuple[Batch, ...], noise: Tensor) -> ModelAndCloud:
        """w <- w - eta [grad CE(w; B) + (lambda / alpha_k) (w - u_i)]."""
        (batch,) = batches
        grad = model.grad_loss(local.theta, batch)
        if is_used(self.prox):
            grad = grad + self.prox / self.alpha * (local.theta - local.cloud)
        return ModelAndCloud(sgd(local.theta, grad, self.eta), local.cloud)

    def end(self, local: ModelAndCloud) -> tuple[Client, Tensor]:
        return Client(local.theta), local.theta

    def views(self, client: Client, received: Tensor) -> dict[str, Client]:
        """Return the cloud model, which the pFedBayes paper seems to report."""
        return {"cloud": Client(received)}
