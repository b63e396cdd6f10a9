"""FedSEP (Guo et al. 2023): FedEP without memory at the clients, who share one average factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Interval, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField, from_natural
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods.base import About, Method, Shard
from pfedbayes.methods.factors.product import Product, Received, add_changes, first_product, prior_of, send
from pfedbayes.methods.factors.tilted import Tilted, begin_fit, fit_step, fitted
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state."""

    product: Product
    size: Tensor
    """Mean number of examples of the clients of the last round; 0 before the first."""


class ReceivedAverage(NamedTuple):
    """What a client receives."""

    q: Received
    size: Tensor
    share: Tensor
    """1 / N."""


class Fit(NamedTuple):
    """The state of a round."""

    tilted: Tilted
    old: Tensor
    """Natural parameters of the server's posterior, (2, T)."""
    damping: Tensor


@dataclass(frozen=True)
class FedSEP(Method):
    """Stochastic expectation propagation: every client takes the factor (q / prior)^(n_i / n) for its own.

    It needs no memory at the clients and is exact if all clients have the same data. If they differ, its mean is not
    that of the posterior, not even on linear regression.

    The authors' cavity is q^(1 - n_i / n), which also divides out a share of the prior; ours keeps the prior whole, as
    if each client had p^(n_i / n) for its part. n is N times the mean size of the last round's clients.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of SGD on the mean loss."""
    momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    """Momentum of SGD, which starts afresh in every round."""
    projection: Literal["laplace", "identity"] = "laplace"
    """Where a client's precision comes from, see FedEP."""
    scale: Positive[float] = 1.0
    """Factor of the precision that the data add."""
    curvature: Positive[float] = 1.0
    """Curvature of the loss of an example with projection = "identity"."""
    damping: Annotated[float, Interval(more_than=0, at_most=1)] | None = None
    """Share of a client's change that is made; None for 1/S with S uploads per round (1/N in the first round)."""
    prior_mean: float = 0.0
    """Mean of the prior of every weight."""
    prior_sigma: Positive[float] = 1.0
    """Standard deviation of the prior of every weight."""

    about = About(
        "FedSEP",
        "Guo et al., ICLR 2023",
        "one Gaussian over models, the product of a prior and one average factor",
        stochastic=True,
        gaussian=True,
        averages=False,
    )

    # Server

    def _prior(self, theta: Tensor) -> Tensor:
        return prior_of(theta, self.prior_mean, self.prior_sigma)

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return the prior; clients start at the network with parameters theta."""
        return Server(first_product(self._prior(theta), theta, 0.0, num_clients), theta.new_zeros(()))

    def download(self, server: Server, clients: Tensor) -> ReceivedAverage:
        size, share = broadcast((server.size, server.product.share), len(clients))
        return ReceivedAverage(send(server.product, self.damping, len(clients)), size, share)

    def aggregate(self, server: Server, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Server:
        """q <- q + sum of the changes."""
        return Server(add_changes(server.product, uploads), sizes.mean().to(server.size))

    # Client

    def begin(self, client: tuple[()], received: ReceivedAverage, shard: Shard) -> Fit:
        q, prior = received.q.q, self._prior(received.q.q[0])
        weight = torch.where(received.size > 0, shard.size / received.size.clamp(min=1), torch.ones_like(shard.size))
        cavity = q - weight * received.share * (q - prior)
        return Fit(begin_fit(received.q.start[0], cavity, shard.size), q, received.q.damping)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (batch_size,)

    def step(self, model: Model, local: Fit, batches: tuple[Batch, ...], noise: Tensor) -> Fit:
        """Take a step of SGD on -log p(D_i | theta) - log cavity(theta), per example."""
        (batch,) = batches
        return local._replace(tilted=fit_step(model, local.tilted, batch, noise, self.eta, self.momentum))

    def end(self, local: Fit) -> tuple[tuple[()], Tensor]:
        """Upload damping (tilted - q)."""
        return (), local.damping * (fitted(local.tilted, self.projection, self.scale, self.curvature) - local.old)

    # Prediction

    def posterior(self, state: Server) -> MeanField:
        return from_natural(state.product.q)
