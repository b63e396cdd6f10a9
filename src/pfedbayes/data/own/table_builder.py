"""Build tables chunk by chunk from cells of text or from typed arrays.

A column holds either numbers or text. A mixture is refused, unless the column is declared to hold categories.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import (
    LARGEST,
    MAX_CATEGORIES,
    Budget,
    Column,
    Kind,
    Numbers,
    Schema,
    Table,
    Texts,
    as_number,
    as_text,
    require_name,
)
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError, one_line

MISSING = {"", "?", "na", "n/a", "#n/a", "nan", "-nan", "nat", "null", "<na>"}  # "none" may be an answer
NUMERALS = set("0123456789+-.eE") | set("nan")  # what cells of numbers consist of; "nan" is a missing one
INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
CONTAINERS = (list, tuple, dict, set, np.ndarray, bytearray, memoryview, complex)
TIMES = (datetime.date, datetime.time, datetime.timedelta)


def table_of(columns: Mapping[str, Any], where: str, schema: Schema, budget: Budget | None = None) -> Table:
    """Return the columns of a pandas frame, or of any mapping from names to arrays, as a table."""
    names = schema.wanted(columns)
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{where}: column names must be strings, not {name!r}: rename the columns")
        require_name(name, where, "the column")
    builder = TableBuilder(where, names, schema, budget or Budget(), unit="row")
    builder.add_arrays([np.asarray(columns[name]) for name in names])
    return builder.table()


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
        self._where, self._unit, self._budget = where, unit, budget
        self._names = names
        roles = set(schema.roles)
        self._columns = [_ColumnBuilder(name, where, unit, schema.kinds.get(name), name in roles) for name in names]
        self._lines: list[Rows] = []
        self._count = 0

    def add_cells(self, columns: Iterable[Iterable[str]], lines: Rows) -> None:
        """Append rows given as columns of text."""
        self._added(lines)
        for column, cells in zip(self._columns, columns, strict=True):
            self._budget.spend(column.add_cells(list(cells), lines), self._where)

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

    def table(self) -> Table:
        """Return the table of all rows."""
        lines = np.concatenate([np.empty(0, np.int64), *self._lines])
        columns = {name: column.column() for name, column in zip(self._names, self._columns, strict=True)}
        return Table(self._where, columns, lines, unit=self._unit)


class _ColumnBuilder:
    """A column under construction.

    The first cell that is not missing decides whether it holds numbers or text, unless that is declared.
    """

    def __init__(self, name: str, where: str, unit: str, kind: Kind | None, is_role: bool) -> None:
        self._name, self._where, self._unit = name, where, unit
        self._kind, self._declared, self._is_role = kind, kind, is_role
        self._parts: list[NDArray[Any]] = []
        self._levels: dict[str, int] = {}
        self._first: tuple[int, str] | None = None  # line and text of the first cell that is not missing

    def add_array(self, array: NDArray[Any], lines: Rows) -> int:
        """Append cells and return the bytes that they take."""
        kind = array.dtype.kind
        if kind in "iuf" and self._kind != "category":
            with np.errstate(over="ignore"):  # a wider type may hold larger numbers; they are refused as infinite
                return self._add_numbers(array.astype(np.float64), lines)
        if kind in "mMcV":
            raise self._unsuitable(array.dtype)
        if kind == "f":  # the shortest text that is this number in its own precision
            return self.add_cells(["" if np.isnan(cell) else as_text(float(str(cell))) for cell in array], lines)
        try:
            values = array.tolist()
            cells = [self._cell(value) for value in values]
        except ValueError as error:  # neither UTF-8 nor a code point, or an integer of thousands of digits
            raise UserError(
                f"{self._where}: the column {self._name!r} holds text that cannot be read ({one_line(error)}): save it "
                "as UTF-8"
            ) from None
        if self._kind is None and any(isinstance(value, str | bytes | bool) for value in values):
            self._kind = "category"  # a string stays text, even if it looks like a number
            self._declared = "category"
        return self.add_cells(cells, lines)

    def _cell(self, value: Any) -> str:
        if isinstance(value, bytes):
            return value.decode()
        # pandas.NaT is a date, but stands for a missing cell
        if isinstance(value, CONTAINERS) or (isinstance(value, TIMES) and str(value) != "NaT"):
            raise self._unsuitable(type(value).__name__)
        return "" if value is None else str(value)

    def _unsuitable(self, kind: object) -> UserError:
        return UserError(
            f"{self._where}: the column {self._name!r} has the type {kind}: convert it to numbers or text, or leave it "
            f"out with data.ignore=[{self._name!r}]"
        )

    def add_cells(self, cells: Sequence[str], lines: Rows) -> int:
        """Append cells of text and return the bytes that they take."""
        if self._declared == "category":
            return self._add_texts(cells, lines)
        stripped = [cell.strip() for cell in cells]
        cleaned = ["nan" if cell.lower() in MISSING else cell for cell in stripped]
        if set("".join(cleaned)) <= NUMERALS:
            try:
                numbers = np.array(cleaned, dtype=np.float64)
            except ValueError:
                return self._add_texts(cells, lines)
            return self._add_numbers(numbers, lines)
        return self._add_texts(cells, lines)

    def _add_numbers(self, numbers: Numbers, lines: Rows) -> int:
        present = np.flatnonzero(~np.isnan(numbers))
        if len(present):
            if self._kind == "category":
                self._refuse(int(lines[present[0]]), as_text(numbers[present[0]]), "text")
            if len(odd := np.flatnonzero(np.abs(numbers) > LARGEST)):
                raise self._too_large(int(lines[odd[0]]), float(numbers[odd[0]]))
            self._kind = "number"
            self._first = self._first or (int(lines[present[0]]), as_text(numbers[present[0]]))
        if self._kind == "category":  # all cells are missing
            return self._keep(np.full(len(numbers), -1, dtype=np.int32))
        return self._keep(numbers)

    def _too_large(self, line: int, number: float) -> UserError:
        size = "infinite" if np.isinf(number) else f"{number:g}, beyond ±{LARGEST:g}"
        return UserError(
            f"{self._where}, {self._unit} {line}: the column {self._name!r} is {size}: give another number, leave the "
            "cell empty, or list the column in data.categories"
        )

    def _add_texts(self, cells: Sequence[str], lines: Rows) -> int:
        codes = np.full(len(cells), -1, dtype=np.int32)
        grown = 0
        for k, cell in enumerate(cells):
            text = cell.strip()
            if text.lower() in MISSING:
                continue
            if self._declared != "category":
                if self._kind != "category" and INFINITE.fullmatch(text):
                    raise self._too_large(int(lines[k]), float(text))
                is_number = as_number(text) is not None
                if self._kind is None:
                    self._kind = "number" if is_number else "category"
                if is_number != (self._kind == "number"):
                    self._refuse(int(lines[k]), text, "numbers" if self._kind == "number" else "text")
            self._first = self._first or (int(lines[k]), text)
            if text not in self._levels:
                require_name(text, f"{self._where}, {self._unit} {lines[k]}", f"the text in the column {self._name!r},")
                grown += 2 * len(text) + 100
                self._levels[text] = len(self._levels)
                if len(self._levels) > MAX_CATEGORIES and not self._is_role:
                    raise UserError(
                        f"{self._where}: the column {self._name!r} has more than {MAX_CATEGORIES} categories, "
                        f"such as {text!r}: leave it out with data.ignore=[{self._name!r}], or write numbers or fewer "
                        "categories"
                    )
            codes[k] = self._levels[text]
        return grown + self._keep(codes)

    def _keep(self, part: NDArray[Any]) -> int:
        self._parts.append(part)
        return part.nbytes

    def _refuse(self, line: int, text: str, holds: str) -> None:
        if self._first:
            reason = f"the column holds {holds} elsewhere ({self._unit} {self._first[0]}: {self._first[1]!r})"
        else:
            reason = f"the column must hold {holds}"
        raise UserError(
            f"{self._where}, {self._unit} {line}: the column {self._name!r} is {text!r}, but {reason}: correct the "
            "cell, leave it empty if the value is missing, or list the column in data.categories"
        )

    def column(self) -> Column:
        """Return the column of all cells."""
        if self._kind == "category":
            # All cells before the first text are missing.
            codes = [part if part.dtype == np.int32 else np.full(len(part), -1, np.int32) for part in self._parts]
            return Texts(np.concatenate([np.empty(0, np.int32), *codes]), tuple(self._levels))
        return np.concatenate([np.empty(0), *self._parts])
