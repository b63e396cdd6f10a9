"""HeurFedAMP (Huang et al. 2021): the server mixes for every client a model of its own from those most like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, require
from pfedbayes.nets import Batch, Model


class Server(NamedTuple):
    """The model w_i last uploaded by each client and the cloud model u_i mixed for it, both (N, T)."""

    models: Tensor
    clouds: Tensor


class Client(NamedTuple):
    """A client's own model w_i (T,)."""

    theta: Tensor


class Local(NamedTuple):
    theta: Tensor
    cloud: Tensor


@dataclass(frozen=True)
class HeurFedAMP(Method):
    """eta: rate of the local SGD steps; self_weight: share xi_ii of a client's own model in its cloud model;
    sharpness: factor sigma of the cosine similarities, 0 treats all others alike; prox, alpha: lambda and alpha_k,
    whose ratio is the weight of the proximal term.

    attention: "fedamp" is the plain FedAMP of the same paper, which weighs others by distance; width is its sigma, and
    it needs alpha <= width / (N - 1), since a client's weight on itself must not be negative.
    """

    eta: float = 0.01
    self_weight: float = 0.5
    sharpness: float = 25.0
    prox: float = 1.0
    alpha: float = 1e4
    attention: Literal["cosine", "fedamp"] = "cosine"
    width: float = 25.0

    about = About(
        "HeurFedAMP",
        "Huang et al., AAAI 2021",
        "a model per client, drawn towards the models most like it",
        personal=True,
        shared=False,
        averages=False,
    )
    habits = Habits(trains="all")

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(0 <= self.self_weight <= 1, f"self_weight must be between 0 and 1, got {self.self_weight}")
        require(self.sharpness >= 0, f"sharpness must not be negative, got {self.sharpness}")
        require(self.prox >= 0, f"prox must not be negative, got {self.prox}")
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")
        require(self.width > 0, f"width must be positive, got {self.width}")

    def init(self, theta: Tensor, num_clients: int, shapes: tuple[torch.Size, ...]) -> Server:
        """Everybody's first model is theta, and so is every mixture of them."""
        # Equal models, as at the start, have the largest weights on each other: alpha A'(0) = alpha / width.
        if self.attention == "fedamp" and self.alpha * (num_clients - 1) > self.width:
            largest = self.width / (num_clients - 1)
            raise UserError(
                f"FedAMP with {num_clients} clients would give a client a negative weight on its own model: "
                f"set method.alpha to at most {largest:.4g} (method.width / {num_clients - 1})"
            )
        models = theta.repeat(num_clients, 1)
        return Server(models, models.clone())

    def download(self, server: Server, clients: Tensor) -> Tensor:
        """Each client's cloud model u_i."""
        return server.clouds[clients.to(server.clouds.device)]

    def aggregate(self, server: Server, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Server:
        """u_i = sum_j xi_ij w_j, where a client that has sent nothing counts with the model it sent last."""
        models = server.models.index_copy(0, clients.to(uploads.device), uploads)
        weights = self.cosine_weights(models) if self.attention == "cosine" else self.fedamp_weights(models)
        return Server(models, clouds=weights @ models)

    def cosine_weights(self, models: Tensor) -> Tensor:
        """xi (N, N): xi_ii is the self weight, and the others share the rest,

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
        """xi (N, N): xi_ij = alpha_k A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), and xi_ii is the rest."""
        distances = torch.stack([(models - model).square().sum(1) for model in models])
        others = self.alpha / self.width * torch.exp(-distances / self.width)
        others = others - others.diagonal().diag()
        return others + (1 - others.sum(1)).diag()

    def enrol(self, received: Tensor) -> Client:
        return Client(received)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Local:
        """Training starts from the cloud model: the proximal term alone is too weak to bring the others in."""
        return Local(received, cloud=received)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """w <- w - eta [grad CE(w; B) + (lambda / alpha_k) (w - u_i)]."""
        (batch,) = batches
        grad = model.grad_loss(local.theta, batch)
        if self.prox:
            grad = grad + self.prox / self.alpha * (local.theta - local.cloud)
        return Local(sgd(local.theta, grad, self.eta), local.cloud)

    def end(self, local: Local) -> tuple[Client, Tensor]:
        return Client(local.theta), local.theta

    def views(self, client: Client, received: Tensor) -> dict[str, Client]:
        """The cloud model, which the pFedBayes paper seems to report."""
        return {"cloud": Client(received)}
