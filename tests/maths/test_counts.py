import numpy as np
import pytest
import torch
from scipy import stats

from pfedbayes.maths.counts import NegativeBinomial, Poisson, _rising, capped_exp
from pfedbayes.maths.metrics import moments


def example(width, rows=50, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(0, 0.8, (rows, width))), torch.from_numpy(rng.poisson(4, (rows, 1)) * 1.0)


def scipy_of(outputs, unit):
    rate = unit * np.exp(outputs[..., 0])
    if outputs.shape[-1] == 1:
        return stats.poisson(rate)
    shape = 1 / (1e-6 + np.exp(outputs[..., 1]))
    return stats.nbinom(shape, shape / (shape + rate))


@pytest.mark.parametrize(("kind", "width"), [(Poisson, 1), (NegativeBinomial, 2)])
def test_counts_agree_with_scipy(kind, width):
    outputs, y = example(width)
    known, ours = scipy_of(outputs.numpy(), 3.0), kind(3.0)
    np.testing.assert_allclose(ours.nll(outputs, y), -known.logpmf(y[:, 0]), rtol=1e-7)
    np.testing.assert_allclose(ours.cdf(outputs, y[:, 0]), known.cdf(y[:, 0]), atol=1e-10)
    assert (ours.cdf(outputs, -torch.ones(50)) == 0).all()
    mean, noise = ours.mean_and_noise(outputs)
    np.testing.assert_allclose(mean[:, 0], known.mean())
    np.testing.assert_allclose(noise[:, 0], known.std(), rtol=1e-5)


@pytest.mark.parametrize(("kind", "width"), [(Poisson, 1), (NegativeBinomial, 2)])
def test_gradients_are_those_of_differences(kind, width):
    outputs, y = example(width, 9)
    assert torch.autograd.gradcheck(lambda x: kind(3.0).nll(x, y), (outputs.requires_grad_(),))


def test_the_likelihood_agrees_with_statsmodels():
    from statsmodels.discrete.discrete_model import NegativeBinomial as Reference

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 2)), rng.poisson(3, 40)
    weights, spread = np.array([0.3, -0.5]), 0.7
    expected = -Reference(y, x).loglike(np.append(weights, np.log(spread)))  # it takes the logarithm before a fit
    outputs = torch.from_numpy(np.stack([x @ weights, np.full(40, np.log(spread - 1e-6))], -1))
    found = NegativeBinomial().nll(outputs, torch.from_numpy(y)[:, None].double()).sum()
    assert float(found) == pytest.approx(expected)


def test_without_dispersion_it_is_poisson():
    outputs, y = example(1)
    wide = torch.cat([outputs, torch.full_like(outputs, -12)], -1)
    np.testing.assert_allclose(NegativeBinomial().nll(wide, y), Poisson().nll(outputs, y), rtol=1e-3)
    single = NegativeBinomial().nll(wide.float(), y.float())
    np.testing.assert_allclose(single, NegativeBinomial().nll(wide, y), rtol=1e-4)


@pytest.mark.parametrize(("kind", "width"), [(Poisson, 1), (NegativeBinomial, 2)])
def test_the_expected_loss_agrees_with_monte_carlo(kind, width):
    mean, y = example(width, 6)
    variance = torch.rand(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(200_000, 6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drawn = kind(2.0).nll(mean + variance.sqrt() * noise, y.expand(200_000, 6, 1)).mean(0)
    found = kind(2.0).expected_nll(mean, variance, y.expand(200_000, 6, 1), noise)
    np.testing.assert_allclose(found.expand(200_000, 6).mean(0), drawn, rtol=0.02)


def test_rates_are_continued_linearly():
    x = torch.tensor([-3.0, 0.0, 14.9, 15.0, 16.0, 40.0], dtype=torch.float64)
    expected = [*np.exp([-3.0, 0.0, 14.9, 15.0]), 2 * np.exp(15.0), 26 * np.exp(15.0)]
    np.testing.assert_allclose(capped_exp(x), expected, rtol=1e-12)


def test_dispersion_is_at_least_a_millionth():
    variance = NegativeBinomial().variance(torch.tensor([[10.0, -99.0]], dtype=torch.float64))
    np.testing.assert_allclose(variance, np.exp(10) + 1e-6 * np.exp(20), rtol=1e-12)


def test_huge_rates_stay_finite():
    outputs = torch.tensor([[1e4, 1e4]], requires_grad=True)
    for kind in (Poisson, NegativeBinomial):
        loss = kind().nll(outputs, torch.ones(1, 1)).sum()
        (gradient,) = torch.autograd.grad(loss, outputs)
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("kind", "width"), [(Poisson, 1), (NegativeBinomial, 2)])
def test_intervals_and_coverage_are_those_of_the_mixture(kind, width):
    outputs = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (20, 30, width)))
    known, ours = scipy_of(outputs.numpy(), 4.0), kind(4.0)
    low, high = (each[:, 0].numpy() for each in ours.interval(outputs, 0.9))
    for end, level in ((low, 0.05), (high, 0.95)):
        assert (known.cdf(end).mean(0) >= level).all()
        assert (known.cdf(end - 1).mean(0) < level).all()
    y = torch.arange(30)[:, None].double()
    scores = dict(zip(ours.metrics, ours.scores(outputs, y).tolist(), strict=True))
    assert scores["coverage"] == pytest.approx(100 * np.mean((y[:, 0].numpy() >= low) & (y[:, 0].numpy() <= high)))
    mean = moments(ours, outputs).mean[:, 0]
    assert scores["rmse"] == pytest.approx(float((y[:, 0] - mean).square().mean().sqrt()))
    exact = -np.log(known.pmf(y[:, 0]).mean(0)).mean()
    assert scores["nll"] == pytest.approx(exact)


@pytest.mark.parametrize("shape", [0.01, 1.0, 29.9, 30.0, 31.0, 100.0, 1e4])
def test_the_normalising_term_is_exact_for_small_and_for_large_shapes(shape):
    counts = torch.tensor([0.0, 1.0, 2.0, 7.0, 100.0, 1000.0], dtype=torch.float64)
    expected = (
        torch.lgamma(counts + shape) - torch.lgamma(torch.tensor(shape, dtype=torch.float64)) - counts * np.log(shape)
    )
    found = _rising(counts, torch.full_like(counts, shape))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=2e-7)
