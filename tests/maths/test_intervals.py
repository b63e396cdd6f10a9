import math

import pytest
from scipy.optimize import brentq
from scipy.stats import beta, binom

from pfedbayes.maths.intervals import (
    at_most,
    binary_kl,
    binomial_lower,
    binomial_upper,
    kl_inverse,
    pac_bayes_kl,
    sampled_mean_upper,
)


@pytest.mark.parametrize("q", [0.0, 0.03, 0.4, 0.9])
@pytest.mark.parametrize("divergence", [1e-4, 0.02, 0.5])
def test_kl_inverse_solves_its_equation(q, divergence):
    p = kl_inverse(q, divergence)
    assert q < p < 1
    assert binary_kl(q, p) == pytest.approx(divergence, rel=1e-6)
    assert p == pytest.approx(brentq(lambda p: binary_kl(q, p) - divergence, q + 1e-12, 1 - 1e-12), abs=1e-9)


def test_kl_at_the_ends():
    assert binary_kl(0.3, 0.3) == 0
    assert binary_kl(0.3, 0.0) == binary_kl(0.3, 1.0) == math.inf
    assert kl_inverse(0.0, 0.1) == pytest.approx(1 - math.exp(-0.1))  # kl(0 || p) = -log(1 - p)
    assert kl_inverse(1.0, 0.1) == 1
    assert kl_inverse(0.2, 1e9) == pytest.approx(1)  # vacuous


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 100), (450, 3000), (99, 100), (100, 100)])
def test_binomial_bounds_are_those_of_clopper_and_pearson(errors, trials):
    assert at_most(errors, trials, 0.2) == pytest.approx(binom.cdf(errors, trials, 0.2), abs=1e-12)
    upper = 1.0 if errors == trials else beta.ppf(0.95, errors + 1, trials - errors)
    lower = 0.0 if errors == 0 else beta.ppf(0.05, errors, trials - errors + 1)
    assert binomial_upper(errors, trials, 0.05) == pytest.approx(upper)
    assert binomial_lower(errors, trials, 0.05) == pytest.approx(lower, abs=1e-12)


def test_without_trials_nothing_is_known():
    assert binomial_upper(0, 0, 0.05) == 1
    assert (at_most(3, 10, 0.0), at_most(3, 10, 1.0), at_most(10, 10, 1.0)) == (1, 0, 1)


# From the formula in another order: p with size * kl(gibbs || p) - kl = log(2 sqrt(size) / delta).
def test_pac_bayes_kl_by_its_formula():
    p = pac_bayes_kl(0.08, 20.0, 250, 0.025)
    assert math.exp(250 * binary_kl(0.08, p) - 20.0) == pytest.approx(2 * math.sqrt(250) / 0.025, rel=1e-6)
    assert pac_bayes_kl(0.08, 0.0, 250, 0.025) < p < pac_bayes_kl(0.08, 40.0, 250, 0.025)


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_each_bound_holds_as_often_as_it_says(rate):
    """Exact, over all outcomes of a binomial: the probability that the bound lies below the rate."""
    trials, delta = 60, 0.1
    for bound in (
        lambda k: binomial_upper(k, trials, delta),
        lambda k: sampled_mean_upper(k / trials, trials, delta),
        lambda k: pac_bayes_kl(k / trials, 0.0, trials, delta),
    ):
        fails = sum(binom.pmf(k, trials, rate) for k in range(trials + 1) if bound(k) < rate)
        assert fails <= delta
    too_low = sum(binom.pmf(k, trials, rate) for k in range(trials + 1) if (k / trials) < rate)
    assert too_low > delta  # so that a bound that forgets its slack would be seen


def test_each_bound_is_as_tight_as_its_formula():
    # Closed forms without an error: 1 - delta^(1/n), and 1 - exp(-log(1/delta) / n).
    for delta in (0.02, 0.05, 0.3):
        assert binomial_upper(0, 40, delta) == pytest.approx(1 - delta ** (1 / 40), rel=1e-9)
        assert binomial_lower(40, 40, delta) == pytest.approx(delta ** (1 / 40), rel=1e-9)
        assert sampled_mean_upper(0.0, 40, delta) == pytest.approx(1 - delta ** (1 / 40), rel=1e-9)
        slack = (3.0 + math.log(2 * math.sqrt(40) / delta)) / 40
        assert pac_bayes_kl(0.0, 3.0, 40, delta) == pytest.approx(1 - math.exp(-slack), rel=1e-9)
