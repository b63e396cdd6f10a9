"""The network of a federation made in Python, in a file: torch layers and a likelihood, without code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pfedbayes.nets import Model, Net, Pixels, WithNoise
from pfedbayes.nets.layers import describe, rebuild
from pfedbayes.runs.outcomes import as_object, of_object, require_width


@dataclass(frozen=True)
class KeptModel:
    """What is needed to build a model again."""

    layers: list[Any]
    """See `nets.layers.describe`."""
    learned_noise: bool
    """Whether a `WithNoise` around the layers adds the learned noise of a regression."""
    likelihood: dict[str, Any]
    """See `outcomes.as_object`."""
    pixels: Pixels
    num_params: int

    @classmethod
    def of(cls, model: Model) -> KeptModel | None:
        """Describe a model; None if its module is more than known layers one after another."""
        module = model.net.module(torch.zeros(model.net.num_params))
        layers = describe(module)
        if layers is None:
            return None
        noise = isinstance(module, WithNoise)
        return cls(layers, noise, as_object(model.likelihood), model.pixels, model.net.num_params)

    def build(self, shape: tuple[int, ...]) -> Model:
        """Build the model for inputs (n, *shape); raise ValueError if a part of it is not what it can be."""
        module = rebuild(self.layers, self.num_params - self.learned_noise, shape, None)
        likelihood = of_object(self.likelihood)
        model = Model(Net(WithNoise(module) if self.learned_noise else module), likelihood, self.pixels)
        require_width(likelihood, model.net)
        return model
