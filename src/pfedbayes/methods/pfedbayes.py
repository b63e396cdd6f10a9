"""pFedBayes (Zhang et al. 2022), Algorithm 1: a Gaussian over models per client; the shared Gaussian is its prior."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, NonNegative, Positive
from pfedbayes.maths.descent import MovingGaussian, descend, join_rows, split_rows
from pfedbayes.maths.gaussian import (
    MeanField,
    Moments,
    barycentre,
    gaussian,
    kl,
    kl_grad_q,
    kl_grad_w,
    mean_field,
    rho_of,
    sample,
    sigma,
)
from pfedbayes.maths.optim import Adam, adam_init, sgd
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.methods.base import About, Habits, Method, Shard, is_used
from pfedbayes.nets import Batch, Model, Net

ALGORITHM_1 = ("zeta", "rho0", "eta_personal", "eta_global", "samples", "beta")  # its own hyper-parameters


class Client(NamedTuple):
    """What a client keeps between rounds."""

    q: Tensor
    """The posterior v = (mu, rho), (2, T)."""
    adam_q: Adam[Tensor]
    adam_w: Adam[Tensor]
    """Adam state of the localized global model."""


class LocalGaussians(NamedTuple):
    """The state of a round."""

    q: MovingGaussian
    """The posterior."""
    w: MovingGaussian
    """The localized global model."""
    fixed_prior: MeanField | tuple[()]
    """The prior of q if it is not w."""
    size: Tensor
    """Number n of training examples."""


@dataclass(frozen=True)
class PFedBayes(Method):
    """Algorithm 1 of the paper, with options that depart from it.

    The fields up to `beta` are the hyper-parameters of Algorithm 1, with the paper's values as defaults. The other
    fields depart from Algorithm 1 unless they keep their defaults.
    """

    zeta: NonNegative[float] = 10.0
    """Weight of the KL term."""
    rho0: float = -2.5
    """Initial rho of every weight."""
    eta_personal: NonNegative[float] = 0.001
    """Learning rate of the personal model q."""
    eta_global: NonNegative[float] = 0.001
    """Learning rate of the localized global model w."""
    samples: Count = 1
    """Weight draws K per step."""
    beta: NonNegative[float] = 1.0
    """Server mixing."""

    # What follows changes Algorithm 1; the defaults do not.
    server: Literal["average", "average-sigma", "barycentre", "hyper-prior"] = "average"
    """What the server averages: (mu, rho) as in Algorithm 1, (mu, sigma), or the KL barycentre of Lemma A.2. With
    "hyper-prior" it is that barycentre under a hyper-prior, which keeps the prior from collapsing onto the clients."""
    hyper_weight: NonNegative[float] = 4.0
    """Weight of the hyper-prior: it acts like this many further clients, which show `hyper_sigma`. 0 is Lemma A.2."""
    hyper_sigma: Positive[float] | None = None
    """The standard deviation of the shared Gaussian that the hyper-prior expects; None for that of `rho0`."""
    noise_std: NonNegative[float] = 1.0
    """Standard deviation of the weight noise g."""
    personal_steps: Count = 1
    """Steps on q per step on w."""
    reset_personal: bool = False
    """Start q at the received w in every round, instead of keeping it."""
    prior: Literal["moving", "fixed"] = "moving"
    """Prior of q: the localized global model ("moving") or the received one ("fixed")."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of q and w. Plain gradient descent ("sgd") diverges at the paper's learning rates."""
    scale: Literal["data", "batch"] = "data"
    """Weight of the likelihood in Eq. (27): n/b ("data"), or 1 ("batch")."""
    eta_data: NonNegative[float] = 0.0
    """If positive, w's means learn from the data instead of from q: SGD with this learning rate on the batch's mean
    loss, at weights drawn from w (K more gradients per step). w's widths still follow q."""
    sigma_by_size: NonNegative[float] = 0.0
    """If positive, a client's posterior starts with standard deviations sigma_by_size / sqrt(n), which shrink with n as
    in Eq. (9), instead of the shared model's."""

    about = About(
        "pFedBayes",
        "Zhang et al., ICML 2022",
        "a Gaussian over models per client, and a shared Gaussian that is their prior",
        personal=True,
        stochastic=True,
        gaussian=True,
    )
    habits = Habits(init="normal", trains="all")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_by_size and self.reset_personal:
            raise ValueError("sigma_by_size needs posteriors that are kept: leave it out, or reset_personal")

    @property
    def extensions(self) -> tuple[str, ...]:
        """The fields that make this another algorithm than Algorithm 1; empty for pFedBayes as published."""
        return tuple(
            field.name
            for field in fields(self)
            if field.name not in ALGORITHM_1 and getattr(self, field.name) != field.default
        )

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Tensor:
        """Return v^0: means theta, and rho0 for all weights."""
        return gaussian(theta, self.rho0)

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """Take the last line of Algorithm 1, a step on the server's problem, Eq. (4):

        v^{t+1} = (1 - beta) v^t + beta mean of the localized global models of S^t, each with weight 1/S.
        """
        equal = torch.ones_like(sizes)
        match self.server:
            case "average":
                mean = weighted_mean(uploads, equal)
            case "average-sigma":
                mu, rho = uploads.unbind(-2)
                mean = torch.stack([weighted_mean(mu, equal), rho_of(weighted_mean(sigma(rho), equal))])
            case "barycentre":
                mean = barycentre(uploads, equal.to(uploads.dtype))
            case "hyper-prior":
                expected = sigma(server.new_tensor(self.rho0)) if self.hyper_sigma is None else self.hyper_sigma
                mean = barycentre(uploads, equal.to(uploads.dtype), self.hyper_weight, expected)
        return torch.lerp(server, mean, self.beta)

    def enrol(self, received: Tensor) -> Client:
        return Client(received, adam_init(received), adam_init(received))

    def begin(self, client: Client, received: Tensor, shard: Shard) -> LocalGaussians:
        """Start w at the received model; q continues from the client's last round."""
        q = received if self.reset_personal else client.q
        if is_used(self.sigma_by_size):
            never_trained = client.adam_q.mean_weight == 0
            by_size = rho_of(self.sigma_by_size / shard.size.sqrt())
            q = torch.stack([q[0], torch.where(never_trained, by_size, q[1])])
        fixed_prior = () if self.prior == "moving" else mean_field(received)
        return LocalGaussians(
            split_rows(q, client.adam_q), split_rows(received, client.adam_w), fixed_prior, shard.size
        )

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return (self.personal_steps, self.samples, model.net.num_params)

    def step(self, model: Model, local: LocalGaussians, batches: tuple[Batch, ...], noise: Tensor) -> LocalGaussians:
        """Take a step on Omega^i, Eq. (27), for q, then one on Omega_w^i = KL(q || w), Eq. (28), for w."""
        (batch,) = batches
        q, w, fixed_prior, size = local
        for g in noise * self.noise_std if is_used(self.noise_std - 1) else noise:
            grad = self.grad_omega(model, q, fixed_prior or w, batch, size, g)
            q = descend(q, grad, self.eta_personal, self.optimizer)  # (27)
        data_means = self._learn_from_data(model, w, batch, g) if is_used(self.eta_data) else None  # (28) overwrites w
        w = descend(w, kl_grad_w(q, w), self.eta_global, self.optimizer)  # (28)
        if data_means is not None:
            w = w._replace(mu=data_means)
        return LocalGaussians(q, w, fixed_prior, size)

    def omega(self, model: Model, q: Moments, prior: Moments, batch: Batch, size: Tensor, g: Tensor) -> Tensor:
        """Return Eq. (27), the stochastic form of the client's problem, Eq. (5), with weight noise g (K, T):

        Omega^i(v) = -(n/b) (1/K) sum_j sum_k log p_{h(v, g_k)}(D_j) + zeta KL(q || prior).
        """
        scaled = self._scaled(batch, size)
        nll = torch.stack([model.nll(sample(q, g_k), scaled) for g_k in g]).sum()
        return nll + self.zeta * kl(q, prior)

    def grad_omega(self, model: Model, q: Moments, prior: Moments, batch: Batch, size: Tensor, g: Tensor) -> MeanField:
        """Return the gradient of `omega`, Eq. (27), in the means and standard deviations of q."""
        scaled = self._scaled(batch, size)
        grad_mu, grad_sigma = kl_grad_q(q, prior, self.zeta)
        for g_k in g:
            grad_theta = model.grad_nll(sample(q, g_k), scaled)
            grad_mu, grad_sigma = grad_mu.add_(grad_theta), torch.addcmul(grad_sigma, grad_theta, g_k)
        return MeanField(grad_mu, grad_sigma)

    def _scaled(self, batch: Batch, size: Tensor) -> Batch:
        """Return the batch with the weight (n/b) (1/K) for each example."""
        scale = size / batch.size if self.scale == "data" else 1.0
        return batch._replace(weight=batch.weight * (scale / self.samples))

    def _learn_from_data(self, model: Model, w: Moments, batch: Batch, g: Tensor) -> Tensor:
        """Return w's means after a step of SGD on the batch's mean loss at weights drawn from w with noise g (K, T)."""
        grads = [model.grad_loss(sample(w, g_k), batch) for g_k in g]
        return sgd(w.mu, torch.stack(grads).mean(0), self.eta_data)

    def end(self, local: LocalGaussians) -> tuple[Client, Tensor]:
        """Keep the posterior and upload the localized global model."""
        q, adam_q = join_rows(local.q)
        w, adam_w = join_rows(local.w)
        return Client(q, adam_q, adam_w), w

    def posterior(self, state: Client | Tensor) -> MeanField:
        mu, sigma = mean_field(state.q if isinstance(state, Client) else state)
        return MeanField(mu, sigma * self.noise_std)
