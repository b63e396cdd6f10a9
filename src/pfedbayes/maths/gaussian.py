"""Mean-field Gaussians over models: v = (mu, rho), a tensor (..., 2, T) with sigma = softplus(rho).

The formulas reuse the memory of their own intermediate results: allocating T numbers costs more than the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus


def sigma(rho: Tensor) -> Tensor:
    """Return the standard deviation sigma = log(1 + exp(rho)), Section 4 of the paper."""
    return softplus(rho)


def rho_of(sigma: Tensor) -> Tensor:
    """Return rho = log(exp(sigma) - 1), the inverse of `sigma`, in a form that overflows at neither end."""
    return sigma + torch.log(-torch.expm1(-sigma))


def gaussian(mu: Tensor, rho0: float) -> Tensor:
    """Return v (2, T) with means mu (T,) and the same rho0 for all weights: independent Gaussians, Eqs. (6), (7)."""
    return torch.stack([mu, torch.full_like(mu, rho0)])


class Moments(Protocol):
    """Anything with the means and standard deviations (..., T) of a Gaussian."""

    @property
    def mu(self) -> Tensor: ...
    @property
    def sigma(self) -> Tensor: ...


class MeanField(NamedTuple):
    """The means and standard deviations of a Gaussian, each (..., T), or a gradient in both."""

    mu: Tensor
    sigma: Tensor


def mean_field(v: Tensor) -> MeanField:
    """Return the means and standard deviations of v."""
    mu, rho = v.unbind(-2)
    return MeanField(mu, sigma(rho))


def grad_in_rho(grad_sigma: Tensor, rho: Tensor) -> Tensor:
    """Return the gradient in rho, given the gradient in sigma: d sigma / d rho = 1 / (1 + exp(-rho))."""
    return torch.sigmoid(rho).mul_(grad_sigma)


def sample(q: Moments, g: Tensor) -> Tensor:
    """Return theta = h(v, g) = mu + sigma * g, Eq. (26), with standard normal g (..., T)."""
    return torch.addcmul(q.mu, q.sigma, g)


def kl(q: Moments, w: Moments) -> Tensor:
    """Return KL(q || w), Eq. (8), summed over the T weights."""
    per_parameter = (
        2 * torch.log(w.sigma / q.sigma) + (q.sigma.square() + (q.mu - w.mu).square()) / w.sigma.square() - 1
    )
    return 0.5 * per_parameter.sum(-1)


def kl_grad_q(q: Moments, w: Moments, zeta: float = 1.0) -> MeanField:
    """Return the gradient of zeta KL(q || w), Eq. (8), in the means and standard deviations of q.

    The factored form is exactly zero at q = w. This matters where the likelihood has no gradient (a dead unit): Adam
    would turn a rounding error of 1e-16 into a full step.
    """
    precision = w.sigma.pow(-2).mul_(zeta)
    spread = (q.sigma - w.sigma).mul_(q.sigma + w.sigma)
    return MeanField((q.mu - w.mu).mul_(precision), spread.div_(q.sigma).mul_(precision))


def kl_grad_w(q: Moments, w: Moments) -> MeanField:
    """Return the gradient of KL(q || w), Eq. (8), in the means and standard deviations of w.

    Factored as in `kl_grad_q`.
    """
    inverse = w.sigma.reciprocal()
    difference, excess = (w.mu - q.mu).mul_(inverse), (w.sigma - q.sigma).mul_(inverse)
    spread = torch.addcmul((2 - excess).mul_(excess), difference, difference, value=-1)
    return MeanField(difference.mul_(inverse), spread.mul_(inverse))


def natural(q: Moments) -> Tensor:
    """Return the natural parameters (eta, lambda) = (mu / sigma^2, 1 / sigma^2), (..., 2, T).

    The natural parameters of a product of Gaussians are the sums of theirs, and those of a quotient the differences. A
    *factor* of a product is a pair (eta, lambda) whose lambda may be 0 or negative.
    """
    precision = q.sigma.pow(-2)
    return torch.stack([precision * q.mu, precision], dim=-2)


def from_natural(parameters: Tensor) -> MeanField:
    """Return the Gaussian with natural parameters (eta, lambda), (..., 2, T), where lambda is positive."""
    eta, precision = parameters.unbind(-2)
    return MeanField(eta / precision, precision.rsqrt())


def clip_precision(factor: Tensor, least: float = 1e-6) -> Tensor:
    """Replace the entries of a factor (..., 2, T) with lambda < `least` by those of N(0, 1 / least)."""
    eta, precision = factor.unbind(-2)
    return torch.stack([torch.where(precision < least, 0.0, eta), precision.clamp(min=least)], dim=-2)


def kl_grad_to_cavity(q: Moments, p: Moments, factor: Tensor) -> MeanField:
    """Return the gradient of KL(q || p / factor) in the means and standard deviations of q.

    factor: natural parameters (..., 2, T). The cavity p / factor need not be a distribution: its normaliser does not
    depend on q. Without a factor the gradient is exactly zero at q = p, see `kl_grad_q`.
    """
    grad, (eta, precision) = kl_grad_q(q, p), factor.unbind(-2)
    return MeanField(grad.mu - (precision * q.mu - eta), grad.sigma - precision * q.sigma)


def barycentre(v: Tensor, weights: Tensor, hyper_weight: float = 0.0, hyper_sigma: Tensor | float = 0.0) -> Tensor:
    """Return the Gaussian w (2, T) that minimises sum_i weights_i KL(v_i || w), Lemma A.2, for v (N, 2, T).

    Its mean is the mean of the means. Its variance is the mean variance plus the variance of the means.

    With a normal-inverse-gamma hyper-prior, flat in the mean, w is the posterior mode. Its variance is then

        (sum_i weights_i (sigma_i^2 + (mu_i - mean)^2) + nu s0^2) / (sum_i weights_i + nu)

    for the weight nu = `hyper_weight` and the expected deviation s0 = `hyper_sigma`. Lemma A.2 maximises the
    likelihood: it is the limit nu = 0.
    """
    mu, rho = v.unbind(-2)
    total = weights.sum()
    share = (weights / total)[:, None]
    mean = (share * mu).sum(0)
    variance = (share * (sigma(rho).square() + (mu - mean).square())).sum(0)
    if hyper_weight:
        variance = (total * variance + hyper_weight * hyper_sigma**2) / (total + hyper_weight)
    return torch.stack([mean, rho_of(variance.sqrt())])


def grad_of_variance(in_sample: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return the gradient in the variance, given that in `sampled(mean, variance, noise)`."""
    return in_sample * noise / (2 * (variance + 1e-12).sqrt())


def sampled(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return mean + sqrt(variance) noise, with a finite gradient where the variance is 0."""
    return torch.addcmul(mean, (variance + 1e-12).sqrt(), noise)
