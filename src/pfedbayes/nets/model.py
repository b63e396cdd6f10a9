"""A mini-batch, and a network with the likelihood that scores its outputs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.likelihoods import Likelihood
from pfedbayes.nets.net import Net

Pixels = Literal["signed", "unit"]


class Batch(NamedTuple):
    """A mini-batch of fixed shape."""

    x: Tensor
    """Inputs (b, ...)."""
    y: Tensor
    """Targets (b, ...)."""
    weight: Tensor
    """1 for examples, 0 for padding (b,)."""

    @property
    def size(self) -> Tensor:
        """The number |B| of examples without padding."""
        return self.weight.sum(-1)


class Model(NamedTuple):
    """A network and its likelihood: all that a method knows about the task."""

    net: Net
    likelihood: Likelihood
    pixels: Pixels = "signed"
    """Scale of image inputs: [-1, 1] ("signed") or [0, 1] ("unit")."""
    half: bool = False
    """Compute the network in bfloat16."""

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of the network with parameters theta at raw inputs x."""
        return self._compute(theta, self.inputs(x, theta.dtype))

    def stacked_outputs(self, thetas: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (K, n, ...) of the networks with parameters thetas (K, T) at the same raw inputs.

        Networks run one after another, except for tables. vmap is no faster on a CPU, and on a GPU it copies the inputs
        K times.
        """
        inputs = self.inputs(x, thetas.dtype)
        together = None if self.half else self.net.stacked(thetas, inputs)
        if together is not None:
            return together
        return torch.stack([self._compute(theta, inputs) for theta in thetas])

    def _compute(self, theta: Tensor, inputs: Tensor) -> Tensor:
        if self.half:
            return self.net(theta.bfloat16(), inputs.bfloat16()).to(theta.dtype)
        return self.net(theta, inputs)

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the inputs of the network: bytes scaled as `pixels` says, anything else unchanged."""
        if x.dtype != torch.uint8:
            return x
        fresh = x.to(dtype)  # in place: a copy of large images costs more than the arithmetic
        return fresh.mul_(1 / 255) if self.pixels == "unit" else fresh.mul_(2 / 255).sub_(1)

    def nll(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return -log p_theta(B), summed over the examples of the batch with their weights."""
        per_example = self.likelihood.nll(self.outputs(theta, batch.x), batch.y)
        return (batch.weight * per_example).sum()

    def noise_shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of the standard normal noise of `expected_nll`: (b, units + outputs), or (T,)."""
        units = self.net.num_units
        return (self.net.num_params,) if units is None else (batch_size, units + self.net.num_outputs)

    def expected_nll(self, mean: Tensor, variance: Tensor, batch: Batch, noise: Tensor) -> Tensor:
        """Return an unbiased estimate of E[nll(theta, batch)] for theta ~ N(mean, variance), from one draw of noise.

        It may exceed the expectation where the likelihood's own `expected_nll` is an upper bound.
        """
        x, units = self.inputs(batch.x, mean.dtype), self.net.num_units
        own = noise if units is None else noise[..., :units]
        moments = self.net.moments(mean, variance, x, own)
        if units is None:
            per_example = self.likelihood.nll(moments[0], batch.y)
        else:
            per_example = self.likelihood.expected_nll(*moments, batch.y, noise[..., units:])
        return (batch.weight * per_example).sum()

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `expected_nll` in mean and variance (T,); all arguments may have a leading axis."""
        units = self.net.num_units or 0

        def of_outputs(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
            in_mean, in_variance = self.likelihood.grad_expected_nll(mean, variance, batch.y, noise[..., units:])
            return batch.weight[..., None] * in_mean, batch.weight[..., None] * in_variance

        x = self.inputs(batch.x, mean.dtype)
        found = self.net.gradients(mean, variance, x, noise[..., :units], of_outputs)
        if found is None:
            grads = torch.func.grad(self.expected_nll, argnums=(0, 1))
            found = (torch.func.vmap(grads) if mean.dim() > 1 else grads)(mean, variance, batch, noise)
        return found

    def grad_nll(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of `nll` in theta."""
        grad: Tensor = torch.func.grad(self.nll)(theta, batch)
        return grad

    def grad_loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return grad CE(theta; B), the gradient of the mean of `nll` over the examples of the batch."""
        return self.grad_nll(theta, batch) / batch.size

    def grad_sampled_nll(self, mean: Tensor, sigma: Tensor, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients in mean and sigma (T,) of the mean of `nll` over theta_k = mean + sigma g_k.

        noise: standard normal g (K, T).
        """
        grads = torch.stack([self.grad_nll(torch.addcmul(mean, sigma, g), batch) for g in noise])
        return grads.mean(0), (grads * noise).mean(0)

    def fisher(self, theta: Tensor, batch: Batch, noise: Tensor) -> Tensor:
        """Return an unbiased estimate of the mean over the batch of the squared gradient of an example's nll (T,).

        This is the diagonal of the empirical Fisher information. Independent factors of mean 0 and variance 1, noise
        (b,), make the products of different examples cancel on average, so that one gradient is enough.
        """
        return self.grad_nll(theta, batch._replace(weight=batch.weight * noise)).square() / batch.size
