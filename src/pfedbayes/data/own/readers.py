"""Read CSV, Parquet and NPZ files into tables, chunk by chunk."""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import Budget, Schema, Table
from pfedbayes.data.own.table_builder import TableBuilder, table_of_arrays
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError

DELIMITERS = ",;\t|"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
CHUNK = 20_000  # rows read at a time


def read_table(path: Path, schema: Schema, budget: Budget | None = None) -> Table:
    """Read a CSV, Parquet or NPZ file."""
    budget = budget or Budget()
    with reading(path):
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path, schema, budget)
        if path.suffix.lower() == ".npz":
            return _read_npz(path, schema, budget)
        return _read_csv(path, schema, budget)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the file system and lack of memory into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None
    except MemoryError:
        raise UserError(f"{path} does not fit into the memory: give fewer columns or rows") from None


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise UserError(f"{purpose} needs {package}: pip install 'pfedbayes[{extra}]'") from None


class Cells(NamedTuple):
    """Some rows of a CSV file, unparsed."""

    columns: dict[str, tuple[str, ...]]
    lines: Rows
    """Line of each row in the file."""
    decimal_comma: bool
    """Whether numbers may have a decimal comma."""

    def numeric(self, name: str) -> Iterable[str]:
        """Return the cells of a column with decimal points."""
        return map(_with_point, self.columns[name]) if self.decimal_comma else self.columns[name]


def read_cells(path: Path) -> Iterator[Cells]:
    """Yield a CSV file chunk by chunk; the first chunk has no rows.

    The file is UTF-8 with a header. The delimiter is the most frequent of , ; tab | in the header. If it is a
    semicolon, numbers may have a decimal comma.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(DELIMITERS, key=header.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = _header(path, next(reader, []))
            yield Cells(dict.fromkeys(names, ()), np.empty(0, np.int64), delimiter == ";")
            for rows, lines in _chunks(path, reader, len(names)):
                yield Cells(dict(zip(names, zip(*rows, strict=True), strict=True)), lines, delimiter == ";")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason}, byte {error.start}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error}): correct the file") from None


def _read_csv(path: Path, schema: Schema, budget: Budget) -> Table:
    chunks = read_cells(path)
    wanted = schema.wanted(next(chunks).columns)
    builder = TableBuilder(str(path), wanted, schema, budget)
    for cells in chunks:
        builder.add_cells((cells.numeric(name) for name in wanted), cells.lines)
    return builder.table()


def table_of_cells(cells: Cells, where: str, schema: Schema) -> Table:
    """Return one chunk of a CSV file as a table."""
    wanted = schema.wanted(cells.columns)
    builder = TableBuilder(where, wanted, schema, Budget())
    builder.add_cells((cells.numeric(name) for name in wanted), cells.lines)
    return builder.table()


def _with_point(cell: str) -> str:
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell.strip()) else cell


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not any(names):
        raise UserError(f"{path} has no header: write the names of the columns into its first line")
    for k, name in enumerate(names):
        if not name:
            raise UserError(f"{path}: column {k + 1} has no name: name it, or save the file without an index")
        if name in names[:k]:
            raise UserError(f"{path} has two columns {name!r}: rename or remove one of them")
    return names


def _chunks(path: Path, reader: Any, width: int) -> Iterator[tuple[list[list[str]], Rows]]:
    """Yield rows with their line numbers, CHUNK at a time, without empty lines."""
    rows: list[list[str]] = []
    lines: list[int] = []
    for row in reader:
        if not row:
            continue
        if len(row) != width:
            raise UserError(
                f"{path}, line {reader.line_num} has {len(row)} cells and the header {width}: correct the line, and "
                "quote text that contains the delimiter"
            )
        rows.append(row)
        lines.append(reader.line_num)
        if len(rows) == CHUNK:
            yield rows, np.array(lines)
            rows, lines = [], []
    if rows:
        yield rows, np.array(lines)


def read_batches(path: Path, schema: Schema | None = None) -> Iterator[dict[str, Any]]:
    """Yield the wanted columns of a Parquet file as Arrow arrays, chunk by chunk; the first chunk has no rows."""
    pyarrow, parquet = (optional(name, "tables", f"reading {path}") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path) as file:
            names = (schema or Schema()).wanted(_header(path, file.schema_arrow.names))
            yield dict.fromkeys(names, pyarrow.array([]))
            for batch in file.iter_batches(batch_size=CHUNK, columns=names):
                arrays = [batch.column(name) for name in names]
                plain = [a.dictionary_decode() if pyarrow.types.is_dictionary(a.type) else a for a in arrays]
                yield dict(zip(names, plain, strict=True))
    except (pyarrow.ArrowException, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as Parquet ({reason}): save it again") from None


def _read_parquet(path: Path, schema: Schema, budget: Budget) -> Table:
    batches = read_batches(path, schema)
    builder = TableBuilder(str(path), list(next(batches)), schema, budget, unit="row")
    for batch in batches:
        builder.add_arrays([array.to_numpy(zero_copy_only=False) for array in batch.values()])
    return builder.table()


def read_arrays(path: Path, budget: Budget) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return the array x (n, ...) of an NPZ file and its other arrays, all of n rows."""
    try:
        with zipfile.ZipFile(path) as archive:  # arrays are read as a whole, so count their size first
            budget.spend(sum(member.file_size for member in archive.infolist()), str(path))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as NPZ ({error}): save it with numpy.savez, without objects") from None
    x = arrays.pop("x", None)
    if x is None or not x.ndim or x.dtype.kind not in "biuf":
        raise UserError(f"{path} has no numeric array x: save x and y in it, and client if it holds all clients")
    for name, array in arrays.items():
        if len(array) != len(x):
            raise UserError(f"{path}: x has {len(x)} rows and {name} has {len(array)}: give one entry per example")
    return x[:, None] if x.ndim == 1 else x, arrays


def _read_npz(path: Path, schema: Schema, budget: Budget) -> Table:
    """Read arrays x (n, d) or (n, ...), y (n,) and, if all clients are in one file, client (n,)."""
    x, others = read_arrays(path, budget)
    return table_of_arrays(x, others, str(path), schema, budget)
