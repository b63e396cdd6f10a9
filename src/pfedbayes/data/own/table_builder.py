"""Build tables chunk by chunk from cells of text or from typed arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.column_builder import ColumnBuilder
from pfedbayes.data.own.columns import LARGEST, Budget, Column, Schema, Table, require_name
from pfedbayes.data.own.dates import date_parts
from pfedbayes.data.own.writing import Writing
from pfedbayes.data.splits import Rows
from pfedbayes.errors import Problems, UserError


def table_of(
    columns: Any, where: str, schema: Schema, budget: Budget | None = None, problems: list[str] | None = None
) -> Table:
    """Return the columns of a data frame, or of any mapping from names to arrays, as a table."""
    columns = columns_of(columns, where)
    names = schema.wanted(columns)
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{where}: column names must be strings, not {name!r}: rename the columns")
        require_name(name, where, "the column")
    builder = TableBuilder(where, names, schema, budget or Budget(), unit="row")
    builder.add_arrays([np.asarray(columns[name]) for name in names])
    return builder.table(problems)


def columns_of(frame: Any, where: str) -> Mapping[str, Any]:
    """Return the columns of a pandas or polars frame by name; a mapping as it is."""
    if isinstance(frame, Mapping):
        return frame
    names = list(getattr(frame, "columns", ()))
    if not names:
        raise UserError(
            f"{where} is {type(frame).__name__}: give a pandas or polars frame, or a mapping from names to arrays"
        )
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{where} has two columns {name!r}: rename or remove one of them")
    return {name: frame[name] for name in names}


def table_of_arrays(
    x: NDArray[Any], others: Mapping[str, NDArray[Any]], where: str, schema: Schema, budget: Budget | None = None
) -> Table:
    """Return a table of x (n, d) as columns x0, x1, ..., or of x (n, ...) as it is, and of other columns."""
    if x.ndim == 2:
        return table_of({f"x{k}": x[:, k] for k in range(x.shape[1])} | dict(others), where, schema, budget)
    if x.dtype.kind == "f" and not (np.abs(x) <= np.float32(LARGEST)).all():
        raise UserError(f"{where}: x holds NaN or infinity, or numbers beyond ±{LARGEST:g}: remove those examples")
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    return replace(table_of(others, where, schema, budget), x=x, lines=np.arange(len(x)))


class TableBuilder:
    """A table under construction."""

    def __init__(self, where: str, names: Sequence[str], schema: Schema, budget: Budget, unit: str = "line") -> None:
        self._where, self._unit, self._budget, self._schema = where, unit, budget, schema
        self._names = names
        self._problems: list[str] = []
        self._columns = [ColumnBuilder(name, where, unit, schema, self._problems) for name in names]
        self._lines: list[Rows] = []
        self._count = 0

    def add_cells(self, columns: Iterable[Iterable[str]], lines: Rows, comma: bool = False) -> None:
        """Append rows given as columns of text. comma: whether a comma separates decimals."""
        self._added(lines)
        for column, cells in zip(self._columns, columns, strict=True):
            self._budget.spend(column.add_cells(list(cells), lines, comma), self._where)

    def add_arrays(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Append rows given as typed arrays, one per column."""
        for name, array in zip(self._names, arrays, strict=True):
            if array.ndim != 1 or len(array) != len(arrays[0]):
                raise UserError(f"{self._where}: the column {name!r} has shape {array.shape}: give one cell per row")
        lines = np.arange(self._count, self._count + (len(arrays[0]) if arrays else 0))
        self._added(lines)
        for column, array in zip(self._columns, arrays, strict=True):
            self._budget.spend(column.add_array(array, lines), self._where)

    def _added(self, lines: Rows) -> None:
        self._lines.append(lines)
        self._count += len(lines)

    def table(self, problems: list[str] | None = None, notes: Sequence[str] = ()) -> Table:
        """Return the table of all rows. What is wrong with it is raised, or appended to `problems`."""
        lines = np.concatenate([np.empty(0, np.int64), *self._lines])
        built = {name: column.built() for name, column in zip(self._names, self._columns, strict=True)}
        dates = tuple(each.date for each in built.values() if each.date)
        commas = tuple(name for name, each in built.items() if each.comma)
        columns: dict[str, Column] = {}
        for name, each in built.items():
            for part, cells in [(name, each.column)] if each.date is None else _parts(each.date, each.column):
                if part in columns or (part != name and part in built):
                    self._problems.append(f"{self._where} has a column {part!r}, which {name!r} would make: rename it")
                columns[part] = cells
        if problems is None and self._problems:
            raise Problems(self._problems)
        if problems is not None:
            problems += self._problems
        writing = Writing(dates, commas, self._schema.writing.missing)
        return Table(self._where, columns, lines, unit=self._unit, writing=writing, notes=tuple(notes))


def _parts(date: Any, column: Column) -> Iterator[tuple[str, Column]]:
    yield from zip(date.parts, date_parts(np.asarray(column)), strict=True)


def with_dates(table: Table, dates: Writing) -> Table:
    """Return the table with its empty columns as dates, where other tables have dates in columns of that name."""
    columns: dict[str, Column] = {}
    absent = np.full(len(table), np.nan)
    for name, column in table.columns.items():
        date = dates.date(name)
        empty = date is not None and not isinstance(column, tuple) and bool(np.isnan(column).all())
        columns |= dict.fromkeys(date.parts, absent) if date is not None and empty else {name: column}
    return replace(table, columns=columns)
