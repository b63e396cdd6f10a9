"""Write tables of predictions chunk by chunk: CSV, Parquet, NPZ."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pfedbayes.data.own.readers import SUFFIXES, optional
from pfedbayes.errors import UserError
from pfedbayes.files.writing import replacing

Write = Callable[[Mapping[str, Any]], None]
"""Appends rows, given as columns of equal length by name."""


@contextmanager
def open_table(path: Path | None) -> Iterator[Write]:
    """Open a table for writing; without a path, CSV on the standard output. After an error there is no file."""
    if path is None:
        yield _csv(sys.stdout, ",")
        return
    kinds = {".csv": _csv_file, ".tsv": _csv_file, ".parquet": _parquet_file, ".npz": _npz_file}
    if path.suffix.lower() not in kinds:
        raise UserError(f"{path} has no known file type: choose a name that ends in {', '.join(SUFFIXES)}")
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
    text.flush()
    text.detach()  # the caller closes the file


def _csv(file: Any, delimiter: str) -> Write:
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    header: list[str] = []

    def write(columns: Mapping[str, Any]) -> None:
        if not header:
            header.extend(columns)
            writer.writerow(header)
        writer.writerows(zip(*([_text(cell) for cell in _cells(column)] for column in columns.values()), strict=True))

    return write


def _cells(column: Any) -> list[Any]:
    cells: list[Any] = column.to_pylist() if hasattr(column, "to_pylist") else np.asarray(column).tolist()
    return cells


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return f"{cell:.7g}" if isinstance(cell, float) else str(cell)


@contextmanager
def _parquet_file(file: BinaryIO, path: Path) -> Iterator[Write]:
    pyarrow, parquet = (optional(name, "tables", f"writing {path}") for name in ("pyarrow", "pyarrow.parquet"))
    opened: list[Any] = []

    def write(columns: Mapping[str, Any]) -> None:
        table = pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()})
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
    arrays: dict[str, Any] = {
        name: np.concatenate([np.asarray(_cells(part[name])) for part in parts]) for name in parts[0]
    }
    for name, array in arrays.items():
        if array.dtype.kind == "O":  # NPZ files pickle objects, so write their text instead
            arrays[name] = np.array([_text(cell) for cell in array])
    np.savez(file, **arrays)
