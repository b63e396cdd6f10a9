from itertools import pairwise

import lifelines
import numpy as np
import pytest
import statsmodels.api as sm
import torch
from lifelines.utils import concordance_index
from scipy.integrate import quad
from torch.testing import assert_close

from pfedbayes.maths.censoring import integrated_brier
from pfedbayes.maths.survival import GRID, Survival

EDGES = (2.0, 5.0, 9.0)
OURS = Survival(EDGES, 0.2)


def example(rows=60, seed=0):
    """Outputs and targets, of which some lie at an edge, at 0, or beyond the horizon."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(5, rows).round(1)
    times[:4] = [0, 2, 5, 9]
    y = np.stack([times, rng.integers(0, 2, rows)], 1)
    return torch.from_numpy(rng.normal(0, 0.7, (rows, 1 + len(EDGES)))), torch.from_numpy(y)


def hazard(outputs, time):
    """The hazard of one row at a time, by its definition."""
    k = np.searchsorted(EDGES[:-1], time, side="left")
    return 0.2 * np.exp(outputs[0] + outputs[1 + k])


def test_density_is_the_hazard_times_the_integral_of_the_hazards_before():
    outputs, y = example()
    for row, (time, event) in zip(outputs.numpy(), y.numpy(), strict=True):
        parts = [0.0, *(edge for edge in EDGES[:-1] if edge < time), time]
        total = sum(quad(lambda t, row=row: hazard(row, t), a, b)[0] for a, b in pairwise(parts))
        found = OURS.nll(torch.from_numpy(row)[None], torch.tensor([[time, event]], dtype=torch.float64))
        assert float(found) == pytest.approx(total - event * np.log(hazard(row, time)), rel=1e-9)


def test_loss_is_least_where_lifelines_and_a_poisson_regression_have_their_estimates():
    rng = np.random.default_rng(1)
    times, event = rng.exponential(4, 300), rng.integers(0, 2, 300)
    fitted = lifelines.PiecewiseExponentialFitter(breakpoints=EDGES[:-1]).fit(times, event)
    # A Poisson regression with one row per person and interval, whose offset is the logarithm of the time at risk.
    ends = np.array([0.0, *EDGES[:-1], np.inf])
    at_risk = times[:, None].clip(ends[:-1], ends[1:]) - ends[:-1]
    happened = event[:, None] * ((times[:, None] > ends[:-1]) & (times[:, None] <= ends[1:]))
    person, interval = np.nonzero(at_risk)
    offset = np.log(at_risk[person, interval])
    poisson = sm.GLM(happened[person, interval], np.eye(3)[interval], sm.families.Poisson(), offset=offset).fit()
    constants = torch.from_numpy(poisson.params - np.log(0.2)).requires_grad_()
    outputs = torch.cat([torch.zeros(1), constants]).expand(300, -1)
    loss = OURS.nll(outputs, torch.from_numpy(np.stack([times, event], 1))).sum()
    (slope,) = torch.autograd.grad(loss, constants)
    assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)
    assert float(loss.detach()) == pytest.approx(-fitted.log_likelihood_, rel=1e-6)


def test_survival_curves_are_those_of_lifelines():
    rng = np.random.default_rng(2)
    times, event = rng.exponential(4, 200), rng.integers(0, 2, 200)
    fitted = lifelines.PiecewiseExponentialFitter(breakpoints=EDGES[:-1]).fit(times, event)
    rates = 1 / np.array([getattr(fitted, f"lambda_{k}_") for k in range(3)])
    outputs = torch.from_numpy(np.concatenate([[0.0], np.log(rates / 0.2)]))[None, None]
    at = torch.tensor([0.0, 1.0, 2.0, 4.5, 9.0, 12.0], dtype=torch.float64)
    found = OURS.curve(outputs, at)[0]
    np.testing.assert_allclose(found, fitted.survival_function_at_times(at.numpy()).to_numpy(), rtol=1e-9)
    np.testing.assert_allclose(OURS.point(outputs[0])[0], OURS.curve(outputs, torch.tensor(EDGES).double())[0])


def test_expected_loss_is_the_mean_over_samples():
    outputs, y = example(8)
    variance = torch.full_like(outputs, 0.3)
    noise = torch.randn(20_000, *outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = OURS.nll(outputs + 0.3**0.5 * noise, y).mean(0)
    assert_close(OURS.expected_nll(outputs, variance, y, noise[0]), sampled, rtol=0.05, atol=0.05)


def test_untrained_outputs_predict_the_pooled_rate_and_huge_ones_stay_finite():
    _, y = example()
    assert_close(OURS.nll(torch.zeros(60, 4, dtype=torch.float64), y), 0.2 * y[:, 0] - y[:, 1] * np.log(0.2))
    for size in (1e4, -1e4):
        outputs = torch.full((60, 4), size)
        zeros = torch.zeros_like(outputs)
        values = [OURS.nll(outputs, y.float()), *OURS.grad_expected_nll(outputs, zeros + 1, y.float(), zeros)]
        assert all(each.isfinite().all() for each in values)


def test_quantiles_of_the_mixture_invert_its_survival_curve():
    outputs, _ = example(40)
    draws = torch.stack([outputs, outputs + 0.5, outputs - 1])
    for level in (0.05, 0.3, 0.5, 0.95):
        found = OURS.quantile(draws, level)
        inside = found.isfinite()
        assert_close(OURS.survival(draws, found)[inside], torch.full((int(inside.sum()),), 1 - level).double())
        beyond = OURS.survival(draws, torch.full((40,), EDGES[-1]).double()) > 1 - level
        assert torch.equal(~inside, beyond)
    assert 0 < OURS.quantile(draws, 0.5).isinf().sum() < 40


def test_scores_are_those_of_the_mixture():
    outputs, y = example(50, seed=5)
    draws = torch.stack([outputs, outputs.flip(0)])
    ranked, nll, brier = OURS.scores(draws, y).tolist()
    chances = torch.stack([(-OURS.nll(each, y)).exp() for each in draws]).mean(0)
    assert nll == pytest.approx(float(-chances.log().mean()))
    middles = (np.arange(GRID) + 0.5) * 9 / GRID
    curves = np.stack([OURS.survival(draws, torch.full((50,), t).double()).numpy() for t in middles], 1)
    expected = integrated_brier(torch.from_numpy(curves), torch.from_numpy(middles), *y.T)
    assert brier == pytest.approx(float(expected), rel=1e-9)
    assert ranked == pytest.approx(concordance_index(y[:, 0], curves.mean(1), y[:, 1]))
    both = OURS.scores(torch.stack([draws, draws]), torch.stack([y, y]))
    assert_close(both, torch.tensor([[ranked, nll, brier]] * 2).double())


def test_rows_without_events_have_no_c_index():
    outputs, y = example()
    y[:, 1] = 0
    assert OURS.scores(outputs[None], y).isnan().tolist() == [True, False, False]
