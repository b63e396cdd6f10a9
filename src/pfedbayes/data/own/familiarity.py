"""Compare new rows with the training data, to notice columns that are written or distributed differently."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from pfedbayes.data.own.columns import Table, Texts, missing
from pfedbayes.data.own.inputs import Input
from pfedbayes.data.own.preprocessing import Preprocessing

REACH = 5.0  # standard deviations; at most 1/25 of the training data lie farther away, whatever their distribution
WARN_ABOVE = 0.05  # share of the cells of a column
MOST_WARNINGS = 10


class Familiarity:
    """Counts the cells of each column that the training data do not prepare a model for.

    These are categories that no client had, and numbers more than `REACH` standard deviations from the mean.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self._inputs = preprocessing.inputs
        self._cells, self._odd = Counter[str](), Counter[str]()
        self._example: dict[str, str] = {}

    def add(self, table: Table, x: Tensor) -> None:
        """Count the rows of a table, given its inputs x (n, d)."""
        start = 0
        for column in self._inputs:
            own, start = x[:, start : start + column.width], start + column.width
            cells = table.columns[column.name]
            present = ~missing(cells)
            if column.kind == "category":
                odd = (own[:, -1].numpy() == 1) & present
            elif column != Input(column.name, "number"):  # it was fitted to data
                odd = own[:, 0].abs().numpy() > REACH
            else:
                continue
            self._cells[column.name] += int(present.sum())
            self._odd[column.name] += int(odd.sum())
            if odd.any() and column.name not in self._example:
                row = int(odd.argmax())
                text = cells.levels[cells.codes[row]] if isinstance(cells, Texts) else f"{cells[row]:g}"
                self._example[column.name] = text

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return the share of such cells by column, for columns that have some."""
        names = {"category": "unseen", "number": "out_of_range"}
        return {
            column.name: {names[column.kind]: self._odd[column.name] / self._cells[column.name]}
            for column in self._inputs
            if self._odd[column.name]
        }

    def warnings(self) -> list[str]:
        """Return a sentence on each column that has more than a few percent of such cells."""
        sentences = []
        for column in self._inputs:
            odd, cells = self._odd[column.name], self._cells[column.name]
            if odd > WARN_ABOVE * cells:
                what = (
                    "hold categories that no training row has"
                    if column.kind == "category"
                    else f"are more than {REACH:g} standard deviations from the mean of the training data"
                )
                sentences.append(
                    f"the column {column.name!r} is unlike the training data: {odd / cells:.0%} of its cells {what}, "
                    f"such as {self._example[column.name]!r}"
                )
        rest = len(sentences) - MOST_WARNINGS
        return [*sentences[:MOST_WARNINGS], *([f"so are {rest:,} other columns"] if rest > 0 else [])]
