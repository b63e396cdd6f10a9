"""The networks of the paper, and a small network for images of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(sizes: Sequence[int], activation: Literal["relu", "tanh"] = "relu") -> nn.Module:
    """Return fully connected layers, e.g. the DNN of Section 5.1, mlp([784, 100, 10]) with 79,510 parameters."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


VGG_CHANNELS = (16, 32, 64, 128, 128)


def vgg(
    outputs: int = 10,
    in_channels: int = 3,
    head: Literal["mlp3", "linear"] = "mlp3",
    norm: Literal["none", "group"] = "none",
) -> nn.Module:
    """Return the VGG of Section 5.1, [16,M,32,M,64,M,128,M,128,M], for 32 x 32 images.

    It has 3 x 3 convolutions, ReLU and 2 x 2 pooling. head: "mlp3" is 128-128-128-outputs with ReLU (279,338 parameters
    in total), "linear" is 128-outputs. norm: "group" adds group normalisation.
    """
    layers: list[nn.Module] = []
    channels = in_channels
    for width in VGG_CHANNELS:
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
        if norm == "group":
            layers.append(nn.GroupNorm(8, width))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    head_sizes = [channels, channels, channels, outputs] if head == "mlp3" else [channels, outputs]
    return nn.Sequential(*layers, mlp(head_sizes))


def cnn(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a small network for images of any shape (C, H, W).

    It has the VGG's channels: 3 x 3 convolutions, ReLU and 2 x 2 pooling until a side is below 8 pixels, then one
    linear layer.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for more in VGG_CHANNELS:
        if min(height, width) < 8:
            break
        layers += [nn.Conv2d(channels, more, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = more, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, outputs))
