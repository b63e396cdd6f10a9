"""Random functions on [-1, 1]^d of known smoothness, and clients whose functions differ a little."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WAVES = {1: 64, 2: 12}  # the highest frequency by dimension: far above what the largest n can resolve


class Functions(NamedTuple):
    """One function per client, sums of waves: frequencies (F, d), weights of cosines and sines (N, F)."""

    frequencies: Array
    cosines: Array
    sines: Array

    def __call__(self, client: int, x: Array) -> Array:
        """Values (n,) of a client's function at x (n, d)."""
        angles = math.pi * x @ self.frequencies.T
        values: Array = np.cos(angles) @ self.cosines[client] + np.sin(angles) @ self.sines[client]
        return values


def draw_functions(
    generator: np.random.Generator, smoothness: float, dimension: int, clients: int, difference: float
) -> Functions:
    """f^i = (f_0 + difference * g^i) / sqrt(1 + difference^2), with f_0 and all g^i drawn alike, of mean square 1.

    The wave of frequency k has Gaussian weights of standard deviation |k|^-(beta + d/2). Such functions have the Hölder
    exponents below beta and no others, and what lies beyond frequency K has a mean square of about K^(-2 beta): for
    them too the best rate that can be had is n^(-2 beta/(2 beta + d)).
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
