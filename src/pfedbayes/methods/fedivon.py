"""FedIvon (Pal et al. 2025): IVON (Shen et al. 2024) on the clients, and a server that weights by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, Interval, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.optim import Ivon, ivon, ivon_init
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.methods.base import About, Method, Shard
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state, which clients receive too."""

    mean: Tensor
    """m (T,)."""
    hessian: Tensor
    """h (T,)."""
    size: Tensor
    """Mean number of examples of the clients of the last round; 0 before the first."""
    clients: Tensor
    """N."""


class Client(NamedTuple):
    """What a client keeps between rounds."""

    mean: Tensor
    hessian: Tensor
    precision: Tensor
    """Precision of its posterior (T,)."""


class Upload(NamedTuple):
    """What a client sends."""

    mean: Tensor
    hessian: Tensor


class Local(NamedTuple):
    """The state of a round."""

    state: Ivon
    centre: Tensor
    """Mean of the prior (T,)."""
    delta: Tensor
    """Precision of the prior, divided by n (T,)."""
    size: Tensor


@dataclass(frozen=True)
class FedIvon(Method):
    """Clients train N(m, 1 / (n (h + delta))) by IVON from the server's (m, h); the server weights means by precision.

    A client's personal model is its posterior after its last local training. With `personal_prior` it keeps that
    posterior, and the server's is its prior, as in pFedBayes.

    IVON is implemented from its equations. The server's rule is known to us from the abstract and a third party's page;
    the details of the personal version are ours. With beta2 = 0.99999, the value of IVON's authors, h hardly moves in a
    round of 20 steps, and the server's rule becomes that of FedAvg: hence 0.999.
    """

    eta: NonNegative[float] = 0.1
    """Learning rate."""
    samples: Count = 1
    """Weight draws K per step."""
    beta1: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    """Decay of the running mean of the gradient, which starts afresh in every round."""
    beta2: Annotated[float, Interval(at_least=0, at_most=1)] = 0.999
    """Decay of the running Hessian, which the server carries from round to round."""
    hessian: Positive[float] = 0.5
    """Initial Hessian h0."""
    delta: Positive[float] = 2e-4
    """Prior precision divided by n: the weight decay."""
    personal_prior: bool = False
    """Take the server's Gaussian as each client's prior, and keep each client's posterior."""
    zeta: Positive[float] = 1.0
    """Weight of the KL term with `personal_prior`."""
    weights: Literal["precision", "paper"] = "precision"
    """Weights of the clients' means: n_i (h_i + delta), or n_i h_i as published, where h_i may be 0 or negative."""
    server_ess: Literal["total", "client"] = "total"
    """Examples behind the shared Gaussian: those of all clients, so that it is the product of the clients' factors, or
    those of a mean client. The paper's choice is not known to us."""

    about = About(
        "FedIvon",
        "Pal et al., TMLR 2025",
        "a Gaussian over models, by a natural-gradient optimizer on the clients",
        personal=True,
        stochastic=True,
        gaussian=True,
        averages=False,
    )

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return m = theta and h = h0."""
        first = torch.full_like(theta, self.hessian)
        return Server(theta, first, theta.new_zeros(()), theta.new_tensor(float(num_clients)))

    def download(self, server: Server, clients: Tensor) -> Server:
        received: Server = broadcast(server, len(clients))
        return received

    def aggregate(self, server: Server, uploads: Upload, sizes: Tensor, clients: Tensor) -> Server:
        """h <- sum w_i h_i and m <- sum w_i (h_i + delta) m_i / sum w_i (h_i + delta), with w_i = n_i / n."""
        precise = self.weights == "precision"
        information = uploads.hessian + self.delta if precise else uploads.hessian.clamp(min=1e-12)
        mean = weighted_mean(information * uploads.mean, sizes) / weighted_mean(information, sizes)
        return server._replace(
            mean=mean, hessian=weighted_mean(uploads.hessian, sizes), size=sizes.mean().to(server.size)
        )

    # Client

    def enrol(self, received: Server) -> Client:
        return Client(received.mean, received.hessian, self.posterior(received).sigma.pow(-2))

    def begin(self, client: Client, received: Server, shard: Shard) -> Local:
        """Start at the server's (m, h), or with `personal_prior` at the client's own."""
        if not self.personal_prior:
            zero = torch.zeros_like(received.mean)
            return Local(ivon_init(received.mean, received.hessian), zero, zero + self.delta, shard.size)
        size = torch.where(received.size > 0, received.size, shard.size)
        delta = size * (received.hessian + self.delta) * self.zeta / shard.size
        return Local(ivon_init(client.mean, client.hessian), received.mean, delta, shard.size)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (self.samples, model.net.num_params)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """Take a step of IVON: the gradient at theta_k = m + sigma g_k, and the Hessian from its product with g_k."""
        (batch,) = batches
        state, centre, delta, size = local
        sigma = (self._examples(size) * (state.hessian + delta)).rsqrt()
        in_mean, in_sigma = model.grad_sampled_nll(state.mean, sigma, batch, noise)
        first = self.hessian + self.delta
        grad, estimate = in_mean / batch.size, in_sigma / batch.size / sigma
        moved = ivon(state, grad, estimate, self.eta, delta, centre, self.beta1, self.beta2, first)
        return Local(moved, centre, delta, size)

    def _examples(self, size: Tensor) -> Tensor:
        """Return lambda, by which the entropy is divided: the KL term with weight zeta counts n / zeta examples."""
        return size / self.zeta if self.personal_prior else size

    def end(self, local: Local) -> tuple[Client, Upload]:
        """Keep the posterior; upload (m, h)."""
        mean, hessian, *_ = local.state
        precision = self._examples(local.size) * (hessian + local.delta)
        return Client(mean, hessian, precision), Upload(mean, hessian)

    # Prediction

    def posterior(self, state: Client | Server) -> MeanField:
        """Return N(m_i, sigma_i^2) of a client, or N(m, 1 / (lambda (h + delta))) of the server."""
        if isinstance(state, Client):
            return MeanField(state.mean, state.precision.rsqrt())
        examples = state.size.clamp(min=1) * (state.clients if self.server_ess == "total" else 1)
        return MeanField(state.mean, (examples * (state.hessian + self.delta)).rsqrt())
