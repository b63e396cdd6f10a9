"""Tables in memory: typed columns, where their rows come from, and how much memory they may take.

A column of numbers is float64, with NaN for missing cells. A column of texts holds one code per cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.spelling import yes_or_no
from pfedbayes.data.own.writing import Writing
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError
from pfedbayes.memory import host_memory

Kind = Literal["number", "category"]
Numbers = NDArray[np.float64]

MAX_CATEGORIES = 100  # of an input column
MEMORY_SHARE = 0.5  # share of the memory that data may take
LARGEST = 1e30  # magnitude of a number; the squares of larger ones overflow
LONGEST = 1000  # characters of a name or a category
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
LEADING_ZERO = re.compile(r"[+-]?0\d", re.ASCII)
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and halves of surrogate pairs


class Texts(NamedTuple):
    """A column of texts."""

    codes: NDArray[np.int32]
    """Indices (n,) into `levels`; -1 for a missing cell."""
    levels: tuple[str, ...]
    """The different texts."""


Column = Numbers | Texts


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, with the source of each row for messages."""

    where: str
    """The file or object that the table comes from."""
    columns: dict[str, Column]
    lines: Rows
    """Line of each row in the source, (n,)."""
    x: NDArray[Any] | None = None
    """Inputs (n, ...) that are not columns, such as images."""
    unit: str = "line"
    """What `lines` counts: "line", "row" or "image"."""
    writing: Writing = field(default_factory=Writing)
    """How the cells of the source are written."""
    notes: tuple[str, ...] = ()
    """What the reader did to the source that the user should know."""

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Return the source of a row, for messages."""
        return f"{self.where}, {self.unit} {self.lines[row]}"

    def take(self, rows: Rows) -> Table:
        """Return a table of these rows."""
        columns = {name: take(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[rows], x=None if self.x is None else self.x[rows])

    def without(self, *names: str | None) -> Table:
        """Return the table without these columns."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in names})


def take(column: Column, rows: Rows) -> Column:
    """Return the cells of a column in these rows."""
    return Texts(column.codes[rows], column.levels) if isinstance(column, Texts) else column[rows]


def missing(column: Column) -> NDArray[np.bool_]:
    """Return which cells are missing, (n,)."""
    mask: NDArray[np.bool_] = column.codes < 0 if isinstance(column, Texts) else np.isnan(column)
    return mask


def as_number(text: str) -> float | None:
    """Return the number that a text spells in ASCII digits, or None for any other text, such as 1_000 or inf."""
    return float(text) if NUMBER.fullmatch(text) else None


def as_text(number: float) -> str:
    """Return a number as a category name: whole numbers without a decimal point."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def as_texts(column: Column) -> Texts:
    """Return a column with its numbers as category names."""
    if isinstance(column, Texts):
        return column
    numbers, codes = np.unique(column, return_inverse=True)
    codes[np.isnan(column)] = -1
    return Texts(codes.astype(np.int32), tuple(as_text(number) for number in numbers if not np.isnan(number)))


def canonical(text: str) -> str:
    """Return the form of a category, class or client that is the same in all file formats.

    Formats write one value differently: 1, 1.0 and 1e0, or true and True. A number with leading zeros is a code.
    """
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if LEADING_ZERO.match(text):
        return text
    if WHOLE.fullmatch(text):  # exact, however long
        return text.lstrip("+") if text.lstrip("+-") != "0" else "0"
    number = as_number(text)
    return text if number is None or math.isinf(number) else as_text(number)


def places(names: Iterable[str], texts: Iterable[str], absent: int) -> list[int]:
    """Return the place of each text among the names, or `absent`: that of the same text, else of the same value.

    Runs of earlier versions may have names that are not canonical. Names "no" and "yes" stand for all their spellings.
    """
    exact = {name: k for k, name in enumerate(names)}
    form = yes_or_no if exact.keys() == {"no", "yes"} else canonical
    forms: dict[str, int] = {}
    found = []
    for text in texts:
        if text not in exact and not forms:
            for name, k in exact.items():
                forms.setdefault(str(form(name)), k)
        found.append(exact[text] if text in exact else forms.get(str(form(text)), absent))
    return found


def require_name(text: str, where: str, what: str) -> None:
    """Refuse a text that cannot be the name of a column, client, class or category."""
    if UNPRINTABLE.search(text):
        raise UserError(
            f"{where}: {what} {text[:LONGEST]!r} has control characters or is not valid Unicode: rename it, or save "
            "the file as UTF-8"
        )
    if len(text) > LONGEST:
        raise UserError(f"{where}: {what} {text[:40]!r}… has {len(text):,} characters: use at most {LONGEST:,}")


def by_value(texts: Iterable[str]) -> list[str]:
    """Sort texts: numbers by value, then other texts alphabetically."""

    def rank(text: str) -> tuple[bool, float, str]:
        number = as_number(text)
        return (True, 0.0, text) if number is None else (False, number, text)

    return sorted(texts, key=rank)


@dataclass(frozen=True)
class Schema:
    """What is known about the columns of a table before it is read."""

    roles: tuple[str, ...] = ()
    """Columns that are not inputs, such as the target."""
    ignore: tuple[str, ...] = ()
    """Columns that are not read."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """What columns hold, where that is known."""
    only: tuple[str, ...] | None = None
    """The only columns that are read; None for all."""
    writing: Writing = field(default_factory=Writing)
    """How cells are written, where that is known."""
    day_first: bool | None = None
    """Whether 3/4/2020 is the third of April, where no cell says so."""

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Return the columns among `names` that are read."""
        ignore, only = set(self.ignore), None if self.only is None else set(self.only)
        return [name for name in names if name not in ignore and (only is None or name in only)]


class Budget:
    """Counts the bytes of data while they are read, so that too much data ends in a message and not in a kill."""

    def __init__(self) -> None:
        self._left = MEMORY_SHARE * host_memory()

    def spend(self, count: int, where: str) -> None:
        """Count these bytes; raise UserError if they exceed the budget."""
        self.require(count, where)
        self._left -= count

    def require(self, count: int, where: str) -> None:
        """Raise UserError if this many bytes exceed the budget."""
        if count > self._left:
            raise UserError(
                f"{where}: the data do not fit into half of the memory ({host_memory() / 1e9:.1f} GB in all): leave "
                "columns out with data.ignore, give fewer rows, or use a larger machine"
            )


def concatenate(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, which need the same columns, as one table."""
    first = tables[0]
    if len(tables) == 1:
        return first
    columns = {name: _concatenate_column(name, tables) for name in first.columns}
    x = None if first.x is None else np.concatenate([table.x for table in tables if table.x is not None])
    writing = Writing.of_all([table.writing for table in tables])
    lines = np.concatenate([table.lines for table in tables])
    notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
    return replace(first, columns=columns, lines=lines, x=x, writing=writing, notes=notes)


def _concatenate_column(name: str, tables: Sequence[Table]) -> Column:
    parts = [table.columns[name] for table in tables]
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([part for part in parts if not isinstance(part, Texts)])
    levels = {level: code for code, level in enumerate(dict.fromkeys(x for part in texts for x in part.levels))}
    codes = []
    for part, table in zip(parts, tables, strict=True):
        if not isinstance(part, Texts) and not missing(part).all():
            raise UserError(
                f"the column {name!r} holds numbers in {table.where} and text in another file: write it in the same "
                "way everywhere, or list it in data.categories"
            )
        own = part if isinstance(part, Texts) else Texts(np.full(len(part), -1, np.int32), ())
        # Code -1, a missing cell, selects the last entry.
        codes.append(np.array([*(levels[level] for level in own.levels), -1], dtype=np.int32)[own.codes])
    return Texts(np.concatenate(codes), tuple(levels))
