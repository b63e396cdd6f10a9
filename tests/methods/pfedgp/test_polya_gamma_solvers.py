import gc
import math
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pfedgp_inputs import covariance, generator
from torch.testing import assert_close

from execution_plans import needs_gpu
from federations import randn
from pfedbayes.methods.pfedgp import polya_gamma
from pfedbayes.methods.pfedgp.polya_gamma import (
    ConjugateGradients,
    cholesky,
    inverse_factor,
    product,
    rbf,
)


class SimpleMatrix(NamedTuple):
    """A matrix on a device that this machine may lack."""

    device: torch.device
    dtype: torch.dtype

    def __matmul__(self, other):
        return "whole"


def test_a_temporary_tensor_takes_a_64th_of_a_gpus_memory(monkeypatch):
    bytes_of_memory = 64 * 4 * 1000  # a 64th holds a thousand numbers in single precision
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=bytes_of_memory)
    )
    gpu = torch.device("cuda")
    assert [polya_gamma.at_once(numbers, gpu) for numbers in (1, 300, 1000, 1001)] == [1000, 3, 1, 1]


class TestCholesky:
    def test_of_a_positive_definite_matrix_is_its_factor(self):
        matrix, _ = covariance(20)
        factor = cholesky(matrix)
        assert_close(factor @ factor.mT, matrix)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_raises_the_diagonal_until_it_works_and_says_so(self, dtype):
        _, z = covariance(150, dtype=dtype)
        matrix = rbf(z.repeat(2, 1), z.repeat(2, 1), 8.0, 1.0)  # every point is there twice
        with pytest.warns(RuntimeWarning, match=r"added .* to its diagonal") as caught:
            factor = cholesky(torch.stack([matrix, matrix + torch.eye(300, dtype=dtype)]))
        assert len(caught) == 1
        added = float(str(caught[0].message).split(": added ")[1].split()[0])
        assert 0 < added < 1e-2
        assert_close(factor[0] @ factor[0].mT, matrix, rtol=0, atol=1.1 * added + 1e-5)

    def test_one_matrix_does_not_change_the_factors_of_others(self):
        sound, z = covariance(40)
        singular = rbf(z[:20].repeat(2, 1), z[:20].repeat(2, 1), 8.0, 1.0) - 1e-9 * torch.eye(40)
        with pytest.warns(RuntimeWarning, match=r"added .* to its diagonal"):
            alone = cholesky(singular)
        with pytest.warns(RuntimeWarning, match=r"added .* to its diagonal"):
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
        monkeypatch.setattr(polya_gamma, "BLOCK", 8)
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
        monkeypatch.setattr(polya_gamma, "BLOCK", 8)
        sound = covariance(20)[0]
        broken = sound.clone()
        broken[18, 3] = broken[3, 18] = torch.nan
        inverse = inverse_factor(torch.stack([sound, broken]))
        assert inverse[0].equal(inverse_factor(sound[None])[0])
        assert inverse[1].isnan().any()


class TestProduct:
    def test_the_head_has_eleven_bits_and_the_rest_the_others(self):
        values = randn(10_000, seed=1, dtype=torch.float32)
        head = polya_gamma._head(values)
        mantissa, _ = torch.frexp(head)
        assert (mantissa * 2**11 == (mantissa * 2**11).round()).all()
        assert ((values - head).abs() < 2**-10 * values.abs()).all()

    def test_three_products_of_parts_are_the_product(self):
        """All but the product of the two rests, each at most 2^-10 of its matrix."""
        a, b = randn(2, 3, 7, 40, seed=1).float(), randn(2, 3, 40, 5, seed=2).float()
        exact = a.double() @ b.double()
        left_out = (a - polya_gamma._head(a)).double() @ (b - polya_gamma._head(b)).double()
        found = polya_gamma.split_product(a, b)
        assert found.dtype == torch.float32
        assert_close(found.double(), exact - left_out, rtol=0, atol=1e-5)
        assert 10 * (found - exact).norm() < (polya_gamma._head(a) @ b - exact).norm()

    def test_only_single_precision_on_a_gpu_is_split(self, monkeypatch):
        monkeypatch.setattr(polya_gamma, "split_product", lambda a, b: "split")
        for device, dtype in (("cuda", torch.float32), ("cuda", torch.float64), ("cpu", torch.float32)):
            matrix = SimpleMatrix(torch.device(device), dtype)
            split = (device, dtype) == ("cuda", torch.float32)
            assert product(matrix, matrix) == ("split" if split else "whole")

    def test_a_gpu_rounds_inputs_only_for_so_long(self):
        before = torch.get_float32_matmul_precision()
        for device, inside in (("cuda", "high"), ("cpu", before)):
            with polya_gamma.rounded(SimpleMatrix(torch.device(device), torch.float32)):
                assert torch.get_float32_matmul_precision() == inside
            assert torch.get_float32_matmul_precision() == before

    @needs_gpu
    def test_on_a_gpu_it_is_as_exact_as_single_precision(self):
        a, b = (randn(2, 3, 300, 300, seed=seed) for seed in (1, 2))
        exact = a @ b
        a, b = a.float().cuda(), b.float().cuda()
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        error = ((a @ b).cpu() - exact).norm()
        ours = (product(a, b.mT.contiguous().mT).cpu() - exact).norm()
        assert torch.get_float32_matmul_precision() == "highest"
        with polya_gamma.rounded(a):
            rough = ((a @ b).cpu() - exact).norm()
        torch.set_float32_matmul_precision(precision)
        assert ours < 3 * error < 0.03 * rough


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

    @needs_gpu
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
        found = polya_gamma._Solver(cov, 4)(scale, vectors)
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
