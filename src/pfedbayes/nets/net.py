"""A network is a function net(theta, x) of one flat vector of parameters; only this file knows layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Likelihood
from pfedbayes.memory import in_memory
from pfedbayes.nets.convolutions import Convolutions, replace_convolutions

Init = Literal["torch", "kaiming", "normal"]
Pixels = Literal["signed", "unit"]
Function = Callable[[Tensor, Tensor], Tensor]  # of theta (T,) and inputs (n, ...)


class Net:
    """A `torch.nn.Module` seen as a function of theta (T,).

    Every parameter lies in theta, in the module's order. Modules with hidden state (buffers that change, dropout)
    are refused: they could be neither Gaussian, nor averaged, nor batched over clients.
    """

    def __init__(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                raise UserError(f"the module draws hidden noise in {name!r} (dropout): remove it or set p=0")
        if buffers := [name for name, _ in module.named_buffers()]:
            raise UserError(
                f"the module keeps hidden state in {buffers[0]!r}: use GroupNorm instead of BatchNorm, and "
                "parameters or constants instead of buffers"
            )
        parameters = dict(module.named_parameters())
        if not parameters:
            raise UserError("the module has no parameters to learn: give a module with at least one layer")
        self._plain = self._module = copy.deepcopy(module).cpu().eval().requires_grad_(False)
        self._names = list(parameters)
        self._ties = len(list(module.named_parameters(remove_duplicate=False))) > len(parameters)
        self.shapes = tuple(parameter.shape for parameter in parameters.values())
        self._sizes = [parameter.numel() for parameter in parameters.values()]
        self.num_params = sum(self._sizes)
        self.head_size = _last_layer_size(module)
        self._lays_out = False
        self._instead: Function | None = None
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())

    def module(self, theta: Tensor) -> nn.Module:
        """The module as it was given, with parameters theta (T,), apart from this one."""
        module = copy.deepcopy(self._plain).to(theta.dtype)
        parts = torch.split_with_sizes(theta.cpu(), self._sizes)
        for parameter, part in zip(module.parameters(), parts, strict=True):
            parameter.copy_(part.view(parameter.shape))
        return module

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs (n, ...) of the network with parameters theta (T,) at inputs x (n, ...)."""
        if self._instead:
            return self._instead(theta, x)
        if self._lays_out:
            theta = _LaidOut.apply(theta)  # type: ignore[no-untyped-call]
        parts = torch.split_with_sizes(theta, self._sizes)  # slices would cost a zero vector each in the backward pass
        return self.apply([part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)], x)

    def apply(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Outputs with these tensors as parameters, in the module's order; their sizes may differ from the module's."""
        parameters = dict(zip(self._names, parts, strict=True))
        # To look for parameters with several names costs as much as a small network.
        outputs: Tensor = torch.func.functional_call(self._module, parameters, (x,), tie_weights=self._ties)
        return outputs

    def fitted(self, convolutions: Convolutions = "native", lays_out: bool = False) -> Net:
        """The same function with another way to compute its 2-d convolutions; lays_out: see `_LaidOut`."""
        other = copy.copy(self)
        other._module = replace_convolutions(copy.deepcopy(self._module), convolutions)
        other._lays_out = lays_out
        return other

    def through(self, wrap: Callable[[Function], Function]) -> Net:
        """The same function, computed as `wrap` of it does."""
        other = copy.copy(self)
        other._instead = wrap(self)
        return other

    def join(self, body: Tensor, head: Tensor) -> Tensor:
        """The body of one theta with the head, the last layer, of another: (T,)."""
        cut = self.num_params - self.head_size
        return torch.cat([body[:cut], head[cut:]])

    def init(self, seed: int, scheme: Init) -> Tensor:
        """A first theta (T,), always made on the CPU so that it does not depend on the device.

        torch: what the module's own layers do in `reset_parameters`; kaiming: N(0, 2/fan_in) weights and zero biases;
        normal: N(0, 0.1^2) for weights and biases.
        """
        module = copy.deepcopy(self._module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the GPU's streams too
            for part in module.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
            for parameter in module.parameters():
                if scheme == "normal":
                    parameter.normal_(0.0, 0.1)
            for part in module.modules():
                if scheme == "kaiming" and isinstance(part, nn.Linear | nn.modules.conv._ConvNd):
                    nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
                    if part.bias is not None:
                        part.bias.zero_()
            return torch.cat([parameter.flatten() for parameter in module.parameters()])


class _LaidOut(torch.autograd.Function):
    """`in_memory`, with gradients: a bias would else be drawn anew wherever it is added."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vector: Tensor) -> Tensor:
        return in_memory(vector)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def _last_layer_size(module: nn.Module) -> int:
    """Parameters of the last layer that has any; they are the tail of theta."""
    own = [sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules()]
    return next(size for size in reversed(own) if size)


class Batch(NamedTuple):
    """A mini-batch of fixed shape: x (b, ...), y (b, ...), weight (b,) 1 for real rows and 0 for padding."""

    x: Tensor
    y: Tensor
    weight: Tensor

    @property
    def size(self) -> Tensor:
        """The number |B| of real examples."""
        return self.weight.sum()


class Model(NamedTuple):
    """A network and the likelihood that scores its outputs: all that a method knows of the task."""

    net: Net
    likelihood: Likelihood
    pixels: Pixels = "signed"
    half: bool = False  # the network computes in bfloat16

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the network with parameters theta at raw inputs."""
        return self._compute(theta, self.inputs(x, theta.dtype))

    def stacked_outputs(self, thetas: Tensor, x: Tensor) -> Tensor:
        """Outputs (K, n, ...) of the networks with parameters thetas (K, T) at the same raw inputs.

        In turn: together they are no faster on a CPU, and on a GPU every network would get a copy of many inputs.
        """
        inputs = self.inputs(x, thetas.dtype)
        return torch.stack([self._compute(theta, inputs) for theta in thetas])

    def _compute(self, theta: Tensor, inputs: Tensor) -> Tensor:
        if self.half:
            return self.net(theta.bfloat16(), inputs.bfloat16()).to(theta.dtype)
        return self.net(theta, inputs)

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Images are stored as bytes; they are scaled to [-1, 1] ("signed") or [0, 1] ("unit") here and only here."""
        if x.dtype != torch.uint8:
            return x
        fresh = x.to(dtype)  # changed in place: of large images every copy costs more than the arithmetic
        return fresh.mul_(1 / 255) if self.pixels == "unit" else fresh.mul_(2 / 255).sub_(1)

    def nll(self, theta: Tensor, batch: Batch) -> Tensor:
        """-log p_theta(B), summed over the real examples of the batch."""
        per_example = self.likelihood.nll(self.outputs(theta, batch.x), batch.y)
        return (batch.weight * per_example).sum()

    def grad_nll(self, theta: Tensor, batch: Batch) -> Tensor:
        """Gradient of `nll` in theta."""
        grad: Tensor = torch.func.grad(self.nll)(theta, batch)
        return grad

    def grad_loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """grad CE(theta; B): gradient of the mean of `nll` over the real examples of the batch."""
        return self.grad_nll(theta, batch) / batch.size


class WithNoise(nn.Module):
    """A regression module with one learned output more: the rho of the noise sigma_eps, the same for every input."""

    def __init__(self, module: nn.Module, rho: float = 0.0) -> None:
        super().__init__()
        self.module = module
        self.rho = nn.Parameter(torch.tensor([rho]))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, d + 1): the module's d means and the constant rho."""
        means = self.module(x)
        return torch.cat([means, self.rho.expand(*means.shape[:-1], 1)], dim=-1)
