"""A hierarchical Bayesian model: theta_i = mu + delta_i, with scales that the server learns.

All clients share q(mu) = N(m, s^2), and each has its own q(delta_i) = N(d_i, sigma_i^2). The priors are mu ~ N(0, S^2)
and delta_i ~ N(0, T^2), with a scale S for each block of weights and a scale T for each weight. Together they maximise

    sum_i (E[log p(D_i | mu + delta_i)] - KL(q(delta_i) || N(0, T^2))) - KL(q(mu) || N(0, S^2)),

a lower bound of the log evidence. The server sets S and T in closed form under an inverse-gamma hyper-prior, which
keeps the spread of a few clients from collapsing to zero.

Limits. With `kl_shared` = 0, q(mu) becomes a point m, since only its KL term keeps s from zero. The best m is the mean
of the clients' means, because sum_i d_i = 0 at the optimum. Without a hyper-prior (`confidence` -> 0), T^2 is then the
mean of d_i^2 + sigma_i^2: the mean variance of the clients plus the variance of their means. So the server has the
barycentre of Lemma A.2, as in pFedBayes with `server` = "barycentre", and the spread of a few clients can collapse.

The independence of mu and delta_i makes q(theta_i) too narrow, see docs/results/widths.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import AtLeastOne, Interval, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField, grad_in_rho, mean_field, rho_of
from pfedbayes.maths.optim import Adam, adam_init
from pfedbayes.maths.stacked import broadcast
from pfedbayes.maths.trees import tree_map
from pfedbayes.methods.base import About, Habits, Limits, Method, Needs, Shard
from pfedbayes.nets import Batch, Model, Net

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8  # of Adam
DEFAULT_ANNEAL = 400  # local steps, where nothing says how long the run is


class Server(NamedTuple):
    """The server's state."""

    shared: Tensor
    """q(mu): means m and rhos of s, (2, T)."""
    adam: Adam[Tensor]
    """Moments of the clients' mean gradient in `shared`."""
    gradient: Tensor
    """Mean gradient of the clients in `shared`, (2, T). With participants, a running mean over rounds."""
    spread: Tensor
    """Prior variances T^2 of delta, (T,)."""
    scale: Tensor
    """Prior variances S^2 of mu, (T,)."""
    start: Tensor
    """The modes of S^2 and T^2 under the hyper-prior alone, (2, T)."""
    block: Tensor
    """The block of each weight, (T,)."""
    share: Tensor
    """1 / N."""
    steps: Tensor
    """Local steps that the clients have taken so far."""


class Received(NamedTuple):
    """What a client receives."""

    shared: Tensor
    adam: Adam[Tensor]
    gradient: Tensor
    spread: Tensor
    scale: Tensor
    share: Tensor
    steps: Tensor


class Client(NamedTuple):
    """What a client keeps between rounds."""

    q: Tensor
    """Its posterior of theta_i = mu + delta_i with the q(mu) of its last round, (2, T)."""
    delta: Tensor
    """q(delta_i): means and rhos (2, T)."""
    adam: Adam[Tensor]
    gradient: Tensor
    """Mean gradient in `shared` of its last round, (2, T)."""


class Local(NamedTuple):
    """The state of a round."""

    shared: Tensor
    """The client's copy of q(mu)."""
    delta: Tensor
    momentum: Adam[Tensor]
    """Adam's moments of the copy."""
    adam: Adam[Tensor]
    gradients: Tensor
    """Sum of the gradients in `shared` so far."""
    taken: Tensor
    """Steps taken so far in this round."""
    correction: Tensor
    """What the other clients' last gradients add to this client's."""
    spread: Tensor
    scale: Tensor
    share: Tensor
    steps: Tensor
    """Steps taken in all, by the server's count."""
    size: Tensor


class Upload(NamedTuple):
    """What a client sends."""

    shared: Tensor
    """Its copy of q(mu)."""
    momentum: Adam[Tensor]
    """Adam's moments of the copy."""
    gradient: Tensor
    """Its mean gradient in `shared` of this round, (2, T)."""
    square: Tensor
    """E[delta_i^2] of each weight, (T,)."""
    steps: Tensor
    """Local steps of this round."""


@dataclass(frozen=True)
class Hierarchical(Method):
    """A hierarchical Bayesian model with learned scales. It has no weight of the KL term to choose."""

    eta_mean: NonNegative[float] = 0.05
    """Learning rate of means."""
    eta_rho: NonNegative[float] = 0.05
    """Learning rate of rhos, which are the logarithms of small standard deviations."""
    anneal: AtLeastOne[int] | None = None
    """Local steps over which the learning rates fall to zero, by a cosine; None for all steps of the run."""
    spread: Positive[float] = 0.3
    """Prior guess of T, as a share of the scale of mu."""
    confidence: Positive[float] = 4.0
    """Weight of the hyper-prior, as if so many clients had shown exactly its scale."""
    wait: Annotated[float, Interval(at_least=0, at_most=1)] = 0.25
    """Share of `anneal` after which the server begins to learn the scales."""
    full_batch: bool = True
    """Train each step on all examples of a client."""
    kl_shared: NonNegative[float] = 1.0
    """Weight of KL(q(mu)). Less than 1 tempers the posterior, which large networks need."""
    kl_personal: NonNegative[float] = 1.0
    """Weight of KL(q(delta))."""

    about = About(
        "Hierarchical",
        "pfedbayes, 2026",
        "a Gaussian over the weights that all clients have in common, and one over each client's difference from them",
        personal=True,
        stochastic=True,
        gaussian=True,
        averages=False,
        mean_only=True,
    )
    habits = Habits(init="torch", trains="chosen")

    @property
    def needs(self) -> Needs:
        return Needs(full_batch=self.full_batch, mapped=False, shuffled=not self.full_batch)

    @property
    def _last_step(self) -> int:
        return self.anneal or DEFAULT_ANNEAL

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return means theta of mu, zero means of delta, and the scales of the hyper-prior."""
        number, fan_in = (each.to(theta.device) for each in net.blocks())
        scale = (1 / fan_in.to(theta.dtype))[number]
        shared = torch.stack([theta, rho_of(0.05 * scale.sqrt())])
        nothing = torch.zeros_like(shared)
        return Server(
            shared=shared,
            adam=adam_init(shared),
            gradient=nothing,
            spread=self.spread**2 * scale,
            scale=scale,
            start=torch.stack([scale, self.spread**2 * scale]),
            block=number,
            share=theta.new_tensor(1 / num_clients),
            steps=theta.new_zeros(()),
        )

    def download(self, server: Server, clients: Tensor) -> Received:
        sent = Received(
            server.shared, server.adam, server.gradient, server.spread, server.scale, server.share, server.steps
        )
        received: Received = broadcast(sent, len(clients))
        return received

    def aggregate(self, server: Server, uploads: Upload, sizes: Tensor, clients: Tensor) -> Server:
        """Average the copies of q(mu) and the gradients, and set the scales in closed form.

        T_g^2 = (sum_i sum_{j in g} E[delta_ij^2] + nu T0_g^2) / (N |g| + nu) for block g,
        T_j^2 = (sum_i E[delta_ij^2] + nu T_g^2) / (N + nu) for weight j, and
        S_g^2 = (sum_{j in g} E[mu_j^2] + nu S0_g^2) / (|g| + nu).
        """
        mean: Upload = tree_map(lambda leaf: leaf.mean(0), uploads)
        count, steps = len(clients), server.steps + mean.steps
        learns = steps >= self.wait * self._last_step
        scale, spread = self._scales(server, mean_field(mean.shared), mean.square * count, count)
        return server._replace(
            shared=mean.shared,
            adam=mean.momentum,
            gradient=torch.lerp(server.gradient, mean.gradient, count * server.share),
            scale=torch.where(learns, scale, server.scale),
            spread=torch.where(learns, spread, server.spread),
            steps=steps,
        )

    def _scales(self, server: Server, shared: MeanField, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return S^2 and T^2 (T,) from q(mu) and the sum over `count` clients of E[delta^2]."""
        nu, block = self.confidence, server.block
        ones = torch.ones_like(squares)

        def of_block(values: Tensor) -> Tensor:
            """Sum over the block of each weight."""
            return torch.zeros_like(values).scatter_add(0, block, values)[block]

        start_scale, start_spread = server.start
        size = of_block(ones)
        scale = (of_block(shared.mu.square() + shared.sigma.square()) + nu * start_scale) / (size + nu)
        block_spread = (of_block(squares) + nu * start_spread) / (count * size + nu)
        return scale, (squares + nu * block_spread) / (count + nu)

    def check_upload(self, server: Server, upload: Upload, limits: Limits) -> str | None:
        """Compare q(mu) with the server's, gradients with the number of examples, and counts with the task.

        Gradients are sums over examples. So they, and Adam's moments of them, are limited per example.
        """
        moments, most = upload.momentum, limits.largest * max(limits.examples, 1)
        found = {
            "its mean has an entry": (upload.shared[0], limits.largest),
            "its rho has an entry": (upload.shared[1], limits.rho),
            "its distance from the server has an entry": (upload.shared - server.shared, limits.step),
            "its deviation from the shared model has an entry": (upload.square.clamp(min=0).sqrt(), limits.step),
            "its gradient has an entry": (upload.gradient, most),
            "its mean of gradients has an entry": (moments.mean, most),
            "its mean of squared gradients has the root": (moments.square.clamp(min=0).sqrt(), most),
        }
        for what, (tensor, bound) in found.items():
            if (largest := float(tensor.abs().max())) > bound:
                return f"{what} of magnitude {largest:.3g}, more than {bound:g}"
        if float(min(moments.square.min(), upload.square.min())) < 0:
            return "a mean of squares is negative"
        if not all(0 <= float(weight) <= 1 for weight in (moments.mean_weight, moments.square_weight)):
            return "a weight of Adam's moments is not between 0 and 1"
        if float(upload.steps) != limits.steps:
            return f"it took {float(upload.steps):g} local steps instead of {limits.steps}"
        return None

    # Client

    def enrol(self, received: Received) -> Client:
        scale = received.spread.sqrt() / self.spread
        delta = torch.stack([torch.zeros_like(scale), rho_of(0.05 * scale)])
        new = self.posterior(received)
        theta = torch.stack([new.mu, rho_of(new.sigma)])
        return Client(theta, delta, adam_init(delta), torch.zeros_like(delta))

    def begin(self, client: Client, received: Received, shard: Shard) -> Local:
        """Take the server's q(mu), and adapt d_i to it: theta_i stays where the data determine it.

        In the exact posterior of a linear Gaussian model, the mean of delta_i given mu falls by 1 - sigma_i^2 / T^2 if
        mu rises by 1. By so much d_i makes up for the difference between the client's last copy of mu and the mean.
        """
        zero = torch.zeros_like(received.steps)
        delta = mean_field(client.delta)
        last_copy = client.q[..., 0, :] - delta.mu
        determined = (1 - delta.sigma.square() / received.spread).clamp(min=0)
        adapted = delta.mu + determined * (last_copy - received.shared[..., 0, :])
        return Local(
            shared=received.shared,
            delta=torch.stack([adapted, client.delta[..., 1, :]], -2),
            momentum=received.adam,
            adam=client.adam,
            gradients=torch.zeros_like(client.delta),
            taken=zero,
            correction=received.gradient - client.gradient,
            spread=received.spread,
            scale=received.scale,
            share=received.share,
            steps=received.steps,
            size=shard.size,
        )

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return model.noise_shape(batch_size)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """Take a step on q(delta_i), and one on the copy of q(mu).

        The copy follows the client's own gradient plus `correction`, which stands for the other clients (as the control
        variates of SCAFFOLD do), and Adam's moments are the server's. So the mean of the copies after one step is close
        to one step of Adam on the mean gradient, and equal to it if clients agree.
        """
        (batch,) = batches
        mu, delta = mean_field(local.shared), mean_field(local.delta)
        variance = mu.sigma.square() + delta.sigma.square()
        in_mean, in_variance = grad_expected_nll(model, mu.mu + delta.mu, variance, batch, local.size, noise)

        def gradient(q: MeanField, rho: Tensor, variance: Tensor, weight: Tensor | float) -> Tensor:
            """Return the gradient in (mu, rho) of the expected loss and of weight * KL(q || N(0, variance)), Eq. (8).

            The KL term has the gradient mu / variance in the mean, and sigma / variance - 1 / sigma in sigma.
            """
            precision = weight / variance
            in_sigma = torch.add(precision, in_variance, alpha=2).mul_(q.sigma).sub_(weight / q.sigma)
            return torch.stack([torch.addcmul(in_mean, q.mu, precision), grad_in_rho(in_sigma, rho)], -2)

        rates = annealed((self.eta_mean, self.eta_rho), local.steps, self._last_step)
        grad_delta = gradient(delta, local.delta[..., 1, :], local.spread, self.kl_personal)
        grad_shared = gradient(mu, local.shared[..., 1, :], local.scale, self.kl_shared * local.share[..., None])
        new_delta, adam = adam_of_gaussian(local.delta, grad_delta, local.adam, rates)
        corrected = grad_shared + local.correction
        shared, momentum = adam_of_gaussian(local.shared, corrected, local.momentum, rates)
        return local._replace(
            shared=shared,
            delta=new_delta,
            momentum=momentum,
            adam=adam,
            gradients=local.gradients + grad_shared,
            taken=local.taken + 1,
            steps=local.steps + 1,
        )

    def end(self, local: Local) -> tuple[Client, Upload]:
        mu, delta = mean_field(local.shared), mean_field(local.delta)
        theta = torch.stack([mu.mu + delta.mu, rho_of((mu.sigma.square() + delta.sigma.square()).sqrt())], -2)
        taken = local.taken.clamp(min=1)[..., None, None]
        gradient = local.gradients / taken
        upload = Upload(
            shared=local.shared,
            momentum=local.momentum,
            gradient=gradient,
            square=delta.mu.square() + delta.sigma.square(),
            steps=local.taken,
        )
        return Client(theta, local.delta, local.adam, gradient), upload

    # Prediction

    def posterior(self, state: Client | Server | Received) -> MeanField:
        """Return q(theta_i) of a client; of the server, the distribution of a new client's weights."""
        if isinstance(state, Client):
            return mean_field(state.q)
        mu = mean_field(state.shared)
        return MeanField(mu.mu, (mu.sigma.square() + state.spread).sqrt())


def with_schedule(method: Method, steps: int) -> Method:
    """Let learning rates without a given `anneal` fall to zero at the end of a run of so many local steps."""
    if isinstance(method, Hierarchical) and method.anneal is None:
        return replace(method, anneal=max(1, steps))
    return method


def grad_expected_nll(
    model: Model, mean: Tensor, variance: Tensor, batch: Batch, size: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients in mean and variance (..., T) of the expected loss of all `size` examples of a client."""
    scaled = batch._replace(weight=batch.weight * (size / batch.size)[..., None])
    return model.grad_expected_nll(mean, variance, scaled, noise)


def annealed(rates: tuple[float, float], steps: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Return learning rates after so many steps: they fall to zero at the last one, by a cosine."""
    factor = 0.5 * (1 + torch.cos(math.pi * (steps / last).clamp(max=1)))
    return rates[0] * factor, rates[1] * factor


def adam_of_gaussian(
    v: Tensor, grad: Tensor, state: Adam[Tensor], rates: tuple[Tensor, Tensor]
) -> tuple[Tensor, Adam[Tensor]]:
    """Take a step of Adam on (mu, rho), (..., 2, T), with a learning rate (...) for each row."""
    mean_weight, square_weight = BETA1 * state.mean_weight + (1 - BETA1), BETA2 * state.square_weight + (1 - BETA2)
    mean = torch.lerp(state.mean, grad, 1 - BETA1)
    square = torch.addcmul(BETA2 * state.square, grad, grad, value=1 - BETA2)
    rate = torch.stack(rates, -1) * (square_weight.sqrt().to(v.dtype) / mean_weight.to(v.dtype))[..., None]
    moved = torch.addcdiv(v, rate[..., None] * mean, square.sqrt().add_(EPS), value=-1)
    return moved, Adam(mean, square, mean_weight, square_weight)
