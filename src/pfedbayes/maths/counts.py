"""Likelihoods of counts: Poisson, and the negative binomial, whose variance exceeds the mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedbayes.maths import metrics
from pfedbayes.maths.gaussian import sampled
from pfedbayes.maths.likelihoods import differentiate
from pfedbayes.maths.mixtures import incomplete_beta

CAP = 15.0  # log-rates beyond are continued linearly, so that no rate overflows
LARGE = 30.0  # shapes beyond use Stirling's series, which loses no digits
SMALLEST = 1e-6  # dispersion


def capped_exp(x: Tensor) -> Tensor:
    """Return exp(x) up to CAP, and the tangent there beyond."""
    return x.clamp(max=CAP).exp() * (1 + (x - CAP).clamp(min=0))


@dataclass(frozen=True)
class Poisson:
    """Counts y (n, 1) with the rate unit * exp(f(x)); outputs (n, 1) are f."""

    unit: float = 1.0
    """Mean count of the training data, which the untrained network predicts."""

    task = "count"
    predicts = "numbers"

    @property
    def metrics(self) -> tuple[str, ...]:
        return metrics.METRICS["count"]

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def offset(self) -> float:
        return 0.0

    def rate(self, outputs: Tensor) -> Tensor:
        """Return the expected count (...)."""
        rate: Tensor = self.unit * capped_exp(outputs[..., 0])
        return rate

    def variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of the count (...)."""
        return self.rate(outputs)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return P(count <= y) for whole numbers y >= -1, broadcast to the outputs (...)."""
        rate = self.rate(outputs).double()
        below = torch.special.gammaincc(y.double().clamp_min(0) + 1 + 0 * rate, rate)
        return torch.where(y < 0, 0.0, below)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-probability of each count."""
        return self._nll(self.rate(outputs), outputs[..., 0], y[..., 0])

    def _nll(self, rate: Tensor, log_rate: Tensor, count: Tensor) -> Tensor:
        unit = torch.as_tensor(self.unit, dtype=rate.dtype).log()
        return rate - count * (log_rate + unit) + torch.lgamma(count + 1)

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the expectation in closed form: E[exp(f)] = exp(m + v/2), capped."""
        rate = self.unit * capped_exp(mean[..., 0] + variance[..., 0] / 2)
        return self._nll(rate, mean[..., 0], y[..., 0])

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return differentiate(self, mean, variance, y, noise)

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expected count and the standard deviation of the count, each (..., 1)."""
        return self.rate(outputs)[..., None], self.variance(outputs).sqrt()[..., None]

    def point(self, outputs: Tensor) -> Tensor:
        return self.rate(outputs)[..., None]

    def interval(self, outputs: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the ends (..., n, 1) of the shortest central interval of whole numbers of the mixture."""
        low, high = (self._quantile(outputs, level) for level in ((1 - coverage) / 2, (1 + coverage) / 2))
        return low[..., None], high[..., None]

    def _quantile(self, outputs: Tensor, level: float) -> Tensor:
        """Return the smallest count (..., n) whose distribution function is at least `level`."""
        predicted = metrics.moments(self, outputs)
        # By Cantelli's inequality; the lower end is below every count.
        reach = predicted.deviation.double() * (1 / (1 - level)) ** 0.5
        high = (predicted.mean.double() + reach).ceil()[..., 0]
        low = torch.full_like(high, -1.0)
        while bool((high - low > 1).any()):
            middle = ((low + high) / 2).floor()
            enough = self.cdf(outputs, middle.unsqueeze(-2)).mean(-2) >= level
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        found: Tensor = high.to(outputs.dtype)
        return found

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the metrics of the mixture. A count is covered if it lies in the central 90 % interval."""
        rmse, nll, _, *spreads = metrics.regression_scores(_Counts(self), outputs, y).unbind(-1)
        count = y[..., 0].unsqueeze(-2)
        above = self.cdf(outputs, count).mean(-2) >= 0.05
        below = self.cdf(outputs, count - 1).mean(-2) < 0.95
        covered = 100 * (above & below).to(rmse.dtype).mean(-1)
        return torch.stack([rmse, nll, covered, *spreads], dim=-1)

    def gist(self, outputs: Tensor) -> Tensor:
        return self.rate(outputs).mean(-2)[..., None]

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        return gist.new_empty(0)


@dataclass(frozen=True)
class NegativeBinomial(Poisson):
    """Counts with mean m = unit * exp(f(x)) and variance m + a m^2; outputs (n, 2) are f and log a.

    log a is the same for every input. As a falls to 0, this becomes the Poisson distribution.
    """

    def _dispersion(self, outputs: Tensor) -> Tensor:
        return SMALLEST + capped_exp(outputs[..., 1])

    def variance(self, outputs: Tensor) -> Tensor:
        rate = self.rate(outputs)
        return rate + self._dispersion(outputs) * rate.square()

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        rate, shape = self.rate(outputs).double(), 1 / self._dispersion(outputs).double()
        below = incomplete_beta(shape, y.double().clamp_min(0) + 1, shape / (shape + rate))
        return torch.where(y < 0, 0.0, below)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-probability of each count."""
        count, rate, spread = y[..., 0], self.rate(outputs), self._dispersion(outputs)
        log_mean = outputs[..., 0] + torch.as_tensor(self.unit, dtype=rate.dtype).log()
        ratio = torch.log1p(spread * rate)
        # log Gamma(y + r) / (Gamma(r) r^y) - (r + y) log(1 + m/r) + y log m - log y!
        log_prob = _rising(count, 1 / spread) - ratio / spread - count * ratio + count * log_mean
        return torch.lgamma(count + 1) - log_prob

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of sampled outputs."""
        return self.nll(sampled(mean, variance, noise), y)


@dataclass(frozen=True)
class _Counts:
    """Counts as numbers whose unit is 1."""

    own: Poisson
    unit: float = 1.0

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.own.mean_and_noise(outputs)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.own.nll(outputs, y)


def _rising(count: Tensor, shape: Tensor) -> Tensor:
    """Return log Gamma(y + r) - log Gamma(r) - y log r."""
    few, many = shape.clamp(max=LARGE), shape.clamp(min=LARGE)
    direct = torch.lgamma(count + few) - torch.lgamma(few) - count * few.log()
    series = (count + many - 0.5) * torch.log1p(count / many) - count + (1 / (count + many) - 1 / many) / 12
    return torch.where(shape < LARGE, direct, series)
