"""A network as a list of torch layers, so that it can be rebuilt without the code that defined it."""

from __future__ import annotations

from typing import Any

from torch import nn

from pfedbayes.errors import UserError
from pfedbayes.nets import WithNoise

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

Layers = list[list[Any]]  # [name, arguments] of each layer


def describe(module: nn.Module) -> Layers | None:
    """Return the layers of a module that calls them one after another; None for any other module.

    The learned noise of a regression (`WithNoise`) is left out.
    """
    if isinstance(module, WithNoise):
        return describe(module.module)
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


def rebuild(layers: Layers) -> nn.Module:
    """Return a module with these layers and new parameters; the inverse of `describe`."""
    kinds = {kind.__name__: kind for kind in KNOWN}
    for name, _ in layers:
        if name not in kinds:
            raise UserError(f"the network has an unknown layer {name!r}: read it with the version that wrote it")
    return nn.Sequential(*(kinds[name](**arguments) for name, arguments in layers))
