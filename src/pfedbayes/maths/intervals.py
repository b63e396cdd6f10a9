"""Confidence bounds on an error rate, given a finite number of examples. Python floats, double precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def binary_kl(q: float, p: float) -> float:
    """Return kl(q || p) = q log(q/p) + (1-q) log((1-q)/(1-p)), the KL divergence of Bernoulli distributions."""
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)


def kl_inverse(q: float, divergence: float) -> float:
    """Return the largest p with kl(q || p) <= divergence."""
    return _last(lambda p: binary_kl(q, p) <= divergence, q)


def at_most(errors: int, trials: int, rate: float) -> float:
    """Return P(X <= errors) for X ~ Binomial(trials, rate)."""
    if errors >= trials or rate <= 0:
        return 1.0
    if rate >= 1:
        return 0.0
    k = torch.arange(errors + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return min(1.0, math.exp(torch.logsumexp(ways + k * math.log(rate) + (n - k) * math.log1p(-rate), 0)))


def binomial_upper(errors: int, trials: int, delta: float) -> float:
    """Return the Clopper–Pearson upper bound on the rate, given `errors` in independent trials.

    The rate is at most this bound with probability at least 1 - delta, in finite samples.
    """
    from scipy.special import betaincinv  # noqa: PLC0415, the core runs without it

    return float(betaincinv(errors + 1, trials - errors, 1 - delta)) if errors < trials else 1.0


def binomial_lower(errors: int, trials: int, delta: float) -> float:
    """Return the Clopper–Pearson lower bound."""
    return 1 - binomial_upper(trials - errors, trials, delta)


def sampled_mean_upper(mean: float, draws: int, delta: float) -> float:
    """Return an upper bound on the expectation of independent numbers in [0, 1], given the mean of some draws.

    It holds with probability at least 1 - delta (Hoeffding 1963, Theorem 1).
    """
    return kl_inverse(mean, math.log(1 / delta) / draws)


def pac_bayes_kl(gibbs: float, kl: float, size: int, delta: float) -> float:
    """Return the PAC-Bayes-kl bound on the Gibbs error (Seeger 2002, Maurer 2004).

    It is the p with kl(gibbs || p) = (kl + log(2 sqrt(size) / delta)) / size. With probability at least 1 - delta it
    holds for all posteriors at once.

    gibbs: the posterior's expected error on `size` examples. kl: its KL divergence in nats from a prior that does not
    depend on these examples.
    """
    return kl_inverse(gibbs, (kl + math.log(2 * math.sqrt(size) / delta)) / size)


def _last(holds: Callable[[float], bool], low: float) -> float:
    """Return the largest number in [low, 1] up to which a condition holds, by bisection, rounded upwards."""
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
