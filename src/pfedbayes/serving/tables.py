"""Write tables of predictions chunk by chunk: CSV, Parquet, NPZ.

A spreadsheet runs a cell of a CSV file that begins like a formula. Such a text gets an apostrophe in front, which
spreadsheets do not show. Numbers, such as the label -1, and sets of them stay as they are.
"""

from __future__ import annotations

import csv
import io
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import as_number
from pfedbayes.data.own.sheets import optional
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.writing import replacing, writing

Write = Callable[[Mapping[str, Any]], None]
"""Appends rows, given as columns of equal length by name."""
# With apostrophes in front, too: so that whoever removes one gets every text back.
FORMULA = re.compile("'*(\\s*[=+\\-@＝＋－＠]|[\\t\\r\\n])")


@contextmanager
def open_table(path: Path | None) -> Iterator[Write]:
    """Open a table for writing; without a path, CSV on the standard output. After an error there is no file."""
    if path is None:
        yield _csv(sys.stdout, ",")
        return
    kinds = {".csv": _csv_file, ".tsv": _csv_file, ".parquet": _parquet_file, ".npz": _npz_file}
    if path.suffix.lower() not in kinds:
        raise UserError(f"{path} has no known file type: choose a name that ends in {', '.join(kinds)}")
    with writing(path):
        require_folder(path)
    with replacing(path) as file, kinds[path.suffix.lower()](file, path) as write:
        yield write


def require_folder(path: Path) -> None:
    """Refuse a file in a folder that does not exist."""
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist: create it, or give another path with -o")


@contextmanager
def _csv_file(file: BinaryIO, path: Path) -> Iterator[Write]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    yield _csv(text, "\t" if path.suffix.lower() == ".tsv" else ",")
    text.detach()  # writes what is left; the caller closes the file


class _LineFeeds:
    """Ends rows of csv.writer by a line feed alone. The writer quotes a carriage return only if it ends rows, too."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, row: str) -> None:
        """Write a row that ends in a carriage return and a line feed."""
        self._file.write(row.removesuffix("\r\n") + "\n")


def _csv(file: Any, delimiter: str) -> Write:
    writer = csv.writer(_LineFeeds(file), delimiter=delimiter)
    header: list[str] = []

    def write(columns: Mapping[str, Any]) -> None:
        if not header:
            header.extend(columns)
            writer.writerow(_harmless(name) for name in header)
        cells = ([_harmless(cell) for cell in _cells(name, column)] for name, column in columns.items())
        writer.writerows(zip(*cells, strict=True))

    return write


def _cells(name: str, column: Any) -> list[Any]:
    if not hasattr(column, "to_pylist"):
        plain: list[Any] = np.asarray(column).tolist()
        return plain
    try:
        cells: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, KeyError, NotImplementedError) as error:  # a date beyond Python's, for example
        raise _unwritable(name, error, "a .parquet file") from None
    return cells


def _unwritable(name: str, error: Exception, instead: str) -> UserError:
    return UserError(
        f"the column {name!r} has cells that cannot be written ({one_line(error)}): remove it from the input, or write "
        f"{instead}"
    )


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return f"{cell:.7g}"
    text = str(cell)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()  # halves of surrogate pairs


def _harmless(cell: Any) -> str:
    """Return the text of a cell, with an apostrophe in front if a spreadsheet might take it for a formula."""
    text = _text(cell)
    if isinstance(cell, str) and FORMULA.match(text) and any(as_number(part) is None for part in text.split("|")):
        return f"'{text}"
    return text


@contextmanager
def _parquet_file(file: BinaryIO, path: Path) -> Iterator[Write]:
    pyarrow, parquet = (optional(name, "tables", f"writing {path}") for name in ("pyarrow", "pyarrow.parquet"))
    opened: list[Any] = []

    def arrow_array(name: str, column: Any) -> Any:
        try:
            return pyarrow.array(column)
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise _unwritable(name, error, "a .csv file") from None

    def write(columns: Mapping[str, Any]) -> None:
        table = pyarrow.table({name: arrow_array(name, column) for name, column in columns.items()})
        if not opened:
            opened.append(parquet.ParquetWriter(file, table.schema))
        opened[0].write_table(table)

    yield write
    for writer in opened:
        writer.close()


@contextmanager
def _npz_file(file: BinaryIO, path: Path) -> Iterator[Write]:
    parts: list[Mapping[str, Any]] = []
    yield parts.append
    # Not numpy.savez, which takes no array named "file".
    with zipfile.ZipFile(file, "w") as archive:
        for name in parts[0]:
            array = np.concatenate([_array(_cells(name, part[name])) for part in parts])
            if array.dtype.kind == "O":  # NPZ files pickle objects, so write their text instead
                array = np.array([_text(cell) for cell in array])
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _array(cells: list[Any]) -> NDArray[Any]:
    """Return an array (n,); cells that are lists or objects become texts."""
    return np.asarray([str(cell) if isinstance(cell, list | tuple | dict) else cell for cell in cells])
