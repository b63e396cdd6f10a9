"""Read CSV and Parquet files into tables, chunk by chunk, and NPZ files as a whole."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from pfedbayes.data.own.columns import Budget, Schema, Table, require_name
from pfedbayes.data.own.npz import read_arrays
from pfedbayes.data.own.table_builder import TableBuilder, table_of_arrays
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.reading import open_regular

DELIMITERS = ",;\t|"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
CHUNK = 20_000  # rows read at a time
CELLS = 4_000_000  # cells read at a time, if that is less
LONGEST_LINE = 1 << 26  # characters


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
        reason = one_line(error.strerror or error)
        raise UserError(f"{path} cannot be read ({reason}): check the path and its permissions") from None
    except MemoryError:
        raise UserError(f"{path} does not fit into the memory: give fewer columns or rows") from None


def existing(path: str | Path) -> Path:
    """Return the path of a file or folder that exists."""
    try:
        found = Path(path).expanduser()
        found.stat()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: correct the path") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL character, or an unknown user's ~
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be opened ({one_line(reason)}): correct the path") from None
    return found


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
        with open_regular(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            delimiter = max(DELIMITERS, key=file.readline(LONGEST_LINE).count)
            file.seek(0)
            reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
            names = _header(path, next(reader, []))
            yield Cells(dict.fromkeys(names, ()), np.empty(0, np.int64), delimiter == ";")
            for rows, lines in _chunks(path, reader, len(names)):
                yield Cells(dict(zip(names, zip(*rows, strict=True), strict=True)), lines, delimiter == ";")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason}, byte {error.start}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error}): correct the file") from None


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise UserError(f"{path} has a line of more than {LONGEST_LINE:,} characters: check that it is CSV")
        yield line


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
    seen = set[str]()
    for k, name in enumerate(names):
        if not name:
            raise UserError(f"{path}: column {k + 1} has no name: name it, or save the file without an index")
        require_name(name, str(path), "the column")
        if name in seen:
            raise UserError(f"{path} has two columns {name!r}: rename or remove one of them")
        seen.add(name)
    return names


def _chunks(path: Path, reader: Any, width: int) -> Iterator[tuple[list[list[str]], Rows]]:
    """Yield rows with their line numbers, some at a time, without empty lines."""
    most = max(1, min(CHUNK, CELLS // width))
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
        if len(rows) == most:
            yield rows, np.array(lines)
            rows, lines = [], []
    if rows:
        yield rows, np.array(lines)


def read_batches(path: Path, schema: Schema | None = None, budget: Budget | None = None) -> Iterator[dict[str, Any]]:
    """Yield the wanted columns of a Parquet file as Arrow arrays, chunk by chunk; the first chunk has no rows.

    budget: refuse a file that claims more rows than fit.
    """
    pyarrow, parquet = (optional(name, "tables", f"reading {path}") for name in ("pyarrow", "pyarrow.parquet"))
    with open_regular(path) as binary:
        try:
            with parquet.ParquetFile(binary) as file:
                names = _header(path, file.schema_arrow.names)
                wanted = (schema or Schema()).wanted(names)
                if budget:
                    budget.require(4 * len(wanted) * file.metadata.num_rows, str(path))
                yield dict.fromkeys(wanted, pyarrow.array([]))
                most = max(1, min(CHUNK, CELLS // len(names)))
                for batch in file.iter_batches(batch_size=most, columns=wanted):
                    batch.validate(
                        full=True
                    )  # damaged files may hold text that is not UTF-8, or lengths beyond the end
                    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
                    yield {name: _plain(pyarrow, arrays[name]) for name in wanted}
        except (pyarrow.ArrowException, EOFError, KeyError, OSError, OverflowError, ValueError) as error:
            raise UserError(f"{path} cannot be read as Parquet ({one_line(error)}): save it again") from None


def _plain(pyarrow: Any, array: Any) -> Any:
    return array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array


def typed_array(path: Path, name: str, array: Any) -> Any:
    """Return an Arrow array as a NumPy array."""
    pyarrow = optional("pyarrow", "tables", f"reading {path}")
    try:
        return array.to_numpy(zero_copy_only=False)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: the column {name!r} has the type {array.type} ({one_line(error, 80)}): convert it to numbers or "
            f"text, or leave it out with data.ignore=[{name!r}]"
        ) from None


def _read_parquet(path: Path, schema: Schema, budget: Budget) -> Table:
    batches = read_batches(path, schema, budget)
    builder = TableBuilder(str(path), list(next(batches)), schema, budget, unit="row")
    for batch in batches:
        builder.add_arrays([typed_array(path, name, array) for name, array in batch.items()])
    return builder.table()


def _read_npz(path: Path, schema: Schema, budget: Budget) -> Table:
    """Read arrays x (n, d) or (n, ...), y (n,) and, if all clients are in one file, client (n,)."""
    x, others = read_arrays(path, budget)
    return table_of_arrays(x, others, str(path), schema, budget)
