"""What a model's outputs say about the targets. Models return outputs; the likelihood scores them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.maths.gaussian import sigma


class Likelihood(Protocol):
    """log p(y | outputs) for one example, and whether outputs are class scores."""

    task: str

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the log-likelihood of each example: outputs (n, ...), y (n, ...) -> (n,)."""
        ...


@dataclass(frozen=True)
class Classification:
    """Softmax classification: outputs (n, C) are logits, y (n,) are labels."""

    task = "classification"

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of each example."""
        return functional.cross_entropy(outputs, y, reduction="none")


@dataclass(frozen=True)
class Regression:
    """Eq. (1): y = f(x) + noise, noise ~ N(0, sigma_eps^2) in each of the d target dimensions.

    With a known sigma_eps the outputs are the means (n, d). With sigma_eps = None the noise is learned: outputs
    (n, d + 1) carry, in their last column, the rho of sigma_eps = softplus(rho), which `nets.WithNoise` appends.

    unit: what targets were divided by before training; scores are told in what they were before.
    """

    sigma_eps: float | None = None
    unit: float = 1.0

    task = "regression"

    def mean_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted means (..., d) and noise standard deviation, broadcastable to them."""
        if self.sigma_eps is None:
            return outputs[..., :-1], sigma(outputs[..., -1:])
        return outputs, torch.full_like(outputs[..., :1], self.sigma_eps)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Gaussian negative log-density of each example, summed over target dimensions."""
        mean, noise = self.mean_and_noise(outputs)
        return (0.5 * ((y - mean) / noise).square() + torch.log(noise) + 0.5 * math.log(2 * math.pi)).sum(-1)
