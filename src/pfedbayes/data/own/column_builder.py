"""Build one column chunk by chunk, and decide at the end whether it holds numbers, dates or text."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import (
    LARGEST,
    MAX_CATEGORIES,
    Column,
    Numbers,
    Schema,
    Texts,
    as_number,
    as_text,
    require_name,
)
from pfedbayes.data.own.dates import DateColumn, needs_order, orders, read_date
from pfedbayes.data.own.spelling import PLACEHOLDERS, written_numbers, yes_or_no
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError, one_line

MISSING = {"", "?", "na", "n/a", "#n/a", "nan", "-nan", "nat", "null", "<na>"}  # "none" may be an answer
NUMERALS = set("0123456789+-.eE") | set("nan")  # what cells of numbers consist of; "nan" is a missing one
INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
CONTAINERS = (list, tuple, dict, set, np.ndarray, bytearray, memoryview, complex)
SPANS = (datetime.time, datetime.timedelta)
MOSTLY = 0.8  # share of texts that are dates, above which the others are taken for mistakes
SHOWN = 3  # odd cells that a message quotes


class Built(NamedTuple):
    """A column and how its cells are written."""

    column: Column
    date: DateColumn | None = None
    """Set if the column holds dates, as days since 1970-01-01."""
    comma: bool = False
    """Whether a comma separates decimals."""


class ColumnBuilder:
    """A column under construction. What is wrong with it goes to `problems`."""

    def __init__(self, name: str, where: str, unit: str, schema: Schema, problems: list[str]) -> None:
        self._name, self._where, self._unit, self._problems = name, where, unit, problems
        self._kind, self._is_role = schema.kinds.get(name), name in set(schema.roles)
        self._date, self._day_first = schema.writing.date(name), schema.day_first
        self._comma = True if name in schema.writing.decimal_comma else None
        self._missing = MISSING | {text.lower() for text in schema.writing.missing}
        self._typed = False  # whether its strings come from a format with types
        self._broken = False
        self._closed = False  # whether further texts are no longer told apart
        self._parts: list[NDArray[Any]] = []  # numbers, or codes of texts
        self._levels: dict[str, int] = {}
        self._level_lines: list[int] = []  # where each text occurs first
        self._first_number: tuple[int, str] | None = None

    def add_array(self, array: NDArray[Any], lines: Rows) -> int:
        """Append cells and return the bytes that they take."""
        kind = array.dtype.kind
        if kind in "iuf" and self._kind != "category":
            with np.errstate(over="ignore"):  # a wider type may hold larger numbers; they are refused as infinite
                return self._add_numbers(array.astype(np.float64), lines)
        if kind == "m":
            return self._add_numbers(array / np.timedelta64(1, "D"), lines)
        if kind in "cV":
            return self._unsuitable(array.dtype, lines)
        if kind == "f":  # the shortest text that is this number in its own precision
            return self.add_cells(["" if np.isnan(cell) else as_text(float(str(cell))) for cell in array], lines)
        try:
            values = np.datetime_as_string(array, unit="s").tolist() if kind == "M" else array.tolist()
            cells = ["" if value is None else value.decode() if isinstance(value, bytes) else str(value)
                     for value in values]  # fmt: skip
        except ValueError as error:  # neither UTF-8 nor a code point, or an integer of thousands of digits
            return self._break(
                f"{self._where}: the column {self._name!r} holds text that cannot be read ({one_line(error)}): save it "
                "as UTF-8", lines
            )  # fmt: skip
        for value, cell in zip(values, cells, strict=True):
            # pandas.NaT is a date, but stands for a missing cell
            if isinstance(value, CONTAINERS) or (isinstance(value, SPANS) and cell != "NaT"):
                return self._unsuitable(type(value).__name__, lines)
        present = [value for value, cell in zip(values, cells, strict=True) if cell.lower() not in self._missing]
        # A string stays text, even if it looks like a number, unless the column holds numbers too.
        if present and all(isinstance(value, str | bytes | bool) for value in present):
            self._typed = True
            return self._add_texts(cells, lines)
        return self.add_cells(cells, lines)

    def add_cells(self, cells: Sequence[str], lines: Rows, comma: bool = False) -> int:
        """Append cells of text and return the bytes that they take. comma: whether a comma separates decimals."""
        if self._broken:
            return self._keep(np.full(len(cells), np.nan))
        if comma and self._comma is None:
            self._comma = True
        if self._kind == "category":
            return self._add_texts([_with_point(cell) for cell in cells] if comma else cells, lines)
        cleaned = ["nan" if cell.lower() in self._missing else cell for cell in map(str.strip, cells)]
        signs = set("".join(cleaned))
        if comma and "," in signs and "." not in signs:
            cleaned, signs = [cell.replace(",", ".") for cell in cleaned], signs - {","}
        if signs <= NUMERALS:
            try:
                numbers = np.array(cleaned, dtype=np.float64)
            except ValueError:
                return self._add_texts(cells, lines)
            return self._add_numbers(numbers, lines)
        return self._add_texts(cells, lines)

    def _add_numbers(self, numbers: Numbers, lines: Rows) -> int:
        present = np.flatnonzero(~np.isnan(numbers))
        if len(present):
            if len(odd := np.flatnonzero(np.abs(numbers) > LARGEST)):
                return self._break(self._too_large(int(lines[odd[0]]), float(numbers[odd[0]])), lines)
            first = present[0]
            self._first_number = self._first_number or (int(lines[first]), as_text(numbers[first]))
        return self._keep(numbers)

    def _add_texts(self, cells: Sequence[str], lines: Rows) -> int:
        codes = np.full(len(cells), -1, dtype=np.int32)
        grown = 0
        for k, cell in enumerate(cells):
            text = cell.strip()
            if text.lower() in self._missing:
                continue
            code = self._levels.get(text)
            if code is None:
                code = len(self._levels)
                if self._closed:
                    codes[k] = code - 1
                    continue
                try:
                    require_name(
                        text, f"{self._where}, {self._unit} {lines[k]}", f"the text in the column {self._name!r},"
                    )
                except UserError as error:
                    return self._break(str(error), lines)
                grown += 2 * len(text) + 200
                self._levels[text] = code
                self._level_lines.append(int(lines[k]))
                self._closed = code == MAX_CATEGORIES and self._holds_names()
            codes[k] = code
        return grown + self._keep(codes)

    def _holds_names(self) -> bool:
        """Return whether the texts so far are too many categories and neither numbers nor dates."""
        if self._is_role or self._date or self._kind == "number":
            return False
        numbers = written_numbers(list(self._levels), self._comma).numbers
        of_use = sum(number is not None or read_date(text, True) is not None or read_date(text, False) is not None
                     for number, text in zip(numbers, self._levels, strict=True))  # fmt: skip
        return self._kind == "category" or 2 * of_use < len(numbers)

    def _keep(self, part: NDArray[Any]) -> int:
        self._parts.append(part)
        return part.nbytes

    def _break(self, problem: str, lines: Rows) -> int:
        """Report what makes the column useless, and keep missing cells in its place."""
        if not self._broken:
            self._problems.append(problem)
        self._broken = True
        return self._keep(np.full(len(lines), np.nan))

    def _unsuitable(self, kind: object, lines: Rows) -> int:
        return self._break(
            f"{self._where}: the column {self._name!r} has the type {kind}: convert it to numbers or text, or leave it "
            f"out with data.ignore=[{self._name!r}]", lines
        )  # fmt: skip

    def _too_large(self, line: int, number: float) -> str:
        size = "infinite" if np.isinf(number) else f"{number:g}, beyond ±{LARGEST:g}"
        return (
            f"{self._where}, {self._unit} {line}: the column {self._name!r} is {size}: give another number, leave the "
            "cell empty, or list the column in data.categories"
        )

    def built(self) -> Built:
        """Return the column of all cells."""
        levels = list(self._levels)
        if self._broken:
            return Built(np.full(sum(map(len, self._parts)), np.nan))
        if self._date is not None:
            return self._dates(levels, {level for level in levels if level.lower() in PLACEHOLDERS}, self._date)
        if self._kind == "category":
            return Built(self._texts())
        return self._inferred(levels)

    def _inferred(self, levels: list[str]) -> Built:
        has_numbers = self._first_number is not None or self._kind == "number"
        placeholders = {level for level in levels if level.lower() in PLACEHOLDERS}
        rest = [level for level in levels if level not in placeholders]
        if not levels or (has_numbers and not rest):
            return Built(self._numbers(dict.fromkeys(levels)))
        if not rest or self._closed:
            return Built(self._texts())
        found = written_numbers(rest, self._comma)
        values = dict(zip(rest, found.numbers, strict=True))
        spelled = [level for level in rest if values[level] is not None]
        if self._typed and not has_numbers and all(as_number(level) is not None for level in spelled):
            spelled = []  # strings of digits are text
        elif len(spelled) == len(rest) and len(found.units) <= 1:
            return self._of_numbers(values, found.comma)
        if self._kind == "number":
            return self._mixed(set(rest) - set(spelled) or set(rest), has_numbers=True)
        if not has_numbers and not self._is_role and (dates := self._as_dates(rest, placeholders)):
            return dates
        if any(INFINITE.fullmatch(level) for level in rest) and (has_numbers or all(
            INFINITE.fullmatch(level) or level in spelled for level in rest
        )):  # fmt: skip
            odd = next(level for level in rest if INFINITE.fullmatch(level))
            self._problems.append(self._too_large(self._level_lines[self._levels[odd]], float(odd)))
            return Built(self._texts())
        if (has_numbers or spelled) and not all(map(yes_or_no, rest)):
            return self._mixed(set(rest) - set(spelled) or set(rest), has_numbers)
        return Built(self._texts())

    def _of_numbers(self, values: dict[str, float | None], comma: bool) -> Built:
        for level, number in values.items():
            if number is not None and abs(number) > LARGEST:
                self._problems.append(self._too_large(self._level_lines[self._levels[level]], number))
                return Built(self._texts())
        return Built(self._numbers(values), comma=comma)

    def _as_dates(self, rest: list[str], placeholders: set[str]) -> Built | None:
        """Return the column if all texts, or nearly all, are dates."""
        dated = [level for level in rest if read_date(level, True) is not None or read_date(level, False) is not None]
        if len(dated) < MOSTLY * len(rest):
            return None
        return self._dates(rest, placeholders, DateColumn(self._name))

    def _dates(self, levels: list[str], placeholders: set[str], known: DateColumn) -> Built:
        real = [level for level in levels if level not in placeholders]
        found = orders(real)
        first = known.day_first
        if first is None or first not in found:
            first = next(iter(found)) if len(found) == 1 else self._day_first
        days = {level: read_date(level, bool(first)) for level in real}
        odd = {level for level, day in days.items() if day is None}
        if odd and not found and self._day_first is None:
            self._problems.append(
                f"{self._where}: the dates in the column {self._name!r} write the day first in some rows and the month "
                f"first in others, such as {self._quoted(odd)}: write them as 2020-12-31, list the column in "
                f"data.categories, or leave it out with --ignore {self._name!r}"
            )
        elif odd:
            self._problems.append(self._cells(odd, "dates", None))
        elif self._first_number is not None:
            line, text = self._first_number
            self._problems.append(
                f"{self._where}, {self._unit} {line}: the column {self._name!r} is {text}, but the column holds dates "
                "elsewhere: write a date, or leave the cell empty"
            )
        elif first is None and needs_order(real):
            example = next(level for level in real if read_date(level, True) != read_date(level, False))
            self._problems.append(
                f"{self._where}: no row of the column {self._name!r} tells whether {example!r} names the day or the "
                "month first: set data.day_first=true or false"
            )
        order = first if needs_order(real) else known.day_first
        return Built(self._numbers(days), DateColumn(self._name, order))

    def _mixed(self, odd: set[str], has_numbers: bool) -> Built:
        """Report a column of numbers and text."""
        counts = np.zeros(len(self._levels), dtype=np.int64)
        numbers = 0
        for part in self._parts:
            if part.dtype == np.int32:
                counts += np.bincount(part[part >= 0], minlength=len(counts))
            else:
                numbers += int((~np.isnan(part)).sum())
        others = {level for level in self._levels if level not in odd and level.lower() not in PLACEHOLDERS}
        texts = sum(int(counts[self._levels[level]]) for level in odd)
        numbers += sum(int(counts[self._levels[level]]) for level in others)
        firsts = [(self._level_lines[self._levels[level]], level) for level in others]
        first_number = min([*firsts, *([self._first_number] if self._first_number else [])], default=None)
        first_text = min((self._level_lines[self._levels[level]], level) for level in odd)
        if first_number is None or self._kind == "number" or numbers > texts or (
            numbers == texts and first_number < first_text
        ):  # fmt: skip
            self._problems.append(self._cells(odd, "numbers", first_number))
        else:
            line, text = first_number
            self._problems.append(
                f"{self._where}, {self._unit} {line}: the column {self._name!r} is {text!r}, but the column holds text "
                f"elsewhere ({self._unit} {first_text[0]}: {first_text[1]!r}): correct the cell, leave it empty if the "
                f"value is missing, list the column in data.categories, or leave it out with --ignore {self._name!r}"
            )
        return Built(self._texts())

    def _cells(self, odd: set[str], holds: str, elsewhere: tuple[int, str] | None) -> str:
        """Return what is wrong with texts among numbers or dates."""
        line, text = min((self._level_lines[self._levels[level]], level) for level in odd)
        if elsewhere is None:
            reason = f"the column must hold {holds}"
        else:
            reason = f"the column holds {holds} elsewhere ({self._unit} {elsewhere[0]}: {elsewhere[1]!r})"
        more = f" (other texts: {self._quoted(odd - {text})})" if len(odd) > 1 else ""
        return (
            f"{self._where}, {self._unit} {line}: the column {self._name!r} is {text!r}, but {reason}{more}: correct "
            f"the cell, say --missing {text!r} if the value is missing, list the column in data.categories, or leave "
            f"it out with --ignore {self._name!r}"
        )

    def _quoted(self, texts: set[str]) -> str:
        some = sorted(texts, key=lambda text: self._levels[text])[:SHOWN]
        return ", ".join(map(repr, some)) + (f", … ({len(texts)} in all)" if len(texts) > SHOWN else "")

    def _numbers(self, values: dict[str, float | None]) -> Numbers:
        """Return all cells as numbers, with the value of each text; a text without one is missing."""
        numbers = [values.get(level) for level in self._levels]
        lookup = np.array([np.nan if number is None else number for number in [*numbers, None]], dtype=np.float64)
        parts = [lookup[part] if part.dtype == np.int32 else part for part in self._parts]
        return np.concatenate([np.empty(0), *parts])

    def _texts(self) -> Texts:
        """Return all cells as text."""
        levels = dict(self._levels)
        codes = []
        for part in self._parts:
            if part.dtype != np.int32:
                own, which = np.unique(part, return_inverse=True)
                found = [-1 if np.isnan(x) else levels.setdefault(as_text(x), len(levels)) for x in own]
                part = np.array([*found, -1], dtype=np.int32)[which]  # noqa: PLW2901
            codes.append(part)
        return Texts(np.concatenate([np.empty(0, np.int32), *codes]), tuple(levels))


def _with_point(cell: str) -> str:
    number = written_numbers([cell.strip()], comma=True).numbers[0] if "," in cell else None
    return cell if number is None else as_text(number)
