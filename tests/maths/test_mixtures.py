import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from pfedbayes.maths import mixtures
from pfedbayes.maths.likelihoods import Gaussian, StudentT
from pfedbayes.maths.mixtures import (
    GRID,
    crps,
    incomplete_beta,
    quantile,
    sorted_points,
    student_cdf,
    student_density,
    student_quantiles,
)


def test_the_incomplete_beta_function_agrees_with_scipy():
    rng = np.random.default_rng(0)
    a, b, x = rng.uniform(0.1, 200, 500), rng.uniform(0.1, 200, 500), rng.uniform(0, 1, 500)
    found = incomplete_beta(*map(torch.from_numpy, (a, b, x)))
    np.testing.assert_allclose(found, stats.beta.cdf(x, a, b), atol=1e-12)


@pytest.mark.parametrize("freedom", [2.0, 3.7, 40.0, math.inf])
def test_students_distribution_agrees_with_scipy(freedom):
    t = np.linspace(-30, 30, 101)
    known = stats.norm if math.isinf(freedom) else stats.t(freedom)
    found = student_cdf(torch.from_numpy(t), torch.tensor(freedom))
    np.testing.assert_allclose(found, known.cdf(t), atol=1e-12)
    heights = student_density(torch.from_numpy(t), torch.tensor(freedom, dtype=torch.float64))
    np.testing.assert_allclose(heights, known.pdf(t), rtol=1e-12)
    quantiles = student_quantiles(torch.tensor([freedom], dtype=torch.float64), 999)[0]
    np.testing.assert_allclose(quantiles, known.ppf((np.arange(999) + 0.5) / 999), rtol=1e-3, atol=1e-7)


def mixture(draws):
    """Outputs (K, 2, 4) for two rows, and the exact distribution function of the first."""
    rng = np.random.default_rng(draws)
    outputs = rng.normal(0, 0.7, (draws, 2, 4))
    outputs[..., 2:] = outputs[:, :1, 2:]  # constants
    location, varying, constant, tails = outputs[:, 0].T
    parts = stats.t(2 + 8 * np.exp(tails), location, np.exp(constant + 0.3 * varying))
    return torch.from_numpy(outputs), lambda z: float(parts.cdf(z).mean())


@pytest.mark.parametrize("draws", [1, 7, 100])
def test_intervals_and_crps_are_those_of_the_mixture(draws):
    outputs, cdf = mixture(draws)
    low, high = StudentT().interval(outputs, 0.9)
    assert cdf(float(low[0])) == pytest.approx(0.05, abs=2e-3)
    assert cdf(float(high[0])) == pytest.approx(0.95, abs=2e-3)
    for y in (-2.0, 0.3, 5.0):
        exact = integrate.quad(lambda z: cdf(z) ** 2, -60, y, limit=200)[0]
        exact += integrate.quad(lambda z: (1 - cdf(z)) ** 2, y, 60, limit=200)[0]
        row = outputs[:, :1]
        found = StudentT(None, 3.0).scores(row, torch.tensor([[y]], dtype=torch.float64))
        values = dict(zip(StudentT().metrics, found.tolist(), strict=True))
        assert values["crps"] == pytest.approx(3 * exact, rel=0.02)
        assert values["coverage"] == 100 * (0.05 <= cdf(y) <= 0.95)


def test_the_crps_of_one_gaussian_has_a_closed_form():
    outputs, y = torch.tensor([[[0.5]]]).double(), torch.tensor([[1.5]]).double()
    z = (1.5 - 0.5) / 2
    exact = 2 * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    scores = dict(zip(Gaussian().metrics, Gaussian(2.0).scores(outputs, y).tolist(), strict=True))
    assert scores["crps"] == pytest.approx(exact, rel=1e-3)


def test_a_student_with_light_tails_is_a_gaussian():
    rng = np.random.default_rng(0)
    location, scale, y = rng.normal(size=(5, 30)), 0.7, torch.from_numpy(rng.normal(size=(30, 1)))
    student = np.stack([location, 0 * location, 0 * location + math.log(scale), 0 * location + 12], -1)
    gaussian = torch.from_numpy(location)[..., None]
    a, b = StudentT(), Gaussian(scale)
    student = torch.from_numpy(student)
    np.testing.assert_allclose(a.nll(student, y), b.nll(gaussian, y), rtol=1e-4)
    np.testing.assert_allclose(a.scores(student, y), b.scores(gaussian, y), rtol=1e-3)
    for ours, theirs in zip(a.interval(student, 0.8), b.interval(gaussian, 0.8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_many_mixtures_are_scored_as_each_alone():
    outputs, y = torch.randn(3, 10, 6, 4).double(), torch.randn(3, 6, 1).double()
    outputs[..., 2:] = outputs[:, :, :1, 2:]
    together = StudentT().scores(outputs, y)
    each = [StudentT().scores(outputs[k], y[k]) for k in range(3)]
    np.testing.assert_allclose(together, torch.stack(each), rtol=1e-10)


@pytest.mark.parametrize("at_once", [1, 600, 1300])
def test_what_is_sorted_in_one_pass_changes_nothing(monkeypatch, at_once):
    outputs, y = torch.randn(10, 7, 4).double(), torch.randn(7, 1).double()
    outputs[..., 2:] = outputs[:, :1, 2:]
    monkeypatch.setattr(mixtures, "POINTS", mixtures.SCORED)
    scores, interval = StudentT().scores(outputs, y), StudentT().interval(outputs, 0.8)
    monkeypatch.setattr(mixtures, "AT_ONCE", at_once)
    torch.testing.assert_close(StudentT().scores(outputs, y), scores)
    torch.testing.assert_close(StudentT().interval(outputs, 0.8), interval)


@pytest.mark.parametrize(("draws", "size", "points"), [(1, 50, 50), (10, 50, 50), (7, 50, 56), (60, 50, 60)])
def test_a_mixture_has_at_least_so_many_points(draws, size, points):
    location = torch.arange(draws * 3.0).view(draws, 3).double()
    freedom = torch.full((draws,), math.inf, dtype=torch.float64)
    ((rows, found),) = sorted_points(location, torch.full_like(location, -30.0), freedom, size)
    assert list(range(3))[rows] == [0, 1, 2]
    # Components of no width are found as often as they have levels.
    expected = location.T.repeat_interleave(points // draws, 1)
    torch.testing.assert_close(found, expected.sort(-1).values)


def test_quantiles_are_linear_between_the_middles_of_steps():
    points = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for level, expected in ((0, 1), (0.125, 1), (0.25, 1.5), (0.375, 2), (0.5, 3), (0.8, 6.8), (0.875, 8), (1, 8)):
        assert float(quantile(points, level)) == pytest.approx(expected)


def test_the_crps_of_points_is_that_of_all_pairs():
    points, y = torch.randn(3, 9).double().sort(-1).values, torch.randn(3).double()
    pairs = (points[:, :, None] - points[:, None]).abs().mean((1, 2))
    torch.testing.assert_close(crps(points, y), (points - y[:, None]).abs().mean(1) - pairs / 2)


@pytest.mark.parametrize("levels", [3, 2000])
def test_quantiles_at_the_degrees_of_freedom_of_the_table_are_exact(levels):
    """Between them they are linear in 1 / freedom."""
    places = (0, 1, 5, GRID - 1)
    for place in places:
        freedom = 2 * (GRID - 1) / place if place else math.inf
        known = stats.t(freedom) if place else stats.norm
        found = student_quantiles(torch.tensor([freedom], dtype=torch.float64), levels)[0]
        np.testing.assert_allclose(found, known.ppf((np.arange(levels) + 0.5) / levels), rtol=1e-8, atol=1e-10)


def test_values_are_sorted_with_what_is_no_number_last():
    values = torch.tensor([[3.0, math.nan, -1.0], [math.inf, 0.0, -math.inf]])
    found = mixtures._sorted(values)
    assert found[0, :2].tolist() == [-1.0, 3.0]
    assert math.isnan(found[0, 2])
    assert found[1].tolist() == [-math.inf, 0.0, math.inf]
    assert values[0, 0] == 3
