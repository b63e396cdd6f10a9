"""Likelihoods: how probable the targets are, given a model's outputs, and how such predictions are scored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.maths import metrics, mixtures, ranking
from pfedbayes.maths.gaussian import grad_of_variance, sampled, sigma


class Likelihood(Protocol):
    """The distribution p(y | outputs) of a target."""

    task: str
    predicts: str
    """What is predicted: "labels" (class probabilities), "numbers", or "times" of which some are censored."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the `scores`."""
        ...

    @property
    def offset(self) -> float:
        """What turns the negative log-likelihood of an example into original units of its target, by addition."""
        ...

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        """Names of the `pooled_scores`, which say more over the rows of all clients together; often none."""
        ...

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood (n,) of each example, from outputs (n, ...) and targets y (n, ...)."""
        ...

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return an estimate of E[nll] (n,) for independent outputs of these moments (n, ...).

        noise: standard normal (n, ...), to sample the outputs that are not integrated in closed form.
        """
        ...

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients (n, ...) of the sum of `expected_nll` in the moments, see `differentiate`."""
        ...

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the `metrics` (..., M) of the averaged prediction of outputs (..., K, n, ...) for targets (..., n)."""
        ...

    def point(self, outputs: Tensor) -> Tensor:
        """Return the prediction (n, ...) of one network: probabilities (n, C), or numbers as it was trained on."""
        ...

    def gist(self, outputs: Tensor) -> Tensor:
        """Return what `pooled_scores` needs of outputs (..., K, n, ...), with one row per example (..., n, R)."""
        ...

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        """Return the `pooled_metrics` (P,) of the rows of all clients."""
        ...


class NumberLikelihood(Likelihood, metrics.Numbers, Protocol):
    """A likelihood of numbers."""

    def interval(self, outputs: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the ends (..., n, d) of the central interval of the mixture of outputs (..., K, n, ...)."""
        ...


def is_of_numbers(likelihood: Likelihood) -> TypeGuard[NumberLikelihood]:
    """Return whether a likelihood predicts numbers."""
    return likelihood.predicts == "numbers"


class LabelLikelihood(Likelihood, Protocol):
    """A likelihood of classes."""

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits (..., C), whose softmax are the probabilities of the classes."""
        ...


def is_of_labels(likelihood: Likelihood) -> TypeGuard[LabelLikelihood]:
    """Return whether a likelihood predicts classes."""
    return likelihood.predicts == "labels"


class TimeLikelihood(Likelihood, Protocol):
    """A likelihood of times to an event, see `survival.Survival`."""

    @property
    def edges(self) -> tuple[float, ...]:
        """Ends of the intervals of time; the last one is that up to which predictions are made."""
        ...

    def survival(self, outputs: Tensor, time: Tensor) -> Tensor:
        """Return the probability (..., n) of no event until a time (..., n), for the mixture of (..., K, n, O)."""
        ...

    def curve(self, outputs: Tensor, times: Tensor) -> Tensor:
        """Return the probabilities (..., n, G) of no event until each of the times (G,), for the mixture."""
        ...

    def quantile(self, outputs: Tensor, level: float) -> Tensor:
        """Return the time (..., n) by which the event has happened with this probability; inf beyond the edges."""
        ...

    def grid(self, like: Tensor) -> Tensor:
        """Return the times (G,) of the curves of `gist`."""
        ...

    def risk(self, curves: Tensor) -> Tensor:
        """Return a number (..., n) between 0 and 1 from `gist`: the higher, the earlier the event is expected."""
        ...


def is_of_times(likelihood: Likelihood) -> TypeGuard[TimeLikelihood]:
    """Return whether a likelihood predicts times to an event."""
    return likelihood.predicts == "times"


@dataclass(frozen=True)
class Classification:
    """Softmax classification: outputs (n, C) are logits, y (n,) are labels."""

    ranking: bool = False
    """Whether to score rankings too: balanced accuracy, AUROC and AUPRC."""

    task = "classification"
    predicts = "labels"

    @property
    def metrics(self) -> tuple[str, ...]:
        known = metrics.METRICS["classification"]
        return known if self.ranking else tuple(name for name in known if name not in metrics.RANKING)

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        return metrics.RANKING if self.ranking else ()

    @property
    def offset(self) -> float:
        return 0.0

    def point(self, outputs: Tensor) -> Tensor:
        return self.logits(outputs).softmax(-1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits (..., C), whose softmax are the probabilities of the classes."""
        return outputs

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = metrics.label_scores(outputs, y)
        if not self.ranking:
            return values
        further = self.pooled_scores(self.gist(outputs), y)
        return torch.cat([values[..., :4], further, values[..., 4:]], dim=-1)

    def gist(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities (..., n, C) of the averaged prediction."""
        return metrics.log_average(outputs)

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        curves = (ranking.area_under_roc, ranking.average_precision)
        areas = (ranking.one_vs_rest(curve, gist, y) for curve in curves)
        return torch.stack([ranking.balanced_accuracy(gist, y), *areas], dim=-1)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return functional.cross_entropy(outputs, y, reduction="none")

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the cross-entropy of sampled logits."""
        return self.nll(sampled(mean, variance, noise), y)

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the cross-entropy, which is softmax - one-hot in the logits."""
        classes = torch.arange(mean.shape[-1], device=mean.device)
        in_logits = sampled(mean, variance, noise).softmax(-1) - (y[..., None] == classes).to(mean.dtype)
        return in_logits, grad_of_variance(in_logits, variance, noise)


@dataclass(frozen=True)
class Regression:
    """Eq. (1): y = f(x) + noise, noise ~ N(0, sigma_eps^2) in each of the d target dimensions.

    With a known sigma_eps, outputs are the means (n, d). Otherwise the noise is learned: the last column of the outputs
    (n, d + 1) is the rho of sigma_eps = softplus(rho), which `nets.WithNoise` appends.
    """

    sigma_eps: float | None = None
    """Standard deviation of the noise; None to learn it."""
    unit: float = 1.0
    """The number by which targets were divided before training. Scores are in the original units."""

    task = "regression"
    predicts = "numbers"

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for name in metrics.METRICS["regression"] if name != "crps")

    @property
    def offset(self) -> float:
        return math.log(self.unit)

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        return ()

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        return metrics.regression_scores(self, outputs, y)

    def gist(self, outputs: Tensor) -> Tensor:
        return outputs.mean(-3)

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        return gist.new_empty(0)

    def point(self, outputs: Tensor) -> Tensor:
        return self.mean_and_noise(outputs)[0]

    def interval(self, outputs: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the ends (..., n, d) of the central interval of a Gaussian with the mixture's mean and variance."""
        predicted = metrics.moments(self, outputs)
        reach = math.sqrt(2) * float(torch.erfinv(torch.tensor(coverage, dtype=torch.float64)))
        return predicted.mean - reach * predicted.deviation, predicted.mean + reach * predicted.deviation

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted means (..., d) and the noise standard deviation, broadcastable to them."""
        if self.sigma_eps is None:
            return outputs[..., :-1], sigma(outputs[..., -1:])
        return outputs, torch.full_like(outputs[..., :1], self.sigma_eps)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative Gaussian log-density of each example, summed over target dimensions."""
        mean, noise = self.mean_and_noise(outputs)
        return (0.5 * ((y - mean) / noise).square() + torch.log(noise) + 0.5 * math.log(2 * math.pi)).sum(-1)

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the expectation over the means in closed form, at a sampled noise level."""
        means, deviation = self.mean_and_noise(sampled(mean, variance, noise))
        count = means.shape[-1]
        squares = (y - mean[..., :count]).square() + variance[..., :count]
        return (0.5 * squares / deviation.square() + torch.log(deviation) + 0.5 * math.log(2 * math.pi)).sum(-1)

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return differentiate(self, mean, variance, y, noise)


@dataclass(frozen=True)
class Gaussian(Regression):
    """One target with Gaussian noise, predicted by the mixture of the draws instead of its mean and variance."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return metrics.METRICS["regression"]

    def location_scale_freedom(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the location, the logarithm of the scale, and the degrees of freedom, each (..., 1)."""
        mean, noise = self.mean_and_noise(outputs)
        return mean, noise.log(), torch.full_like(noise, math.inf)

    def interval(self, outputs: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the ends (..., n, 1) of the central interval of the mixture."""
        levels = ((1 - coverage) / 2, (1 + coverage) / 2)
        parts = [
            [mixtures.quantile(points, level) for level in levels]
            for _, points in self._points(outputs, mixtures.POINTS)
        ]
        low, high = (torch.cat(ends, -1)[..., None] for ends in zip(*parts, strict=True))
        return low, high

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the metrics. The CRPS and the interval are those of the mixture."""
        rmse, nll, _, *spreads = super().scores(outputs, y).unbind(-1)
        target = y[..., 0]
        total, inside = torch.zeros_like(rmse), torch.zeros_like(rmse)
        for rows, points in self._points(outputs, mixtures.SCORED):
            own = target[..., rows]
            total = total + mixtures.crps(points, own).sum(-1)
            within = (own >= mixtures.quantile(points, 0.05)) & (own <= mixtures.quantile(points, 0.95))
            inside = inside + within.to(rmse.dtype).sum(-1)
        size = target.shape[-1]
        return torch.stack([rmse, nll, self.unit * total / size, 100 * inside / size, *spreads], dim=-1)

    def _points(self, outputs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        location, log_scale, freedom = (each.squeeze(-1) for each in self.location_scale_freedom(outputs))
        return mixtures.sorted_points(location, log_scale.expand_as(location), freedom[..., 0], size)


@dataclass(frozen=True)
class StudentT(Gaussian):
    """y = f(x) + scale(x) t, with t of Student's distribution, whose tails and scale are learned.

    Outputs (n, 4): the location, a(x), and two numbers that are the same for every input, c and k. The scale is
    exp(c + 0.3 a(x)), and the degrees of freedom are 2 + 8 exp(k), so that the variance is finite.
    """

    def location_scale_freedom(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the location, the logarithm of the scale, and the degrees of freedom, each (..., 1)."""
        location, varying, constant, tails = outputs.unbind(-1)
        return location[..., None], (constant + 0.3 * varying)[..., None], (2 + 8 * tails.exp())[..., None]

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the location and the standard deviation of y, each (..., 1)."""
        location, log_scale, freedom = self.location_scale_freedom(outputs)
        return location, log_scale.exp() * (freedom / (freedom - 2)).sqrt()

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-density of Student's distribution of each example."""
        location, log_scale, freedom = self.location_scale_freedom(outputs)
        return _student_nll((y - location).square(), log_scale, freedom).sum(-1)

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return an upper bound: the density at the expected squared residual, as log(1 + z) is concave in z."""
        _, log_scale, freedom = self.location_scale_freedom(sampled(mean, variance, noise))
        squares = (y - mean[..., :1]).square() + variance[..., :1]
        return _student_nll(squares, log_scale, freedom).sum(-1)

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the bound, with z = squares / (freedom scale^2) and its share z / (1 + z)."""
        _, log_scale, freedom = self.location_scale_freedom(sampled(mean, variance, noise))
        residual = y - mean[..., :1]
        precision = (-2 * log_scale).exp() / freedom
        z = (residual.square() + variance[..., :1]) * precision
        share = z / (1 + z)
        in_squares = (freedom + 1) / 2 * precision / (1 + z)
        in_log_scale = 1 - (freedom + 1) * share
        in_freedom = 0.5 * (torch.log1p(z) - (freedom + 1) / freedom * share - _digamma_step(freedom / 2) + 1 / freedom)
        in_sampled = torch.cat([0.3 * in_log_scale, in_log_scale, (freedom - 2) * in_freedom], dim=-1)
        in_mean = torch.cat([-2 * residual * in_squares, in_sampled], dim=-1)
        spreads = grad_of_variance(in_sampled, variance[..., 1:], noise[..., 1:])
        return in_mean, torch.cat([in_squares, spreads], dim=-1)


def _digamma_step(a: Tensor) -> Tensor:
    """Return digamma(a + 1/2) - digamma(a) for a >= 1, several times as fast as torch's two digammas.

    The step at a + 8 has a series in 1 / a; each smaller a adds 1 / a - 1 / (a + 1/2) = 1 / (2 a (a + 1/2)).
    """
    steps = sum(((a + k) * (2 * a + (2 * k + 1))).reciprocal_() for k in range(8))
    inverse = 1 / (a + 8)
    square = inverse * inverse
    series = square * (-1 / 64 + square * (1 / 128 + square * (-17 / 2048 + square * (31 / 2048))))
    return steps + inverse / 2 + square * (1 / 8 + series)


def differentiate(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum of `expected_nll` in the moments, by automatic differentiation."""

    def total(mean: Tensor, variance: Tensor) -> Tensor:
        return likelihood.expected_nll(mean, variance, y, noise).sum()

    grads: tuple[Tensor, Tensor] = torch.func.grad(total, argnums=(0, 1))(mean, variance)
    return grads


def _student_nll(squares: Tensor, log_scale: Tensor, freedom: Tensor) -> Tensor:
    """Return -log p of squared residuals under Student's distribution."""
    tails = (freedom + 1) / 2 * torch.log1p(squares * (-2 * log_scale).exp() / freedom)
    normaliser = torch.lgamma(freedom / 2) - torch.lgamma((freedom + 1) / 2) + 0.5 * torch.log(freedom * math.pi)
    return tails + log_scale + normaliser
