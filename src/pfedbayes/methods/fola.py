"""FOLA (Liu et al. 2021): online Laplace approximations, whose product is the prior of the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.methods.base import About, Method, Shard, is_used
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state."""

    mean: Tensor
    """mu (T,)."""
    precision: Tensor
    """lambda (T,), per example."""
    size: Tensor
    """Mean number of examples of the clients of the last round; 0 before the first."""
    clients: Tensor
    """N."""


class Laplace(NamedTuple):
    """A mean, and a precision per example. A client receives it, and uploads its own."""

    mean: Tensor
    precision: Tensor


class Local(NamedTuple):
    """The state of a round."""

    theta: Tensor
    received: Laplace
    fisher: Tensor
    """Sum of the estimated Fisher information per example (T,)."""
    steps: Tensor


@dataclass(frozen=True)
class FOLA(Method):
    """Clients train towards the server's Gaussian N(mu, 1 / lambda); it multiplies their Laplace approximations.

    The rules are recalled from the paper, not read again: the prior loss, the weighted product and the Fisher
    information. With `accumulate`, lambda grows in every round, because the same data count again; PVI is the method
    that divides the old contribution out.

    The precision lambda is that of one example. Predictions draw from N(mu, 1 / (n lambda + 1 / prior_sigma^2)) with
    the number n of examples of all clients, where the paper names N(mu, 1 / lambda).
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of SGD."""
    prior_weight: NonNegative[float] = 0.1
    """Weight of the prior loss (1/2) sum lambda (theta - mu)^2."""
    accumulate: bool = False
    """Add the server's precision to the client's."""
    floor: Positive[float] = 1e-8
    """Smallest precision. Weights without curvature have the plain mean."""
    prior_sigma: Positive[float] = 1.0
    """Standard deviation of a prior that bounds the widths of predictions."""

    about = About(
        "FOLA",
        "Liu et al., 2021",
        "one Gaussian over models, the product of the clients' Laplace approximations",
        stochastic=True,
        gaussian=True,
        averages=False,
    )

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return mu = theta, and no information."""
        lowest = torch.full_like(theta, self.floor)
        return Server(theta, lowest, theta.new_zeros(()), theta.new_tensor(float(num_clients)))

    def download(self, server: Server, clients: Tensor) -> Laplace:
        received: Laplace = broadcast(Laplace(server.mean, server.precision), len(clients))
        return received

    def aggregate(self, server: Server, uploads: Laplace, sizes: Tensor, clients: Tensor) -> Server:
        """lambda <- sum pi_i lambda_i and mu <- sum pi_i lambda_i mu_i / lambda, with pi_i = n_i / n."""
        precision = weighted_mean(uploads.precision, sizes)
        mean = weighted_mean(uploads.precision * uploads.mean, sizes) / precision
        return server._replace(mean=mean, precision=precision, size=sizes.mean().to(server.size))

    # Client

    def begin(self, client: tuple[()], received: Laplace, shard: Shard) -> Local:
        return Local(received.mean, received, torch.zeros_like(received.mean), torch.zeros_like(shard.size))

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (batch_size,)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad [CE(theta; B) + (prior_weight / 2) sum lambda (theta - mu)^2]."""
        (batch,) = batches
        grad, received = model.grad_loss(local.theta, batch), local.received
        if is_used(self.prior_weight):
            grad = grad + self.prior_weight * received.precision * (local.theta - received.mean)
        fisher = local.fisher + model.fisher(local.theta, batch, noise)
        return Local(sgd(local.theta, grad, self.eta), received, fisher, local.steps + 1)

    def end(self, local: Local) -> tuple[tuple[()], Laplace]:
        """lambda_i = F_i, the mean over the steps of the empirical Fisher information per example."""
        precision = local.fisher / local.steps.clamp(min=1)
        if self.accumulate:
            precision = precision + local.received.precision
        return (), Laplace(local.theta, precision.clamp(min=self.floor))

    # Prediction

    def posterior(self, state: Server | Laplace) -> MeanField:
        """Return N(mu, 1 / (n lambda + 1 / prior_sigma^2))."""
        examples = state.size * state.clients if isinstance(state, Server) else torch.zeros(())
        precision = examples.to(state.mean) * state.precision + self.prior_sigma**-2
        return MeanField(state.mean, precision.rsqrt())
