import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from federations import randn
from pfedbayes.maths.trees import stack
from pfedbayes.methods.pfedgp import polya_gamma as polyagamma
from pfedbayes.methods.pfedgp.polya_gamma import (
    ConjugateGradients,
    cholesky,
    draw,
    inverse_factor,
    moments,
    pg_mean,
    product,
    rbf,
    side_probabilities,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pg(c, generator):
    return polyagamma.pg(c, torch.rand(*c.shape, polyagamma.TERMS, generator=generator))


def gibbs(cov, kappa, chains, steps, generator):
    return polyagamma.gibbs(cov, kappa, draw(chains, len(kappa), steps, generator))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def covariance(n, seed=0, jitter=1e-3, dtype=torch.float64):
    """Kernel matrix of random points on a sphere, and the points."""
    z = torch.nn.functional.normalize(randn(n, 4, seed=seed), dim=-1).to(dtype)
    return rbf(z, z, 8.0, 1.0) + jitter * torch.eye(n, dtype=dtype), z


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
        omega = polyagamma.pg(first, draws.uniform[0][chain])
        for prior, noise, uniform in zip(priors, draws.noise, draws.uniform[1:], strict=True):
            observed = kappa / omega - prior - noise[chain] / omega.sqrt()
            f = prior + cov @ torch.linalg.inv(cov + torch.diag(1 / omega)) @ observed
            omega = polyagamma.pg(f, uniform[chain])
        chains.append(omega)
    return torch.stack(chains)


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
        k = np.arange(1, polyagamma.TERMS + 1)
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


class TestCholesky:
    def test_of_a_positive_definite_matrix_is_its_factor(self):
        matrix, _ = covariance(20)
        factor = cholesky(matrix)
        assert_close(factor @ factor.mT, matrix)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_raises_the_diagonal_until_it_works_and_says_so(self, dtype):
        _, z = covariance(150, dtype=dtype)
        matrix = rbf(z.repeat(2, 1), z.repeat(2, 1), 8.0, 1.0)  # every point is there twice
        with pytest.warns(RuntimeWarning, match="added to its diagonal") as caught:
            factor = cholesky(torch.stack([matrix, matrix + torch.eye(300, dtype=dtype)]))
        assert len(caught) == 1
        added = float(str(caught[0].message).split(": ")[1].split()[0])
        assert 0 < added < 1e-2
        assert_close(factor[0] @ factor[0].mT, matrix, rtol=0, atol=1.1 * added + 1e-5)

    def test_one_matrix_does_not_change_the_factors_of_others(self):
        sound, z = covariance(40)
        singular = rbf(z[:20].repeat(2, 1), z[:20].repeat(2, 1), 8.0, 1.0) - 1e-9 * torch.eye(40)
        with pytest.warns(RuntimeWarning, match="added to its diagonal"):
            alone = cholesky(singular)
        with pytest.warns(RuntimeWarning, match="added to its diagonal"):
            together = cholesky(torch.stack([sound, singular, torch.nan * sound]))
        assert together[0].equal(cholesky(sound))
        assert together[1].equal(alone)
        assert together[2].isnan().all()

    def test_leaves_alone_what_is_not_finite(self):
        matrix, _ = covariance(5)
        matrix[2, 3] = matrix[3, 2] = torch.nan
        assert cholesky(matrix).isnan().all()


class TestInverseFactor:
    @pytest.mark.parametrize("n", [1, 7, 8, 9, 40, 61])
    def test_by_halves_it_is_the_inverse_of_the_factor(self, n, monkeypatch):
        monkeypatch.setattr(polyagamma, "BLOCK", 8)
        matrices = torch.stack([covariance(n, seed=seed)[0] + torch.eye(n) for seed in range(6)]).view(2, 3, n, n)
        inverse = inverse_factor(matrices)
        assert not inverse.triu(1).any()
        assert_close(inverse @ torch.linalg.cholesky(matrices), torch.eye(n, dtype=torch.float64).expand(2, 3, n, n))

    def test_it_is_about_as_exact_as_substitution(self):
        matrix = covariance(600)[0] + 0.1 * torch.eye(600)
        right = randn(600, 200, seed=1)
        exact = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), right, upper=False)
        factor = torch.linalg.cholesky(matrix.float())
        substituted = torch.linalg.solve_triangular(factor, right.float(), upper=False)
        assert (inverse_factor(matrix.float()) @ right.float() - exact).norm() < 10 * (substituted - exact).norm()

    def test_what_is_not_finite_stays_with_its_matrix(self, monkeypatch):
        monkeypatch.setattr(polyagamma, "BLOCK", 8)
        sound = covariance(20)[0]
        broken = sound.clone()
        broken[18, 3] = broken[3, 18] = torch.nan
        inverse = inverse_factor(torch.stack([sound, broken]))
        assert inverse[0].equal(inverse_factor(sound[None])[0])
        assert inverse[1].isnan().any()


class TestProduct:
    def test_the_head_has_eleven_bits_and_the_rest_the_others(self):
        values = randn(10_000, seed=1, dtype=torch.float32)
        head = polyagamma._head(values)
        mantissa, _ = torch.frexp(head)
        assert (mantissa * 2**11 == (mantissa * 2**11).round()).all()
        assert ((values - head).abs() < 2**-10 * values.abs()).all()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu_it_is_as_exact_as_single_precision(self):
        a, b = (randn(2, 3, 300, 300, seed=seed) for seed in (1, 2))
        exact = a @ b
        a, b = a.float().cuda(), b.float().cuda()
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        error = ((a @ b).cpu() - exact).norm()
        ours = (product(a, b.mT.contiguous().mT).cpu() - exact).norm()
        assert torch.get_float32_matmul_precision() == "highest"
        with polyagamma.rounded(a):
            rough = ((a @ b).cpu() - exact).norm()
        torch.set_float32_matmul_precision(precision)
        assert ours < 3 * error < 0.03 * rough


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
        monkeypatch.setitem(polyagamma.ALIGNED, "cpu", multiple)
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
        monkeypatch.setattr(polyagamma, "CHUNK", size)
        for ours, expected in zip(results(), whole, strict=True):
            assert_close(ours, expected)

    def test_processes_side_by_side_are_each_alone(self):
        each = [covariance(9, seed=seed)[0] for seed in (1, 2)]
        crosses = [rbf(randn(5, 4, seed=seed), randn(9, 4, seed=seed + 2), 8.0, 1.0) for seed in (3, 4)]
        kappas = [self.kappa, -self.kappa]
        draws = [draw(3, 9, 4, generator(seed)) for seed in (5, 6)]
        cov, cross, kappa = (torch.stack(parts) for parts in (each, crosses, kappas))
        omega = polyagamma.gibbs(cov, kappa, stack(draws))
        mean, variance = moments(cov, cross, 8.0, omega, kappa)
        sides = side_probabilities(mean, variance, "mean")
        for k in range(2):
            assert_close(omega[k], polyagamma.gibbs(each[k], kappas[k], draws[k]))
            alone = moments(each[k], crosses[k], 8.0, omega[k], kappas[k])
            assert_close((mean[k], variance[k]), alone)
            assert_close(tuple(side[k] for side in sides), side_probabilities(*alone, "mean"))

    @pytest.mark.parametrize("size", [1, 2**21])
    def test_the_gradient_of_processes_side_by_side_is_right(self, size, monkeypatch):
        monkeypatch.setattr(polyagamma, "CHUNK", size)
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


class TestGibbs:
    """On both sides of ITERATE_FROM: by conjugate gradients and by factors."""

    @pytest.fixture(params=[0, 10**9], ids=["iterated", "factorised"], autouse=True)
    def _way(self, request, monkeypatch):
        monkeypatch.setitem(polyagamma.ITERATE_FROM, "cpu", request.param)

    n = 60
    covs = torch.stack([covariance(60, seed=seed)[0] for seed in range(6)]).view(2, 3, 60, 60)
    kappa = torch.where(randn(2, 3, 60, seed=8) > 0, 0.5, -0.5).double()

    def draws(self):
        return [[draw(4, self.n, 5, generator(3 * row + column)) for column in range(3)] for row in range(2)]

    def test_it_is_the_formulas_with_inverses(self):
        draws = self.draws()
        omega = polyagamma.gibbs(self.covs, self.kappa, stack([stack(row) for row in draws]))
        assert omega.shape == (2, 3, 4, self.n)
        for row in range(2):
            for column in range(3):
                expected = dense_gibbs(self.covs[row, column], self.kappa[row, column], draws[row][column])
                assert_close(omega[row, column], expected, rtol=1e-12, atol=0)

    def test_single_precision_is_enough(self):
        cov, kappa, draws = self.covs[0, 0], self.kappa[0, 0], self.draws()[0][0]
        omega = polyagamma.gibbs(cov.float(), kappa.float(), draws)
        assert omega.dtype == torch.float32
        assert_close(omega.double(), dense_gibbs(cov, kappa, draws), rtol=5e-5, atol=0)

    def test_what_is_not_finite_stays_with_its_chain_and_process(self):
        covs, draws = self.covs.clone(), stack([stack(row) for row in self.draws()])
        sound = polyagamma.gibbs(covs, self.kappa, draws)
        covs[0, 1, 7, 7] = torch.nan
        draws.noise[2][1, 2, 3, 5] = torch.inf
        draws.prior[3][1, 0, 1, 9] = torch.nan
        omega = polyagamma.gibbs(covs, self.kappa, draws)
        broken = torch.zeros(2, 3, 4, dtype=torch.bool)
        broken[0, 1] = broken[1, 2, 3] = broken[1, 0, 1] = True
        assert not omega[broken].isfinite().any()
        assert_close(omega[~broken], sound[~broken], rtol=1e-12, atol=0)


class TestConjugateGradients:
    @staticmethod
    def system(cov, chains=4, largest=5.0):
        """scale (chains, n) with omega up to the largest, and vectors as those of Gibbs chains."""
        scale = (largest * torch.rand(chains, len(cov), generator=generator(1)).double() + 1e-3).sqrt()
        return scale, 0.5 / scale - scale * randn(chains, len(cov), seed=2) - randn(chains, len(cov), seed=3)

    @staticmethod
    def solve(cov, scale, vectors):
        gradients = ConjugateGradients(cov, len(vectors))
        assert gradients.solve(scale, vectors)
        return gradients.solved

    def test_one_system_after_another(self):
        cov, _ = covariance(300)
        gradients = ConjugateGradients(cov, 4)
        for largest in (5.0, 0.1):
            scale, vectors = self.system(cov, largest=largest)
            assert gradients.solve(scale, vectors)
            assert_close(gradients.solved, self.dense(cov, scale, vectors), rtol=1e-9, atol=1e-9)

    def test_it_is_gone_when_nobody_needs_it(self):
        gradients = ConjugateGradients(covariance(20)[0], 4)
        alive = weakref.ref(gradients)
        gc.disable()
        try:
            del gradients
            assert alive() is None
        finally:
            gc.enable()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpu_replays_them(self):
        cov = torch.stack([covariance(300, seed=seed)[0] for seed in range(3)])
        scale, vectors = (torch.stack(parts) for parts in zip(*map(self.system, cov), strict=True))
        expected = ConjugateGradients(cov, 4)
        ours = ConjugateGradients(cov.cuda(), 4)
        for _ in range(2):
            scale *= 0.9
            assert expected.solve(scale, vectors)
            assert ours.solve(scale.cuda(), vectors.cuda())
            assert_close(ours.solved.cpu(), expected.solved, rtol=1e-8, atol=1e-8)

    @staticmethod
    def dense(cov, scale, vectors):
        system = torch.eye(len(cov)) + scale[:, :, None] * cov * scale[:, None, :]
        return torch.from_numpy(np.linalg.solve(system.numpy(), vectors[..., None].numpy()))[..., 0]

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-4)])
    @pytest.mark.parametrize("apart", [0.0, 1e-3, 1.0])
    def test_points_may_be_nearly_the_same(self, apart, dtype, tolerance):
        z = torch.nn.functional.normalize(randn(1, 4, seed=4) + apart * randn(300, 4, seed=5), dim=-1)
        cov = rbf(z, z, 8.0, 1.0) + 1e-3 * torch.eye(300)
        scale, vectors = self.system(cov)
        solved = self.solve(*(each.to(dtype) for each in (cov, scale, vectors)))
        assert solved.dtype == dtype
        error = (solved - self.dense(cov, scale, vectors)).norm(dim=-1)
        assert (error < tolerance * self.dense(cov, scale, vectors).norm(dim=-1)).all()

    def test_many_large_eigenvalues_are_left_to_factors(self):
        z = torch.nn.functional.normalize(randn(100, 4, seed=5), dim=-1)
        cov = rbf(z, z, 1e6, 0.5) + 1e-3 * torch.eye(100)
        scale, vectors = self.system(cov)
        assert not ConjugateGradients(cov, 4).solve(scale, vectors)
        found = polyagamma._Solver(cov, 4)(scale, vectors)
        assert_close(found, self.dense(cov, scale, vectors), rtol=1e-6, atol=1e-6)

    def test_chains_that_are_done_wait_for_the_others(self):
        cov, _ = covariance(300, dtype=torch.float32)
        scale, vectors = (each.float() for each in self.system(cov))
        alone = self.solve(cov, scale[3:], vectors[3:])
        vectors[0] = 0
        scale[1] = 0  # B is the identity
        scale[2, 1:] = 0  # and here all but one eigenvalue are 1
        solved = self.solve(cov, scale, vectors)
        assert not solved[0].any()
        assert solved[1].equal(vectors[1])
        assert_close(solved[2, 1:], vectors[2, 1:])
        assert_close(solved[2, 0], vectors[2, 0] / (1 + scale[2, 0].square() * cov[0, 0]))
        assert_close(solved[3:], alone, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_chain_that_is_not_finite_does_not_hold_up_the_others(self, value):
        cov, _ = covariance(300)
        scale, vectors = self.system(cov)
        vectors[1, 7] = value
        solved = self.solve(cov, scale, vectors)
        assert not solved[1].isfinite().any()
        vectors[1] = 0
        assert_close(solved[[0, 2, 3]], self.dense(cov, scale, vectors)[[0, 2, 3]], rtol=1e-9, atol=1e-9)


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
