"""FedPop (Kotelevskii et al. 2022): a shared body, and Langevin samples of each client's last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, CountOrZero, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField, sample
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.methods.base import About, Method, Shard, is_used
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state, which clients receive too."""

    body: Tensor
    """All layers but the last, (T - H,)."""
    head: Tensor
    """mu, the mean of the prior of the clients' last layers, (H,)."""
    variance: Tensor
    """s^2, the variance of that prior."""


class Client(NamedTuple):
    """What a client keeps between rounds."""

    body: Tensor
    """The body after its last local training."""
    head: Tensor
    """z_i, where the chain is, (H,)."""
    samples: Tensor
    """The last samples of the chain, (M, H)."""


class Upload(NamedTuple):
    """What a client sends."""

    body: Tensor
    mean: Tensor
    """Mean of the chain after burn-in, (H,)."""
    variance: Tensor
    """Variance of the chain after burn-in, (H,)."""


class Local(NamedTuple):
    """The state of a round."""

    client: Client
    prior: Server
    total: Tensor
    squares: Tensor
    counted: Tensor
    steps: Tensor
    size: Tensor


@dataclass(frozen=True)
class FedPop(Method):
    """theta_i = (body, z_i) with z_i ~ N(mu, s^2 I). Unadjusted Langevin dynamics samples z_i; SGD trains the body.

    The server averages the bodies, and sets mu and s^2 from the clients' samples (expectation maximisation: Lemma A.2
    for the last layer). A client predicts with its last samples, one network each. The authors' code trains the shared
    part one client after another; bodies that train beside the chains and are averaged are our choice.

    Langevin dynamics without a correction is biased: with step gamma and curvature a, its variance is
    1 / (a (1 - gamma a / 2)).
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the body."""
    eta_head: NonNegative[float] = 0.01
    """Step of the chain, times n: gamma = eta_head / n."""
    noise_std: NonNegative[float] = 1.0
    """Standard deviation of the Langevin noise; 0 ends at the mode, as in FedPer with a proximal term."""
    burn_in: CountOrZero = 5
    """Steps of a round before its samples count."""
    samples: Count = 10
    """Number M of samples that a client keeps."""
    sigma0: Positive[float] = 0.1
    """Initial standard deviation s of the prior of the last layers."""
    learn_spread: bool = True
    """Let the server learn s^2; else it stays."""

    about = About(
        "FedPop",
        "Kotelevskii et al., NeurIPS 2022",
        "a shared body, and samples of each client's last layer around a shared mean",
        personal=True,
        stochastic=True,
        averages=False,
    )

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        cut = net.num_params - net.head_size
        return Server(theta[:cut], theta[cut:], theta.new_tensor(self.sigma0**2))

    def download(self, server: Server, clients: Tensor) -> Server:
        received: Server = broadcast(server, len(clients))
        return received

    def aggregate(self, server: Server, uploads: Upload, sizes: Tensor, clients: Tensor) -> Server:
        """mu <- mean of the clients' means; s^2 <- mean of (variance + (mean - mu)^2), over clients and weights."""
        head = uploads.mean.mean(0)
        variance = (uploads.variance + (uploads.mean - head).square()).mean()
        learned = variance if self.learn_spread else server.variance
        return Server(weighted_mean(uploads.body, sizes), head, learned.clamp(min=1e-8))

    # Client

    def enrol(self, received: Server) -> Client:
        return Client(received.body, received.head, received.head.expand(self.samples, -1))

    def begin(self, client: Client, received: Server, shard: Shard) -> Local:
        zero, none = torch.zeros_like(received.head), torch.zeros_like(shard.size)
        return Local(client._replace(body=received.body), received, zero, zero, none, none, shard.size)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (model.net.head_size,)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """z <- z - gamma [(n/b) grad nll(body, z; B) + (z - mu) / s^2] + sqrt(2 gamma) xi; SGD for the body."""
        (batch,) = batches
        (body, head, samples), prior, cut = local.client, local.prior, len(local.client.body)
        grad = model.grad_loss(torch.cat([body, head]), batch)
        gamma = self.eta_head / local.size
        drift = local.size * grad[cut:] + (head - prior.head) / prior.variance
        moved = head - gamma * drift
        if is_used(self.noise_std):
            moved = torch.addcmul(moved, (2 * gamma).sqrt() * self.noise_std, noise)
        counts = (local.steps >= self.burn_in).to(moved.dtype)
        kept = torch.where(counts > 0, torch.cat([samples[1:], moved[None]]), samples)
        return local._replace(
            client=Client(sgd(body, grad[:cut], self.eta), moved, kept),
            total=local.total + counts * moved,
            squares=local.squares + counts * moved.square(),
            counted=local.counted + counts,
            steps=local.steps + 1,
        )

    def end(self, local: Local) -> tuple[Client, Upload]:
        """Keep the chain; upload its moments, or where it is if the round ended before burn-in."""
        some, count = local.counted > 0, local.counted.clamp(min=1)
        mean = torch.where(some, local.total / count, local.client.head)
        variance = torch.where(some, (local.squares / count - mean.square()).clamp(min=0), 0.0)
        return local.client, Upload(local.client.body, mean, variance)

    # Prediction

    def posterior(self, state: Client | Server) -> MeanField:
        """Return mean and deviations of a client's samples; of the server, the distribution of a new client."""
        still = torch.zeros_like(state.body)
        if isinstance(state, Server):
            deviation = state.variance.sqrt().expand_as(state.head)
            return MeanField(torch.cat([state.body, state.head]), torch.cat([still, deviation]))
        deviation = state.samples.std(0, correction=0)
        return MeanField(torch.cat([state.body, state.samples.mean(0)]), torch.cat([still, deviation]))

    def predict(self, model: Model, state: Client | Server, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return outputs (K, n, ...), one for each sample of a client's chain, again from the first if K > M."""
        q = self.posterior(state)
        if noise is None:
            return model.outputs(q.mu, x)[None]
        if isinstance(state, Server):
            return model.stacked_outputs(sample(q, noise), x)
        heads = state.samples[torch.arange(len(noise), device=x.device) % self.samples]
        return model.stacked_outputs(torch.cat([state.body.expand(len(heads), -1), heads], 1), x)
