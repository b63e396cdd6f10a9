"""Read CSV and Excel files as they come: several encodings and delimiters, empty and repeated columns, totals."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

import numpy as np

from pfedbayes.data.own.columns import Schema, require_name
from pfedbayes.data.own.sheets import EXCEL, sheet_rows
from pfedbayes.data.splits import Rows
from pfedbayes.errors import Problems, UserError
from pfedbayes.files.reading import open_regular

DELIMITERS = ";\t|,"  # of equally good ones, the first: text often has commas
CHUNK = 20_000  # rows read at a time
CELLS = 4_000_000  # cells read at a time, if that is less
LONGEST_LINE = 1 << 26  # characters
SAMPLE = 20  # lines by which the delimiter is chosen
BLOCK = 1 << 20  # bytes by which the encoding is checked
SEPARATOR = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # a line that Excel understands
TOTALS = re.compile(r"((grand|sub) ?)?totals?:?|sum:?|averages?:?|mean:?|summe:?|gesamt:?", re.IGNORECASE)
MOST_TOTALS = 3  # rows at the end of a file
SHOWN = 5  # lines that a message names


class Cells(NamedTuple):
    """Some rows of a CSV file, unparsed."""

    columns: dict[str, tuple[str, ...]]
    lines: Rows
    """Line of each row in the file."""
    decimal_comma: bool
    """Whether a comma separates decimals."""


def read_cells(
    path: Path, schema: Schema | None = None, notes: list[str] | None = None, problems: list[str] | None = None
) -> Iterator[Cells]:
    """Yield a CSV file chunk by chunk; the first chunk has no rows.

    The file has a header. The delimiter is the one of ; tab | , that cuts the first lines into most cells. If it is a
    semicolon, commas separate decimals.

    notes: of a training table; if given, rows of totals at its end and empty rows are left out, and what was done is
    appended. problems: what is wrong is appended, or raised if None.
    """
    found: list[str] = []
    said = notes if notes is not None else []
    numbered, comma = (sheet_rows(path), False) if path.suffix.lower() == EXCEL else _csv_rows(path, said)
    _, first = next(numbered, (0, []))
    names = header(path, first, schema or Schema(), said, found)
    yield Cells(dict.fromkeys(names, ()), np.empty(0, np.int64), comma)
    for rows, lines in _chunks(path, numbered, names, said if notes is not None else None, found):
        yield Cells(dict(zip(names, zip(*rows, strict=True), strict=True)), lines, comma)
    if problems is not None:
        problems += found
    elif found:
        raise Problems(found)


def _csv_rows(path: Path, notes: list[str]) -> tuple[Iterator[tuple[int, list[str]]], bool]:
    """Return the rows with the lines in which they end, and whether a comma separates decimals."""
    with open_regular(path) as binary:
        encoding = _encoding(path, binary, notes)
        with io.TextIOWrapper(binary, encoding=encoding, newline="") as file:
            delimiter = _delimiter(path, file)
    return _parsed(path, encoding, delimiter), delimiter == ";"


def _parsed(path: Path, encoding: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    try:
        with open_regular(path) as binary, io.TextIOWrapper(binary, encoding=encoding, newline="") as file:
            reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
            for k, row in enumerate(reader):
                if k or not SEPARATOR.fullmatch(delimiter.join(row)):
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise UserError(_damaged(path, error)) from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error}): correct the file") from None


def _damaged(path: Path, error: UnicodeDecodeError) -> str:
    return f"{path} is not UTF-8 ({error.reason}, byte {error.start}): save it as UTF-8"


def _encoding(path: Path, file: BinaryIO, notes: list[str]) -> str:
    """Return the encoding of a file: UTF-8, UTF-16 with a byte order mark, or Windows-1252, which holds Latin-1."""
    start = file.read(2)
    file.seek(0)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    decoder = codecs.getincrementaldecoder("utf-8")()
    beyond_ascii = False
    try:
        while block := file.read(BLOCK):
            beyond_ascii |= not decoder.decode(block).isascii()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        # Text that is UTF-8 in other places is damaged, rather than in another encoding.
        valid = block.decode("utf-8", errors="ignore") if block else ""
        if beyond_ascii or not valid.isascii() or b"\0" in block:
            return "utf-8-sig"
        notes.append(f"{path} is not UTF-8 and is read as Windows-1252 (Latin-1)")
        return "cp1252"
    finally:
        file.seek(0)
    return "utf-8-sig"


def _delimiter(path: Path, file: TextIO) -> str:
    """Return the delimiter that cuts the first lines into most cells, as many in each as in the header."""
    try:
        lines = [file.readline(LONGEST_LINE) for _ in range(SAMPLE)]
    except UnicodeDecodeError as error:
        raise UserError(_damaged(path, error)) from None
    if named := SEPARATOR.fullmatch(lines[0].strip("\ufeff\r\n")):
        return named[1]
    best, most = ",", (False, 1)
    for delimiter in DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=delimiter) if row]
        except csv.Error:
            continue
        # Rows may miss or repeat the last delimiter; quoted line breaks may cut the last of them.
        even = len(widths) < 2 or abs(widths[1] - widths[0]) <= 1
        if widths and (even and widths[0] > 1, widths[0]) > most:
            best, most = delimiter, (even and widths[0] > 1, widths[0])
    return best


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise UserError(f"{path} has a line of more than {LONGEST_LINE:,} characters: check that it is CSV")
        yield line


def header(path: Path, cells: Sequence[str], schema: Schema, notes: list[str], problems: list[str]) -> list[str]:
    """Return the names of the columns: a repeated one gets a number, one without a name its position."""
    names = [cell.strip() for cell in cells]
    if not any(names):
        raise UserError(f"{path} has no header: write the names of the columns into its first line")
    seen: dict[str, int] = {}
    roles, own = set(schema.roles), set(names)
    for k, name in enumerate(names):
        if not name:
            names[k] = free_name(f"column {k + 1}", own)
            continue
        require_name(name, str(path), "the column")
        seen[name] = count = seen.get(name, 0) + 1
        if count > 1 and name in roles:
            problems.append(f"{path} has two columns {name!r}: rename or remove one of them")
        if count > 1:
            names[k] = free_name(f"{name} ({count})", own)
            notes.append(f"{path} has two columns {name!r}: the one at position {k + 1} is called {names[k]!r}")
    return names


def free_name(name: str, taken: set[str]) -> str:
    """Return the name, or one like it that no other column has; add it to those taken."""
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def _chunks(
    path: Path,
    numbered: Iterator[tuple[int, list[str]]],
    names: Sequence[str],
    notes: list[str] | None,
    problems: list[str],
) -> Iterator[tuple[list[list[str]], Rows]]:
    """Yield rows with their line numbers, some at a time, without empty lines."""
    width = len(names)
    most = max(1, min(CHUNK, CELLS // width))
    rows: list[list[str]] = []
    lines: list[int] = []
    odd: list[tuple[int, int]] = []
    for line, row in numbered:
        if not row or (notes is not None and not any(map(str.strip, row))):
            continue
        if len(row) > width and not any(map(str.strip, row[width:])):
            row = row[:width]  # delimiters at the end of the line  # noqa: PLW2901
        if len(row) != width:
            odd.append((line, len(row)))
            continue
        if len(rows) == most + MOST_TOTALS:
            yield rows[:most], np.array(lines[:most])
            rows, lines = rows[most:], lines[most:]
        rows.append(row)
        lines.append(line)
    if notes is not None:
        while rows and _is_total(rows[-1]):
            notes.append(f"{path}, line {lines[-1]} is left out: {_first(rows[-1])!r} is a total, not a row of data")
            del rows[-1], lines[-1]
    for start in range(0, len(rows), most):
        yield rows[start : start + most], np.array(lines[start : start + most])
    if odd:
        first, count = odd[0]
        others = ", ".join(f"{each} has {cells}" for each, cells in odd[1:SHOWN])
        more = f", and {len(odd) - SHOWN:,} more" if len(odd) > SHOWN else ""
        problems.append(
            f"{path}, line {first} has {count} cells and the header {width}"
            + (f" (so do lines like it: {others}{more})" if others else "")
            + ": correct the line, and quote text that contains the delimiter"
        )


def _first(row: Sequence[str]) -> str:
    return next((cell.strip() for cell in row if cell.strip()), "")


def _is_total(row: Sequence[str]) -> bool:
    """Return whether a last row sums the others up: it begins with such a word, and some of its cells are empty."""
    return TOTALS.fullmatch(_first(row)) is not None and not all(map(str.strip, row))
