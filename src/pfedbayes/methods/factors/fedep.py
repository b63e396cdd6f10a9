"""FedEP (Guo et al. 2023): expectation propagation, with a factor per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from pfedbayes.constraints import Interval, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField, from_natural
from pfedbayes.methods.base import About, Method, Needs, Shard
from pfedbayes.methods.factors.product import Product, Received, add_changes, first_product, prior_of, send, without
from pfedbayes.methods.factors.tilted import Tilted, begin_fit, fit_step, fitted
from pfedbayes.nets import Batch, Model, Net


class Fit(NamedTuple):
    """The state of a round."""

    tilted: Tilted
    old: Tensor
    """Natural parameters of the server's posterior, (2, T)."""
    factor: Tensor
    """Natural parameters of the client's factor, (2, T)."""
    damping: Tensor


@dataclass(frozen=True)
class FedEP(Method):
    """q(theta) = p(theta) product of t_i(theta), as in PVI, but a client matches moments of p(D_i | theta) * cavity.

    The mean is that of the iterates of SGD; the precision follows from the data by `projection`. PVI is the method that
    fits the factor by variational inference instead.

    Two things differ from the authors' code. It also puts momentum on the factors, at the clients and at the server,
    after which q is no longer the product of the factors. And it starts from a model that FedAvg has trained.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of SGD on the mean loss."""
    momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    """Momentum of SGD, which starts afresh in every round."""
    projection: Literal["laplace", "identity"] = "laplace"
    """Where a client's precision comes from: the empirical Fisher information of its data, estimated along its steps
    ("laplace"), or no curvature at all ("identity")."""
    scale: Positive[float] = 1.0
    """Factor of the precision that the data add; the authors' commands have 500."""
    curvature: Positive[float] = 1.0
    """Curvature of the loss of an example with projection = "identity"."""
    damping: Annotated[float, Interval(more_than=0, at_most=1)] | None = None
    """Share of a client's change that is made; None for 1/S with S uploads per round (1/N in the first round)."""
    prior_mean: float = 0.0
    """Mean of the prior of every weight."""
    prior_sigma: Positive[float] = 1.0
    """Standard deviation of the prior of every weight."""

    about = About(
        "FedEP",
        "Guo et al., ICLR 2023",
        "one Gaussian over models, the product of a prior and a factor per client, by expectation propagation",
        stochastic=True,
        gaussian=True,
        averages=False,
    )

    @property
    def needs(self) -> Needs:
        return Needs(tied=True)

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Product:
        """Return the prior; clients start at the network with parameters theta."""
        return first_product(prior_of(theta, self.prior_mean, self.prior_sigma), theta, 0.0, num_clients)

    def download(self, server: Product, clients: Tensor) -> Received:
        return send(server, self.damping, len(clients))

    def aggregate(self, server: Product, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Product:
        """q <- q + sum of the changes of the factors."""
        return add_changes(server, uploads)

    def leave(self, server: Product, client: int, kept: Tensor) -> Product:
        """q <- q - t_i, with the factor that the client has kept."""
        return without(server, kept)

    # Client

    def enrol(self, received: Received) -> Tensor:
        return received.q.new_zeros(received.q.shape)

    def begin(self, client: Tensor, received: Received, shard: Shard) -> Fit:
        tilted = begin_fit(received.start[0], received.q - client, shard.size)
        return Fit(tilted, received.q, client, received.damping)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (batch_size,)

    def step(self, model: Model, local: Fit, batches: tuple[Batch, ...], noise: Tensor) -> Fit:
        """Take a step of SGD on -log p(D_i | theta) - log cavity(theta), per example."""
        (batch,) = batches
        return local._replace(tilted=fit_step(model, local.tilted, batch, noise, self.eta, self.momentum))

    def end(self, local: Fit) -> tuple[Tensor, Tensor]:
        """t_i <- t_i + damping (tilted - q); keep the factor, and upload its change."""
        change = local.damping * (fitted(local.tilted, self.projection, self.scale, self.curvature) - local.old)
        return local.factor + change, change

    # Prediction

    def posterior(self, state: Product | Received) -> MeanField:
        return from_natural(state.q)
