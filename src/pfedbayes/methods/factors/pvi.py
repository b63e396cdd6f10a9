"""PVI (Bui et al. 2018, Ashman et al. 2022): one posterior, the product of a prior and a factor per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from torch import Tensor

from pfedbayes.constraints import Count, Interval, NonNegative, Positive
from pfedbayes.maths.descent import MovingGaussian, descend, join_rows, split_rows
from pfedbayes.maths.gaussian import MeanField, clip_precision, from_natural, kl_grad_to_cavity, mean_field, natural
from pfedbayes.maths.optim import adam_init
from pfedbayes.methods.base import About, Method, Needs, Shard
from pfedbayes.methods.factors.product import (
    Product,
    Received,
    add_changes,
    centre,
    first_product,
    prior_of,
    send,
    without,
)
from pfedbayes.nets import Batch, Model, Net


class Fit(NamedTuple):
    """The state of a round."""

    q: MovingGaussian
    """The client's fit of the posterior."""
    received: MeanField
    """The server's posterior."""
    old: Tensor
    """Natural parameters of the server's posterior, (2, T)."""
    factor: Tensor
    """Natural parameters of the client's factor, (2, T)."""
    damping: Tensor
    size: Tensor
    """Number n of training examples."""


@dataclass(frozen=True)
class PVI(Method):
    """Partitioned variational inference: q(theta) = p(theta) product of t_i(theta), with mean-field Gaussian factors.

    A client fits its own factor only. It sees the other clients through the cavity q / t_i, so its data count once,
    however many rounds it takes part in. The server adds the changes of the factors. A client that leaves takes its
    factor along: this is exact at a fixed point of a conjugate model; otherwise run a few rounds more.

    That fixed points of PVI are those of variational inference on all data is a theorem of the paper, which we quote
    from memory; the tests check it on linear regression.
    """

    eta: NonNegative[float] = 0.001
    """Learning rate of Adam, which starts afresh in every round."""
    samples: Count = 1
    """Weight draws K per step."""
    damping: Annotated[float, Interval(more_than=0, at_most=1)] | None = None
    """Share of a client's change that is made; None for 1/S with S uploads per round, which keeps precisions positive
    (1/N in the first round). The authors' code has 1, which suits clients that take turns."""
    prior_mean: float = 0.0
    """Mean of the prior of every weight."""
    prior_sigma: Positive[float] = 1.0
    """Standard deviation of the prior of every weight."""
    rho0: float = -2.5
    """Rho of every weight at the start of the first round."""
    zeta: Positive[float] = 1.0
    """The data act like n/zeta examples. Not in the paper, which has 1."""
    valid_factors: bool = False
    """Clip the precision of every factor at 1e-6, so that each factor is a distribution."""

    about = About(
        "PVI",
        "Ashman et al., 2022",
        "one Gaussian over models, the product of a prior and a factor per client",
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
        return first_product(prior_of(theta, self.prior_mean, self.prior_sigma), theta, self.rho0, num_clients)

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
        """Return the factor of a client that has not taken part: 1, with natural parameters 0."""
        return received.q.new_zeros(received.q.shape)

    def begin(self, client: Tensor, received: Received, shard: Shard) -> Fit:
        q = split_rows(received.start, adam_init(received.start))
        return Fit(q, centre(received), received.q, client, received.damping, shard.size)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (self.samples, model.net.num_params)

    def step(self, model: Model, local: Fit, batches: tuple[Batch, ...], noise: Tensor) -> Fit:
        """Take a step of Adam on n/(b zeta) (1/K) sum_k nll(mu + sigma g_k; B) + KL(q || cavity)."""
        (batch,) = batches
        grad = self.grad(model, local.q, local.received, local.factor, batch, local.size, noise)
        return local._replace(q=descend(local.q, grad, self.eta))

    def grad(
        self,
        model: Model,
        q: MovingGaussian,
        received: MeanField,
        factor: Tensor,
        batch: Batch,
        size: Tensor,
        noise: Tensor,
    ) -> MeanField:
        """Return the gradient of the client's objective in the means and standard deviations of q."""
        scaled = batch._replace(weight=batch.weight * (size / batch.size / self.zeta))
        in_mean, in_sigma = model.grad_sampled_nll(q.mu, q.sigma, scaled, noise)
        divergence = kl_grad_to_cavity(q, received, factor)
        return MeanField(divergence.mu + in_mean, divergence.sigma + in_sigma)

    def end(self, local: Fit) -> tuple[Tensor, Tensor]:
        """t_i <- t_i + damping (q_new - q); keep the factor, and upload its change."""
        found = natural(mean_field(join_rows(local.q)[0]))
        factor = local.factor + local.damping * (found - local.old)
        if self.valid_factors:
            factor = clip_precision(factor)
        return factor, factor - local.factor

    # Prediction

    def posterior(self, state: Product | Received) -> MeanField:
        return from_natural(state.q)
