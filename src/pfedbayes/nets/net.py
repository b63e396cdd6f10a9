"""A network as a function net(theta, x) of one flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pfedbayes.errors import UserError
from pfedbayes.memory import in_memory
from pfedbayes.nets.convolutions import Convolutions, replace_convolutions
from pfedbayes.nets.table import TableNet

Init = Literal["torch", "kaiming", "normal"]
Function = Callable[[Tensor, Tensor], Tensor]  # of theta (T,) and inputs (n, ...)


class Net:
    """A `torch.nn.Module` as a function of theta (T,).

    theta holds all parameters, in the module's order. Modules with hidden state (buffers, dropout) are refused: a
    buffer can be neither Gaussian, nor averaged, nor batched over clients.
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
        self._contiguous = False
        self._instead: Function | None = None
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())

    def module(self, theta: Tensor) -> nn.Module:
        """Return a copy of the original module with parameters theta (T,)."""
        module = copy.deepcopy(self._plain).to(theta.dtype)
        for parameter, part in zip(module.parameters(), self._parts(theta.cpu()), strict=True):
            parameter.copy_(part)
        return module

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (n, ...) of the network with parameters theta (T,) at inputs x (n, ...)."""
        if self._instead:
            return self._instead(theta, x)
        if self._contiguous:
            theta = _InMemory.apply(theta)  # type: ignore[no-untyped-call]
        return self.apply(self._parts(theta), x)

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the inputs (n, F) of the last linear layer: features @ W.T + b = net(theta, x).

        With learned noise (`WithNoise`), the product gives the means without the noise column. Of a `TableNet`, it
        gives the outputs from `head_start` on, without constants.
        """
        module, prefix = self._module, ""
        if isinstance(module, WithNoise):
            module, prefix = module.module, "module."
        named = zip(self._names, self._parts(theta), strict=True)
        parameters = {name.removeprefix(prefix): part for name, part in named if name.startswith(prefix)}
        calls = _LinearCalls()
        with calls:
            outputs = torch.func.functional_call(module, parameters, (x,), tie_weights=self._ties)
        completed = isinstance(module, TableNet)
        if calls.last is None or (calls.last[1] is not outputs and not completed):
            raise UserError(
                "features are the input of a final torch.nn.Linear, which this network does not have: append one"
            )
        return calls.last[0]

    @property
    def head_start(self) -> int:
        """The index of the first output of the last linear layer: 1 for a `TableNet` with a reference, else 0."""
        return int(isinstance(self._plain, TableNet) and self._plain.reference)

    def _parts(self, theta: Tensor) -> list[Tensor]:
        """Return the parameters as views of theta, in the module's order."""
        parts = torch.split_with_sizes(theta, self._sizes, -1)  # in the backward pass, slices cost a zero vector each
        return [part.view(*theta.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def apply(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the outputs with these parameters, in the module's order; shapes may differ from the module's."""
        parameters = dict(zip(self._names, parts, strict=True))
        # Searching for tied parameters takes as long as a small network.
        outputs: Tensor = torch.func.functional_call(self._module, parameters, (x,), tie_weights=self._ties)
        return outputs

    @property
    def num_units(self) -> int | None:
        """The number of hidden units that `moments` samples for an example; None if it samples the weights."""
        return self._plain.num_units if isinstance(self._plain, TableNet) else None

    @property
    def num_outputs(self) -> int:
        """The number of outputs of a `TableNet`."""
        return self._plain.num_outputs if isinstance(self._plain, TableNet) else 0

    def stacked(self, thetas: Tensor, x: Tensor) -> Tensor | None:
        """Return the outputs (K, n, O) of networks with parameters thetas (K, T); None unless they are `TableNet`s."""
        if not isinstance(self._plain, TableNet):
            return None
        return self._plain.stacked(dict(zip(self._names, self._parts(thetas), strict=True)), x)

    def moments(self, mean: Tensor, variance: Tensor, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances (n, ...) of the outputs for parameters of independent N(mean, variance), (T,).

        They are moments given the noise, on which the outputs depend: (n, units) standard normal numbers for the hidden
        units of a `TableNet`. Of any other network, noise (T,) draws the weights, and the variances are zero.
        """
        if isinstance(self._plain, TableNet):
            means, variances = (dict(zip(self._names, self._parts(each), strict=True)) for each in (mean, variance))
            return self._plain.moments(means, variances, x, noise)
        outputs = self(torch.addcmul(mean, variance.sqrt(), noise), x)
        return outputs, torch.zeros_like(outputs)

    def gradients(
        self,
        mean: Tensor,
        variance: Tensor,
        x: Tensor,
        noise: Tensor,
        of_outputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor] | None:
        """Return the gradients of a loss in mean and variance (..., T), see `TableNet.gradients`; None for others."""
        if not isinstance(self._plain, TableNet):
            return None
        means, variances = (dict(zip(self._names, self._parts(each), strict=True)) for each in (mean, variance))
        found = self._plain.gradients(means, variances, x, noise, of_outputs)
        in_mean, in_variance = (
            torch.cat([each[name].flatten(mean.dim() - 1) for name in self._names], -1) for each in found
        )
        return in_mean, in_variance

    def blocks(self) -> Blocks:
        """Return the blocks of weights that have a scale in common: those of a `TableNet`, else each parameter."""
        if isinstance(self._plain, TableNet):
            within = self._plain.blocks(self._names)
        else:
            within = [torch.zeros(shape, dtype=torch.int64) for shape in self.shapes]
        numbers, fans, first = [], [], 0
        for block, shape in zip(within, self.shapes, strict=True):
            count = int(block.max()) + 1 if block.numel() else 0
            # The number of inputs of one output that belong to the block; 1 for biases.
            rows = block.flatten(1) if len(shape) > 1 else block[:, None]
            fans += [max(1, int((rows == k).sum(1).max())) for k in range(count)]
            numbers.append(block.flatten() + first)
            first += count
        return Blocks(torch.cat(numbers), torch.tensor(fans, dtype=torch.float64))

    def fitted(self, convolutions: Convolutions = "native", contiguous: bool = False) -> Net:
        """Return the same function, computed differently.

        convolutions: how to compute 2-d convolutions; contiguous: write theta to memory first, see `in_memory`.
        """
        other = copy.copy(self)
        other._module = replace_convolutions(copy.deepcopy(self._module), convolutions)
        other._contiguous = contiguous
        return other

    def through(self, wrap: Callable[[Function], Function]) -> Net:
        """Return the same function, computed by `wrap(self)`."""
        other = copy.copy(self)
        other._instead = wrap(self)
        return other

    def join(self, body: Tensor, head: Tensor) -> Tensor:
        """Return theta (T,) with the last layer of `head` and all other layers of `body`."""
        cut = self.num_params - self.head_size
        return torch.cat([body[:cut], head[cut:]])

    def init(self, seed: int, scheme: Init) -> Tensor:
        """Return initial parameters theta (T,), always made on the CPU so that they do not depend on the device.

        torch: the layers' own `reset_parameters`; kaiming: N(0, 2/fan_in) weights and zero biases; normal: N(0, 0.1^2)
        weights and biases.
        """
        module = copy.deepcopy(self._module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the GPU's generators
            module.apply(_reset)  # children first, so that a module may overrule them
            for parameter in module.parameters():
                if scheme == "normal":
                    parameter.normal_(0.0, 0.1)
            for part in module.modules():
                if scheme == "kaiming" and isinstance(part, nn.Linear | nn.modules.conv._ConvNd):
                    nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
                    if part.bias is not None:
                        part.bias.zero_()
            return torch.cat([parameter.flatten() for parameter in module.parameters()])


class Blocks(NamedTuple):
    """Blocks of weights."""

    number: Tensor
    """The block of each weight (T,)."""
    fan_in: Tensor
    """The number of inputs of each block; 1 for biases."""


class _InMemory(torch.autograd.Function):
    """`in_memory`, with gradients. Without it, a compiler recomputes a sampled bias wherever it is added."""

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


class _LinearCalls(TorchFunctionMode):
    """Remember the input and the output of the last linear layer that is called."""

    last: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.last = (args[0], output)
        return output


def _reset(part: nn.Module) -> None:
    """Draw the parameters of a layer anew, if it knows how to."""
    if callable(reset := getattr(part, "reset_parameters", None)):
        reset()


def _last_layer_size(module: nn.Module) -> int:
    """Return the number of parameters of the last layer that has any; they come last in theta."""
    own = [sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules()]
    return next(size for size in reversed(own) if size)


class WithNoise(nn.Module):
    """A regression module with one more output: the learned rho of the noise sigma_eps, the same for every input."""

    def __init__(self, module: nn.Module, rho: float = 0.0) -> None:
        super().__init__()
        self.module = module
        self.rho = nn.Parameter(torch.tensor([rho]))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (n, d + 1): the module's d means and the constant rho."""
        means = self.module(x)
        return torch.cat([means, self.rho.expand(*means.shape[:-1], 1)], dim=-1)
