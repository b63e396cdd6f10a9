"""Likelihoods: how probable the targets are, given a model's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.maths.gaussian import sigma


class Likelihood(Protocol):
    """The distribution p(y | outputs) of a target."""

    task: str

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood (n,) of each example, from outputs (n, ...) and targets y (n, ...)."""
        ...


@dataclass(frozen=True)
class Classification:
    """Softmax classification: outputs (n, C) are logits, y (n,) are labels."""

    task = "classification"

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return functional.cross_entropy(outputs, y, reduction="none")


@dataclass(frozen=True)
class Regression:
    """Eq. (1): y = f(x) + noise, noise ~ N(0, sigma_eps^2) in each of the d target dimensions.

    With a known sigma_eps, outputs are the means (n, d). Otherwise the noise is learned: the last column of the outputs
    (n, d + 1) is the rho of sigma_eps = softplus(rho), which `nets.WithNoise` appends.
    """

    sigma_eps: float | None = None
    """Standard deviation of the noise; None to learn it."""
    unit: float = 1.0
    """The number by which targets were divided before training. Scores are in the original units."""

    task = "regression"

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted means (..., d) and the noise standard deviation, broadcastable to them."""
        if self.sigma_eps is None:
            return outputs[..., :-1], sigma(outputs[..., -1:])
        return outputs, torch.full_like(outputs[..., :1], self.sigma_eps)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative Gaussian log-density of each example, summed over target dimensions."""
        mean, noise = self.mean_and_noise(outputs)
        return (0.5 * ((y - mean) / noise).square() + torch.log(noise) + 0.5 * math.log(2 * math.pi)).sum(-1)
