"""How the page shows numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.silos.statistics import Difference


def row(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    """Return a score with three decimals, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def signed(value: float) -> str:
    """Return a difference with three decimals and its sign."""
    return f"{value:+.3f}".replace("-", "−")


def difference_cells(one: Difference) -> list[str]:
    """Return a difference with its interval, and what the interval shows."""
    if math.isnan(one.low):
        return [f"{signed(one.mean)}", one.word]
    return [f"{signed(one.mean)} [{signed(one.low)}, {signed(one.high)}]", one.word]


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Return mean ± standard deviation of the values that are known, with one decimal."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{np.mean(known):.1f}" + (f" ± {np.std(known, ddof=1):.1f}" if len(known) > 1 else "")
