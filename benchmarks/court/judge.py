"""Distances between what a method claims and the exact posterior."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.special import ndtri

from benchmarks.court.cases import NOISE, Data
from benchmarks.court.exact import Gaussian

LEVELS = (0.5, 0.8, 0.95)
Scores = dict[str, float]


def deviations(q: Gaussian) -> Tensor:
    """Return standard deviations (N, d)."""
    return q.covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def mean_error(q: Gaussian, p: Gaussian) -> Tensor:
    """Return the Mahalanobis distance of the means (N,) by p's covariance, divided by sqrt(d)."""
    gap = q.mean - p.mean
    squares = (gap * torch.linalg.solve(p.covariance, gap[..., None])[..., 0]).sum(-1)
    distance: Tensor = (squares / gap.shape[-1]).sqrt()
    return distance


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """Return KL(p || q) of Gaussians, (N,)."""
    gap, dims = q.mean - p.mean, p.mean.shape[-1]
    trace = torch.linalg.solve(q.covariance, p.covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    square = (gap * torch.linalg.solve(q.covariance, gap[..., None])[..., 0]).sum(-1)
    divergence: Tensor = 0.5 * (trace + square - dims + torch.logdet(q.covariance) - torch.logdet(p.covariance))
    return divergence


def normal_kl(mean: Tensor, variance: Tensor, other: Tensor, others_variance: Tensor) -> Tensor:
    """Return KL(N(mean, variance) || N(other, others_variance)), elementwise."""
    ratio = variance / others_variance
    return 0.5 * (ratio + (mean - other).square() / others_variance - 1 - ratio.log())


def moments_at(q: Gaussian, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (N, n) of x'theta."""
    return q.mean @ x.T, torch.einsum("kd,nde,ke->nk", x, q.covariance, x)


def probability(q: Gaussian, x: Tensor) -> Tensor:
    """Return E[sigmoid(x'theta)] (N, n), by Gauss-Hermite quadrature."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(30))
    mean, variance = moments_at(q, x)
    values = torch.sigmoid(mean[..., None] + variance.clamp(min=0).sqrt()[..., None] * nodes)
    average: Tensor = (values * weights).sum(-1) / math.sqrt(2 * math.pi)
    return average


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of Bernoulli variables, elementwise."""
    p, q = p.clamp(1e-9, 1 - 1e-9), q.clamp(1e-9, 1 - 1e-9)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def judge(q: Gaussian, p: Gaussian, data: Data, exact: Tensor | None) -> Scores:
    """Return a method's scores on a data set: its claim q against the exact posterior p.

    exact: draws (K, N, d) of the posterior of logistic regression; None for linear regression. A claim without widths
    has scores for its mean only.
    """
    if not bool(q.mean.isfinite().all() & q.covariance.isfinite().all()):
        return {"diverged": 1.0}
    x, truth = torch.from_numpy(data.held_out), torch.from_numpy(data.theta)[: len(p.mean)]
    found = {"mean error": float(mean_error(q, p).mean())}
    if exact is None:
        ours, theirs = moments_at(q, x), moments_at(p, x)
        predictive = normal_kl(theirs[0], theirs[1] + NOISE**2, ours[0], ours[1] + NOISE**2)
    else:
        predictive = bernoulli_kl(torch.sigmoid(exact @ x.T).mean(0), probability(q, x))
    found["predictive KL"] = float(predictive.mean())
    sd = deviations(q)
    if not bool((sd > 0).all()):
        return found
    found["log sd ratio"] = float((sd / deviations(p)).log().mean())
    found["KL"] = float(kl(p, q).mean())
    z = ((truth - q.mean) / sd).abs()
    for level in LEVELS:
        found[f"coverage {level:g}"] = float((z < ndtri(torch.tensor((1 + level) / 2).double())).double().mean())
    if exact is not None:
        quantiles = ndtri((torch.arange(len(exact)).double() + 0.5) / len(exact))
        ours = q.mean + sd * quantiles[:, None, None]
        found["W1"] = float((ours - exact.sort(0).values).abs().mean())
    return found


def judge_outputs(ours: Tensor, exact: Tensor) -> Scores:
    """Return the scores of a network's outputs (K, n) against exact draws (K', n): means and widths of predictions."""
    mean, variance, other, others = ours.mean(0), ours.var(0), exact.mean(0), exact.var(0)
    found = {
        "mean error": float(((mean - other).square() / others).mean().sqrt()),
        "predictive KL": float(normal_kl(other, others + NOISE**2, mean, variance + NOISE**2).mean()),
    }
    if bool((variance > 0).all()):
        found["log sd ratio"] = float(0.5 * (variance / others).log().mean())
    return found


def loss_to_truth(q: Gaussian, data: Data, binary: bool) -> float:
    """Return the mean KL divergence of q's predictions from the true distribution of targets at held-out inputs.

    It differs from the expected held-out loss by a constant, so it needs no posterior to compare settings.
    """
    if not bool(q.mean.isfinite().all() & q.covariance.isfinite().all()):
        return math.inf
    x, truth = torch.from_numpy(data.held_out), torch.from_numpy(data.theta)[: len(q.mean)]
    if binary:
        return float(bernoulli_kl(torch.sigmoid(truth @ x.T), probability(q, x)).mean())
    mean, variance = moments_at(q, x)
    noise = torch.full_like(mean, NOISE**2)
    return float(normal_kl(truth @ x.T, noise, mean, variance + NOISE**2).mean())


def rank_test(ranks: Tensor, draws: int, bins: int = 20) -> float:
    """Return chi^2 of ranks among this many draws over equal bins, divided by its degrees of freedom; 1 if uniform."""
    counts = torch.histc(ranks.double(), bins=bins, min=0, max=draws + 1)
    expected = len(ranks) / bins
    return float((counts - expected).square().sum() / expected / (bins - 1))


def ranks(q: Gaussian, data: Data, draws: int, generator: torch.Generator) -> Tensor:
    """Return the ranks of the true weights among draws of q, one for each weight of the first client."""
    noise = torch.randn(draws, q.mean.shape[-1], generator=generator, dtype=torch.float64)
    root = torch.linalg.cholesky(q.covariance[0])
    below: Tensor = (q.mean[0] + noise @ root.T < torch.from_numpy(data.theta)[0]).sum(0)
    return below
