"""pFedBayes (Zhang et al. 2022), Algorithm 1: every client has a Gaussian over models whose prior is the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.gaussian import (
    MeanField,
    barycentre,
    gaussian,
    grad_in_rho,
    kl_grad_q,
    kl_grad_w,
    mean_field,
    rho_of,
    sample,
    sigma,
)
from pfedbayes.maths.optim import Adam, adam_init, adam_of, sgd
from pfedbayes.methods.base import About, Habits, Method, Shard, require, weighted_mean
from pfedbayes.nets import Batch, Model


class Client(NamedTuple):
    """What a client keeps between rounds: its posterior q (2, T) and the Adam states of q and of its copy of w."""

    q: Tensor
    adam_q: Adam[Tensor]
    adam_w: Adam[Tensor]


class Moving(NamedTuple):
    """A Gaussian in training: the rows of v, the sigma of the present rho, and the Adam state of both rows.

    The rows are apart so that a step goes over memory once: a compiler does not fuse what has to be stacked.
    """

    mu: Tensor
    rho: Tensor
    sigma: Tensor
    adam: Adam[tuple[Tensor, ...]]

    @property
    def field(self) -> MeanField:
        """Means and standard deviations."""
        return MeanField(self.mu, self.sigma)


def _set_out(v: Tensor, state: Adam[Tensor]) -> Moving:
    """Copies, since steps change them in place."""

    def apart(rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(row.clone(memory_format=torch.contiguous_format) for row in rows.unbind(-2))

    mu, rho = apart(v)
    moments = Adam(apart(state.mean), apart(state.square), state.mean_weight, state.square_weight)
    return Moving(mu, rho, sigma(rho), moments)


def _come_home(moving: Moving) -> tuple[Tensor, Adam[Tensor]]:
    mean, square, *weights = moving.adam
    return torch.stack([moving.mu, moving.rho]), Adam(torch.stack(mean), torch.stack(square), *weights)


class Local(NamedTuple):
    """A round under way: the posterior q, the localized global model w, the prior if it is another than w, and the
    weight n of the likelihood."""

    q: Moving
    w: Moving
    prior: MeanField | tuple[()]
    size: Tensor


@dataclass(frozen=True)
class PFedBayes(Method):
    """zeta: weight of the KL term; rho0: first rho of every weight; eta_personal, eta_global: rates of the two models;
    samples: weight draws K per step; beta: server mixing.

    Deviations found in other implementations are options, neutral by default. server: Algorithm 1 averages (mu, rho);
    "average-sigma" averages (mu, sigma); "barycentre" is Lemma A.2. noise_std: standard deviation of the weight
    noise. personal_steps: steps on q per step on w. reset_personal: q starts every round at the received w.
    prior: "moving" takes the localized global model as the prior, "fixed" the received one. optimizer: "sgd" is the
    literal gradient descent, which diverges at the paper's rates. scale: "batch" drops the factor n/b.

    eta_data and sigma_by_size go beyond the paper. With eta_data above 0 the localized global model learns its means
    from the client's data, much as in FedAvg, by SGD with this rate on the mean loss of the batch at weights drawn from
    it, at the cost of K more gradients; its widths follow q as ever, at the rate eta_global. With sigma_by_size above 0
    the posterior of a client with n training examples starts with standard deviations of sigma_by_size / sqrt(n)
    instead of the shared model's, which then follow: with n they shrink as in Eq. (9) of the paper's theory.
    """

    zeta: float = 10.0
    rho0: float = -2.5
    eta_personal: float = 0.001
    eta_global: float = 0.001
    samples: int = 1
    beta: float = 1.0
    server: Literal["average", "average-sigma", "barycentre"] = "average"
    noise_std: float = 1.0
    personal_steps: int = 1
    reset_personal: bool = False
    prior: Literal["moving", "fixed"] = "moving"
    optimizer: Literal["adam", "sgd"] = "adam"
    scale: Literal["data", "batch"] = "data"
    eta_data: float = 0.0
    sigma_by_size: float = 0.0

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
        require(self.zeta >= 0, f"zeta must not be negative, got {self.zeta}")
        require(self.eta_personal >= 0, f"eta_personal must not be negative, got {self.eta_personal}")
        require(self.eta_global >= 0, f"eta_global must not be negative, got {self.eta_global}")
        require(self.eta_data >= 0, f"eta_data must not be negative, got {self.eta_data}")
        require(self.sigma_by_size >= 0, f"sigma_by_size must not be negative, got {self.sigma_by_size}")
        require(
            not (self.sigma_by_size and self.reset_personal),
            "sigma_by_size is for posteriors that are kept: leave it out, or reset_personal",
        )
        require(self.samples >= 1, f"samples must be at least 1, got {self.samples}")
        require(self.beta >= 0, f"beta must not be negative, got {self.beta}")
        require(self.noise_std >= 0, f"noise_std must not be negative, got {self.noise_std}")
        require(self.personal_steps >= 1, f"personal_steps must be at least 1, got {self.personal_steps}")

    def init(self, theta: Tensor, num_clients: int, shapes: tuple[torch.Size, ...]) -> Tensor:
        """v^0: means theta, one rho for all."""
        return gaussian(theta, self.rho0)

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """The last line of Algorithm 1, a step on the server's problem, Eq. (4):

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
        return torch.lerp(server, mean, self.beta)

    def enrol(self, received: Tensor) -> Client:
        return Client(received, adam_init(received), adam_init(received))

    def begin(self, client: Client, received: Tensor, shard: Shard) -> Local:
        """The localized global model starts at the received one; the posterior goes on from where it was."""
        q = received if self.reset_personal else client.q
        if self.sigma_by_size:
            never_trained = client.adam_q.mean_weight == 0
            by_size = rho_of(self.sigma_by_size / shard.size.sqrt())
            q = torch.stack([q[0], torch.where(never_trained, by_size, q[1])])
        prior = () if self.prior == "moving" else mean_field(received)
        return Local(_set_out(q, client.adam_q), _set_out(received, client.adam_w), prior, shard.size)

    def noise_shape(self, num_params: int) -> tuple[int, ...]:
        return (self.personal_steps, self.samples, num_params)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """A step on Omega^i for q, then one on Omega_w^i = KL(q || w), Eq. (28), for w, which sees the new q."""
        (batch,) = batches
        q, w, fixed, size = local
        prior = fixed or w.field
        for g in noise * self.noise_std if self.noise_std != 1 else noise:
            q = self._update(q, self.personal_grad(model, q.field, prior, batch, size, g), self.eta_personal)
        taught = self._taught(model, w, batch, g) if self.eta_data else None  # before the next line changes w in place
        w = self._update(w, kl_grad_w(q.field, w.field), self.eta_global)
        # If w is taught, only the widths of that step count.
        return Local(q, w if taught is None else w._replace(mu=taught), fixed, size)

    def personal_grad(
        self, model: Model, q: MeanField, prior: MeanField, batch: Batch, size: Tensor, g: Tensor
    ) -> MeanField:
        """Gradient in q of Eq. (27), the stochastic form of the client's problem, Eq. (5), with weight noise g (K, T):

        Omega^i(v) = -(n/b) (1/K) sum_j sum_k log p_{h(v, g_k)}(D_j) + zeta KL(q || prior).
        """
        scale = size / batch.size if self.scale == "data" else 1.0
        scaled = batch._replace(weight=batch.weight * (scale / self.samples))
        grad_mu, grad_sigma = kl_grad_q(q, prior, self.zeta)
        for g_k in g:
            grad_theta = model.grad_nll(sample(q, g_k), scaled)
            grad_mu, grad_sigma = grad_mu.add_(grad_theta), torch.addcmul(grad_sigma, grad_theta, g_k)
        return MeanField(grad_mu, grad_sigma)

    def _taught(self, model: Model, w: Moving, batch: Batch, g: Tensor) -> Tensor:
        """The means of w after a step of SGD on the loss of the batch at weights drawn from w with noise g (K, T)."""
        grads = [model.grad_loss(sample(w.field, g_k), batch) for g_k in g]
        return sgd(w.mu, torch.stack(grads).mean(0), self.eta_data)

    def _update(self, moving: Moving, grad: MeanField, rate: float) -> Moving:
        """A step against the gradient in means and standard deviations."""
        mu, rho, _, state = moving
        grad_rho = grad_in_rho(grad.sigma, rho)
        if self.optimizer == "sgd":
            mu, rho = sgd(mu, grad.mu, rate), sgd(rho, grad_rho, rate)
        else:
            (mu, rho), state = adam_of((mu, rho), (grad.mu, grad_rho), state, rate, reuse=True)
        return Moving(mu, rho, sigma(rho), state)

    def end(self, local: Local) -> tuple[Client, Tensor]:
        """The localized global model goes to the server; the posterior stays."""
        q, adam_q = _come_home(local.q)
        w, adam_w = _come_home(local.w)
        return Client(q, adam_q, adam_w), w

    def posterior(self, state: Client | Tensor) -> MeanField:
        mu, sigma = mean_field(state.q if isinstance(state, Client) else state)
        return MeanField(mu, sigma * self.noise_std)
