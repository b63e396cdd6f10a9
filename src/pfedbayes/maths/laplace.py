"""Laplace approximations of the last layer: Gaussians over its weights W (C, D), given its inputs phi (n, D).

The curvature is the generalised Gauss-Newton matrix, the sum over examples of Lambda (x) phi phi^T. Lambda (C, C) is
the Hessian of an example's negative log-likelihood in its C outputs. With the prior N(0, 1 / tau) the posterior is
N(W, (curvature + tau I)^-1). It comes in three structures: "full", its "diagonal", and the "kronecker" product of
B = sum of Lambda and A = mean of phi phi^T. Curvatures of parts of the data add up; of the Kronecker factors, this
approximates once more.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.trees import Tree

Structure = Literal["kronecker", "diagonal", "full"]
PRECISIONS = 81  # values of tau that are tried, between 1e-4 and 1e4


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of a curvature."""

    values: Tensor
    """Eigenvalues (C, D)."""
    vectors: tuple[Tensor, ...]
    """() of a diagonal one; (U (C, C), V (D, D)) of a Kronecker product; (Q (C D, C D),) of a full one."""


def curvature(structure: Structure, phi: Tensor, hessian: Tensor) -> Tree:
    """Return the curvature of examples with inputs phi (n, D) and Hessians Lambda (n, C, C), as additive tensors."""
    if structure == "diagonal":
        return torch.einsum("ncc,nd->cd", hessian, phi.square())
    if structure == "kronecker":
        return hessian.sum(0), phi.mT @ phi, phi.new_ones(len(phi)).sum()
    rows = [torch.einsum("nb,nd->dbn", of_output, phi) @ phi for of_output in hessian.unbind(1)]
    return torch.stack(rows).flatten(2, 3).flatten(0, 1)


def spectrum(structure: Structure, summed: Tree, outputs: int) -> Spectrum:
    """Return the eigenvalues and eigenvectors of a summed curvature of this number C of outputs."""
    if structure == "diagonal":
        return Spectrum(summed, ())
    if structure == "kronecker":
        of_outputs, of_inputs, count = summed
        b, u = torch.linalg.eigh(of_outputs)
        a, v = torch.linalg.eigh(of_inputs / count)
        return Spectrum(b.clamp_min(0)[:, None] * a.clamp_min(0), (u, v))
    values, vectors = torch.linalg.eigh(summed)
    return Spectrum(values.clamp_min(0).view(outputs, -1), (vectors,))


def precisions(like: Tensor) -> Tensor:
    """Return the prior precisions tau that are tried, (P,)."""
    return torch.logspace(-4, 4, PRECISIONS, dtype=like.dtype, device=like.device)


def log_evidence(values: Tensor, weights: Tensor) -> Tensor:
    """Return the log marginal likelihood of each of the `precisions`, up to a constant, (P,).

    log p(D) ~ log p(D | W) - (tau |W|^2 + log det(curvature + tau I) - H log tau) / 2, with H weights.
    """
    tau = precisions(values)
    determinant = (values.flatten() + tau[:, None]).log().sum(-1)
    return -0.5 * (tau * weights.square().sum() + determinant - values.numel() * tau.log())


def deviations(found: Spectrum, tau: Tensor, noise: Tensor) -> Tensor:
    """Return draws (K, C, D) of W minus its mean, from standard normal noise (K, C D)."""
    scaled = noise.view(len(noise), *found.values.shape) * (found.values + tau).rsqrt()
    if len(found.vectors) == 2:
        u, v = found.vectors
        return u @ scaled @ v.mT
    for vectors in found.vectors:
        scaled = (scaled.flatten(1) @ vectors.mT).view_as(scaled)
    return scaled


def output_variances(found: Spectrum, tau: Tensor, phi: Tensor) -> Tensor:
    """Return the variances (n, C) of the outputs W phi, for inputs phi (n, D)."""
    inverse = 1 / (found.values + tau)
    if not found.vectors:
        return phi.square() @ inverse.mT
    if len(found.vectors) == 2:
        u, v = found.vectors
        return (phi @ v).square() @ inverse.mT @ u.square().mT
    (vectors,) = found.vectors
    projected = torch.einsum("nd,cde->nce", phi, vectors.view(*found.values.shape, -1))
    return projected.square() @ inverse.flatten()


def probit(logits: Tensor, variances: Tensor) -> Tensor:
    """Return logits (..., C) whose softmax approximates the mean softmax of Gaussian logits (MacKay 1992)."""
    return logits / (1 + math.pi / 8 * variances).sqrt()
