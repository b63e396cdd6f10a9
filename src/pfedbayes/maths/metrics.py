"""Accuracy, calibration and uncertainty of K predictions, one per draw of the weights.

All functions accept leading axes, so that they can score many models at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.special import erf

from pfedbayes.maths.ranking import tied_ranks

RANKING = ("balanced_accuracy", "auroc", "auprc")
# By task, all metrics that a likelihood of the task may have; `Likelihood.metrics` says which.
METRICS = {
    "classification": ("accuracy", "nll", "brier", "ece", *RANKING, "entropy", "mutual_information"),
    "regression": ("rmse", "nll", "crps", "coverage", "deviation", "model_deviation"),
    "ordinal": ("accuracy", "nll", "brier", "ece", "mae", "entropy", "mutual_information"),
    "count": ("rmse", "nll", "coverage", "deviation", "model_deviation"),
    "survival": ("c_index", "nll", "ibs"),
}
BINS = 15  # confidence bins of the calibration errors


def log_average(outputs: Tensor) -> Tensor:
    """Return the log-probabilities (n, C) of the averaged prediction of logits (K, n, C)."""
    return _log_softmax(outputs).logsumexp(-3) - math.log(outputs.shape[-3])


def _log_softmax(outputs: Tensor) -> Tensor:
    """Return the log-softmax. torch's function is four times slower on a CPU if there are few classes."""
    return outputs - outputs.logsumexp(-1, keepdim=True)


def log_label_prior(counts: Tensor) -> Tensor:
    """Return a client's log-probabilities of the labels (C,) before it sees an input, from its training counts (C,).

    Half an example per label smooths the counts (Jeffreys' Dirichlet prior).
    """
    return torch.log((counts + 0.5) / (counts + 0.5).sum())


def accuracy(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the percentage of examples whose most probable label is right."""
    return 100 * (log_probs.argmax(-1) == y).to(log_probs.dtype).mean(-1)


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the mean negative log-probability of the true label."""
    return -log_probs.gather(-1, y[..., None]).squeeze(-1).mean(-1)


def brier(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared distance between the probabilities and the one-hot true label (0 to 2)."""
    probs = log_probs.exp()
    return (probs.square().sum(-1) - 2 * probs.gather(-1, y[..., None]).squeeze(-1) + 1).mean(-1)


class Reliability(NamedTuple):
    """Sums per confidence bin, each (BINS,). The sums of several clients add up."""

    confidence: Tensor
    """Sum of confidences."""
    correct: Tensor
    """Number of correct predictions."""
    total: Tensor
    """Number of predictions."""


def reliability(log_probs: Tensor, y: Tensor) -> Reliability:
    """Return how often predictions of a given confidence are right."""
    surest, label = log_probs.max(-1)
    confidence, correct = surest.exp(), (label == y).to(log_probs.dtype)
    # Bins are (lower, upper], as usual; a confidence of 0 cannot occur.
    index = (torch.ceil(confidence * BINS) - 1).clamp(0, BINS - 1).long()
    # A matrix product sums in a fixed order on every device.
    weight = log_probs.new_zeros(*index.shape, BINS).scatter(-1, index[..., None], 1.0)
    sums = torch.stack([confidence, correct, torch.ones_like(correct)], -2) @ weight
    return Reliability(*sums.unbind(-2))


def ece(sums: Reliability) -> Tensor:
    """Return the expected calibration error: the mean gap of confidence and accuracy, weighted by bin counts."""
    return (sums.confidence - sums.correct).abs().sum(-1) / sums.total.sum(-1)


def adaptive_ece(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the calibration error over BINS bins of equal counts (Nguyen and O'Connor 2015)."""
    confidence, label = log_probs.exp().max(-1)
    order = confidence.argsort(-1)
    gap = (confidence - (label == y).to(confidence.dtype)).gather(-1, order)
    bins = gap.tensor_split(min(BINS, gap.shape[-1]), dim=-1)
    return torch.stack([part.sum(-1).abs() for part in bins], -1).sum(-1) / gap.shape[-1]


def confidence(log_probs: Tensor) -> Tensor:
    """Return -log(1 - p) for the probability p of the most probable label.

    It distinguishes predictions whose p rounds to 1.
    """
    others = log_probs.scatter(-1, log_probs.argmax(-1, keepdim=True), -torch.inf)
    return -others.logsumexp(-1)


def risk_coverage(score: Tensor, wrong: Tensor) -> Tensor:
    """Return the error rate among the k examples with the highest scores (..., n), for k = 1 ... n.

    This is the risk at coverage k/n. Examples with equal scores count with their mean error.
    """
    score, order = score.sort(-1, descending=True)
    _, group = tied_ranks(score)
    count = torch.zeros_like(score).scatter_add(-1, group, torch.ones_like(score))
    errors = torch.zeros_like(score).scatter_add(-1, group, wrong.to(score.dtype).gather(-1, order))
    taken = torch.arange(1, score.shape[-1] + 1, dtype=score.dtype, device=score.device)
    return (errors / count.clamp_min(1)).gather(-1, group).cumsum(-1) / taken


def aurc(score: Tensor, wrong: Tensor) -> Tensor:
    """Return the area under the risk-coverage curve: the mean error rate over all coverages (0 is best)."""
    return risk_coverage(score, wrong).mean(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy of each predictive distribution in nats: the total uncertainty."""
    return -(log_probs.exp() * log_probs).sum(-1)


class Uncertainty(NamedTuple):
    """The uncertainty of each prediction in nats: total = aleatoric + epistemic."""

    total: Tensor
    """Entropy of the averaged prediction."""
    aleatoric: Tensor
    """Mean entropy of single draws of the weights. More data does not reduce it."""
    epistemic: Tensor
    """Disagreement between draws: the mutual information of label and weights. More data reduces it."""


def decompose_uncertainty(outputs: Tensor, log_probs: Tensor | None = None) -> Uncertainty:
    """Split the entropy of the averaged prediction (n, C) of logits (K, n, C) into its two parts, each (n,)."""
    total = entropy(log_average(outputs) if log_probs is None else log_probs)
    if outputs.shape[-3] == 1:
        return Uncertainty(total, total, torch.zeros_like(total))
    aleatoric = torch.minimum(entropy(_log_softmax(outputs)).mean(-2), total)  # larger only by rounding
    return Uncertainty(total, aleatoric, total - aleatoric)


def mutual_information(outputs: Tensor) -> Tensor:
    """Return the epistemic uncertainty (n,) of logits (K, n, C): entropy of the average minus average entropy."""
    return decompose_uncertainty(outputs).epistemic


def temperature(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the temperatures T (...,) that minimise the NLL of softmax(log_probs / T), for log_probs (..., n, C).

    Temperature scaling is due to Guo et al. (2017). The NLL is convex in 1/T, so bisection of its slope finds the
    minimum in 1/64 <= T <= 64.
    """
    low, high = (torch.full_like(log_probs[..., 0, 0], end, dtype=torch.float64) for end in (2.0**-6, 2.0**6))
    logits, true = log_probs.double(), log_probs.double().gather(-1, y[..., None]).squeeze(-1)
    for _ in range(40):
        middle = (low * high).sqrt()  # of 1/T
        probs = (middle[..., None, None] * logits).softmax(-1)
        slope = ((probs * logits).sum(-1) - true).mean(-1)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return (low * high).rsqrt().to(log_probs.dtype)


def tempered(log_probs: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-probabilities (..., n, C) at temperatures (...,)."""
    return _log_softmax(log_probs / temperature[..., None, None])


class Numbers(Protocol):
    """A likelihood of numbers, see `likelihoods.Regression`."""

    @property
    def unit(self) -> float:
        """The number by which targets were divided before training."""
        ...

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of each prediction (..., K, n, d)."""
        ...

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood (..., K, n)."""
        ...


class Gaussians(NamedTuple):
    """Predictions of a regression, each (..., n, d)."""

    mean: Tensor
    deviation: Tensor
    """Standard deviation of the target."""
    model_deviation: Tensor
    """Its part that comes from the uncertainty about the model."""


def moments(likelihood: Numbers, outputs: Tensor) -> Gaussians:
    """Return the mean and the deviations of the mixture of the K predictions."""
    means, noise = likelihood.mean_and_noise(outputs)
    mean = means.mean(-3)
    between = (means - mean.unsqueeze(-3)).square().mean(-3)
    return Gaussians(mean, (noise.square().mean(-3) + between).sqrt(), between.sqrt())


def regression_scores(likelihood: Numbers, outputs: Tensor, y: Tensor) -> Tensor:
    """Return RMSE, NLL, coverage and deviations of the mixture of the K predictions, in the targets' original units.

    coverage: percentage of targets in the central 90 % interval of the Gaussian with the mixture's mean and variance.
    deviation, model_deviation: means over examples, see `Gaussians`.
    """
    mean, deviation, model_deviation = moments(likelihood, outputs)
    log_density = torch.logsumexp(-likelihood.nll(outputs, y.unsqueeze(-3)), dim=-2) - math.log(outputs.shape[-3])
    inside = erf((y - mean).abs() / (deviation * math.sqrt(2))) <= 0.9
    rmse = (y - mean).square().mean((-2, -1)).sqrt()
    nll = y.shape[-1] * math.log(likelihood.unit) - log_density.mean(-1)
    covered = 100 * inside.to(rmse.dtype).mean((-2, -1))
    spreads = (likelihood.unit * each.mean((-2, -1)) for each in (deviation, model_deviation))
    return torch.stack([likelihood.unit * rmse, nll, covered, *spreads], dim=-1)


def label_scores(logits: Tensor, y: Tensor) -> Tensor:
    """Return accuracy, NLL, Brier score, ECE, entropy and mutual information of logits (K, n, C) for labels y (n,)."""
    log_probs = log_average(logits)
    calibration = ece(reliability(log_probs, y))
    uncertainty = decompose_uncertainty(logits, log_probs)
    mean_uncertainty = (uncertainty.total.mean(-1), uncertainty.epistemic.mean(-1))
    good = (accuracy(log_probs, y), nll(log_probs, y), brier(log_probs, y), calibration)
    return torch.stack([*good, *mean_uncertainty], dim=-1)
