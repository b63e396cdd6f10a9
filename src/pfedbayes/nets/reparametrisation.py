"""Local reparametrisation (Kingma et al. 2015): sample the outputs of a dense layer instead of its weights.

If the weights are independent Gaussians, the outputs of a dense layer for one input are independent Gaussians, too.
Sampled separately for each example, they have the same distribution per example as with sampled weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pfedbayes.nets import Net


class Dense(NamedTuple):
    """A dense layer."""

    weight: int
    """Index of its weight among the net's parameters."""
    bias: int
    """Index of its bias; -1 if it has none."""
    units: int
    """Number of outputs."""


def dense_layers(net: Net, x: Tensor, dtype: torch.dtype) -> tuple[Dense, ...]:
    """Return the layers whose outputs can be sampled: nothing else uses their parameters, and each example once.

    x (1, ...): an example of the inputs. Convolutions, and dense layers that slide along an axis, need sampled weights:
    their outputs at different positions are correlated.
    """
    parts = [torch.zeros(shape, dtype=dtype, device=x.device) for shape in net.shapes]
    with _Watch(parts) as watch:
        net.apply(parts, x)
    return tuple(layer for layer in watch.dense if all(watch.uses[k] == 1 for k in layer[:2] if k >= 0))


def num_drawn_weights(net: Net, dense: Sequence[Dense]) -> int:
    """Return the number W of parameters that are still sampled as weights."""
    return sum(net.shapes[k].numel() for k in _others(net, dense))


def drawn_outputs(
    net: Net, dense: Sequence[Dense], mean: Tensor, deviation: Tensor, x: Tensor, weights: Tensor, units: Tensor
) -> Tensor:
    """Return outputs (K, n, ...) at inputs x (n, ...) of a net with Gaussian parameters of these moments (T,).

    units (K, n, U): noise for the U outputs of the dense layers. weights (K, W): noise for the other parameters.
    """
    sizes = [shape.numel() for shape in net.shapes]
    means, deviations = (
        [part.view(shape) for part, shape in zip(torch.split_with_sizes(moment, sizes), net.shapes, strict=True)]
        for moment in (mean, deviation)
    )
    others = _others(net, dense)

    def draw(weights: Tensor, units: Tensor) -> Tensor:
        parts = list(means)
        for k, noise in zip(others, torch.split_with_sizes(weights, [sizes[k] for k in others]), strict=True):
            parts[k] = means[k] + deviations[k] * noise.view(net.shapes[k])
        noises = torch.split_with_sizes(units, [layer.units for layer in dense], dim=-1)
        with _Draw(means, deviations, dense, noises):
            return net.apply(parts, x)

    # vmap computes the first layer's moments once for all draws. Convolutions do not gain from it.
    outputs: Tensor = torch.func.vmap(draw, chunk_size=1 if net.convolutional else None)(weights, units)
    return outputs


def _others(net: Net, dense: Sequence[Dense]) -> list[int]:
    taken = {k for layer in dense for k in layer[:2]}
    return [k for k in range(len(net.shapes)) if k not in taken]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of `functional.linear`, positional or keyword."""
    return input, weight, bias


class _Watch(TorchFunctionMode):
    """Count the calls that use each of these tensors, and record calls of dense layers."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self.position = {id(part): k for k, part in enumerate(parts)}
        self.uses: Counter[int] = Counter()
        self.dense: list[Dense] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.uses.update(
            self.position[id(leaf)] for leaf in _flat((args, *kwargs.values())) if id(leaf) in self.position
        )
        if func is functional.linear:
            x, weight, bias = _linear(*args, **kwargs)
            known = id(weight) in self.position and (bias is None or id(bias) in self.position)
            if known and x.shape[:-1] == (1,):
                place = -1 if bias is None else self.position[id(bias)]
                self.dense.append(Dense(self.position[id(weight)], place, len(weight)))
        return func(*args, **kwargs)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class _Draw(TorchFunctionMode):
    """Replace the outputs of these dense layers by samples."""

    def __init__(
        self, means: Sequence[Tensor], deviations: Sequence[Tensor], dense: Sequence[Dense], noises: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.deviations = deviations
        self.layers = {id(means[layer.weight]): (layer, noise) for layer, noise in zip(dense, noises, strict=True)}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mean = func(*args, **(kwargs or {}))
        if func is not functional.linear:
            return mean
        x, weight, _ = _linear(*args, **(kwargs or {}))
        if id(weight) not in self.layers:
            return mean
        layer, noise = self.layers[id(weight)]
        bias = self.deviations[layer.bias].square() if layer.bias >= 0 else None
        variance = functional.linear(x.square(), self.deviations[layer.weight].square(), bias)
        return torch.addcmul(mean, variance.sqrt(), noise)
