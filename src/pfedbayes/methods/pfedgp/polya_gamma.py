"""Binary Gaussian-process classification by Pólya-Gamma augmentation (Polson, Scott & Windle 2013).

Labels y in {0, 1} have the logistic likelihood p(y = 1 | f) = 1 / (1 + exp(-f)), and f ~ N(0, K). Given a variable
omega_n ~ PG(1, f_n) per example, the likelihood is Gaussian: an observation kappa_n / omega_n of f_n with noise
variance 1 / omega_n, where kappa = y - 1/2. All that remains are solves with K + Omega^-1. They use
B = I + Omega^1/2 K Omega^1/2, whose eigenvalues are at least 1, so single precision is enough:

    (K + Omega^-1)^-1 = Omega^1/2 B^-1 Omega^1/2.

Chains are a leading axis and share K. Further axes "..." before it are independent processes with equal numbers of
examples. If a chain has one right-hand side, conjugate gradients solve for all chains with products by K, without one
matrix per chain. If it has many, the matrices of a chunk of chains are factorised in one batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.memory import without_collecting

Link = Literal["mean", "reference"]

# Size of a temporary tensor, of which there are about four. On a CPU: numbers, 8 MB in single precision, which fit into
# the cache (larger tensors take a third more time). On a GPU: a share of its memory. A tensor holds at least one n x n
# matrix per process.
CHUNK = 2**21
GPU_SHARE = 1 / 64
# Use conjugate gradients from this many examples on; factorising smaller matrices is faster.
ITERATE_FROM = {"cpu": 50, "cuda": 1000}
AT_A_TIME = 5  # iterations between tests of convergence, which wait for the GPU
BLOCK = 288  # factorise matrices with at most this many rows directly, larger ones by halves
ALIGNED = {"cpu": 1, "cuda": 64}  # pad the number of examples to a multiple of this
TERMS = 20  # of the series of a Pólya-Gamma variable
POINTS = 20  # of the Gauss-Hermite quadrature


def rbf(a: Tensor, b: Tensor, outputscale: float, lengthscale: float) -> Tensor:
    """Return k(a_i, b_j) = outputscale exp(-||a_i - b_j||^2 / (2 lengthscale^2)), (..., m, n).

    a (..., m, F), b (..., n, F).
    """
    squared = a.square().sum(-1, keepdim=True) + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
    return outputscale * torch.exp(squared / (-2 * lengthscale**2))


def pg_mean(c: Tensor) -> Tensor:
    """Return the mean tanh(c/2) / (2c) of PG(1, c); 1/4 at c = 0."""
    c = c.abs().clamp_min(1e-4)
    return torch.tanh(c / 2) / (2 * c)


def pg(c: Tensor, uniform: Tensor) -> Tensor:
    """Return a draw from PG(1, c) for each entry of c, from uniform numbers (*c.shape, terms):

    omega = 1/(2 pi^2) sum_k E_k / ((k - 1/2)^2 + c^2 / (4 pi^2)), E_k ~ Exp(1), k = 1, 2, ...

    The mean replaces the truncated terms, so the mean is exact. Their variance is about 1 / (12 pi^4 terms^3): with 20
    terms, 3e-6 of the variance at c = 0 and 4e-4 at c = 12.
    """
    k = torch.arange(1, uniform.shape[-1] + 1, dtype=c.dtype, device=c.device)
    rates = 2 * math.pi**2 * ((k - 0.5).square() + (c / (2 * math.pi)).square()[..., None])
    exponential = -torch.log1p(-uniform.to(c.dtype))
    return pg_mean(c) + ((exponential - 1) / rates).sum(-1)


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factors of matrices (..., n, n).

    If a matrix is not positive definite in its precision, add increasing jitter to its diagonal until it is, and warn.
    Matrices that are not finite have NaN factors. Neither changes the factors of the other matrices.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor
    finite = matrix.isfinite().all(-1).all(-1)
    factor = torch.where(finite[..., None, None], factor, torch.nan)
    failed = (info != 0) & finite
    if not failed.any():
        return factor
    eps = torch.finfo(matrix.dtype).eps
    jitter = torch.where(failed, eps * matrix.diagonal(dim1=-2, dim2=-1).mean(-1), 0)
    while failed.any():
        jitter = torch.where(failed, 10 * jitter, jitter)
        raised, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed(jitter[..., None].expand(matrix.shape[:-1])))
        factor = torch.where(failed[..., None, None], raised, factor)
        failed &= info != 0
    warnings.warn(
        f"a covariance matrix is not positive definite up to rounding: added {float(jitter.max()):.0e} to its diagonal",
        RuntimeWarning,
        stacklevel=2,
    )
    return factor


class Draws(NamedTuple):
    """The random numbers of Gibbs chains."""

    prior: tuple[Tensor, ...]
    """For each step, normal numbers (chains, n) for a draw from the prior."""
    noise: tuple[Tensor, ...]
    """For each step but the first, normal numbers (chains, n) for the noise."""
    uniform: tuple[Tensor, ...]
    """For each step, uniform numbers (chains, n, TERMS) for omega."""


def draw(chains: int, n: int, steps: int, generator: torch.Generator) -> Draws:
    """Return the random numbers of Gibbs chains for n examples.

    They are always in single precision, since torch draws other numbers in double precision.
    """
    settings: Any = {"generator": generator, "device": generator.device, "dtype": torch.float32}
    prior, noise, uniform = [], [], []
    for step in range(steps):
        prior.append(torch.randn(chains, n, **settings))
        if step:
            noise.append(torch.randn(chains, n, **settings))
        uniform.append(torch.rand(chains, n, TERMS, **settings))
    return Draws(tuple(prior), tuple(noise), tuple(uniform))


def gibbs(cov: Tensor, kappa: Tensor, draws: Draws) -> Tensor:
    """Return the last omega (..., chains, n) of Gibbs chains that start with f ~ N(0, K) and draw, in each step,

    omega | f ~ PG(1, f),   f | omega ~ N(Sigma kappa, Sigma),   Sigma = (K^-1 + Omega)^-1,

    the latter by Matheron's rule, which does not factorise Sigma: with f' ~ N(0, K) and noise e ~ N(0, Omega^-1),
    f = f' + K (K + Omega^-1)^-1 (kappa / omega - f' - e).
    """
    # In double precision: K's smallest eigenvalue is its jitter, which single precision loses for large n.
    root = cholesky(cov.double()).to(cov.dtype)
    first, *priors = (normal.to(cov.dtype) @ root.mT for normal in draws.prior)
    omega = pg(first, draws.uniform[0])
    solver = _Solver(cov, first.shape[-2])
    for prior, noise, uniform in zip(priors, draws.noise, draws.uniform[1:], strict=True):
        scale = omega.sqrt()
        residual = kappa[..., None, :] / scale - scale * prior - noise
        omega = pg(prior + (scale * solver(scale, residual)) @ cov, uniform)
    return omega


class _Solver:
    """Multiply one vector per chain by B^-1, for processes with these covariances (..., n, n)."""

    def __init__(self, cov: Tensor, chains: int) -> None:
        self._cov = cov
        many = cov.shape[-1] >= ITERATE_FROM[cov.device.type]
        self._iterated = ConjugateGradients(cov, chains) if many else None

    def __call__(self, scale: Tensor, vectors: Tensor) -> Tensor:
        """Return the products with vectors (..., chains, n); scale = omega^1/2. The next call may overwrite them."""
        if self._iterated and self._iterated.solve(scale, vectors):
            return self._iterated.solved
        parts = _parts(scale, scale.shape[-1] ** 2)
        solved = [_solve(_whitener(self._cov, scale[..., part, :]), vectors[..., part, :]) for part in parts]
        return torch.cat(solved, dim=-2)


class ConjugateGradients:
    """Multiply vectors (..., chains, n) by B^-1, up to rounding.

    Tens of iterations are typical, since few eigenvalues of B are large. The iteration does not wait for chains that
    are not finite. Converged chains continue with the others; lower bounds on divisors avoid 0 / 0. All tensors are
    allocated in advance, so that a GPU can capture the iterations once and replay them: each has about 14 kernels.
    """

    def __init__(self, cov: Tensor, chains: int) -> None:
        self._cov, self._tiny = cov, torch.finfo(cov.dtype).tiny
        vectors = cov.new_zeros(*cov.shape[:-2], chains, cov.shape[-1])
        numbers = vectors[..., :1].clone()
        self.solved, self._residual, self._direction, self._scale, self._image, self._scratch = (
            torch.zeros_like(vectors) for _ in range(6)
        )
        self._squared, self._before, self._factor = (torch.zeros_like(numbers) for _ in range(3))
        self._replay = _recorded(self._iterate) if cov.device.type == "cuda" else None

    def solve(self, scale: Tensor, vectors: Tensor) -> bool:
        """Iterate until `solved` is the solution, and return whether that took fewer than n iterations.

        In exact arithmetic n iterations always suffice, but factorising costs less than that.
        """
        self.solved.zero_()
        for tensor, value in ((self._residual, vectors), (self._direction, vectors), (self._scale, scale)):
            tensor.copy_(value)
        self._sum_of_squares()
        goal = (8 * torch.finfo(vectors.dtype).eps) ** 2 * self._squared
        for _ in range(-(-vectors.shape[-1] // AT_A_TIME)):
            (self._replay or self._iterate)()
            if not (self._squared > goal).any():  # False for NaN
                return True
        return False

    def _iterate(self) -> None:
        for _ in range(AT_A_TIME):
            torch.mul(self._scale, self._direction, out=self._scratch)
            torch.matmul(self._scratch, self._cov, out=self._image)
            self._image.mul_(self._scale).add_(self._direction)
            torch.mul(self._direction, self._image, out=self._scratch)
            torch.sum(self._scratch, -1, keepdim=True, out=self._factor)
            torch.div(self._squared, self._factor.clamp_min_(self._tiny), out=self._factor)
            self.solved.addcmul_(self._factor, self._direction)
            self._residual.addcmul_(self._factor, self._image, value=-1)
            self._before.copy_(self._squared)
            self._sum_of_squares()
            torch.div(self._squared, self._before.clamp_min_(self._tiny), out=self._factor)
            self._direction.mul_(self._factor).add_(self._residual)

    def _sum_of_squares(self) -> None:
        torch.mul(self._residual, self._residual, out=self._scratch)
        torch.sum(self._scratch, -1, keepdim=True, out=self._squared)


def _recorded(function: Callable[[], None]) -> Callable[[], None]:
    """Capture the function as a CUDA graph, which works on the same tensors at every call."""
    graph, aside = torch.cuda.CUDAGraph(), _stream_for_recording()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        function()  # warm up: libraries initialise themselves, which cannot be captured
        with without_collecting():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
    torch.cuda.current_stream().wait_stream(aside)
    return graph.replay


@cache
def _stream_for_recording() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _whitener(cov: Tensor, scale: Tensor) -> Tensor:
    """Return L^-1 (..., chains, n, n) for the Cholesky factors L of B; scale = omega^1/2."""
    system = scale[..., :, None] * cov[..., None, :, :] * scale[..., None, :]
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    return inverse_factor(system)


def _solve(whitener: Tensor, vectors: Tensor) -> Tensor:
    """Return B^-1 times vectors (..., n)."""
    solved: Tensor = (whitener.mT @ (whitener @ vectors[..., None]))[..., 0]
    return solved


def inverse_factor(matrix: Tensor) -> Tensor:
    """Return L^-1 for the Cholesky factors L of matrices (..., n, n), by halves: nearly all of it are products."""
    n = matrix.shape[-1]
    if n <= BLOCK:
        identity = torch.eye(n, dtype=matrix.dtype, device=matrix.device).expand(matrix.shape)
        inverse: Tensor = torch.linalg.solve_triangular(cholesky(matrix), identity, upper=False)
        return inverse
    half = n // 2
    first = inverse_factor(matrix[..., :half, :half])
    below = product(matrix[..., half:, :half], first.mT)
    second = inverse_factor(matrix[..., half:, half:] - product(below, below.mT))
    inverse = torch.zeros_like(matrix)
    inverse[..., :half, :half] = first
    inverse[..., half:, :half] = -product(second, product(below, first))
    inverse[..., half:, half:] = second
    return inverse


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for matrices (..., m, k) and (..., k, n), in single precision on a GPU by its TF32 units."""
    return split_product(a, b) if a.device.type == "cuda" and a.dtype == torch.float32 else a @ b


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for matrices (..., m, k) and (..., k, n) in single precision, as the sum of three rounded products.

    Split both matrices into an 11-bit part and the rest. TF32 units round their inputs to 11 bits; three products of
    parts are as exact as one product in single precision, and faster.
    """
    batch = a.shape[:-2]
    a, b = (values.reshape(math.prod(batch), *values.shape[-2:]) for values in (a, b))
    a_head, b_head = _head(a), _head(b)
    with rounded(a):
        small = torch.bmm(a_head, b - b_head).baddbmm_(a - a_head, b_head)
        return small.baddbmm_(a_head, b_head).view(*batch, *small.shape[-2:])


def _head(values: Tensor) -> Tensor:
    """Truncate single precision to 11 bits, of which 10 are stored."""
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)


@contextmanager
def rounded(values: Tensor) -> Iterator[None]:
    """Let a GPU round inputs of products to 11 bits (TF32): several times as fast, and enough for gradients."""
    before = torch.get_float32_matmul_precision()
    if values.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def at_once(numbers: int, device: torch.device) -> int:
    """Return how many items of `numbers` numbers each fit into a temporary tensor; at least one."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return max(1, int(GPU_SHARE * memory / 4) // numbers)
    return max(1, CHUNK // numbers)


def _parts(omega: Tensor, numbers: int) -> Iterator[slice]:
    """Return slices of the chains that fit into memory, given `numbers` per chain and process."""
    *processes, chains, _ = omega.shape
    size = at_once(math.prod(processes) * numbers, omega.device)
    return (slice(start, start + size) for start in range(0, chains, size))


class _Moments(torch.autograd.Function):
    """`moments` with an explicit gradient. With V = cross (K + Omega^-1)^-1 from the forward pass,

    d mean = (d cross - V dK) alpha,   d variance = diag(V dK V^T - 2 d cross V^T).

    This does not differentiate a factorisation: over all chains it is a few matrix products.
    """

    @staticmethod
    def forward(ctx: Any, cov: Tensor, cross: Tensor, variance: float, omega: Tensor, kappa: Tensor) -> Any:
        m, n = cross.shape[-2:]
        parts = list(_parts(omega, n * max(m, n)))
        alpha = torch.empty_like(omega)
        variances = omega.new_empty(*omega.shape[:-1], m)
        # One tensor for all chains: pieces between temporaries would fragment the memory.
        solved = omega.new_empty(*omega.shape[:-1], m, n) if any(ctx.needs_input_grad) else None
        for part in parts:
            scale = omega[..., part, :].sqrt()
            whitener = _whitener(cov, scale)
            alpha[..., part, :] = scale * _solve(whitener, kappa[..., None, :] / scale)
            white = product(cross[..., None, :, :] * scale[..., None, :], whitener.mT)
            variances[..., part, :] = variance - white.square().sum(-1)
            if solved is not None:
                with rounded(cov):
                    torch.mul(white @ whitener, scale[..., None, :], out=solved[..., part, :, :])
        ctx.save_for_backward(alpha, solved)
        ctx.parts = parts
        return alpha @ cross.mT, variances

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        alpha, solved = ctx.saved_tensors
        grad_mean, grad_variance = grads
        with rounded(alpha):
            grad_cross = grad_mean.mT @ alpha
            grad_cov = alpha.new_zeros(*alpha.shape[:-2], *alpha.shape[-1:] * 2)
            for part in ctx.parts:
                some = solved[..., part, :, :]
                weighted = some * grad_variance[..., part, :, None]
                grad_cross -= 2 * weighted.sum(-3)
                weighted -= grad_mean[..., part, :, None] * alpha[..., part, None, :]
                grad_cov += some.flatten(-3, -2).mT @ weighted.flatten(-3, -2)
        return grad_cov, grad_cross, None, None, None


def moments(cov: Tensor, cross: Tensor, variance: float, omega: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (..., chains, m) of f at m new points, given omega (..., chains, n):

    mean = cross alpha, alpha = (K + Omega^-1)^-1 (kappa / omega);
    variance = k(x, x) - diag(cross (K + Omega^-1)^-1 cross^T).

    cross (..., m, n): the kernel between new and old points. variance: k(x, x). Differentiable in K and cross, but not
    in omega and kappa.
    """
    # Pad with points that are independent of all others: fast products need aligned sizes.
    spare = -cov.shape[-1] % ALIGNED[cov.device.type]
    cov, cross = functional.pad(cov, (0, spare, 0, spare)), functional.pad(cross, (0, spare))
    omega, kappa = functional.pad(omega, (0, spare), value=1.0), functional.pad(kappa, (0, spare))
    mean, left = _Moments.apply(cov, cross, variance, omega, kappa)  # type: ignore[no-untyped-call]
    return mean, left.clamp_min(1e-6 * variance)


def side_probabilities(mean: Tensor, variance: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """Return p(y = 1) and p(y = 0) at m points, (..., m) each: averages over chains of moments (..., chains, m).

    link "mean": E[sigmoid(f)], by Gauss-Hermite quadrature. link "reference", as in the authors' code:
    exp(E[log sigmoid(f)]) for y = 1 and the rest for y = 0. This lower bound favours y = 0.
    """
    nodes, weights = (torch.from_numpy(part).to(mean) for part in np.polynomial.hermite_e.hermegauss(POINTS))
    f = mean[..., None] + variance.sqrt()[..., None] * nodes
    weights = weights / weights.sum()
    if link == "reference":
        one = (functional.logsigmoid(f) @ weights).exp().mean(-2)
        return one, 1 - one
    return (torch.sigmoid(f) @ weights).mean(-2), (torch.sigmoid(-f) @ weights).mean(-2)
