"""Slopes on logarithmic axes, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Slope(NamedTuple):
    """An exponent with its 95 % confidence interval [low, high]."""

    value: float
    low: float
    high: float


def fit(sizes: Sequence[float], errors: Array) -> Array:
    """Return the exponent a of errors ~ c * sizes^a by least squares in logarithms; errors (..., sizes)."""
    x = np.log(sizes) - np.log(sizes).mean()
    slopes: Array = np.log(errors) @ x / (x @ x)
    return slopes


def errors_of(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], Array]:
    """Return the sizes of a curve, and the errors (replicates, clients, sizes) of its complete replicates."""
    sizes = sorted({record["size"] for record in records})
    table = {(record["replicate"], record["size"]): [c[name] for c in record["clients"]] for record in records}
    whole = whole_replicates(records)
    return sizes, np.array([[table[r, size] for size in sizes] for r in whole]).swapaxes(1, 2)


def whole_replicates(records: Sequence[dict[str, Any]]) -> list[int]:
    """Return the replicates that have all sizes of a curve."""
    by_replicate: dict[int, set[int]] = {}
    for record in records:
        by_replicate.setdefault(record["replicate"], set()).add(record["size"])
    sizes = set().union(*by_replicate.values())
    return sorted(replicate for replicate, own in by_replicate.items() if own == sizes)


def slope(sizes: Sequence[float], errors: Array, resamples: int = 2000) -> Slope:
    """Return the exponent of the mean error, errors (replicates, clients, sizes), with a bootstrap interval.

    Clients of a replicate share part of their functions: the bootstrap draws replicates, then clients in each. A
    replicate has the same functions at every size, so it is drawn for all sizes at once.
    """
    generator = np.random.default_rng(0)
    replicates, clients, _ = errors.shape
    rows = generator.integers(replicates, size=(resamples, replicates, 1))
    columns = generator.integers(clients, size=(resamples, replicates, clients))
    drawn = fit(sizes, errors[rows, columns].mean((1, 2)))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Slope(float(fit(sizes, errors.mean((0, 1)))), float(low), float(high))
