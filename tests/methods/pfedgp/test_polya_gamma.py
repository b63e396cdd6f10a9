import math

import numpy as np
import pytest
import torch
from pfedgp_inputs import covariance, generator, tensor
from torch.testing import assert_close

from federations import randn
from pfedbayes.maths.trees import stack
from pfedbayes.methods.pfedgp import polya_gamma
from pfedbayes.methods.pfedgp.polya_gamma import (
    draw,
    moments,
    pg_mean,
    rbf,
    side_probabilities,
)


def pg(c, generator):
    return polya_gamma.pg(c, torch.rand(*c.shape, polya_gamma.TERMS, generator=generator))


def gibbs(cov, kappa, chains, steps, generator):
    return polya_gamma.gibbs(cov, kappa, draw(chains, len(kappa), steps, generator))


def dense_moments(cov, cross, variance, omega, kappa):
    """The formulas with inverses, chain by chain."""
    mean, rest = [], []
    for row in omega:
        inverse = torch.linalg.inv(cov + torch.diag(1 / row))
        mean.append(cross @ inverse @ (kappa / row))
        rest.append(variance - (cross @ inverse * cross).sum(-1))
    return torch.stack(mean), torch.stack(rest)


def dense_gibbs(cov, kappa, draws):
    """The formulas with inverses, for one process, chain by chain."""
    root = torch.linalg.cholesky(cov)
    chains = []
    for chain in range(len(draws.prior[0])):
        first, *priors = (root @ normal[chain].double() for normal in draws.prior)
        omega = polya_gamma.pg(first, draws.uniform[0][chain])
        for prior, noise, uniform in zip(priors, draws.noise, draws.uniform[1:], strict=True):
            observed = kappa / omega - prior - noise[chain] / omega.sqrt()
            f = prior + cov @ torch.linalg.inv(cov + torch.diag(1 / omega)) @ observed
            omega = polya_gamma.pg(f, uniform[chain])
        chains.append(omega)
    return torch.stack(chains)


def test_the_numbers_of_a_run_depend_on_these():
    assert (polya_gamma.TERMS, polya_gamma.POINTS) == (20, 20)


class TestKernel:
    def test_it_is_the_formula(self):
        a, b = randn(3, 5, seed=1), randn(4, 5, seed=2)
        k = rbf(a, b, 8.0, 1.5)
        for i in range(3):
            for j in range(4):
                distance = math.dist(a[i].tolist(), b[j].tolist())
                assert float(k[i, j]) == pytest.approx(8 * math.exp(-(distance**2) / (2 * 1.5**2)), rel=1e-12)

    def test_a_point_with_itself_has_the_output_scale(self):
        a = randn(6, 5, seed=3)
        assert_close(rbf(a, a, 8.0, 1.0).diagonal(), torch.full((6,), 8.0, dtype=torch.float64))


class TestPolyaGamma:
    @staticmethod
    def variance(c):
        return (math.sinh(c) - c) / (4 * c**3 * math.cosh(c / 2) ** 2) if c else 1 / 24

    @pytest.mark.parametrize("c", [0.0, 0.3, -1.0, 4.0, 12.0])
    def test_draws_have_the_mean_and_variance_of_the_distribution(self, c):
        count = 200_000
        draws = pg(torch.full((count,), c, dtype=torch.float64), generator(1))
        mean = math.tanh(c / 2) / (2 * c) if c else 0.25
        assert float(draws.mean()) == pytest.approx(mean, abs=5 * math.sqrt(self.variance(c) / count))
        fourth = float((draws - draws.mean()).pow(4).mean())
        error = math.sqrt((fourth - self.variance(c) ** 2) / count)
        assert float(draws.var()) == pytest.approx(self.variance(c), abs=5 * error)

    @pytest.mark.parametrize(("c", "share"), [(0.0, 4e-6), (4.0, 3e-5), (12.0, 5e-4), (30.0, 6e-3)])
    def test_terms_left_out_have_little_variance(self, c, share):
        k = np.arange(1, polya_gamma.TERMS + 1)
        taken = (1 / (2 * math.pi**2 * ((k - 0.5) ** 2 + (c / (2 * math.pi)) ** 2)) ** 2).sum()
        assert 0 < 1 - taken / self.variance(c) < share

    @pytest.mark.parametrize("t", [0.5, 2.0, 5.0])
    def test_laplace_transform_is_the_hyperbolic_secant(self, t):
        # E[exp(-omega t^2 / 2)] = 1 / cosh(t / 2) for PG(1, 0): what makes the augmentation exact.
        values = torch.exp(-pg(torch.zeros(200_000, dtype=torch.float64), generator(2)) * t**2 / 2)
        assert float(values.mean()) == pytest.approx(1 / math.cosh(t / 2), abs=5 * float(values.std()) / 447)

    def test_mean_goes_to_a_quarter_and_does_not_know_signs(self):
        assert_close(pg_mean(tensor(0.0, 1e-9, 1e-4)), tensor(0.25, 0.25, 0.25))
        assert_close(pg_mean(tensor(-3.0)), pg_mean(tensor(3.0)))

    def test_draws_are_positive_far_out(self):
        assert (pg(torch.tensor([0.0, 50.0, -500.0]).repeat(1000), generator(3)) > 0).all()


class TestMoments:
    cov, z = covariance(9)
    cross = rbf(torch.nn.functional.normalize(randn(5, 4, seed=7), dim=-1), z, 8.0, 1.0)
    kappa = torch.where(randn(9, seed=8) > 0, 0.5, -0.5).double()
    omega = randn(3, 9, seed=9).abs() / 5 + 1e-3

    def test_they_are_the_formulas_with_inverses(self):
        mean, variance = moments(self.cov, self.cross, 8.0, self.omega, self.kappa)
        expected = dense_moments(self.cov, self.cross, 8.0, self.omega, self.kappa)
        assert_close(mean, expected[0])
        assert_close(variance, expected[1])

    def test_at_the_old_points_they_are_the_augmented_posterior(self):
        # Sigma = (K^-1 + Omega)^-1 = K - K (K + Omega^-1)^-1 K, and the mean is Sigma kappa.
        mean, variance = moments(self.cov, self.cov, 8.0 + 1e-3, self.omega, self.kappa)
        for row, m, v in zip(self.omega, mean, variance, strict=True):
            posterior = torch.linalg.inv(torch.linalg.inv(self.cov) + torch.diag(row))
            assert_close(m, posterior @ self.kappa)
            assert_close(v, posterior.diagonal())

    def test_the_gradient_is_autograds(self):
        weight_mean, weight_variance = randn(3, 5, seed=10), randn(3, 5, seed=11)

        def gradient(function):
            z, new = self.z.clone().requires_grad_(), randn(5, 4, seed=12).requires_grad_()
            cov = rbf(z, z, 8.0, 1.0) + 1e-3 * torch.eye(9)
            mean, variance = function(cov, rbf(new, z, 8.0, 1.0), 8.0, self.omega, self.kappa)
            return torch.autograd.grad((weight_mean * mean + weight_variance * variance).sum(), (z, new))

        for ours, theirs in zip(gradient(moments), gradient(dense_moments), strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("multiple", [3, 8])
    def test_points_that_fill_up_change_nothing(self, multiple, monkeypatch):
        def results():
            cov, cross = self.cov.clone().requires_grad_(), self.cross.clone().requires_grad_()
            found = moments(cov, cross, 8.0, self.omega, self.kappa)
            return [*found, *torch.autograd.grad((found[0].sin() + found[1].cos()).sum(), (cov, cross))]

        plain = results()
        monkeypatch.setitem(polya_gamma.ALIGNED, "cpu", multiple)
        for ours, expected in zip(results(), plain, strict=True):
            assert_close(ours, expected)

    @pytest.mark.parametrize("size", [1, 9 * 9 * 2])
    def test_chunks_change_nothing(self, size, monkeypatch):
        def results():
            cov, cross = self.cov.clone().requires_grad_(), self.cross.clone().requires_grad_()
            mean, variance = moments(cov, cross, 8.0, self.omega, self.kappa)
            grads = torch.autograd.grad((mean.sin() + variance.cos()).sum(), (cov, cross))
            return [mean, variance, *grads, gibbs(self.cov, self.kappa, 3, 4, generator())]

        whole = results()
        monkeypatch.setattr(polya_gamma, "CHUNK", size)
        for ours, expected in zip(results(), whole, strict=True):
            assert_close(ours, expected)

    @pytest.mark.parametrize("size", [1, 2**21])  # the chains in parts, or all at once
    def test_processes_side_by_side_are_each_alone(self, size, monkeypatch):
        monkeypatch.setattr(polya_gamma, "CHUNK", size)
        each = [covariance(9, seed=seed)[0] for seed in (1, 2)]
        crosses = [rbf(randn(5, 4, seed=seed), randn(9, 4, seed=seed + 2), 8.0, 1.0) for seed in (3, 4)]
        kappas = [self.kappa, -self.kappa]
        draws = [draw(3, 9, 4, generator(seed)) for seed in (5, 6)]
        cov, cross, kappa = (torch.stack(parts) for parts in (each, crosses, kappas))
        omega = polya_gamma.gibbs(cov, kappa, stack(draws))
        mean, variance = moments(cov, cross, 8.0, omega, kappa)
        sides = side_probabilities(mean, variance, "mean")
        for k in range(2):
            assert_close(omega[k], polya_gamma.gibbs(each[k], kappas[k], draws[k]))
            alone = moments(each[k], crosses[k], 8.0, omega[k], kappas[k])
            assert_close((mean[k], variance[k]), alone)
            assert_close(tuple(side[k] for side in sides), side_probabilities(*alone, "mean"))

    @pytest.mark.parametrize("size", [1, 2**21])
    def test_the_gradient_of_processes_side_by_side_is_right(self, size, monkeypatch):
        monkeypatch.setattr(polya_gamma, "CHUNK", size)
        omega, kappa = torch.stack([self.omega, self.omega.flip(0)]), torch.stack([self.kappa, -self.kappa])

        def function(z, new):
            cov = rbf(z, z, 8.0, 1.0) + 0.1 * torch.eye(9)
            return moments(cov, rbf(new, z, 8.0, 1.0), 8.0, omega, kappa)

        z, new = randn(2, 9, 4, seed=12).requires_grad_(), randn(2, 5, 4, seed=13).requires_grad_()
        assert torch.autograd.gradcheck(function, (z, new))

    def test_single_precision_is_enough(self):
        cov, z = covariance(400, jitter=1e-3)
        new = torch.nn.functional.normalize(randn(50, 4, seed=13), dim=-1)
        kappa = torch.where(z[:, 0] > 0, 0.5, -0.5).double()
        probabilities = []
        for dtype in (torch.float32, torch.float64):
            omega = gibbs(cov.to(dtype), kappa.to(dtype), 4, 5, generator(3))
            found = moments(cov.to(dtype), rbf(new, z, 8.0, 1.0).to(dtype), 8.0, omega, kappa.to(dtype))
            probabilities.append(side_probabilities(*found, "mean")[0].double())
        assert_close(*probabilities, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("border", "iterated"), [(8, True), (9, False)])
def test_large_systems_are_iterated(monkeypatch, border, iterated):
    monkeypatch.setitem(polya_gamma.ITERATE_FROM, "cpu", border)
    assert (polya_gamma._Solver(torch.eye(8).double().expand(3, 8, 8), 2)._iterated is not None) == iterated


class TestGibbs:
    """On both sides of ITERATE_FROM: by conjugate gradients and by factors."""

    @pytest.fixture(params=[0, 10**9], ids=["iterated", "factorised"], autouse=True)
    def _way(self, request, monkeypatch):
        monkeypatch.setitem(polya_gamma.ITERATE_FROM, "cpu", request.param)

    n = 60
    covs = torch.stack([covariance(60, seed=seed)[0] for seed in range(6)]).view(2, 3, 60, 60)
    kappa = torch.where(randn(2, 3, 60, seed=8) > 0, 0.5, -0.5).double()

    def draws(self):
        return [[draw(4, self.n, 5, generator(3 * row + column)) for column in range(3)] for row in range(2)]

    def test_it_is_the_formulas_with_inverses(self):
        draws = self.draws()
        omega = polya_gamma.gibbs(self.covs, self.kappa, stack([stack(row) for row in draws]))
        assert omega.shape == (2, 3, 4, self.n)
        for row in range(2):
            for column in range(3):
                expected = dense_gibbs(self.covs[row, column], self.kappa[row, column], draws[row][column])
                assert_close(omega[row, column], expected, rtol=1e-12, atol=0)

    def test_single_precision_is_enough(self):
        cov, kappa, draws = self.covs[0, 0], self.kappa[0, 0], self.draws()[0][0]
        omega = polya_gamma.gibbs(cov.float(), kappa.float(), draws)
        assert omega.dtype == torch.float32
        assert_close(omega.double(), dense_gibbs(cov, kappa, draws), rtol=5e-5, atol=0)

    def test_what_is_not_finite_stays_with_its_chain_and_process(self):
        covs, draws = self.covs.clone(), stack([stack(row) for row in self.draws()])
        sound = polya_gamma.gibbs(covs, self.kappa, draws)
        covs[0, 1, 7, 7] = torch.nan
        draws.noise[2][1, 2, 3, 5] = torch.inf
        draws.prior[3][1, 0, 1, 9] = torch.nan
        omega = polya_gamma.gibbs(covs, self.kappa, draws)
        broken = torch.zeros(2, 3, 4, dtype=torch.bool)
        broken[0, 1] = broken[1, 2, 3] = broken[1, 0, 1] = True
        assert not omega[broken].isfinite().any()
        assert_close(omega[~broken], sound[~broken], rtol=1e-12, atol=0)


def quadrature(cov, points=60):
    """Nodes (points^n, n) and weights of N(0, cov)."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(points))
    grid = torch.cartesian_prod(*[nodes] * len(cov)).view(-1, len(cov))
    weight = torch.cartesian_prod(*[weights / weights.sum()] * len(cov)).view(-1, len(cov)).prod(-1)
    return grid @ torch.linalg.cholesky(cov).mT, weight


class TestPosterior:
    """Long Gibbs runs against numerical integration over the two or three values of f."""

    chains = 20_000

    def test_one_example(self):
        f, weight = quadrature(tensor([8.0]))
        weight = weight * torch.sigmoid(f[:, 0])
        mean = float(weight @ f[:, 0] / weight.sum())
        assert mean == pytest.approx(1.920, abs=5e-4)
        variance = float(weight @ f[:, 0].square() / weight.sum()) - mean**2

        cov = tensor([8.0])
        omega = gibbs(cov, tensor(0.5), self.chains, 15, generator(4))
        means, variances = moments(cov, cov, 8.0, omega, tensor(0.5))
        assert float(means.mean()) == pytest.approx(mean, abs=5 * float(means.std()) / math.sqrt(self.chains))
        assert float(variances.mean() + means.var()) == pytest.approx(variance, rel=0.02)

    @pytest.mark.parametrize("labels", [(1.0, 0.0), (1.0, 1.0)])
    def test_two_examples_and_a_new_one(self, labels):
        cov, _ = covariance(3, seed=5, jitter=0.1)
        y = tensor(*labels)
        f, weight = quadrature(cov)
        weight = weight * torch.sigmoid((2 * y - 1) * f[:, :2]).prod(-1)
        weight = weight / weight.sum()

        old, cross = cov[:2, :2], cov[2:, :2]
        omega = gibbs(old, y - 0.5, self.chains, 15, generator(5))
        error = 5 * omega.std(0) / math.sqrt(self.chains)
        assert ((omega.mean(0) - weight @ pg_mean(f[:, :2])).abs() < error).all()
        one, zero = side_probabilities(*moments(old, cross, float(cov[2, 2]), omega, y - 0.5), "mean")
        assert float(one) == pytest.approx(float(weight @ torch.sigmoid(f[:, 2])), abs=3e-3)
        assert float(one + zero) == pytest.approx(1)

    def test_five_steps_are_near_the_end(self):
        cov, z = covariance(15, seed=6)
        kappa = torch.where(z[:, 0] > 0, 0.5, -0.5).double()
        few, many = (gibbs(cov, kappa, 3000, steps, generator(6)).mean(0) for steps in (5, 25))
        assert_close(few, many, rtol=0.1, atol=0)


class TestSideProbabilities:
    mean, variance = tensor([0.0, 2.0, -7.0, 0.3]), tensor([4.0, 0.5, 3.0, 8.0])

    def integral(self, function):
        f = torch.linspace(-40, 40, 200_001, dtype=torch.float64)[:, None]
        density = torch.exp(-((f - self.mean[0]) ** 2) / (2 * self.variance[0]))
        return (function(f) * density).sum(0) / density.sum(0)

    def test_mean_is_the_expected_sigmoid(self):
        one, zero = side_probabilities(self.mean, self.variance, "mean")
        assert_close(one, self.integral(torch.sigmoid), rtol=1e-3, atol=1e-4)
        assert_close(one + zero, torch.ones_like(one))

    def test_reference_is_the_lower_bound(self):
        one, zero = side_probabilities(self.mean, self.variance, "reference")
        assert_close(one, self.integral(torch.nn.functional.logsigmoid).exp(), rtol=1e-3, atol=1e-4)
        assert_close(one + zero, torch.ones_like(one))
        assert float(one[0]) == pytest.approx(0.344, abs=5e-4)  # where the mean is 1/2

    def test_chains_are_averaged(self):
        mean, variance = self.mean.view(2, 2), self.variance.view(2, 2)
        one, _ = side_probabilities(mean, variance, "mean")
        each, _ = side_probabilities(self.mean, self.variance, "mean")
        assert_close(one, each.view(2, 2).mean(0))

    def test_small_probabilities_keep_their_digits(self):
        mean, variance = torch.full((1, 1), 30.0), torch.full((1, 1), 1e-6)
        assert float(side_probabilities(mean, variance, "mean")[1]) == pytest.approx(math.exp(-30), rel=1e-3)


@pytest.mark.parametrize("link", ["mean", "reference"])
def test_probabilities_are_averages_over_chains(link):
    mean, variance = randn(3, 4), randn(3, 4, seed=1).square() + 0.1
    one, other = side_probabilities(mean, variance, link)
    each = [side_probabilities(mean[k : k + 1], variance[k : k + 1], link)[0] for k in range(3)]
    assert_close(one, torch.stack(each).mean(0))
    assert_close(one + other, torch.ones_like(one))


@pytest.mark.parametrize("variance", [0.01, 100.0])
def test_a_variance_never_ends_below_a_millionth_of_the_kernels(variance):
    cov = torch.full((1, 1), variance, dtype=torch.float64)
    _, left = polya_gamma.moments(cov, cov, variance, tensor([[1e12]]), tensor([[0.5]]))
    assert_close(left, torch.full_like(left, 1e-6 * variance))
