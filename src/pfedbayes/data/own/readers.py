"""Tables of one's own, read into columns chunk by chunk: CSV, Parquet, NPZ, and frames in memory.

A column of numbers is float64 with NaN where a cell is missing; a column of texts is a code per cell. A column holds
either; a mixture is refused, unless the column is declared to be categories.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.errors import UserError
from pfedbayes.memory import host_memory

Kind = Literal["number", "category"]
Numbers = NDArray[np.float64]
Rows = NDArray[np.int64]

MISSING = {"", "?", "na", "n/a", "#n/a", "nan", "nat", "null", "<na>"}  # "none" may be an answer
DELIMITERS = ",;\t|"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
CHUNK = 20_000  # rows that are texts at a time
MOST_CATEGORIES = 100  # of a column
MEMORY_SHARE = 0.5  # of the memory may go into data


class Texts(NamedTuple):
    """A column of texts: codes (n,) into `levels`, -1 where a cell is missing."""

    codes: NDArray[np.int32]
    levels: tuple[str, ...]


Column = Numbers | Texts


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length and, for messages, where they come from and the line of each row there.

    x: inputs (n, ...) that are no columns, images for example.
    """

    where: str
    columns: dict[str, Column]
    lines: Rows
    x: NDArray[Any] | None = None
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Where a row stands, for people."""
        return f"{self.where}, {self.unit} {self.lines[row]}"

    def take(self, rows: Rows) -> Table:
        """Some of the rows."""
        columns = {name: take(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[rows], x=None if self.x is None else self.x[rows])

    def without(self, *names: str | None) -> Table:
        """All columns but these."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in names})


def take(column: Column, rows: Rows) -> Column:
    """Some of the cells of a column."""
    return Texts(column.codes[rows], column.levels) if isinstance(column, Texts) else column[rows]


def missing(column: Column) -> NDArray[np.bool_]:
    """Which cells are missing: (n,)."""
    mask: NDArray[np.bool_] = column.codes < 0 if isinstance(column, Texts) else np.isnan(column)
    return mask


def as_text(number: float) -> str:
    """A number that stands for a category, as people write it."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def by_value(texts: Iterable[str]) -> list[str]:
    """Sorted: numbers by their value before texts by the alphabet."""

    def rank(text: str) -> tuple[bool, float, str]:
        number = _number(text)
        return (True, 0.0, text) if number is None else (False, number, text)

    return sorted(texts, key=rank)


@dataclass(frozen=True)
class Schema:
    """What is known of columns before they are read.

    roles: the target and others that are no inputs; ignore: columns that are not read; kinds: what columns hold; only:
    all that is read, if it is known.
    """

    roles: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    only: tuple[str, ...] | None = None

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Which of these columns are read."""
        return [name for name in names if name not in self.ignore and (self.only is None or name in self.only)]


class Budget:
    """The bytes that data may take, counted as they are read, so that too much ends in a sentence and not in a kill."""

    def __init__(self) -> None:
        self._left = MEMORY_SHARE * host_memory()

    def spend(self, count: int, where: str) -> None:
        """Count so many bytes."""
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{where}: the data do not fit into the memory ({host_memory() / 1e9:.1f} GB, of which data may take "
                "half): leave columns out with data.ignore, give fewer rows, or use a larger machine"
            )


def read_table(path: Path, schema: Schema, budget: Budget | None = None) -> Table:
    """A CSV, Parquet or NPZ file."""
    budget = budget or Budget()
    with reading(path):
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path, schema, budget)
        if path.suffix.lower() == ".npz":
            return _read_npz(path, schema, budget)
        return _read_csv(path, schema, budget)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what hinders reading into one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): make it readable") from None
    except MemoryError:
        raise UserError(f"{path} does not fit into the memory: give fewer columns or rows") from None


def table_of(columns: Mapping[str, Any], where: str, schema: Schema, budget: Budget | None = None) -> Table:
    """The columns of a pandas frame, or of any mapping from names to arrays."""
    names = schema.wanted(columns)
    if any(not isinstance(name, str) for name in names):
        raise UserError(f"{where}: the names of columns must be texts, not {names!r}")
    growing = _Growing(where, names, schema, budget or Budget(), unit="row")
    growing.add_arrays([np.asarray(columns[name]) for name in names])
    return growing.table()


def optional(module: str, extra: str, purpose: str) -> Any:
    """A package that not everybody needs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise UserError(f"{purpose} needs {package}: pip install 'pfedbayes[{extra}]'") from None


def concatenate(tables: Sequence[Table]) -> Table:
    """The rows of all tables under one another; all need the same columns."""
    first = tables[0]
    if len(tables) == 1:
        return first
    columns: dict[str, Column] = {}
    for name in first.columns:
        parts = [table.columns[name] for table in tables]
        texts = [part for part in parts if isinstance(part, Texts)]
        if not texts:
            columns[name] = np.concatenate([part for part in parts if not isinstance(part, Texts)])
            continue
        levels = {level: code for code, level in enumerate(dict.fromkeys(x for part in texts for x in part.levels))}
        codes = []
        for part, table in zip(parts, tables, strict=True):
            if not isinstance(part, Texts) and not missing(part).all():
                raise UserError(
                    f"the column {name!r} holds numbers in {table.where} and texts in another file: write it in "
                    "one way everywhere, or list it in data.categories"
                )
            own = part if isinstance(part, Texts) else Texts(np.full(len(part), -1, np.int32), ())
            # Code -1, a missing cell, finds the last entry.
            codes.append(np.array([*(levels[level] for level in own.levels), -1], dtype=np.int32)[own.codes])
        columns[name] = Texts(np.concatenate(codes), tuple(levels))
    x = None if first.x is None else np.concatenate([table.x for table in tables if table.x is not None])
    return replace(first, columns=columns, lines=np.concatenate([table.lines for table in tables]), x=x)


class _Growing:
    """A table that grows chunk by chunk."""

    def __init__(self, where: str, names: Sequence[str], schema: Schema, budget: Budget, unit: str = "line") -> None:
        self._where, self._unit, self._budget = where, unit, budget
        self._names = names
        self._columns = [
            _GrowingColumn(name, where, unit, schema.kinds.get(name), name in schema.roles) for name in names
        ]
        self._lines: list[Rows] = []
        self._count = 0

    def add_cells(self, columns: Iterable[Iterable[str]], lines: Rows) -> None:
        """More rows as texts."""
        self._added(lines)
        for column, cells in zip(self._columns, columns, strict=True):
            self._budget.spend(column.add_cells(list(cells), lines), self._where)

    def add_arrays(self, arrays: Sequence[NDArray[Any]]) -> None:
        """More rows as arrays that have a type."""
        for name, array in zip(self._names, arrays, strict=True):
            if array.ndim != 1 or len(array) != len(arrays[0]):
                raise UserError(f"{self._where}: the column {name!r} has the shape {array.shape}, not one cell per row")
        lines = np.arange(self._count, self._count + (len(arrays[0]) if arrays else 0))
        self._added(lines)
        for column, array in zip(self._columns, arrays, strict=True):
            self._budget.spend(column.add_array(array, lines), self._where)

    def _added(self, lines: Rows) -> None:
        self._lines.append(lines)
        self._count += len(lines)

    def table(self) -> Table:
        lines = np.concatenate([np.empty(0, np.int64), *self._lines])
        columns = {name: column.whole() for name, column in zip(self._names, self._columns, strict=True)}
        return Table(self._where, columns, lines, unit=self._unit)


class _GrowingColumn:
    """A column that grows; its first cell that is not missing decides what it holds, unless that is known."""

    def __init__(self, name: str, where: str, unit: str, kind: Kind | None, is_role: bool) -> None:
        self._name, self._where, self._unit = name, where, unit
        self._kind, self._declared, self._is_role = kind, kind, is_role
        self._parts: list[NDArray[Any]] = []
        self._levels: dict[str, int] = {}
        self._first: tuple[int, str] | None = None  # line and text of the first cell that was there

    def add_array(self, array: NDArray[Any], lines: Rows) -> int:
        """More cells; the bytes that they take."""
        if array.dtype.kind in "iuf" and self._kind != "category":
            return self._add_numbers(array.astype(np.float64), lines)
        if array.dtype.kind in "mMcV":
            raise UserError(
                f"{self._where}: the column {self._name!r} is {array.dtype}: turn it into a number or a text"
            )
        if array.dtype.kind == "f":
            return self.add_cells(["" if np.isnan(cell) else as_text(cell) for cell in array], lines)
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
        values = array.tolist()
        cells = ["" if value is None else str(value) for value in values]
        if self._kind is None and any(isinstance(value, str | bool) for value in values):
            self._kind = "category"  # what comes as a text stays one, even if it looks like a number
            self._declared = "category"
        return self.add_cells(cells, lines)

    def add_cells(self, cells: Sequence[str], lines: Rows) -> int:
        """More cells as texts; the bytes that they take."""
        if self._declared == "category":
            return self._add_texts(cells, lines)
        try:
            cleaned = ["nan" if cell.strip().lower() in MISSING else cell for cell in cells]
            return self._add_numbers(np.array(cleaned, dtype=np.float64), lines)
        except ValueError:
            return self._add_texts(cells, lines)

    def _add_numbers(self, numbers: Numbers, lines: Rows) -> int:
        present = np.flatnonzero(~np.isnan(numbers))
        if len(present):
            if self._kind == "category":
                self._refuse(int(lines[present[0]]), as_text(numbers[present[0]]), "texts")
            if len(infinite := np.flatnonzero(np.isinf(numbers))):
                place = f"{self._where}, {self._unit} {lines[infinite[0]]}"
                raise UserError(f"{place}: the column {self._name!r} is infinite: give a number or leave it empty")
            self._kind = "number"
            self._first = self._first or (int(lines[present[0]]), as_text(numbers[present[0]]))
        if self._kind == "category":  # all are missing
            return self._keep(np.full(len(numbers), -1, dtype=np.int32))
        return self._keep(numbers)

    def _add_texts(self, cells: Sequence[str], lines: Rows) -> int:
        codes = np.full(len(cells), -1, dtype=np.int32)
        grown = 0
        for k, cell in enumerate(cells):
            text = cell.strip()
            if text.lower() in MISSING:
                continue
            if self._declared != "category":
                is_number = _number(text) is not None
                if self._kind is None:
                    self._kind = "number" if is_number else "category"
                if is_number != (self._kind == "number"):
                    self._refuse(int(lines[k]), text, "numbers" if self._kind == "number" else "texts")
            self._first = self._first or (int(lines[k]), text)
            if text not in self._levels:
                grown += 2 * len(text) + 100
                self._levels[text] = len(self._levels)
                if len(self._levels) > MOST_CATEGORIES and not self._is_role:
                    raise UserError(
                        f"{self._where}: the column {self._name!r} has more than {MOST_CATEGORIES} different texts, "
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
            reason = f"it holds {holds} elsewhere ({self._unit} {self._first[0]} says {self._first[1]!r})"
        else:
            reason = f"it has to hold {holds}"
        raise UserError(
            f"{self._where}, {self._unit} {line}: the column {self._name!r} says {text!r}, but {reason}: correct the "
            "cell, leave it empty if it is missing, or list the column in data.categories"
        )

    def whole(self) -> Column:
        if self._kind == "category":
            # Parts from before the first text have nothing but missing cells.
            codes = [part if part.dtype == np.int32 else np.full(len(part), -1, np.int32) for part in self._parts]
            return Texts(np.concatenate([np.empty(0, np.int32), *codes]), tuple(self._levels))
        return np.concatenate([np.empty(0), *self._parts])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Cells(NamedTuple):
    """Some rows of a CSV file as they stand there, by column, and their lines. With a decimal comma, numbers may have
    one."""

    columns: dict[str, tuple[str, ...]]
    lines: Rows
    decimal_comma: bool

    def numeric(self, name: str) -> Iterable[str]:
        """The cells of a column with decimal points."""
        return map(_with_point, self.columns[name]) if self.decimal_comma else self.columns[name]


def read_cells(path: Path) -> Iterator[Cells]:
    """A CSV file chunk by chunk, one without cells if it has no rows: UTF-8, with a header; the delimiter is the one of
    , ; tab | that the header has most of. Where it is a semicolon, numbers may have a decimal comma."""
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
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error}): mend the file") from None


def _read_csv(path: Path, schema: Schema, budget: Budget) -> Table:
    chunks = read_cells(path)
    wanted = schema.wanted(next(chunks).columns)
    growing = _Growing(str(path), wanted, schema, budget)
    for cells in chunks:
        growing.add_cells((cells.numeric(name) for name in wanted), cells.lines)
    return growing.table()


def table_of_cells(cells: Cells, where: str, schema: Schema) -> Table:
    """One chunk of a CSV file as a table."""
    wanted = schema.wanted(cells.columns)
    growing = _Growing(where, wanted, schema, Budget())
    growing.add_cells((cells.numeric(name) for name in wanted), cells.lines)
    return growing.table()


def _with_point(cell: str) -> str:
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell.strip()) else cell


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not any(names):
        raise UserError(f"{path} has no header: its first line must name the columns")
    for k, name in enumerate(names):
        if not name:
            raise UserError(f"{path}: column {k + 1} has no name: give it one, or write the file without an index")
        if name in names[:k]:
            raise UserError(f"{path} has two columns {name!r}: rename or remove one of them")
    return names


def _chunks(path: Path, reader: Any, width: int) -> Iterator[tuple[list[list[str]], Rows]]:
    """Rows with their line numbers, so many at a time; empty lines are left out."""
    rows: list[list[str]] = []
    lines: list[int] = []
    for row in reader:
        if not row:
            continue
        if len(row) != width:
            raise UserError(
                f"{path}, line {reader.line_num} has {len(row)} cells and the header {width}: mend the line, and put "
                "quotes around texts that contain the delimiter"
            )
        rows.append(row)
        lines.append(reader.line_num)
        if len(rows) == CHUNK:
            yield rows, np.array(lines)
            rows, lines = [], []
    if rows:
        yield rows, np.array(lines)


def read_batches(path: Path, schema: Schema | None = None) -> Iterator[dict[str, Any]]:
    """A Parquet file chunk by chunk, the wanted columns as Arrow arrays; the first chunk has no rows."""
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
        raise UserError(f"{path} cannot be read as Parquet ({reason}): write it again") from None


def _read_parquet(path: Path, schema: Schema, budget: Budget) -> Table:
    batches = read_batches(path, schema)
    growing = _Growing(str(path), list(next(batches)), schema, budget, unit="row")
    for batch in batches:
        growing.add_arrays([array.to_numpy(zero_copy_only=False) for array in batch.values()])
    return growing.table()


def read_arrays(path: Path, budget: Budget) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """The array x (n, ...) of an NPZ file and its other arrays, all of n rows."""
    try:
        with zipfile.ZipFile(path) as archive:  # it is read as a whole, so its size is counted first
            budget.spend(sum(member.file_size for member in archive.infolist()), str(path))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as NPZ ({error}): write it by numpy.savez, without objects") from None
    x = arrays.pop("x", None)
    if x is None or not x.ndim or x.dtype.kind not in "biuf":
        raise UserError(f"{path} has no array x of numbers: give it x and y, and client if it holds all clients")
    for name, array in arrays.items():
        if len(array) != len(x):
            raise UserError(f"{path}: x has {len(x)} rows and {name} has {len(array)}: give one for each example")
    return x[:, None] if x.ndim == 1 else x, arrays


def table_of_arrays(
    x: NDArray[Any], others: Mapping[str, NDArray[Any]], where: str, schema: Schema, budget: Budget | None = None
) -> Table:
    """x (n, d) as columns x0, x1, ..., or x (n, ...) as it is, beside other columns."""
    if x.ndim == 2:
        return table_of({f"x{k}": x[:, k] for k in range(x.shape[1])} | dict(others), where, schema, budget)
    if not np.isfinite(x).all():
        raise UserError(f"{where}: x holds NaN or infinity: remove or replace those examples")
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    return replace(table_of(others, where, schema, budget), x=x, lines=np.arange(len(x)))


def _read_npz(path: Path, schema: Schema, budget: Budget) -> Table:
    """Arrays x (n, d) or (n, ...), y (n,) and, if all clients are in one file, client (n,)."""
    x, others = read_arrays(path, budget)
    return table_of_arrays(x, others, str(path), schema, budget)
