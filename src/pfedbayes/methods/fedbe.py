"""FedBE (Chen & Chao 2021): FedAvg that predicts with an ensemble drawn from the clients' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.gaussian import MeanField, sample
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.methods.base import About, LocalModel, Method
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state."""

    mean: Tensor
    """w (T,)."""
    variance: Tensor
    """Weighted variance of the last uploads around w, (T,)."""
    uploads: Tensor
    """The last uploads, (S, T)."""


@dataclass(frozen=True)
class FedBE(Method):
    """Training is FedAvg's. Predictions average over networks from a distribution that is fitted to the last uploads.

    `teacher = "gaussian"` is the Gaussian of the uploads of Thorgeirsson & Gauterin (2021), and the Gaussian of the
    FedBE paper as we remember it. The authors of FedBE also distil the ensemble into the next model, which needs
    unlabelled data at the server; here there are none.

    The spread of the uploads is heterogeneity and drift, not the width of a posterior: it is zero with one client, and
    it does not shrink with the number of examples.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""
    teacher: Literal["gaussian", "dirichlet", "clients"] = "gaussian"
    """What the networks of the ensemble are: draws from N(mean, variance) of the uploads; random convex combinations
    of the uploads; or the mean and the uploads themselves, one after another."""
    scale: NonNegative[float] = 1.0
    """Factor of the standard deviations with teacher = "gaussian"."""

    about = About(
        "FedBE",
        "Chen & Chao, ICLR 2021",
        "one shared model, and an ensemble around it from the clients' models",
        stochastic=True,
        gaussian=True,
        averages=False,
    )

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        return Server(theta, torch.zeros_like(theta), theta[None])

    def download(self, server: Server, clients: Tensor) -> Tensor:
        received: Tensor = broadcast(server.mean, len(clients))
        return received

    def aggregate(self, server: Server, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Server:
        """w <- sum pi_i theta_i, with the variance sum pi_i (theta_i - w)^2."""
        mean = weighted_mean(uploads, sizes)
        return Server(mean, weighted_mean((uploads - mean).square(), sizes), uploads)

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return LocalModel(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))

    def posterior(self, state: Server) -> MeanField | None:
        """Return the Gaussian of the uploads; None for other ensembles."""
        return MeanField(state.mean, self.scale * state.variance.sqrt()) if self.teacher == "gaussian" else None

    def predict(self, model: Model, state: Server, x: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None:
            return model.outputs(state.mean, x)[None]
        return model.stacked_outputs(self.networks(state, noise), x)

    def networks(self, state: Server, noise: Tensor) -> Tensor:
        """Return the networks (K, T) of the ensemble for noise (K, T).

        The weights of the convex combinations are Dirichlet(1, …, 1): exponential variables E_i, half the sum of two
        squared normal numbers each, divided by their sum.
        """
        match self.teacher:
            case "gaussian":
                return sample(MeanField(state.mean, self.scale * state.variance.sqrt()), noise)
            case "dirichlet":
                count = len(state.uploads)
                exponential = noise[:, : 2 * count].square().view(-1, count, 2).sum(-1)
                weights: Tensor = exponential / exponential.sum(-1, keepdim=True)
                return weights @ state.uploads
            case "clients":
                members = torch.cat([state.mean[None], state.uploads])
                return members[torch.arange(len(noise), device=members.device) % len(members)]
