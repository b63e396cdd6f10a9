import numpy as np
import pytest
import torch
from scipy import special
from torch.distributions import Categorical, Normal
from torch.testing import assert_close

from pfedbayes.maths.counts import NegativeBinomial, Poisson
from pfedbayes.maths.gaussian import rho_of
from pfedbayes.maths.likelihoods import (
    Classification,
    Gaussian,
    Regression,
    StudentT,
    _digamma_step,
    differentiate,
    is_of_labels,
    is_of_numbers,
)
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


def sampled(likelihood, mean, variance, y, noise):
    """Return the mean over noise (K, n, O) of the loss of sampled outputs, and its standard error."""
    values = likelihood.nll(mean + variance.sqrt() * noise, y.expand(len(noise), *y.shape))
    return values.mean(0), values.std(0) / len(noise) ** 0.5


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", [Regression, Gaussian])
def test_the_expected_loss_of_a_regression_is_exact_in_the_means(kind, known):
    likelihood, width, targets = kind(0.7 if known else None), 2 if known else 3, 2
    mean, variance, y = randn(5, width), randn(5, width, seed=1).square(), randn(5, targets, seed=2)
    noise = randn(40_000, 5, width, seed=3)
    if not known:  # one noise level
        noise[..., -1] = noise[:1, :, -1]
    exact, error = sampled(likelihood, mean, variance, y, noise)
    found = likelihood.expected_nll(mean, variance, y, noise[0])
    assert found.shape == (5,)
    assert ((found - exact).abs() < 5 * error).all()


def test_the_expected_loss_of_labels_is_that_of_the_sampled_logits():
    mean, variance, noise = randn(12, 3), randn(12, 3, seed=1).square(), randn(12, 3, seed=2)
    for likelihood in (Classification(), Ordinal(classes=3)):
        expected = likelihood.nll(mean + variance.sqrt() * noise, LABELS)
        assert_close(likelihood.expected_nll(mean, variance, LABELS, noise), expected)


def test_the_expected_loss_of_student_is_at_the_expected_square():
    mean, variance, y, noise = randn(5, 4), randn(5, 4, seed=1).square(), randn(5, 1, seed=2), randn(5, 4, seed=3)
    drawn = mean + variance.sqrt() * noise
    squares = (y - mean[:, :1]).square() + variance[:, :1]
    drawn[:, :1] = y - squares.sqrt()
    assert_close(StudentT().expected_nll(mean, variance, y, noise), StudentT().nll(drawn, y))


def test_gradients_without_variance_are_finite():
    for likelihood, width, y in ((Classification(), 3, LABELS), (StudentT(), 4, randn(12, 1, seed=3))):
        found = likelihood.grad_expected_nll(
            randn(12, width), torch.zeros(12, width, dtype=torch.float64), y, randn(12, width, seed=2)
        )
        assert all(each.isfinite().all() for each in found)


def test_labels_are_predicted_as_probabilities():
    outputs = randn(2, 7, 3)
    for likelihood in (Classification(), Ordinal(classes=3)):
        chances = likelihood.point(outputs)
        assert_close(chances, likelihood.logits(outputs).softmax(-1))
        assert_close(chances.sum(-1), torch.ones(2, 7, dtype=torch.float64))


def test_student_has_the_mean_and_deviation_of_its_density():
    outputs = randn(7, 4)
    freedom, scale = 2 + 8 * outputs[:, 3].exp(), (outputs[:, 2] + 0.3 * outputs[:, 1]).exp()
    known = torch.distributions.StudentT(freedom, outputs[:, 0], scale)
    mean, deviation = StudentT().mean_and_noise(outputs)
    assert_close(mean[:, 0], known.mean)
    assert_close(deviation[:, 0], known.stddev)
    y = randn(7, 1, seed=1)
    assert_close(StudentT().nll(outputs, y), -known.log_prob(y[:, 0]))


def test_numbers_are_predicted_as_their_mean():
    outputs = randn(2, 7, 4)
    assert_close(Regression(0.5).point(outputs), outputs)
    assert_close(Regression().point(outputs), outputs[..., :3])
    assert_close(StudentT().point(outputs), outputs[..., :1])
    assert_close(Poisson(3.0).point(outputs), 3 * outputs[..., :1].exp())


def test_the_gist_has_one_row_for_each_example():
    outputs = randn(5, 7, 3)
    assert_close(Regression().gist(outputs), outputs.mean(0))
    assert_close(Poisson(3.0).gist(outputs), 3 * outputs[..., :1].exp().mean(0))
    for likelihood in (Classification(), Ordinal(classes=3)):
        assert_close(likelihood.gist(outputs), likelihood.point(outputs).mean(0).log())
    for likelihood in (Regression(), Poisson(), Ordinal(classes=3), Classification()):
        assert likelihood.pooled_metrics == ()
    for likelihood in (Regression(), Poisson(), Ordinal(classes=3)):
        assert likelihood.pooled_scores(outputs, LABELS).numel() == 0


@pytest.mark.parametrize("likelihood", [Regression(0.5, unit=3.0), Regression(unit=3.0), Gaussian(unit=3.0)])
def test_losses_have_an_offset_to_original_units(likelihood):
    """The density of 3 y at 3 times its value is a third."""
    assert likelihood.offset == pytest.approx(float(torch.tensor(3.0, dtype=torch.float64).log()))


def test_labels_and_counts_have_no_unit():
    assert [each.offset for each in (Classification(), Ordinal(), Poisson(3.0), NegativeBinomial(3.0))] == [0.0] * 4


def test_the_interval_of_a_regression_has_the_variance_of_the_mixture():
    outputs = randn(9, 6, 2)
    low, high = Regression(0.7).interval(outputs, 0.9)
    middle, deviation = outputs.mean(0), (outputs.var(0, unbiased=False) + 0.49).sqrt()
    assert_close(low, middle - 1.6448536269514722 * deviation)
    assert_close(high, middle + 1.6448536269514722 * deviation)


def test_labels_and_numbers_are_told_apart():
    labels, numbers = (Classification(), Ordinal()), (Regression(), StudentT(), Poisson(), NegativeBinomial())
    assert all(is_of_labels(each) and not is_of_numbers(each) for each in labels)
    assert all(is_of_numbers(each) and not is_of_labels(each) for each in numbers)


SCORED = [
    (Classification(), 3), (Classification(True), 3), (Classification(True), 2), (Ordinal(classes=3), 3),
    (Regression(), 2), (Gaussian(0.5, 3.0), 1), (Poisson(2.0), 1), (NegativeBinomial(2.0), 2), (StudentT(None, 3.0), 4),
]  # fmt: skip


@pytest.mark.parametrize(("likelihood", "width"), SCORED, ids=str)
def test_many_models_are_scored_as_each_alone(likelihood, width):
    outputs = randn(2, 3, 4, 12, width)
    if likelihood.predicts == "labels":
        y = (torch.arange(12) % width).expand(2, 3, 12).contiguous()
    else:
        y = torch.arange(12.0, dtype=torch.float64)[:, None].expand(2, 3, 12, 1)
        if width > 1:  # constants
            outputs[..., width // 2 :] = outputs[..., :1, width // 2 :]
    assert likelihood.nll(outputs[0, 0, 0], y[0, 0]).shape == (12,)
    together = likelihood.scores(outputs, y)
    assert together.shape == (2, 3, len(likelihood.metrics))
    for a in range(2):
        for b in range(3):
            assert_close(together[a, b], likelihood.scores(outputs[a, b], y[a, b]))


@pytest.mark.parametrize(("likelihood", "width"), [pair for pair in SCORED if pair[0].predicts == "numbers"], ids=str)
def test_scores_are_means_over_rows(likelihood, width):
    outputs, y = randn(4, 6, width), torch.arange(6.0, dtype=torch.float64)[:, None]
    if width > 1:
        outputs[..., width // 2 :] = outputs[..., :1, width // 2 :]
    each = torch.stack([likelihood.scores(outputs[:, k : k + 1], y[k : k + 1]) for k in range(6)])
    together = likelihood.scores(outputs, y)
    for k, name in enumerate(likelihood.metrics):
        mean = each[:, k].square().mean().sqrt() if name == "rmse" else each[:, k].mean()
        assert name not in ("rmse", "nll", "coverage", "crps") or float(together[k]) == pytest.approx(float(mean))


def test_the_step_of_digamma_is_that_of_scipy():
    a = np.concatenate([np.linspace(1, 40, 200), np.logspace(2, 4, 20)])
    exact = special.digamma(a + 0.5) - special.digamma(a)
    np.testing.assert_allclose(_digamma_step(torch.from_numpy(a)), exact, rtol=1e-9)
    np.testing.assert_allclose(_digamma_step(torch.from_numpy(a).float()), exact, rtol=1e-6)
