"""Accuracy, calibration and uncertainty from a stack of K predictions, one per draw of the weights.

All functions take any number of leading axes, so that many models can be scored at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import erf

from pfedbayes.likelihoods import Likelihood, Regression

METRICS = {
    "classification": ("accuracy", "nll", "brier", "ece"),
    "regression": ("rmse", "nll", "coverage"),
}
BINS = 15  # equal-width confidence bins of the calibration error


def log_average(outputs: Tensor) -> Tensor:
    """Log-probabilities (n, C) of the averaged prediction of logits (K, n, C)."""
    log_probs = _log_softmax(outputs)
    draws = outputs.shape[-3]
    return log_probs.squeeze(-3) if draws == 1 else log_probs.logsumexp(-3) - math.log(draws)


def _log_softmax(outputs: Tensor) -> Tensor:
    """torch's own, which is four times slower on a CPU where there are few classes."""
    return outputs - outputs.logsumexp(-1, keepdim=True)


def log_label_prior(counts: Tensor) -> Tensor:
    """A client's log-probabilities of the labels (C,) before it sees an input, from its training counts (C,), smoothed
    by half an example per label (Jeffreys' Dirichlet prior)."""
    return torch.log((counts + 0.5) / (counts + 0.5).sum())


def accuracy(log_probs: Tensor, y: Tensor) -> Tensor:
    """Percentage of examples whose most probable label is right."""
    return 100 * (log_probs.argmax(-1) == y).to(log_probs.dtype).mean(-1)


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-probability of the true label."""
    return -log_probs.gather(-1, y[..., None]).squeeze(-1).mean(-1)


def brier(log_probs: Tensor, y: Tensor) -> Tensor:
    """Mean squared distance between the probabilities and the indicator of the true label (0 to 2)."""
    probs = log_probs.exp()
    return (probs - torch.nn.functional.one_hot(y, probs.shape[-1])).square().sum(-1).mean(-1)


class Reliability(NamedTuple):
    """Sums per confidence bin, so that clients can be added up: each (BINS,)."""

    confidence: Tensor
    correct: Tensor
    total: Tensor


def reliability(log_probs: Tensor, y: Tensor) -> Reliability:
    """How often predictions of a given confidence are right."""
    confidence, label = log_probs.exp().max(-1)
    # Bins are (lower, upper], as in the common definition; a confidence of 0 cannot occur.
    index = (torch.ceil(confidence * BINS) - 1).clamp(0, BINS - 1).long()
    weight = torch.nn.functional.one_hot(index, BINS).to(log_probs.dtype)
    correct = (label == y).to(log_probs.dtype)
    return Reliability(
        *((part[..., None, :] @ weight).squeeze(-2) for part in (confidence, correct, torch.ones_like(correct)))
    )


def ece(sums: Reliability) -> Tensor:
    """Expected calibration error: mean gap between confidence and accuracy, weighted by bin counts."""
    return (sums.confidence - sums.correct).abs().sum(-1) / sums.total.sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy of each predictive distribution, in nats: the total uncertainty."""
    return -(log_probs.exp() * log_probs).sum(-1)


def mutual_information(outputs: Tensor) -> Tensor:
    """Entropy of the average minus the average entropy of logits (K, n, C): the epistemic uncertainty, (n,)."""
    return (entropy(log_average(outputs)) - entropy(outputs.log_softmax(-1)).mean(-2)).clamp_min(0)


def regression_scores(likelihood: Regression, outputs: Tensor, y: Tensor) -> Tensor:
    """RMSE of the predictive mean, NLL of the mixture of the K predictions, and the share (in percent) of targets
    inside the central 90 % interval of the Gaussian with the mixture's mean and variance; the first two in the units
    that targets had before they were divided by `likelihood.unit`."""
    means, noise = likelihood.mean_and_noise(outputs)
    mean = means.mean(-3)
    deviation = (noise.square() + (means - mean.unsqueeze(-3)).square()).mean(-3).sqrt()
    log_density = torch.logsumexp(-likelihood.nll(outputs, y.unsqueeze(-3)), dim=-2) - math.log(outputs.shape[-3])
    inside = erf((y - mean).abs() / (deviation * math.sqrt(2))) <= 0.9
    rmse = (y - mean).square().mean((-2, -1)).sqrt()
    nll = y.shape[-1] * math.log(likelihood.unit) - log_density.mean(-1)
    return torch.stack([likelihood.unit * rmse, nll, 100 * inside.to(rmse.dtype).mean((-2, -1))], dim=-1)


def scores(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """The figures METRICS[task] of the averaged prediction of outputs (K, n, ...) for targets y (n, ...)."""
    if isinstance(likelihood, Regression):
        return regression_scores(likelihood, outputs, y)
    log_probs = log_average(outputs)
    calibration = ece(reliability(log_probs, y))
    return torch.stack([accuracy(log_probs, y), nll(log_probs, y), brier(log_probs, y), calibration], dim=-1)
