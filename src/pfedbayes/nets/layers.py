"""A network as a list of torch layers, so that it can be rebuilt without the code that defined it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pfedbayes.nets import TableNet, WithNoise

MOST_LAYERS, MOST_SIZES, LONGEST_ARGUMENT = 1000, 8, 30

# The constructor arguments of each layer, which are also its attributes.
KNOWN: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features", "bias"),
    nn.Conv1d: ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding"),
    nn.AvgPool2d: ("kernel_size", "stride", "padding"),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.ReLU: (),
    nn.Tanh: (),
    nn.Sigmoid: (),
    nn.GELU: ("approximate",),
    nn.SiLU: (),
}

# The arguments of `TableNet`, which stands alone: sizes of at least these numbers, and a flag.
TABLE = {"plain": 1, "pieces": 0, "hidden": 1, "outputs": 1, "constants": 0}

# The arguments that are positive, or lists of positive numbers.
SIZES = {
    "in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups",
    "num_groups", "num_channels", "normalized_shape",
}  # fmt: skip

Layers = list[list[Any]]  # [name, arguments] of each layer


def describe(module: nn.Module) -> Layers | None:
    """Return the layers of a module that calls them one after another; None for any other module.

    The learned noise of a regression (`WithNoise`) is left out.
    """
    if isinstance(module, WithNoise):
        return describe(module.module)
    if type(module) is TableNet:
        sizes = {"plain": module.plain, "pieces": module.pieces, "hidden": module.num_units, "outputs": module.outputs}
        constants = 0 if module.constants is None else len(module.constants)
        return [["TableNet", {**sizes, "constants": constants, "reference": module.reference}]]
    if type(module) is nn.Sequential:
        parts = [describe(part) for part in module]
        return None if None in parts else [layer for part in parts for layer in part or []]
    kind = next((kind for kind in KNOWN if isinstance(module, kind)), None)
    if kind is None or getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    values = {name: getattr(module, name) for name in KNOWN[kind]}
    if "bias" in values:
        values["bias"] = values["bias"] is not None
    return [[kind.__name__, values]]


def rebuild(layers: Layers, num_params: int, shape: tuple[int, ...], outputs: int | None) -> nn.Module:
    """Return a module with these layers and new parameters; the inverse of `describe`.

    The layers may come from a file of a stranger: raise ValueError, before any memory is allocated, unless they are
    known ones with `num_params` parameters in all, which map inputs (n, *shape) to outputs (n, outputs).
    """
    kinds = {kind.__name__: kind for kind in KNOWN}
    if not isinstance(layers, list) or len(layers) > MOST_LAYERS:
        raise ValueError("the layers of the network are no list, or too many")
    if len(layers) == 1 and isinstance(layers[0], list) and layers[0][:1] == ["TableNet"]:
        return _rebuild_table(layers[0], num_params, shape, outputs)
    for layer in layers:
        match layer:
            case [str() as name, dict() as arguments] if name in kinds and set(arguments) == set(KNOWN[kinds[name]]):
                if all(_is_argument(key, value) for key, value in arguments.items()):
                    continue
        raise ValueError(f"the layer {str(layer)[:80]!r} is not known")

    def make() -> nn.Module:
        return nn.Sequential(*(kinds[name](**arguments) for name, arguments in layers))

    try:
        with torch.device("meta"):  # shapes without memory
            module = make()
            found = tuple(module(torch.empty(2, *shape)).shape)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, IndexError, AttributeError, AssertionError) as error:
        raise ValueError(f"its layers do not make a network: {error}") from None
    if sum(weight.numel() for weight in module.parameters()) != num_params:
        raise ValueError(f"its layers do not have the {num_params:,} parameters that it holds")
    if len(found) != 2 or found[1] != (outputs or found[1]):
        raise ValueError(f"its layers map 2 examples to shape {found}, not to (2, {outputs})")
    return make()


def _rebuild_table(layer: list[Any], num_params: int, shape: tuple[int, ...], outputs: int | None) -> TableNet:
    """Return a `TableNet`, after comparing its sizes with the data, as integers."""
    match layer:
        case [str(), dict() as given] if set(given) == {*TABLE, "reference"} and type(given["reference"]) is bool:
            if all(type(given[name]) is int and TABLE[name] <= given[name] <= num_params for name in TABLE):
                plain, pieces, hidden, dense, constants = (given[name] for name in TABLE)
                found = (plain + 1) * hidden + (plain + pieces + hidden + 1) * dense + constants
                if found != num_params:
                    raise ValueError(f"its layers do not have the {num_params:,} parameters that it holds")
                if shape != (plain + pieces,):
                    raise ValueError(f"its network takes {plain + pieces} inputs, and the data have shape {shape}")
                width = given["reference"] + dense + constants
                if width != (outputs or width):
                    raise ValueError(f"its network has {width} outputs, not {outputs}")
                return TableNet(plain, pieces, hidden, dense, constants, given["reference"])
    raise ValueError(f"the layer {str(layer)[:80]!r} is not known")


def _is_argument(key: str, value: Any) -> bool:
    """Return whether a value is a number, a name such as "tanh", or a short list of integers; sizes are positive."""
    sizes = value if isinstance(value, list | tuple) else [value]
    if key in SIZES and not all(type(item) is int and item > 0 for item in sizes):
        return False
    if isinstance(value, list | tuple):
        return len(value) <= MOST_SIZES and all(type(item) is int for item in value)
    return isinstance(value, int | float | str) and len(str(value)) <= LONGEST_ARGUMENT
