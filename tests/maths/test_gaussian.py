import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from pfedbayes.maths.gaussian import (
    MeanField,
    barycentre,
    clip_precision,
    from_natural,
    gaussian,
    grad_in_rho,
    grad_of_variance,
    kl,
    kl_grad_q,
    kl_grad_to_cavity,
    kl_grad_w,
    mean_field,
    natural,
    rho_of,
    sample,
    sampled,
    sigma,
)
from pfedbayes.maths.random import Purpose, key, normal

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return normal(shape, key(seed, Purpose.INIT), dtype, CPU)


def random_v(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(..., 2, T) with means of both signs and sigmas from about 0.01 to 4."""
    mu, rho = draw(2, *shape, seed=seed, dtype=dtype)
    return torch.stack([mu, 1.2 * rho - 1], dim=-2)


def as_normal(v: torch.Tensor) -> Normal:
    mu, rho = v.unbind(-2)
    return Normal(mu, torch.log1p(rho.exp()))


def in_v(v: torch.Tensor, grad_mu: torch.Tensor, grad_sigma: torch.Tensor) -> torch.Tensor:
    """A gradient in means and standard deviations as one in v."""
    rho = v.select(-2, 1)
    return torch.stack([grad_mu, grad_in_rho(grad_sigma, rho)], dim=-2)


# log(1 + exp(rho)) on the grid of the paper's tuning table; -2.5 is the paper's choice.
@pytest.mark.parametrize(
    ("rho", "expected"), [(-1, 0.313262), (-1.5, 0.201413), (-2, 0.126928), (-2.5, 0.0788897), (-3, 0.0485874)]
)
def test_sigma_is_softplus(rho, expected):
    assert float(sigma(torch.tensor(rho, dtype=torch.float64))) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(math.log1p(math.exp(rho)), rel=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 3e-6)])
def test_rho_of_inverts_sigma_from_tiny_to_huge(dtype, rtol):
    wanted = torch.logspace(-8, 3, 400, dtype=dtype)
    assert_close(sigma(rho_of(wanted)), wanted, rtol=rtol, atol=0)


def test_gaussian_gives_every_parameter_its_mean_and_the_same_rho():
    mu = draw(7)
    assert_close(gaussian(mu, -2.5), torch.stack([mu, torch.full((7,), -2.5, dtype=mu.dtype)]))


def test_samples_have_the_mean_and_standard_deviation_of_v():
    v, count = random_v(4, seed=1), 100_000
    thetas = sample(mean_field(v), draw(count, 4, seed=2))
    mu, std = v[0], torch.log1p(v[1].exp())
    assert (thetas.mean(0) - mu).abs().div(std).max() < 5 / math.sqrt(count)
    # The standard error of an estimated standard deviation is std / sqrt(2 count).
    assert (thetas.std(0) / std - 1).abs().max() < 5 / math.sqrt(2 * count)


def test_gradient_in_v_is_that_of_a_function_of_the_sample():
    v, g = random_v(6, seed=3).requires_grad_(), draw(6, seed=4)
    theta = sample(mean_field(v), g)
    value = (theta.sin() * theta).sum()
    (expected,) = torch.autograd.grad(value, v, retain_graph=True)
    (grad_theta,) = torch.autograd.grad(value, theta)
    assert_close(in_v(v.detach(), grad_theta, grad_theta * g), expected)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_kl_agrees_with_torch_distributions(shape):
    q, w = random_v(*shape, seed=5), random_v(*shape, seed=6)
    assert_close(
        kl(mean_field(q), mean_field(w)), kl_divergence(as_normal(q), as_normal(w)).sum(-1), rtol=1e-12, atol=0
    )


def test_kl_agrees_with_monte_carlo():
    q, w, count = random_v(3, seed=7), random_v(3, seed=8), 200_000
    thetas = sample(mean_field(q), draw(count, 3, seed=9))
    ratios = (as_normal(q).log_prob(thetas) - as_normal(w).log_prob(thetas)).sum(-1)
    assert abs(ratios.mean() - kl(mean_field(q), mean_field(w))) < 5 * ratios.std() / math.sqrt(count)


def test_kl_is_zero_at_equality_and_positive_elsewhere():
    v = random_v(5, seed=10)
    own = mean_field(v)
    assert float(kl(own, own)) == 0
    for entry in range(v.numel()):
        for shift in (-0.01, 0.01):
            moved = v.flatten().index_add(0, torch.tensor([entry]), torch.tensor([shift], dtype=v.dtype)).view_as(v)
            assert kl(mean_field(moved), own) > 0
            assert kl(own, mean_field(moved)) > 0


@pytest.mark.parametrize(("gradient", "argument"), [(kl_grad_q, 0), (kl_grad_w, 1)])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_kl_gradients_agree_with_autograd(gradient, argument, shape):
    pair = [random_v(*shape, seed=11).requires_grad_(), random_v(*shape, seed=12).requires_grad_()]
    divergence = kl_divergence(*(as_normal(v) for v in pair)).sum()
    (expected,) = torch.autograd.grad(divergence, pair[argument])
    found = gradient(*(mean_field(v.detach()) for v in pair))
    own = pair[argument].detach()
    assert_close(in_v(own, *found), expected, rtol=1e-10, atol=1e-12)


def test_kl_gradients_leave_their_arguments_alone_and_have_the_weight_of_the_term():
    q, w = (mean_field(random_v(5, seed=seed)) for seed in (11, 12))
    copies = [part.clone() for part in (*q, *w)]
    plain, weighted = kl_grad_q(q, w), kl_grad_q(q, w, zeta=3.0)
    kl_grad_w(q, w)
    assert all(torch.equal(part, copy) for part, copy in zip((*q, *w), copies, strict=True))
    assert_close(list(weighted), [3 * part for part in plain])


@pytest.mark.parametrize("gradient", [kl_grad_q, kl_grad_w])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_gradients_vanish_to_the_last_bit_at_equality(gradient, dtype):
    v = random_v(10_000, seed=13, dtype=dtype)
    assert all(torch.equal(part, torch.zeros_like(part)) for part in gradient(mean_field(v), mean_field(v.clone())))


def test_samples_without_variance_have_a_finite_gradient():
    mean, noise = draw(5), draw(5, seed=1)
    variance = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    drawn = sampled(mean, variance, noise)
    assert_close(drawn.detach(), mean, rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(drawn.sum(), variance)
    assert grad.isfinite().all()
    assert_close(grad_of_variance(torch.ones(5, dtype=torch.float64), variance.detach(), noise), grad)


class TestBarycentre:
    v = random_v(4, 6, seed=14)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    share = weights / weights.sum()

    def objective(self, w: torch.Tensor) -> torch.Tensor:
        each = kl_divergence(as_normal(self.v), as_normal(w[None].expand_as(self.v))).sum(-1)
        return self.share @ each

    def test_gradient_of_the_average_kl_is_zero(self):
        w = barycentre(self.v, self.weights).requires_grad_()
        (gradient,) = torch.autograd.grad(self.objective(w), w)
        assert gradient.abs().max() < 1e-12

    def test_no_perturbation_lowers_the_average_kl(self):
        w = barycentre(self.v, self.weights)
        least = self.objective(w)
        for seed in range(200):
            scale = 10.0 ** -(seed % 4)
            assert self.objective(w + scale * draw(2, 6, seed=100 + seed)) > least

    def test_minimum_is_half_the_gap_between_the_log_variances(self):
        # At the minimum the quadratic terms average to 1, so that only 1/2 log(sigma_w^2 / sigma_i^2) is left.
        w = barycentre(self.v, self.weights)
        gap = sigma(w[1]).square().log().sum() - self.share @ sigma(self.v[:, 1]).square().log().sum(-1)
        assert_close(self.objective(w), 0.5 * gap, rtol=1e-12, atol=0)

    def test_variance_is_the_mean_second_moment_minus_the_squared_mean(self):
        mu, rho = self.v.unbind(-2)
        moment = self.share @ (sigma(rho).square() + mu.square())
        w = barycentre(self.v, self.weights)
        assert_close(w[0], self.share @ mu)
        assert_close(sigma(w[1]).square(), moment - (self.share @ mu).square(), rtol=1e-11, atol=0)

    def test_only_ratios_of_weights_matter(self):
        assert_close(barycentre(self.v, 7 * self.weights), barycentre(self.v, self.weights))

    def test_equal_gaussians_are_their_own_barycentre(self):
        same = self.v[:1].expand(3, -1, -1)
        assert_close(barycentre(same, self.weights[:3]), self.v[0])


class TestNaturalParameters:
    q, p = MeanField(draw(5, seed=71), draw(5, seed=72).exp()), MeanField(draw(5, seed=73), draw(5, seed=74).exp())

    def test_there_and_back(self):
        assert_close(from_natural(natural(self.q)), self.q)
        assert_close(natural(self.q)[1], self.q.sigma.pow(-2))

    def test_a_product_of_densities_is_the_sum_of_parameters(self):
        product, x = from_natural(natural(self.q) + natural(self.p)), draw(40, 5, seed=75)

        def log_density(each):
            return torch.distributions.Normal(each.mu, each.sigma).log_prob(x)

        gap = log_density(self.q) + log_density(self.p) - log_density(product)
        assert_close(gap, gap[:1].expand_as(gap))  # the normaliser, for each weight

    def test_precisions_are_clipped_with_their_means(self):
        factor = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 0.0]])
        assert_close(clip_precision(factor), torch.tensor([[1.0, 0.0, 0.0], [0.5, 1e-6, 1e-6]]))

    def test_gradient_of_the_divergence_from_a_cavity(self):
        factor = 0.3 * natural(MeanField(draw(5, seed=76), self.p.sigma))
        cavity = from_natural(natural(self.p) - factor)
        found, expected = kl_grad_to_cavity(self.q, self.p, factor), kl_grad_q(self.q, cavity)
        assert_close(found, expected)
        alone = kl_grad_to_cavity(self.p, self.p, torch.zeros(2, 5).double())
        assert not any(part.any() for part in alone)

    def test_an_improper_cavity_has_a_gradient_too(self):
        factor = torch.stack([draw(5, seed=77), self.p.sigma.pow(-2) + 1])
        mu, sigma = (part.clone().requires_grad_() for part in self.q)
        eta, precision = natural(self.p) - factor
        (precision * (mu.square() + sigma.square()) / 2 - eta * mu - sigma.log()).sum().backward()
        assert_close(kl_grad_to_cavity(self.q, self.p, factor), MeanField(mu.grad, sigma.grad))
