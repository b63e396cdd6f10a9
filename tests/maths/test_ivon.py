"""IVON, on losses whose posterior is known."""

import pytest
import torch
from torch.testing import assert_close

from federations import randn, same_bits
from pfedbayes.maths.optim import ivon, ivon_hessian, ivon_init


def test_the_hessian_is_moved_along_an_exponential_map():
    hessian, estimate = randn(1000, seed=1).exp(), 30 * randn(1000, seed=2)
    delta, beta2 = 0.01, 0.9
    x = (1 - beta2) * (estimate - hessian) / (hessian + delta)
    moved = ivon_hessian(hessian, estimate, delta, beta2)
    assert_close(moved + delta, (hessian + delta) * (1 + x + x.square() / 2), rtol=1e-10, atol=1e-10)
    assert (moved + delta >= (hessian + delta) / 2 - 1e-12).all()


def test_the_precision_stays_positive_but_the_hessian_need_not():
    hessian, noise = torch.full((50,), 0.5).double(), randn(1000, 50)
    lowest = hessian
    for k in range(1000):
        hessian = ivon_hessian(hessian, 3 * noise[k] - 1, 0.5, 0.9)
        lowest = torch.minimum(lowest, hessian)
        assert (hessian + 0.5 > 0).all()
    assert (lowest < 0).any()


def steps(count, curvature, target, ess, centre, precision, beta2=0.99, rate=0.05, pairs=True):
    """Run IVON on curvature/2 (theta - target)^2 with exact expectations, from the draws +1 and -1."""
    state, delta = ivon_init(torch.zeros(1).double(), torch.full((1,), 0.5).double()), precision / ess
    for _ in range(count):
        sigma = (ess * (state.hessian + delta)).rsqrt()
        grads = [curvature * (state.mean + sign * sigma - target) for sign in (1, -1)]
        estimate = (grads[0] - grads[1]) / 2 / sigma
        state = ivon(state, (grads[0] + grads[1]) / 2, estimate, rate, delta, centre, beta2=beta2)
    return state, (ess * (state.hessian + delta)).item()


@pytest.mark.parametrize(("centre", "precision"), [(0.0, 2.0), (0.7, 20.0)])
def test_the_fixed_point_is_the_exact_posterior(centre, precision):
    curvature, target, ess = 1.5, 2.0, 40.0
    state, found = steps(3000, curvature, target, ess, centre, precision)
    exact = ess * curvature + precision
    assert found == pytest.approx(exact, rel=1e-6)
    assert state.mean.item() == pytest.approx((ess * curvature * target + precision * centre) / exact, rel=1e-6)


def test_twice_the_data_leave_the_hessian_and_halve_the_variance():
    one, single = steps(2000, 1.5, 2.0, 40.0, 0.0, 2.0)
    two, double = steps(2000, 1.5, 2.0, 80.0, 0.0, 4.0)
    assert_close(one.hessian, two.hessian, rtol=1e-6, atol=0)
    assert double == pytest.approx(2 * single, rel=1e-6)


def test_gradient_times_noise_estimates_the_hessian():
    curvature, sigma, g = randn(4, seed=1).exp(), 0.3, randn(20_000, 4, seed=2)
    grads = curvature * (0.4 + sigma * g)
    estimates = grads * g / sigma
    error = estimates.std(0) / len(g) ** 0.5
    assert ((estimates.mean(0) - curvature) / error).abs().max() < 4


def test_without_momentum_and_with_a_fixed_hessian_it_is_sgd_with_weight_decay():
    m, h, grad, delta = randn(5, seed=3), torch.full((5,), 0.5).double(), randn(5, seed=4), 0.01
    state = ivon(ivon_init(m, h), grad, randn(5), 0.1, delta, beta1=0.0, beta2=1.0, first=0.5 + delta)
    assert_close(state.mean, m - 0.1 * (grad + delta * m))
    assert torch.equal(state.hessian, h)


def test_a_prior_centred_at_zero_is_weight_decay_bit_for_bit():
    state, grad, estimate = ivon_init(randn(5, seed=3), randn(5).exp()), randn(5, seed=4), randn(5, seed=5)
    zero = torch.zeros(5).double()
    assert same_bits(ivon(state, grad, estimate, 0.1, 0.01), ivon(state, grad, estimate, 0.1, zero + 0.01, zero))


def test_steps_can_be_clipped():
    state = ivon_init(torch.zeros(3).double(), torch.ones(3).double())
    grad = torch.tensor([5.0, -0.1, -9.0]).double()
    moved = ivon(state, grad, torch.ones(3).double(), 0.1, 0.0, clip=1.0)
    assert_close(moved.mean, -0.1 * torch.tensor([1.0, -0.1, -1.0]).double())
