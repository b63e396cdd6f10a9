"""Mean-field Gaussians over models: v = (mu, rho), a tensor (..., 2, T) with sigma = softplus(rho)."""

from __future__ import annotations

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


def sample(v: Tensor, g: Tensor) -> Tensor:
    """Eq. (26): theta = h(v, g) = mu + sigma * g, with g standard normal of shape (..., T)."""
    mu, rho = v.unbind(-2)
    return mu + sigma(rho) * g


def sample_grad(v: Tensor, g: Tensor, grad_theta: Tensor) -> Tensor:
    """The gradient in v of a function of theta = h(v, g), given its gradient in theta."""
    rho = v.select(-2, 1)
    return torch.stack([grad_theta, grad_theta * g * torch.sigmoid(rho)], dim=-2)


def kl(q: Tensor, w: Tensor) -> Tensor:
    """Eq. (8): KL(q || w), summed over the T parameters."""
    mu_q, rho_q = q.unbind(-2)
    mu_w, rho_w = w.unbind(-2)
    sigma_q, sigma_w = sigma(rho_q), sigma(rho_w)
    per_parameter = (
        2 * torch.log(sigma_w / sigma_q) + (sigma_q.square() + (mu_q - mu_w).square()) / sigma_w.square() - 1
    )
    return 0.5 * per_parameter.sum(-1)


def kl_grad_q(q: Tensor, w: Tensor) -> Tensor:
    """Gradient of KL(q || w), Eq. (8), in q = (mu_q, rho_q).

    The factored form is exactly zero at q = w. It has to be: where the likelihood has no gradient (a dead unit),
    Adam would turn a rounding error of 1e-16 into a full step.
    """
    mu_q, rho_q = q.unbind(-2)
    mu_w, rho_w = w.unbind(-2)
    sigma_q, sigma_w = sigma(rho_q), sigma(rho_w)
    precision = sigma_w.square().reciprocal()
    grad_mu = (mu_q - mu_w) * precision
    grad_sigma = (sigma_q - sigma_w) * (sigma_q + sigma_w) / sigma_q * precision
    return torch.stack([grad_mu, grad_sigma * torch.sigmoid(rho_q)], dim=-2)


def kl_grad_w(q: Tensor, w: Tensor) -> Tensor:
    """Gradient of KL(q || w), Eq. (8), in w = (mu_w, rho_w), factored as in `kl_grad_q`."""
    mu_q, rho_q = q.unbind(-2)
    mu_w, rho_w = w.unbind(-2)
    sigma_q, sigma_w = sigma(rho_q), sigma(rho_w)
    precision = sigma_w.square().reciprocal()
    difference = mu_q - mu_w
    grad_mu = -difference * precision
    spread = (sigma_q - sigma_w) * (sigma_q + sigma_w) + difference.square()
    grad_sigma = -spread * precision / sigma_w
    return torch.stack([grad_mu, grad_sigma * torch.sigmoid(rho_w)], dim=-2)


def barycentre(v: Tensor, weights: Tensor) -> Tensor:
    """Lemma A.2: the Gaussian w (2, T) that minimises sum_i weights_i KL(v_i || w) for v (N, 2, T).

    Its mean is the mean of the means; its variance is the mean variance plus the spread of the means.
    """
    mu, rho = v.unbind(-2)
    share = (weights / weights.sum())[:, None]
    mean = (share * mu).sum(0)
    variance = (share * (sigma(rho).square() + (mu - mean).square())).sum(0)
    return torch.stack([mean, rho_of(variance.sqrt())])
