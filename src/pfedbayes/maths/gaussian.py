"""Mean-field Gaussians over models: v = (mu, rho), a tensor (..., 2, T) with sigma = softplus(rho).

What a formula has made itself it changes in place: a fresh tensor for so many weights costs more than the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


def sigma(rho: Tensor) -> Tensor:
    """Standard deviation sigma = log(1 + exp(rho)), Section 4 of the paper."""
    return softplus(rho)


def rho_of(sigma: Tensor) -> Tensor:
    """Inverse of `sigma`: rho = log(exp(sigma) - 1), written so that neither end overflows."""
    return sigma + torch.log(-torch.expm1(-sigma))


def gaussian(mu: Tensor, rho0: float) -> Tensor:
    """Eqs. (6), (7): independent Gaussians with means mu (T,) and, to begin with, one rho for all: v (2, T)."""
    return torch.stack([mu, torch.full_like(mu, rho0)])


class MeanField(NamedTuple):
    """A Gaussian by the means and standard deviations of its weights, each (..., T); or a gradient in both."""

    mu: Tensor
    sigma: Tensor


def mean_field(v: Tensor) -> MeanField:
    """Means and standard deviations of v."""
    mu, rho = v.unbind(-2)
    return MeanField(mu, sigma(rho))


def grad_in_rho(grad_sigma: Tensor, rho: Tensor) -> Tensor:
    """The gradient in rho from the one in sigma: d sigma / d rho = 1 / (1 + exp(-rho))."""
    return torch.sigmoid(rho).mul_(grad_sigma)


def sample(q: MeanField, g: Tensor) -> Tensor:
    """Eq. (26): theta = h(v, g) = mu + sigma * g, with g standard normal of shape (..., T)."""
    return torch.addcmul(q.mu, q.sigma, g)


def kl(q: MeanField, w: MeanField) -> Tensor:
    """Eq. (8): KL(q || w), summed over the T parameters."""
    per_parameter = (
        2 * torch.log(w.sigma / q.sigma) + (q.sigma.square() + (q.mu - w.mu).square()) / w.sigma.square() - 1
    )
    return 0.5 * per_parameter.sum(-1)


def kl_grad_q(q: MeanField, w: MeanField, zeta: float = 1.0) -> MeanField:
    """Gradient of zeta KL(q || w), Eq. (8), in the means and standard deviations of q.

    The factored form is exactly zero at q = w. It has to be: where the likelihood has no gradient (a dead unit),
    Adam would turn a rounding error of 1e-16 into a full step.
    """
    precision = w.sigma.pow(-2).mul_(zeta)
    spread = (q.sigma - w.sigma).mul_(q.sigma + w.sigma)
    return MeanField((q.mu - w.mu).mul_(precision), spread.div_(q.sigma).mul_(precision))


def kl_grad_w(q: MeanField, w: MeanField) -> MeanField:
    """Gradient of KL(q || w), Eq. (8), in the means and standard deviations of w, factored as in `kl_grad_q`."""
    inverse = w.sigma.reciprocal()
    difference, excess = (w.mu - q.mu).mul_(inverse), (w.sigma - q.sigma).mul_(inverse)
    spread = torch.addcmul((2 - excess).mul_(excess), difference, difference, value=-1)
    return MeanField(difference.mul_(inverse), spread.mul_(inverse))


def barycentre(v: Tensor, weights: Tensor) -> Tensor:
    """Lemma A.2: the Gaussian w (2, T) that minimises sum_i weights_i KL(v_i || w) for v (N, 2, T).

    Its mean is the mean of the means; its variance is the mean variance plus the spread of the means.
    """
    mu, rho = v.unbind(-2)
    share = (weights / weights.sum())[:, None]
    mean = (share * mu).sum(0)
    variance = (share * (sigma(rho).square() + (mu - mean).square())).sum(0)
    return torch.stack([mean, rho_of(variance.sqrt())])
