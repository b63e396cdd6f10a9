"""pFedVEM (Zhu et al. 2023): a Gaussian over each client's last layer, averaged by confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, NonNegative
from pfedbayes.maths.gaussian import MeanField, grad_in_rho, kl_grad_q, sigma
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.methods.base import About, Habits, Method, Shard
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state, which clients receive too."""

    body: Tensor
    """All layers but the last, (T - H,)."""
    head: Tensor
    """w, the mean of the clients' last layers, (H,)."""


class Client(NamedTuple):
    """What a client keeps between rounds."""

    body: Tensor
    mean: Tensor
    """m_i, the mean of its last layer, (H,)."""
    rho: Tensor
    """rho of the standard deviations of its last layer, (H,)."""


class Upload(NamedTuple):
    """What a client sends."""

    body: Tensor
    head: Tensor
    confidence: Tensor
    """1 / rho_i^2."""


class Local(NamedTuple):
    """The state of a round."""

    q: Client
    velocity: Client
    prior: MeanField
    """N(w, rho_i^2)."""
    steps: Tensor
    size: Tensor


@dataclass(frozen=True)
class PFedVEM(Method):
    """theta_i = (body, head_i) with head_i ~ N(w, rho_i^2 I): expectation maximisation by variational inference.

    A client takes turns between its last layer (E-step: mini-batches of its likelihood, plus the KL divergence from
    N(w, rho_i^2)) and its body, as in FedRep. Its confidence 1 / rho_i^2 weights its head in the server's mean. Its own
    body after training is part of its personal model. The authors' E-step takes 10 full-batch steps, then 5 epochs on
    the body; choose `head_steps`, `body_steps` and full batches for that.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the body."""
    eta_head: NonNegative[float] = 0.01
    """Learning rate of the last layer, for the objective per example; the authors' 0.001 is for the sum over n."""
    momentum: NonNegative[float] = 0.9
    """Momentum of both, which starts afresh in every round."""
    samples: Count = 5
    """Draws K of the last layer per step."""
    head_steps: Count = 1
    """Steps on the last layer in one cycle."""
    body_steps: Count = 1
    """Steps on the body in one cycle."""
    zeta: NonNegative[float] = 1.0
    """Weight of the KL term; 1 in the paper."""
    rho0: float = 0.5413
    """Initial rho of the last layer: sigma = 1, as in the authors' code."""
    beta: NonNegative[float] = 0.0
    """Share of the old model that the server keeps."""

    about = About(
        "pFedVEM",
        "Zhu et al., CVPR 2023",
        "a shared body, and a Gaussian over each client's last layer, weighted by confidence",
        personal=True,
        stochastic=True,
        gaussian=True,
        averages=False,
    )
    habits = Habits(trains="all")

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        cut = net.num_params - net.head_size
        return Server(theta[:cut], theta[cut:])

    def download(self, server: Server, clients: Tensor) -> Server:
        received: Server = broadcast(server, len(clients))
        return received

    def aggregate(self, server: Server, uploads: Upload, sizes: Tensor, clients: Tensor) -> Server:
        """body <- sum n_i body_i / sum n_i and w <- sum m_i / rho_i^2 / sum 1 / rho_i^2, each mixed with the old."""
        body, head = weighted_mean(uploads.body, sizes), weighted_mean(uploads.head, uploads.confidence)
        return Server(torch.lerp(body, server.body, self.beta), torch.lerp(head, server.head, self.beta))

    # Client

    def enrol(self, received: Server) -> Client:
        return Client(received.body, received.head, torch.zeros_like(received.head) + self.rho0)

    def begin(self, client: Client, received: Server, shard: Shard) -> Local:
        """Take the server's body, and set rho_i^2 = (sum sigma_i^2 + ||m_i - w||^2) / H (M-step)."""
        squares = sigma(client.rho).square() + (client.mean - received.head).square()
        prior = MeanField(received.head, squares.mean().sqrt().expand_as(received.head))
        q = client._replace(body=received.body)
        still = Client(*(torch.zeros_like(part) for part in q))
        return Local(q, still, prior, torch.zeros_like(shard.size, dtype=torch.int64), shard.size)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (self.samples, model.net.head_size)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """Take a step on the last layer, of (1/n) [(n/b) mean_k nll + zeta KL(q || N(w, rho_i^2))], or on the body."""
        (batch,) = batches
        q, cut = local.q, len(local.q.body)
        of_head = sigma(q.rho)
        still, no_noise = torch.zeros_like(q.body), noise.new_zeros(self.samples, cut)
        mean, deviation = torch.cat([q.body, q.mean]), torch.cat([still, of_head])
        in_mean, in_sigma = model.grad_sampled_nll(mean, deviation, batch, torch.cat([no_noise, noise], 1))
        divergence = kl_grad_q(MeanField(q.mean, of_head), local.prior, self.zeta)
        grad_sigma = in_sigma[cut:] / batch.size + divergence.sigma / local.size
        grads = Client(
            body=in_mean[:cut] / batch.size,
            mean=in_mean[cut:] / batch.size + divergence.mu / local.size,
            rho=grad_in_rho(grad_sigma, q.rho),
        )
        head_turn = local.steps % (self.head_steps + self.body_steps) < self.head_steps
        turns, rates = (~head_turn, head_turn, head_turn), (self.eta, self.eta_head, self.eta_head)
        parts = zip(turns, rates, q, local.velocity, grads, strict=True)
        speeds = [torch.where(turn, self.momentum * old + grad, old) for turn, _, _, old, grad in parts]
        moves = zip(turns, rates, q, speeds, strict=True)
        moved = Client(*(torch.where(turn, old - rate * speed, old) for turn, rate, old, speed in moves))
        return local._replace(q=moved, velocity=Client(*speeds), steps=local.steps + 1)

    def end(self, local: Local) -> tuple[Client, Upload]:
        """Keep the body and the Gaussian; upload body, m_i and 1 / rho_i^2, and not the widths."""
        confidence = local.prior.sigma.square().mean().reciprocal()
        return local.q, Upload(local.q.body, local.q.mean, confidence)

    # Prediction

    def posterior(self, state: Client | Server) -> MeanField:
        """Return the Gaussian of a client's weights; the server's model is a single network."""
        if isinstance(state, Server):
            theta = torch.cat(state)
            return MeanField(theta, torch.zeros_like(theta))
        widths = torch.cat([torch.zeros_like(state.body), sigma(state.rho)])
        return MeanField(torch.cat([state.body, state.mean]), widths)
