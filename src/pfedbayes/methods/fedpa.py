"""FedPA (Al-Shedivat et al. 2021): FedAvg whose clients correct their updates by their posterior covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, CountOrZero, NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Needs, Shard
from pfedbayes.nets import Batch, Model


class Local(NamedTuple):
    """The state of a round."""

    w: Tensor
    """The received model."""
    theta: Tensor
    sums: Tensor
    """Sum of the iterates of each sample, (l, T)."""
    counts: Tensor
    """Number of iterates of each sample, (l,)."""
    steps: Tensor
    round: Tensor
    """Rounds that the client has taken part in."""


@dataclass(frozen=True)
class FedPA(Method):
    """The mode of a product of Gaussians N(mu_i, Sigma_i) is where sum_i n_i Sigma_i^-1 (theta - mu_i) = 0.

    A client draws samples by SGD: the means of consecutive iterates after a burn-in. Its update is
    Delta_i = Sigma^-1 (w - mean of the samples), with the shrunk covariance of the samples. It uploads w - Delta_i, so
    that the server's average and its optimizers apply. FedAvg is the case Sigma = I.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of SGD."""
    burn_in: CountOrZero = 10
    """Steps before the first sample."""
    samples: Count = 5
    """Number l of samples of a round."""
    sample_steps: Count = 2
    """Iterates that are averaged to one sample."""
    shrinkage: NonNegative[float] = 0.01
    """The paper's rho: Sigma = r I + (1 - r) S with r = 1 / (1 + (l - 1) rho), for the sample covariance S."""
    warm_rounds: CountOrZero = 0
    """Rounds of FedAvg that a client takes part in first; the authors' runs have 400."""

    about = About("FedPA", "Al-Shedivat et al., ICLR 2021", "one shared model, the mode of a product of Gaussians")

    @property
    def needs(self) -> Needs:
        return Needs(max_steps=self.burn_in + self.samples * self.sample_steps)

    def enrol(self, received: Tensor) -> Tensor:
        """Return the number of rounds that the client has taken part in."""
        return received.new_zeros(())

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> Local:
        counts = received.new_zeros(self.samples)
        return Local(received, received, counts[:, None] * received, counts, received.new_zeros(()), client)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B); add it to the sample whose turn it is."""
        (batch,) = batches
        theta = sgd(local.theta, model.grad_loss(local.theta, batch), self.eta)
        number = (local.steps - self.burn_in).div(self.sample_steps, rounding_mode="floor")
        now = (torch.arange(self.samples, device=theta.device) == number).to(theta.dtype)
        sums = torch.addcmul(local.sums, now[:, None], theta)
        return local._replace(theta=theta, sums=sums, counts=local.counts + now, steps=local.steps + 1)

    def end(self, local: Local) -> tuple[Tensor, Tensor]:
        """Upload w - Delta, or the last iterate in warm rounds and in rounds that end before the first sample."""
        samples = local.sums / local.counts.clamp(min=1)[:, None]
        found = local.w - corrected_update(local.w, samples, local.counts > 0, self.shrinkage)
        plain = (local.round < self.warm_rounds) | (local.counts.sum() == 0)
        return local.round + 1, torch.where(plain, local.theta, found)


def corrected_update(w: Tensor, samples: Tensor, drawn: Tensor, shrinkage: float) -> Tensor:
    """Return Delta = (r I + (1 - r) S)^-1 (w - mean) by Woodbury's identity, without a (T, T) matrix.

    With d = w - mean, U (l, T) = samples - mean and k = (1 - r) / (l - 1):
    Delta = [d - k U' (k U U' + r I)^-1 U d] / r.

    samples: (l, T); drawn: which of them count, (l,).
    """
    count = drawn.sum().to(w.dtype)
    mean = (samples * drawn[:, None]).sum(0) / count.clamp(min=1)
    deviations = (samples - mean) * drawn[:, None]
    r = 1 / (1 + (count - 1).clamp(min=0) * shrinkage)
    k = (1 - r) / (count - 1).clamp(min=1)
    d = w - mean
    gram = k * (deviations @ deviations.T) + r * torch.eye(len(samples), dtype=w.dtype, device=w.device)
    delta: Tensor = (d - k * (deviations.T @ torch.linalg.solve(gram, deviations @ d))) / r
    return delta
