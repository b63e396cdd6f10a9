"""The formulas of Section 3 against values worked out by hand, their limits, and what the paper claims of them."""

import dataclasses
import math

import pytest
import torch

from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import MeanField, barycentre, kl, mean_field, sigma
from pfedbayes.paper import theory
from pfedbayes.paper.theory import Constants, Setting

# H = BM = 2 and T = 2 * 2 + 3 = 7 parameters: small enough to work out by hand.
TINY = Setting(size=7, layers=1, width=2, inputs=1, outputs=1, weight_bound=1.0, zeta=2.0, smoothness=1.0)
PAPER = Setting()


def changed(s, **given):
    return dataclasses.replace(s, **given)


class TestByHand:
    def test_the_number_of_parameters_is_that_of_the_net(self):
        from pfedbayes.nets import Net, mlp

        assert PAPER.num_params == 79_510
        assert TINY.num_params == 7
        assert Setting(inputs=5, outputs=2, layers=3, width=4).num_params == Net(mlp([5, 4, 4, 4, 2])).num_params

    def test_A_and_sigma_n(self):
        a = 4**-4 / math.log(6) / (9 + 1 / 15 + 2 / 9)
        assert theory.scale_a(TINY) == pytest.approx(a, rel=1e-14)
        assert theory.sigma_n_squared(TINY) == pytest.approx(a / 8, rel=1e-14)

    def test_r_n_and_epsilon_n(self):
        # n = T, so that the second logarithm is log 1.
        assert theory.r_n(TINY) == pytest.approx(2 * math.log(2), rel=1e-14)
        expected = math.sqrt(2 * math.log(2)) * math.log(7) ** 1.01
        assert theory.epsilon_n(TINY) == pytest.approx(expected, rel=1e-14)
        # n = 4 T: log sqrt(4) = log 2 more, and a quarter of the factor.
        assert theory.r_n(changed(TINY, size=28)) == pytest.approx(3 * math.log(2) / 4, rel=1e-14)

    def test_xi_n_and_the_rates(self):
        assert theory.xi_n(TINY) == pytest.approx(1 / 49, rel=1e-14)
        assert theory.chosen_num_params(changed(TINY, size=8)) == pytest.approx(2, rel=1e-14)
        assert theory.minimax_rate(changed(TINY, size=8)) == pytest.approx(1 / 4, rel=1e-14)
        assert theory.convergence_rate(changed(TINY, size=8)) == pytest.approx(math.log(8) ** 2.02 / 4, rel=1e-14)
        assert theory.rate_exponent(2, 1) == -0.8

    def test_lemmas_and_theorem_with_constants_that_tell_them_apart(self):
        s = changed(TINY, constants=Constants(C=2, C_prime=3, C_second=5, C_0=7))
        r, xi, epsilon = 2 * math.log(2), 7 / 49, theory.epsilon_n(s)
        assert theory.lemma1(s, 14.0) == pytest.approx(2 + 2 * epsilon**2, rel=1e-14)
        assert theory.lemma2(s) == pytest.approx(7 * (3 * 2 * r + 5 * xi), rel=1e-14)
        assert theory.theorem1(s) == pytest.approx(2 * epsilon**2 + 3 * r + 5 * xi / 2, rel=1e-14)

    def test_the_papers_network(self):
        # (T/n) (2 log 100 + log(784 sqrt(1000/79510))) = 79.51 * 13.686 by a pocket calculator.
        assert theory.r_n(PAPER) == pytest.approx(1088.2, rel=1e-3)
        assert math.sqrt(theory.sigma_n_squared(PAPER)) == pytest.approx(7.1e-9, rel=0.01)


class TestShape:
    @pytest.mark.parametrize("s", [PAPER, changed(TINY, size=1000)])
    def test_more_data_lower_every_error(self, s):
        more = changed(s, size=4 * s.size)
        for quantity in (theory.r_n, theory.epsilon_n, theory.sigma_n_squared, theory.theorem1, theory.minimax_rate):
            assert quantity(more) < quantity(s)

    def test_epsilon_n_is_r_n_with_a_logarithm(self):
        assert theory.epsilon_n(PAPER) ** 2 == pytest.approx(theory.r_n(PAPER) * math.log(1000) ** 2.02, rel=1e-12)

    def test_a_wider_net_estimates_worse_and_approximates_better(self):
        wide = changed(PAPER, width=200)
        assert theory.r_n(wide) > theory.r_n(PAPER)
        assert theory.xi_n(wide) < theory.xi_n(PAPER)

    def test_zeta_lowers_only_the_approximation_error(self):
        s = changed(TINY, size=10_000)
        gap = theory.theorem1(s) - theory.theorem1(changed(s, zeta=1e9))
        assert gap == pytest.approx(theory.xi_n(s) / 2, rel=1e-6)

    def test_the_chosen_T_balances_the_errors_up_to_logarithms(self):
        """With T = n^(d/(2 beta + d)), T/n and T^(-2 beta/d) are the same power of n, the minimax rate."""
        for beta, d in ((1.0, 1), (2.0, 3)):
            s = changed(PAPER, smoothness=beta, dimension=d, size=12_345)
            chosen = theory.chosen_num_params(s)
            assert chosen / s.size == pytest.approx(theory.minimax_rate(s), rel=1e-12)
            assert chosen ** (-2 * beta / d) == pytest.approx(theory.minimax_rate(s), rel=1e-12)

    def test_the_width_for_a_number_of_parameters_is_the_largest_that_keeps_to_it(self):
        assert theory.width_for(79_510, 784, 10) == 100
        assert theory.width_for(79_509, 784, 10) == 99
        assert theory.width_for(1, 784, 10) == 2


class TestUsefulSize:
    @pytest.mark.parametrize("s", [PAPER, TINY, changed(PAPER, layers=3, width=20)])
    def test_from_there_on_the_bound_is_below_one_and_just_before_it_is_not(self, s):
        n = theory.useful_size(s)
        assert all(theory.theorem1(changed(s, size=n * k)) < 1 for k in (1, 2, 10, 1000))
        assert theory.theorem1(changed(s, size=n - 1)) >= 1

    def test_with_tiny_constants_it_is_the_least_that_there_can_be(self):
        assert theory.useful_size(changed(TINY, constants=Constants(C=1e-3, C_prime=1e-3))) == 2

    def test_there_is_none_if_the_net_cannot_come_near_the_function(self):
        s = changed(TINY, dimension=1000, constants=Constants(C_0=10))
        assert theory.useful_size(s) is None

    def test_at_the_papers_sizes_the_bound_says_nothing(self):
        for size in (250, 1000, 4500):
            assert theory.theorem1(changed(PAPER, size=size)) > 1e4
        assert theory.useful_size(PAPER) > 1e8


class TestHellinger:
    @pytest.mark.parametrize("gap", [0.0, 0.3, 2.0, 8.0])
    def test_it_is_one_minus_the_overlap_of_the_densities(self, gap):
        sigma_eps = 0.7
        p, q = torch.distributions.Normal(0.0, sigma_eps), torch.distributions.Normal(gap, sigma_eps)
        y = p.sample((200_000,)) if gap < 3 else torch.linspace(-10, 20, 200_001)
        if gap < 3:
            root = ((q.log_prob(y) - p.log_prob(y)) / 2).exp()
            expected, tolerance = 1 - root.mean(), 5 * root.std() / math.sqrt(len(y)) + 1e-7
        else:
            # Where the densities hardly meet, samples see nothing and the integral is a sum.
            overlap = ((q.log_prob(y) + p.log_prob(y)) / 2).exp()
            expected, tolerance = 1 - torch.trapezoid(overlap, y), 1e-5
        found = theory.hellinger_squared(torch.tensor([gap]), torch.zeros(1), sigma_eps)
        assert abs(found - expected) <= tolerance

    def test_it_averages_over_the_last_dimension_and_stays_within_0_and_1(self):
        f = torch.tensor([[0.0, 1e6], [0.0, 0.0]])
        assert torch.equal(theory.hellinger_squared(f, torch.zeros(2), 1.0), torch.tensor([0.5, 0.0]))

    def test_l2_is_bounded_by_it(self):
        largest, sigma_eps = 1.5, 0.8
        f, truth = 2 * largest * torch.rand(2, 1000, dtype=torch.float64) - largest
        factor = theory.l2_factor(largest, sigma_eps)
        distance = theory.hellinger_squared(f[:, None], truth[:, None], sigma_eps)
        assert bool((distance >= factor * (f - truth).square() - 1e-15).all())
        # The factor is the best one: at the largest gap both sides are equal.
        ends = theory.hellinger_squared(torch.tensor([largest]), torch.tensor([-largest]), sigma_eps)
        assert float(ends) == pytest.approx(factor * (2 * largest) ** 2, rel=1e-6)

    def test_the_bound_in_l2_is_the_rate_over_it(self):
        """Eq. (24): C_F times the L2 error is at most the Hellinger distance, which is at most the rate."""
        s = Setting(inputs=3)
        assert theory.l2_bound(s, 1.5, 0.8) * theory.l2_factor(1.5, 0.8) == pytest.approx(theory.convergence_rate(s))


class TestWhereThePaperDisagreesWithItself:
    """What docs/theory.md says of the paper."""

    def test_the_last_step_of_lemma_2_needs_three_inputs(self):
        """log(2 B^2/sigma_n^2)/2 <= (L+1) log(2BM) + log log(3 s_0 M)/2 + log(4 s_0 sqrt(n/T)) + log(2 B^2)/2."""

        def holds(inputs):
            s = Setting(inputs=inputs, outputs=1, width=50)
            b, m, t = s.weight_bound, s.width, s.num_params
            left = math.log(2 * b**2 / theory.sigma_n_squared(s)) / 2
            right = (s.layers + 1) * math.log(2 * b * m) + math.log(math.log(3 * inputs * m)) / 2
            right += math.log(4 * inputs * math.sqrt(s.size / t)) + math.log(2 * b**2) / 2
            return left <= right

        assert [inputs for inputs in range(1, 20) if not holds(inputs)] == [1, 2]

    def test_r_n_is_negative_for_few_data_and_refused(self):
        s = Setting(size=2, inputs=1, outputs=1000, width=2)
        assert theory.r_n(s) < 0
        assert s.size < theory.least_size(s)
        with pytest.raises(UserError, match="negative"):
            theory.epsilon_n(s)

    def test_zeta_divides_the_number_of_examples(self):
        """A client that knows one number: its optimum with n examples and zeta is that with n/zeta examples and 1."""
        f, prior = 0.8, MeanField(torch.tensor([0.1]).double(), torch.tensor([0.5]).double())

        def objective(v, n, zeta):
            q = mean_field(v)
            return n * ((q.mu - f).square() + q.sigma.square()).sum() / 2 + zeta * kl(q, prior)

        def optimum(n, zeta):
            v = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
            minimise(lambda: objective(v, n, zeta), v)
            return v.detach()

        torch.testing.assert_close(optimum(40, 10.0), optimum(4, 1.0), rtol=1e-6, atol=1e-6)
        precision = 4 + 1 / 0.5**2
        expected = torch.tensor([[(4 * f + 0.1 / 0.5**2) / precision]], dtype=torch.float64)
        torch.testing.assert_close(optimum(4, 1.0)[:1], expected, rtol=1e-6, atol=0)

    def test_a_zeta_beyond_n_contradicts_the_theorem_with_a_fixed_C(self):
        """Two clients with one number each, 3 and -3: for zeta = n^2 their posteriors stay together, far from both,
        while the right-hand side of Theorem 1 goes to nothing."""

        def distance(n, zeta):
            truth = torch.tensor([3.0, -3.0], dtype=torch.float64)
            w = MeanField(torch.zeros(1).double(), torch.ones(1).double())
            for _ in range(20_000):
                precision = n / zeta + w.sigma.pow(-2)
                mu = (n / zeta * truth + w.mu * w.sigma.pow(-2)) / precision
                spread = precision.rsqrt().expand(2)
                w = MeanField(mu.mean().view(1), (spread.square() + (mu - mu.mean()).square()).mean().sqrt().view(1))
            g = torch.linspace(-4, 4, 401, dtype=torch.float64)
            weight = (-g.square() / 2).exp()
            drawn = mu[:, None] + spread[:, None] * g
            return float((weight * -torch.expm1(-(drawn - truth[:, None]).square() / 8)).sum() / (2 * weight.sum()))

        n = 10**7
        s = Setting(size=n, inputs=1, outputs=1, width=2, zeta=float(n) ** 2, constants=Constants(C_0=1e-9))
        assert theory.theorem1(s) < 0.01
        assert distance(n, 1.0) < 0.01
        assert distance(n, float(n) ** 2) > 0.5


def minimise(objective, v):
    """L-BFGS to the end."""
    optimizer = torch.optim.LBFGS(
        [v], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def evaluate():
        optimizer.zero_grad()
        value = objective()
        value.backward()
        return value

    optimizer.step(evaluate)


def test_lemma_A2_is_what_numerical_optimisation_finds():
    """From a far start L-BFGS over (mu, rho) of w ends at the closed form."""
    generator = torch.Generator().manual_seed(3)
    mu = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    rho = torch.randn(6, 8, generator=generator, dtype=torch.float64) - 1
    clients = torch.stack([mu, rho], 1)
    w = torch.full((2, 8), 2.0, dtype=torch.float64, requires_grad=True)
    minimise(lambda: kl(mean_field(clients), mean_field(w[None])).mean(), w)
    found = w.detach()
    expected = barycentre(clients, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sigma(found[1]), sigma(rho).mean(0), rtol=0.05), "averaging sigma would do as well"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 1}, "n must be at least 2"),
        ({"width": 1}, "width must be at least 2"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"weight_bound": 0.01}, "B times the width M"),
        ({"zeta": 0.5}, "zeta of at least 1"),
        ({"smoothness": 0.0}, "beta, the smoothness, must be positive"),
        ({"dimension": -1.0}, "d, the dimension, must be positive"),
    ],
)
def test_what_the_theory_does_not_cover_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        Setting(**given)


def test_constants_are_positive_and_delta_is_above_one():
    with pytest.raises(UserError, match="C_prime must be positive"):
        Constants(C_prime=0)
    with pytest.raises(UserError, match="delta must be more than 1"):
        Constants(delta=1.0)
