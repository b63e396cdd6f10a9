"""What each column of the user's tables is taken for, to be read before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfedbayes.data.own.columns import Table, missing
from pfedbayes.data.own.inputs import Input
from pfedbayes.data.own.preprocessing import Preprocessing
from pfedbayes.data.own.target import listed


@dataclass(frozen=True)
class ColumnUse:
    """What one column of a file is taken for."""

    name: str
    taken_for: str
    """The target, numbers, dates, categories, or "left out"."""
    about: str
    """Its range, its categories, or why it is left out."""
    missing: float
    """Share of the rows in which it is missing."""


def column_uses(tables: Sequence[Table], preprocessing: Preprocessing) -> tuple[ColumnUse, ...]:
    """Return how each column of the tables of all clients is used, in the order of the first table."""
    rows = sum(map(len, tables))
    inputs = {column.name: column for column in preprocessing.inputs}
    left_out = {column.name: column.reason for column in preprocessing.left_out}
    part_of = {part: column for column in preprocessing.writing.dates for part in column.parts}
    uses: dict[str, ColumnUse] = {}
    use: tuple[str, str]
    for column in tables[0].columns:
        absent = sum(int(missing(table.columns[column]).sum()) for table in tables if column in table.columns)
        date = part_of.get(column)
        if column in preprocessing.target.columns:
            use = ("event" if column == preprocessing.target.event else "target", preprocessing.target.task)
        elif date is not None and not all(part in left_out for part in date.parts):
            order = {True: "day first", False: "month first", None: ""}[date.day_first]
            use = ("dates", ", ".join(filter(None, ["year, month, weekday and days since 1970", order])))
        elif column in left_out:
            use = ("left out", left_out[column])
        else:
            use = _input(inputs[column])
        name = date.name if date is not None else column
        uses.setdefault(name, ColumnUse(name, *use, absent / rows))
    return tuple(uses.values())


def _input(column: Input) -> tuple[str, str]:
    if column.kind == "category":
        return "categories", f"{len(column.categories)}: {listed(column.categories)}"
    return "numbers", f"mean {column.mean:.4g}, standard deviation {column.deviation:.4g}"
