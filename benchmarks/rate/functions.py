"""Random functions of known smoothness on [-1, 1]^d, slightly different for every client."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WAVES = {1: 64, 2: 12}  # the highest frequency by dimension, far above what the largest n resolves


class Functions(NamedTuple):
    """One function per client, each a sum of waves."""

    frequencies: Array  # (F, d)
    cosines: Array  # weights (N, F)
    sines: Array  # weights (N, F)

    def __call__(self, client: int, x: Array) -> Array:
        """Return the values (n,) of a client's function at x (n, d)."""
        angles = math.pi * x @ self.frequencies.T
        values: Array = np.cos(angles) @ self.cosines[client] + np.sin(angles) @ self.sines[client]
        return values


def draw_functions(
    generator: np.random.Generator, smoothness: float, dimension: int, clients: int, difference: float
) -> Functions:
    """Draw f^i = (f_0 + difference * g^i) / sqrt(1 + difference^2) with f_0 and g^i of one law and mean square 1.

    The wave of frequency k has Gaussian weights of standard deviation |k|^-(beta + d/2). Such functions have every
    Hölder exponent below beta and no larger one. Their part beyond frequency K has mean square of about K^(-2 beta),
    so the best possible rate is n^(-2 beta/(2 beta + d)) for them too.
    """
    lattice = [
        k for k in product(range(-WAVES[dimension], WAVES[dimension] + 1), repeat=dimension) if k > (0,) * dimension
    ]
    frequencies = np.array(lattice, dtype=float)
    decay = np.linalg.norm(frequencies, axis=1) ** -(smoothness + dimension / 2)
    waves = decay * generator.standard_normal((clients + 1, 2, len(decay)))
    waves /= np.sqrt((waves**2).sum((1, 2), keepdims=True) / 2)
    mixed = (waves[0] + difference * waves[1:]) / math.sqrt(1 + difference**2)
    return Functions(frequencies, mixed[:, 0], mixed[:, 1])
