import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.testing import assert_close

from pfedbayes.maths.counts import NegativeBinomial, Poisson
from pfedbayes.maths.gaussian import rho_of
from pfedbayes.maths.likelihoods import Classification, Gaussian, Regression, StudentT, differentiate
from pfedbayes.maths.ordinal import Ordinal
from pfedbayes.maths.survival import Survival

LABELS = torch.arange(12) % 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_classification_is_the_log_probability_of_the_label():
    logits, y = 3 * randn(20, 4), torch.arange(20) % 4
    assert_close(Classification().nll(logits, y), -Categorical(logits=logits).log_prob(y))


@pytest.mark.parametrize("dimensions", [1, 3])
def test_regression_with_known_noise_is_a_gaussian_density(dimensions):
    mean, y = randn(20, dimensions), randn(20, dimensions, seed=1)
    assert_close(Regression(0.3).nll(mean, y), -Normal(mean, 0.3).log_prob(y).sum(-1))


@pytest.mark.parametrize("sigma_eps", [0.3, None])
def test_noise_has_one_column_for_each_example(sigma_eps):
    assert Regression(sigma_eps).mean_and_noise(randn(5, 4, 3))[1].shape == (5, 4, 1)


def test_noise_is_learned_and_targets_are_in_their_own_unit_unless_said_otherwise():
    assert Regression() == Regression(sigma_eps=None, unit=1.0)


def test_regression_with_learned_noise_reads_rho_from_the_last_column():
    outputs, y = randn(20, 3), randn(20, 2, seed=1)
    noise = torch.log1p(outputs[:, 2:].exp())
    assert_close(Regression().nll(outputs, y), -Normal(outputs[:, :2], noise).log_prob(y).sum(-1))


def test_likelihood_of_learned_noise_peaks_at_the_root_mean_square_residual():
    # d/ds sum [r^2 / (2 s^2) + log s] = 0 at s^2 = mean r^2.
    residuals = randn(50, 1)
    rho = rho_of(residuals.square().mean().sqrt()).requires_grad_()
    outputs = torch.cat([torch.zeros(50, 1), rho.expand(50, 1)], dim=-1)
    (gradient,) = torch.autograd.grad(Regression().nll(outputs, residuals).sum(), rho)
    assert abs(gradient) < 1e-10


def test_likelihoods_map_over_clients():
    logits, y = randn(3, 7, 4), torch.arange(21).view(3, 7) % 4
    nll = Classification().nll
    assert_close(torch.func.vmap(nll)(logits, y), torch.stack([nll(*pair) for pair in zip(logits, y, strict=True)]))


@pytest.mark.parametrize(
    ("likelihood", "width", "y"),
    [
        (Classification(), 3, LABELS), (Ordinal(classes=3), 3, LABELS), (Poisson(), 1, LABELS[:, None].double()),
        (NegativeBinomial(), 2, LABELS[:, None].double()), (Regression(0.5), 1, randn(12, 1, seed=3)),
        (Regression(), 2, randn(12, 1, seed=3)), (Gaussian(), 2, randn(12, 1, seed=3)),
        (StudentT(), 4, randn(12, 1, seed=3)),
        (Survival((0.5, 1.5), 0.7), 3, torch.stack([randn(12, seed=3).abs(), LABELS % 2], 1)),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_expected_loss(likelihood, width, y):
    mean, variance, noise = randn(12, width), randn(12, width, seed=1).square() + 0.1, randn(12, width, seed=2)
    found = likelihood.grad_expected_nll(mean, variance, y, noise)
    for ours, exact in zip(found, differentiate(likelihood, mean, variance, y, noise), strict=True):
        assert_close(ours, exact)
