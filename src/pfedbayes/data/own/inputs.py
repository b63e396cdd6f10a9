"""How one column of a table is encoded as inputs of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import MAX_CATEGORIES, Column, Kind, Numbers, Texts, places
from pfedbayes.data.own.pieces import fit_pieces, ramps
from pfedbayes.data.own.summaries import ColumnSummary
from pfedbayes.errors import UserError


@dataclass(frozen=True)
class Input:
    """How one column is encoded."""

    name: str
    kind: Kind
    mean: float = 0.0
    """Mean of the numbers."""
    deviation: float = 1.0
    """Standard deviation of the numbers."""
    indicator: bool = False
    """Whether a second input says that the cell is missing."""
    categories: tuple[str, ...] = ()
    """The categories, one input each."""
    edges: tuple[float, ...] = ()
    """Edges of the bins of the piecewise-linear encoding, in the units of the column; empty if it has none."""
    centres: tuple[float, ...] = ()
    """Mean of the ramp of each bin over the training rows, which is subtracted."""

    @property
    def width(self) -> int:
        """Number of plain inputs."""
        return len(self.categories) + 1 if self.kind == "category" else 1 + self.indicator

    @property
    def pieces(self) -> int:
        """Number of piecewise-linear inputs."""
        return len(self.centres)

    def encode_pieces(self, column: Numbers) -> NDArray[np.float32]:
        """Return the piecewise-linear inputs (n, pieces); missing cells count as the mean."""
        numbers = np.where(np.isnan(column), self.mean, column)
        return (2 * (ramps(numbers, self.edges) - self.centres)).astype(np.float32)

    def encode(self, column: Column) -> NDArray[np.float32]:
        """Return the plain inputs (n, width)."""
        if isinstance(column, Texts):
            return self._encode_texts(column)
        absent = np.isnan(column)
        standard = np.where(absent, 0.0, (column - self.mean) / self.deviation)
        with np.errstate(over="ignore"):  # numbers that are too large are refused by `Preprocessing.encode`
            return np.stack([standard, absent][: self.width], axis=1).astype(np.float32)

    def _encode_texts(self, column: Texts) -> NDArray[np.float32]:
        unknown = len(self.categories)
        # Code -1, a missing cell, selects the last entry.
        lookup = np.array([*places(self.categories, column.levels, unknown), unknown])
        inputs: NDArray[np.float32] = np.eye(unknown + 1, dtype=np.float32)[lookup[column.codes]]
        return inputs


def fit_input(column: ColumnSummary, parts: Sequence[ColumnSummary], pieces: int) -> Input:
    """Return the encoding of a column. column: merged from `parts`, the summaries of the clients."""
    if column.kind == "number":
        edges, centres = fit_pieces(column, parts, pieces)
        return Input(
            column.name, "number", column.mean, deviation_of(column), column.missing > 0, edges=edges, centres=centres
        )
    if column.values is None or len(column.values) > MAX_CATEGORIES:
        raise UserError(
            f"the column {column.name!r} has more than {MAX_CATEGORIES} categories: leave it out with "
            f"data.ignore=[{column.name!r}], or write numbers or fewer categories"
        )
    return Input(column.name, "category", categories=column.values)


def deviation_of(column: ColumnSummary) -> float:
    """Return the standard deviation; 1 if all values are equal up to rounding."""
    deviation = math.sqrt(column.squares / column.count) if column.count else 0.0
    return deviation if deviation > 1e-9 * abs(column.mean) else 1.0
