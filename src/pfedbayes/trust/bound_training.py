"""Training for a bound: posteriors that minimise an upper bound on their own error.

The objective is the quadratic PAC-Bayes bound (Pérez-Ortiz et al. 2021) on the cross-entropy L, as a share of
-log `LEAST` and at most 1:

f(q) = (sqrt(L + B) + sqrt(B))^2 with B = (KL(q || prior) + log(2 sqrt(n) / delta)) / (2 n).

Its gradient is that of n L + w KL, up to a factor, with w = (1 + sqrt(1 + L / B)) / 2: the bound itself says how much
the data and the prior count. The posterior keeps the widths of the prior, and its means move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.engine.personalisation import FixedPriors
from pfedbayes.maths.gaussian import MeanField, mean_field
from pfedbayes.methods import PFedBayes
from pfedbayes.methods.base import Needs, Shard
from pfedbayes.nets import Batch, Model

LEAST = 0.05  # probability of a label at which the cross-entropy counts as a whole error
MOMENTUM = 0.9
LENGTH = 0.5  # of the first step, in standard deviations of the prior; then it falls to 0 by a cosine


class Client(NamedTuple):
    """What a client keeps."""

    q: Tensor
    """The posterior v = (mu, rho), (2, T)."""


class _Moving(NamedTuple):
    """The state of a round."""

    shift: Tensor
    """Distance (T,) of the means from those of the prior, in standard deviations of the prior."""
    momentum: Tensor
    prior: Tensor
    size: Tensor
    taken: Tensor


@dataclass(frozen=True)
class TowardsBound(FixedPriors):
    """Posteriors that are trained for their bound, each client from its own fixed prior."""

    steps: int
    """Number of steps."""
    delta: float
    """Probability with which the bound may fail."""
    noise_std: float = 1.0
    """Standard deviation of the weight noise, as that of pFedBayes."""
    full_batch: bool = False
    """Whether a step uses all examples."""

    about = PFedBayes.about._replace(title="Bound", shared=False, averages=False)

    @property
    def needs(self) -> Needs:
        return Needs(full_batch=self.full_batch)

    def enrol(self, received: Tensor) -> Client:
        return Client(received)

    def begin(self, client: Client, received: Tensor, shard: Shard) -> _Moving:
        nothing = torch.zeros_like(received[0])
        return _Moving(nothing, nothing, received, shard.size, torch.zeros_like(shard.size))

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return model.noise_shape(batch_size)

    def step(self, model: Model, local: _Moving, batches: tuple[Batch, ...], noise: Tensor) -> _Moving:
        """Take a step of fixed length against the gradient of f, with momentum, in standard deviations of the prior."""
        (batch,), prior = batches, self._drawn(local.prior)
        grad, nll = torch.func.grad_and_value(model.expected_nll)(
            prior.mu + prior.sigma * local.shift, prior.sigma.square(), batch, noise
        )
        weight = self.weight_of_kl(nll / batch.size, 0.5 * local.shift.square().sum(), local.size)
        direction = local.size / batch.size * grad * prior.sigma + weight * local.shift
        momentum = torch.lerp(direction, local.momentum, MOMENTUM)
        pace = 0.5 * LENGTH * (1 + torch.cos(math.pi * local.taken / self.steps))
        shift = local.shift - pace * momentum / momentum.norm().clamp_min(1e-12)
        return local._replace(shift=shift, momentum=momentum, taken=local.taken + 1)

    def weight_of_kl(self, nll: Tensor, divergence: Tensor, size: Tensor) -> Tensor:
        """Return the weight of the KL term beside the summed NLL of all examples, from the mean NLL."""
        largest = -math.log(LEAST)
        loss = (nll / largest).clamp(0, 1)
        spread = (divergence + (2 * size.sqrt() / self.delta).log()) / (2 * size)
        return largest * (1 + (1 + loss / spread).sqrt()) / 2

    def end(self, local: _Moving) -> tuple[Client, Tensor]:
        mu, rho = local.prior.unbind(-2)
        q = torch.stack([mu + self._drawn(local.prior).sigma * local.shift, rho])
        return Client(q), q

    def posterior(self, state: Client) -> MeanField:
        return self._drawn(state.q)

    def _drawn(self, v: Tensor) -> MeanField:
        """Return the Gaussian that weights are drawn from."""
        mu, sigma = mean_field(v)
        return MeanField(mu, self.noise_std * sigma)
