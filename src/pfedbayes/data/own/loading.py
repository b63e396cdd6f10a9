"""Load your own files as shards: find the files, group rows by client, split them, and fit the preprocessing."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data.config import PIECES, DataConfig, Task
from pfedbayes.data.own import images
from pfedbayes.data.own.columns import (
    Budget,
    Kind,
    Schema,
    Table,
    Texts,
    by_value,
    canonical,
    concatenate,
    missing,
    require_name,
)
from pfedbayes.data.own.describing import column_uses
from pfedbayes.data.own.preprocessing import Preprocessing, combine
from pfedbayes.data.own.readers import SUFFIXES, existing, read_table
from pfedbayes.data.own.summaries import MAX_INTEGER_CLASSES, ClientSummary, summarise
from pfedbayes.data.own.table_builder import table_of, with_dates
from pfedbayes.data.own.times import read_events
from pfedbayes.data.own.writing import Writing
from pfedbayes.data.shards import Shards
from pfedbayes.data.splits import Rows, SplitPurpose, held_out
from pfedbayes.errors import Problems, UserError

SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
          "test": "test"}  # fmt: skip
NPZ_TARGET, NPZ_CLIENT = "y", "client"


def load_own(config: DataConfig) -> Shards:
    """Load the files at `config.path`."""
    path = existing(str(config.path))
    column = config.client_column
    if path.is_dir() and images.is_tree(path):
        if config.client_column is not None:
            raise UserError(f"{path} has one folder of images per client: leave --client-column out")
        tables, target = images.read_tree(path, config.image_size), config.target or images.CLASS
        if target != images.CLASS:
            raise UserError(f"{path} has the form client/class/image: leave --target out")
    else:
        tables, target, column = _read_clients(path, config)
    return _shards(tables, target, config, _others(config, column))


def holds_tables(path: str) -> bool:
    """Return whether a path of the user's own data leads to tables, as far as one can tell, not to images or arrays."""
    try:
        place = existing(path)
        if place.is_dir():
            return not images.is_tree(place) and all(file.suffix.lower() != ".npz" for file in _files(place))
    except UserError:
        return True  # `load_own` says what is wrong
    return place.suffix.lower() != ".npz"


def shards_from_tables(
    tables: Any,
    target: str,
    *,
    client_column: str | None = None,
    task: Task | None = None,
    event: str | None = None,
    split_column: str | None = None,
    categories: Sequence[str] = (),
    ignore: Sequence[str] = (),
    keep: Sequence[str] = (),
    missing: Sequence[str] = (),
    day_first: bool | None = None,
    drop_missing_target: bool = False,
    test_fraction: float = 0.2,
    validation: float = 0.0,
    seed: int = 1,
    pieces: int = PIECES,
) -> Shards:
    """Return shards of tables in memory.

    tables: per client a pandas or polars frame, or any mapping from column names to arrays; with `client_column`, one
    such table of all clients. The other arguments are those of `DataConfig`.
    """
    config = DataConfig(
        name="files", path="tables", target=target, task=task, event=event, split_column=split_column,
        client_column=client_column, categories=tuple(categories), ignore=tuple(ignore), keep=tuple(keep),
        missing=tuple(missing), day_first=day_first, drop_missing_target=drop_missing_target,
        test_fraction=test_fraction, validation=validation, seed=seed, pieces=pieces,
    )  # fmt: skip
    schema, budget = _schema(config, target), Budget()
    given = {"the table": tables} if client_column is not None else dict(tables)
    problems: list[str] = []
    own = {name: table_of(columns, name, schema, budget, problems) for name, columns in given.items()}
    return _shards(_clients(own, config, target, client_column, problems), target, config, _others(config))


def _others(config: DataConfig, column: str | None = None) -> list[str]:
    """Return the columns that are not inputs because the user says so. column: that of the clients."""
    return [*config.ignore, *filter(None, (column or config.client_column, config.split_column))]


def shards_from_table(columns: Mapping[str, Any], config: DataConfig) -> Shards:
    """Return shards of one table in memory, as `load_own` does of a file with the same cells.

    columns: arrays by name, with the target and the client column of `config`.
    """
    if config.target is None or config.client_column is None:
        raise UserError("a table needs a target and a client column: set data.target and data.client_column")
    problems: list[str] = []
    table = table_of(columns, "the table", _schema(config, config.target), Budget(), problems)
    clients = _clients({"the table": table}, config, config.target, config.client_column, problems)
    return _shards(clients, config.target, config, _others(config))


def summarise_client(config: DataConfig, client: int, name: str) -> ClientSummary:
    """Summarise the file of one client, for clients on separate machines; `combine` fits the preprocessing.

    client: its number, which determines the random split of its rows.
    """
    table, cut = _read_client(config, client, name)
    return summarise(name, table, str(config.target), cut["train"], config.task, config.pieces > 0, config.event)


def load_client(config: DataConfig, client: int, name: str, preprocessing: Preprocessing) -> Shards:
    """Load the file of one client with the preprocessing that was fitted to all clients."""
    table, cut = _read_client(config, client, name)
    return _encoded({name: table}, [cut], preprocessing, str(config.path))


def _read_client(config: DataConfig, client: int, name: str) -> tuple[Table, dict[str, Rows]]:
    """Return the table of one client and the split of its rows."""
    path = existing(str(config.path))
    if not path.is_file():
        raise UserError(f"{path} is not a file: set data.path to the table of this client")
    if config.target is None:
        raise UserError(f"data.target is missing: set it to the column of {path} to predict")
    problems: list[str] = []
    table = read_table(path, _schema(config, config.target), problems=problems)
    table = _clients({name: table}, config, config.target, None, problems)[name]
    return table.without(config.split_column), _split(client, name, table, config.target, config)


def read_inputs(path: str | Path, preprocessing: Preprocessing) -> Tensor:
    """Return the inputs (n, *shape) of rows to predict.

    path: a table with the input columns of the training data, an NPZ file with x, or images.
    """
    path = existing(path)
    if preprocessing.image and path.suffix.lower() != ".npz":
        return preprocessing.encode(images.read_images(images.image_files(path), str(path), preprocessing.shape))
    if path.is_dir() or path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is not a table: give a file that ends in {', '.join(SUFFIXES)}")
    table = read_table(path, preprocessing.schema, every_row=True)
    if not len(table):
        raise UserError(f"{path} has no rows: add some")
    return preprocessing.encode(table)


def _schema(config: DataConfig, target: str | None, column: str | None = None) -> Schema:
    """Return the schema of the training tables. column: that of the clients."""
    names = [name for name in (column or config.client_column, config.split_column, config.event) if name]
    kinds: dict[str, Kind] = dict.fromkeys([*config.categories, *names], "category")
    roles = (*names, *([target] if target else []))
    return Schema(roles, config.ignore, kinds, writing=Writing(missing=config.missing), day_first=config.day_first)


def _read_clients(path: Path, config: DataConfig) -> tuple[dict[str, Table], str, str | None]:
    """Return the table of each client, the name of the target, and the name of the client column, if any."""
    files = _files(path)
    arrays = all(file.suffix.lower() == ".npz" for file in files)
    target = config.target or (NPZ_TARGET if arrays else None)
    column = config.client_column or (NPZ_CLIENT if arrays and not path.is_dir() else None)
    if column is None and not path.is_dir():
        raise UserError(f"{path} is one file: name the column with the client of each row with --client-column")
    budget, problems = Budget(), list[str]()
    schema = _schema(config, target, column)
    tables = [read_table(file, schema, budget, problems) for file in files]
    if target is None:
        table = tables[0]
        raise UserError(
            f"no target is given: name one of the columns with --target ({table.where} has {_some(table.columns)})"
        )
    names = [file.stem if column is None else str(file) for file in files]
    own = dict(zip(names, tables, strict=True))
    return _clients(own, config, target, column, problems), target, column


def _clients(
    tables: Mapping[str, Table], config: DataConfig, target: str, column: str | None, problems: list[str]
) -> dict[str, Table]:
    """Return the table of each client; raise what is wrong with any table, all at once.

    column: that of the clients, if a table does not hold one client each. problems: what the readers have found.
    """
    for table in tables.values():
        problems += _missing_columns(table, [target, config.event, column, config.split_column, *config.categories])
        problems += _missing_cells(table, target, column, config)
    if problems:
        raise Problems(problems)
    dates = Writing.of_all([table.writing for table in tables.values()])
    own = {name: with_dates(table, dates) for name, table in tables.items()}
    if config.drop_missing_target:
        own = {name: _with_target(table, target) for name, table in own.items()}
    return own if column is None else _by_client(list(own.values()), column)


def _missing_columns(table: Table, names: Sequence[str | None]) -> Iterator[str]:
    present = set(table.columns) | {date.name for date in table.writing.dates}
    for name in filter(None, names):
        if name not in present:
            close = difflib.get_close_matches(name[:100], [column[:100] for column in present][:1000], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {_some(table.columns)}"
            yield f"{table.where} has no column {name!r}: {hint}"


def _missing_cells(table: Table, target: str, column: str | None, config: DataConfig) -> Iterator[str]:
    """Yield which clients and targets are missing."""
    remedies = [(column, "fill in the client, or remove the row")]
    if not config.drop_missing_target:
        remedies.append((target, "fill it in, remove the row, or leave out such rows with --drop-missing-target"))
    for name, remedy in remedies:
        if name is None or name not in table.columns:
            continue
        rows = np.flatnonzero(missing(table.columns[name]))
        if len(rows):
            what = "the target " if name == target else ""
            more = f" (and in {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
            yield f"{table.place(int(rows[0]))}: {what}{name!r} is missing{more}: {remedy}"


def _with_target(table: Table, target: str) -> Table:
    """Return the rows that have a target."""
    present = ~missing(table.columns[target])
    if present.all():
        return table
    note = f"{table.where}: {int((~present).sum()):,} of {len(table):,} rows have no target and are left out"
    return replace(table.take(np.flatnonzero(present)), notes=(*table.notes, note))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path} has no known file type: give a file that ends in {', '.join(SUFFIXES)}")
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions") from None
    if not files:
        raise UserError(
            f"{path} has no data: put one file per client there ({', '.join(SUFFIXES)}), or images as client/class/"
        )
    for stem, count in Counter(file.stem for file in files).items():
        if count > 1:
            raise UserError(f"{path} has two files named {stem!r}, but each file is one client: rename or remove one")
    return files


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:12]) + (f", … ({len(listed)} in all)" if len(listed) > 12 else "")


def _by_client(tables: Sequence[Table], column: str) -> dict[str, Table]:
    """Return the rows of all files, grouped by the client column."""
    parts: dict[str, list[Table]] = {}
    for table in tables:
        clients = table.columns[column]
        if not len(table):
            raise UserError(f"{table.where} has no rows: add some or remove the file")
        if set(table.columns) != set(tables[0].columns):
            odd = next(iter(set(table.columns) ^ set(tables[0].columns)))
            raise UserError(
                f"{table.where} and {tables[0].where} differ in the column {odd!r}: give both the same columns"
            )
        assert isinstance(clients, Texts)  # noqa: S101, the schema declares it
        order = np.argsort(clients.codes, kind="stable")
        counts = np.bincount(clients.codes, minlength=len(clients.levels))
        own = table.without(column)
        for level, rows in zip(clients.levels, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            parts.setdefault(canonical(level), []).append(own.take(rows))
    return {name: concatenate(parts[name]) for name in by_value(parts)}


def _shards(tables: Mapping[str, Table], target: str, config: DataConfig, others: Sequence[str]) -> Shards:
    """Split the rows of each client, fit the preprocessing to the training rows, and encode all rows."""
    if not tables:
        raise UserError("there are no clients: give one table per client")
    for name, table in tables.items():
        require_name(str(name), table.where, "the client")
    cuts = [_split(i, name, table, target, config) for i, (name, table) in enumerate(tables.items())]
    own = {name: table.without(config.split_column) for name, table in tables.items()}
    fitted = combine(
        [
            summarise(name, table, target, cut["train"], config.task, config.pieces > 0, config.event)
            for (name, table), cut in zip(own.items(), cuts, strict=True)
        ],
        config.task,
        config.pieces,
        config.order,
        config.keep,
    )
    preprocessing = replace(fitted, others=(*others, *fitted.others))
    return _encoded(own, cuts, preprocessing, config.path or "the tables")


def _split(client: int, name: str, table: Table, target: str, config: DataConfig) -> dict[str, Rows]:
    """Check that a table has training rows with targets, and return its `split_rows`."""
    if not len(table):
        raise UserError(f"{name} has no rows ({table.where}): add some or leave the client out")
    cut = split_rows(client, table, target, config)
    if not len(cut["train"]):
        raise UserError(f"{name} has no training rows ({table.where}): add some or leave the client out")
    return cut


def _encoded(
    own: Mapping[str, Table], cuts: Sequence[Mapping[str, Rows]], preprocessing: Preprocessing, where: str
) -> Shards:
    """Encode tables whose rows are split, as shards."""
    if preprocessing.inputs:
        Budget().spend(2 * 4 * sum(map(len, own.values())) * preprocessing.shape[0], where)
    starts = np.cumsum([0, *(len(table) for table in own.values())])
    parts = {
        part: tuple(torch.from_numpy(cut[part] + start) for cut, start in zip(cuts, starts, strict=False))
        for part in cuts[0]
    }
    return Shards(
        x=torch.cat([preprocessing.encode(table) for table in own.values()]),
        y=torch.cat([torch.from_numpy(preprocessing.target.encode(table)) for table in own.values()]),
        **parts,
        names=tuple(own),
        num_classes=None if preprocessing.target.classes is None else len(preprocessing.target.classes),
        preprocessing=preprocessing,
        columns=column_uses(list(own.values()), preprocessing) if preprocessing.inputs else (),
        notes=tuple(dict.fromkeys(note for table in own.values() for note in table.notes)),
    )


def split_rows(client: int, table: Table, target: str, config: DataConfig) -> dict[str, Rows]:
    """Return a client's rows for training, validation and test, and those withheld for a certificate.

    The split column decides, if there is one. Otherwise the fractions are drawn at random, stratified by event, or by
    label if the target looks like labels.
    """
    labels = read_events(table, config.event).astype(np.int64) if config.event else _labels(table, target, config.task)
    cut: dict[str, Rows] = {"train": np.arange(len(table))}
    fractions = [
        ("test", config.test_fraction, SplitPurpose.TEST_CUT),
        ("validation", config.validation, SplitPurpose.VALIDATION_CUT),
    ]
    if config.split_column is not None:
        cut, fractions = _split_by_column(table, config.split_column), []
    if config.certify:
        fractions.append(("certify", config.certify, SplitPurpose.CERTIFY_CUT))
    for part, fraction, purpose in fractions:
        rows = cut["train"]
        own = None if labels is None else labels[rows]
        held = held_out(own, len(rows), fraction, purpose.stream(client), config.seed)
        cut[part], cut["train"] = rows[held], rows[~held]
    return cut


def _labels(table: Table, target: str, task: Task | None) -> Rows | None:
    """Return the labels of all rows; None if the target does not look like labels."""
    column = table.columns[target]
    values = column.codes.astype(np.int64) if isinstance(column, Texts) else np.unique(column, return_inverse=True)[1]
    few = isinstance(column, Texts) or len(np.unique(values)) <= MAX_INTEGER_CLASSES
    return values if few and task not in ("regression", "count") else None


def _split_by_column(table: Table, name: str) -> dict[str, Rows]:
    column = table.columns[name]
    assert isinstance(column, Texts)  # noqa: S101, the schema declares it
    parts = np.array([*(SPLITS.get(level.lower(), "") for level in column.levels), ""])[column.codes]
    if len(odd := np.flatnonzero(parts == "")):
        row = int(odd[0])
        said = repr(column.levels[column.codes[row]]) if column.codes[row] >= 0 else "missing"
        raise UserError(f"{table.place(row)}: {name!r} is {said}: write train, validation or test")
    return {part: np.flatnonzero(parts == part) for part in ("train", "validation", "test")}
