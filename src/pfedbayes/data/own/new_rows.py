"""Read new data for trained models: rows to predict, chunk by chunk, and the examples of a new client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data.own import images
from pfedbayes.data.own.columns import Budget, Table, missing
from pfedbayes.data.own.csv_files import CHUNK, read_cells
from pfedbayes.data.own.npz import read_arrays
from pfedbayes.data.own.preprocessing import Preprocessing
from pfedbayes.data.own.readers import (
    SUFFIXES,
    existing,
    read_batches,
    read_table,
    reading,
    table_of_cells,
    typed_array,
)
from pfedbayes.data.own.table_builder import columns_of, table_of, table_of_arrays
from pfedbayes.errors import UserError

IMAGES_AT_ONCE = 1000
FILE = "file"  # the column that names an image


class Chunk(NamedTuple):
    """Some rows."""

    table: Table
    """The columns of the rows that are inputs."""
    x: Tensor
    """Inputs (n, ...)."""
    kept: Mapping[str, Any]
    """All columns of the rows as they were given: lists or arrays."""


def read_chunks(source: str | Path | Mapping[str, Any], preprocessing: Preprocessing) -> Iterator[Chunk]:
    """Yield the rows of a table in a file or in memory, of an NPZ file with x, or of images.

    A table needs all input columns of the training data, and may have others.
    """
    chunks = (
        _of_columns(source, preprocessing) if not isinstance(source, str | Path) else _of_file(source, preprocessing)
    )
    rows = 0
    for chunk in chunks:
        rows += len(chunk.x)
        if len(chunk.x):
            yield chunk
    if not rows:
        name = source if isinstance(source, str | Path) else "the table"
        raise UserError(f"{name} has no rows: add some")


def read_examples(source: str | Path | Mapping[str, Any], preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    """Return the inputs (n, ...) and targets (n,) or (n, 1) of one client.

    source: a table with the target, in a file or in memory; an NPZ file with x and y; or images class/image.png.
    """
    target, schema = preprocessing.target, preprocessing.inputs_schema(*preprocessing.target.columns)
    if not isinstance(source, str | Path):
        table = table_of(source, "the table", schema)
    elif preprocessing.image and (path := existing(source)).is_dir():
        table = images.read_classes(path, preprocessing.shape)
        table = Table(table.where, {target.name: table.columns[images.CLASS]}, table.lines, table.x, table.unit)
    else:
        table = _with_channel(read_table(_table_file(existing(source)), schema), preprocessing)
    for name in target.columns:
        if name not in table.columns:
            raise UserError(f"{table.where} lacks the target column {name!r}: add it")
    if not len(table):
        raise UserError(
            f"{table.where} has no rows: predict with the shared model (pfedbayes predict --shared), or add some"
        )
    if len(absent := np.flatnonzero(missing(table.columns[target.name]))):
        raise UserError(
            f"{table.place(int(absent[0]))}: the target {target.name!r} is missing: fill it in or remove the row"
        )
    return preprocessing.encode(table), torch.from_numpy(target.encode(table))


def _table_file(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is not a table: give a file that ends in {', '.join(SUFFIXES)}")
    return path


def _of_file(path: str | Path, preprocessing: Preprocessing) -> Iterator[Chunk]:
    path = existing(path)
    if preprocessing.image and path.suffix.lower() != ".npz":
        return _of_images(path, preprocessing)
    kinds = {".npz": _of_npz, ".parquet": _of_parquet}
    return kinds.get(_table_file(path).suffix.lower(), _of_csv)(path, preprocessing)


def _of_columns(columns: Mapping[str, Any], preprocessing: Preprocessing) -> Iterator[Chunk]:
    if not preprocessing.inputs and "x" in columns:
        yield from _of_arrays(np.asarray(columns["x"]), columns, "the table", preprocessing)
        return
    columns = columns_of(columns, "the table")
    table = table_of(columns, "the table", preprocessing.inputs_schema())
    yield Chunk(table, preprocessing.encode(table), {str(name): np.asarray(columns[name]) for name in columns})


def _of_csv(path: Path, preprocessing: Preprocessing) -> Iterator[Chunk]:
    with reading(path):
        for cells in read_cells(path):
            table = table_of_cells(cells, str(path), preprocessing.inputs_schema())
            yield Chunk(table, preprocessing.encode(table), cells.columns)


def _of_parquet(path: Path, preprocessing: Preprocessing) -> Iterator[Chunk]:
    with reading(path):
        start = 0
        for batch in read_batches(path):
            own = preprocessing.inputs_schema()
            arrays = {name: typed_array(path, name, batch[name]) for name in own.wanted(batch)}
            table = table_of(arrays, str(path), own)
            table.lines[:] += start  # line numbers for messages
            start += len(table)
            yield Chunk(table, preprocessing.encode(table), batch)


def _of_npz(path: Path, preprocessing: Preprocessing) -> Iterator[Chunk]:
    with reading(path):
        x, others = read_arrays(path, Budget())
    yield from _of_arrays(x, others, str(path), preprocessing)


def _of_arrays(x: NDArray[Any], others: Mapping[str, Any], where: str, preprocessing: Preprocessing) -> Iterator[Chunk]:
    taken = len(preprocessing.inputs)
    if taken and x.ndim == 2 and x.shape[1] > taken:
        raise UserError(f"{where}: an example has {x.shape[1]} numbers, but the models take {taken}: remove the others")
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        table = _with_channel(table_of_arrays(x[rows], {}, where, preprocessing.inputs_schema()), preprocessing)
        kept = {name: np.asarray(array)[rows] for name, array in others.items() if np.ndim(array) == 1}
        yield Chunk(table, preprocessing.encode(table), kept)


def _with_channel(table: Table, preprocessing: Preprocessing) -> Table:
    """Return the table with grey images (n, H, W) as (n, 1, H, W)."""
    if table.x is None or (1, *table.x.shape[1:]) != preprocessing.shape:
        return table
    return Table(table.where, table.columns, table.lines, table.x[:, None], table.unit)


def _of_images(path: Path, preprocessing: Preprocessing) -> Iterator[Chunk]:
    files = images.image_files(path)
    for start in range(0, len(files), IMAGES_AT_ONCE):
        some = files[start : start + IMAGES_AT_ONCE]
        table = images.read_images(some, str(path), preprocessing.shape)
        names = [os.fsencode(file.name).decode(errors="backslashreplace") for file in some]
        yield Chunk(table, preprocessing.encode(table), {FILE: names})
