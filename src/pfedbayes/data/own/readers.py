"""Read CSV and Parquet files into tables, chunk by chunk, and Excel and NPZ files as a whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfedbayes.data.own.columns import Budget, Schema, Table, missing
from pfedbayes.data.own.csv_files import CELLS, CHUNK, Cells, header, read_cells
from pfedbayes.data.own.npz import read_arrays
from pfedbayes.data.own.sheets import optional
from pfedbayes.data.own.table_builder import TableBuilder, table_of_arrays
from pfedbayes.errors import Problems, UserError, one_line
from pfedbayes.files.reading import open_regular

SUFFIXES = (".csv", ".tsv", ".parquet", ".npz", ".xlsx")
UNNAMED = re.compile(r"column \d+")


def read_table(
    path: Path,
    schema: Schema,
    budget: Budget | None = None,
    problems: list[str] | None = None,
    every_row: bool = False,
) -> Table:
    """Read a CSV, Parquet, Excel or NPZ file. What is wrong with it is raised, or appended to `problems`.

    every_row: keep empty rows and totals of CSV and Excel files too.
    """
    budget = budget or Budget()
    with reading(path):
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path, schema, budget, problems)
        if path.suffix.lower() == ".npz":
            return _read_npz(path, schema, budget)
        return _read_cells(path, schema, budget, problems, every_row)


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


def _read_cells(path: Path, schema: Schema, budget: Budget, problems: list[str] | None, every_row: bool) -> Table:
    found: list[str] = []
    notes: list[str] = []
    chunks = read_cells(path, schema, None if every_row else notes, found)
    wanted = schema.wanted(next(chunks).columns)
    builder = TableBuilder(str(path), wanted, schema, budget)
    for cells in chunks:
        builder.add_cells((cells.columns[name] for name in wanted), cells.lines, cells.decimal_comma)
    table = _without_unnamed(builder.table(found, notes))
    if problems is None and found:
        raise Problems(found)
    if problems is not None:
        problems += found
    return table


def _without_unnamed(table: Table) -> Table:
    """Return the table without empty columns that have no name, as delimiters at the end of lines make them."""
    empty = [name for name, column in table.columns.items() if UNNAMED.fullmatch(name) and missing(column).all()]
    return table.without(*empty)


def table_of_cells(cells: Cells, where: str, schema: Schema) -> Table:
    """Return one chunk of a CSV file as a table."""
    wanted = schema.wanted(cells.columns)
    builder = TableBuilder(where, wanted, schema, Budget())
    builder.add_cells((cells.columns[name] for name in wanted), cells.lines, cells.decimal_comma)
    return builder.table()


def read_batches(path: Path, schema: Schema | None = None, budget: Budget | None = None) -> Iterator[dict[str, Any]]:
    """Yield the wanted columns of a Parquet file as Arrow arrays, chunk by chunk; the first chunk has no rows.

    budget: refuse a file that claims more rows than fit.
    """
    pyarrow, parquet = (optional(name, "tables", f"reading {path}") for name in ("pyarrow", "pyarrow.parquet"))
    with open_regular(path) as binary:
        try:
            with parquet.ParquetFile(binary) as file:
                problems: list[str] = []
                names = header(path, file.schema_arrow.names, schema or Schema(), [], problems)
                if problems or names != [name.strip() for name in file.schema_arrow.names]:
                    raise UserError(f"{path} repeats a column or has one without a name: rename it")
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


def _read_parquet(path: Path, schema: Schema, budget: Budget, problems: list[str] | None) -> Table:
    batches = read_batches(path, schema, budget)
    builder = TableBuilder(str(path), list(next(batches)), schema, budget, unit="row")
    for batch in batches:
        builder.add_arrays([typed_array(path, name, array) for name, array in batch.items()])
    return builder.table(problems)


def _read_npz(path: Path, schema: Schema, budget: Budget) -> Table:
    """Read arrays x (n, d) or (n, ...), y (n,) and, if all clients are in one file, client (n,)."""
    x, others = read_arrays(path, budget)
    return table_of_arrays(x, others, str(path), schema, budget)
