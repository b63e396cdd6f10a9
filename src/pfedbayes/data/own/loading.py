"""One's own data as shards: which files there are, whose rows are whose, cutting, and fitting the preprocessing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data.config import DataConfig, Task
from pfedbayes.data.own import images
from pfedbayes.data.own.preprocessing import FEW_WHOLE_NUMBERS, Preprocessing, Summary, combine, summarise
from pfedbayes.data.own.readers import (
    SUFFIXES,
    Budget,
    Kind,
    Rows,
    Schema,
    Table,
    Texts,
    by_value,
    concatenate,
    missing,
    read_table,
    table_of,
)
from pfedbayes.data.shards import Shards
from pfedbayes.data.splits import Purpose, held_out
from pfedbayes.errors import UserError

SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
          "test": "test"}  # fmt: skip
NPZ_TARGET, NPZ_CLIENT = "y", "client"


def load_own(config: DataConfig) -> Shards:
    """The data that `path` names."""
    path = Path(str(config.path)).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist: correct --data")
    column = config.client_column
    if path.is_dir() and images.is_tree(path):
        if config.client_column is not None:
            raise UserError(f"{path} has a folder of images per client: leave --client-column out")
        tables, target = images.read_tree(path, config.image_size), config.target or images.CLASS
        if target != images.CLASS:
            raise UserError(f"{path} is a tree client/class/image: leave --target out")
    else:
        tables, target, column = _read_clients(path, config)
    others = [*config.ignore, *filter(None, (column, config.split_column))]
    return _shards(tables, target, config, others)


def shards_from_tables(
    tables: Mapping[str, Any],
    target: str,
    *,
    task: Task | None = None,
    split_column: str | None = None,
    categories: Sequence[str] = (),
    ignore: Sequence[str] = (),
    test_fraction: float = 0.2,
    validation: float = 0.0,
    seed: int = 1,
) -> Shards:
    """The shards of tables in memory: per client a pandas frame, or any mapping from names of columns to arrays."""
    config = DataConfig(
        name="files", path="tables", target=target, task=task, split_column=split_column, categories=tuple(categories),
        ignore=tuple(ignore), test_fraction=test_fraction, validation=validation, seed=seed,
    )  # fmt: skip
    schema, budget = _schema(config, target), Budget()
    own = {name: table_of(columns, name, schema, budget) for name, columns in tables.items()}
    return _shards(own, target, config, [*ignore, *filter(None, [split_column])])


def summarise_client(config: DataConfig, client: int, name: str) -> Summary:
    """What a client with its own file at `path` tells the others, so that `combine` can fit the preprocessing: for
    clients on machines of their own. client: its number, which decides how its rows are cut."""
    table, cut = _read_client(config, client, name)
    return summarise(name, table, str(config.target), cut["train"], config.task)


def load_client(config: DataConfig, client: int, name: str, preprocessing: Preprocessing) -> Shards:
    """The data of one client alone, from its own file by the preprocessing that was fitted to all."""
    table, cut = _read_client(config, client, name)
    return _encoded({name: table}, [cut], preprocessing, str(config.path))


def _read_client(config: DataConfig, client: int, name: str) -> tuple[Table, dict[str, Rows]]:
    """One client's own table and how its rows are cut."""
    path = Path(str(config.path)).expanduser()
    if not path.is_file():
        raise UserError(f"{path} is no file: let data.path name the table of this client")
    if config.target is None:
        raise UserError(f"say with data.target which column of {path} is to be predicted")
    table = read_table(path, _schema(config, config.target))
    return table.without(config.split_column), _cut(client, name, table, config.target, config)


def read_inputs(path: str | Path, preprocessing: Preprocessing) -> Tensor:
    """The inputs (n, *shape) of rows to be predicted: a table with the columns of the training data (a target is not
    needed), an NPZ file with x, or images."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist: correct the path")
    if preprocessing.image and path.suffix.lower() != ".npz":
        return preprocessing.encode(images.read_images(images.image_files(path), str(path), preprocessing.shape))
    if path.is_dir() or path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is no table: give a file that ends in {', '.join(SUFFIXES)}")
    table = read_table(path, preprocessing.schema)
    if not len(table):
        raise UserError(f"{path} has no rows: give some")
    return preprocessing.encode(table)


def _schema(config: DataConfig, target: str | None) -> Schema:
    names = [name for name in (config.client_column, config.split_column) if name]
    kinds: dict[str, Kind] = dict.fromkeys([*config.categories, *names], "category")
    return Schema((*names, *([target] if target else [])), config.ignore, kinds)


def _read_clients(path: Path, config: DataConfig) -> tuple[dict[str, Table], str, str | None]:
    """The rows of each client, and the names of the target and, if there is one, of the client column."""
    files = _files(path)
    arrays = all(file.suffix.lower() == ".npz" for file in files)
    target = config.target or (NPZ_TARGET if arrays else None)
    column = config.client_column or (NPZ_CLIENT if arrays and not path.is_dir() else None)
    if column is None and not path.is_dir():
        raise UserError(f"{path} is one file: name the column that tells the clients apart with --client-column")
    schema = _schema(config, target)
    if column is not None:
        schema = Schema((*schema.roles, column), schema.ignore, {**schema.kinds, column: "category"})
    budget = Budget()
    tables = [read_table(file, schema, budget) for file in files]
    for table in tables:
        if target is None:
            raise UserError(
                f"say which column is to be predicted with --target: {table.where} has {_some(table.columns)}"
            )
        for name in filter(None, (target, column, config.split_column, *config.categories)):
            _require_column(table, name)
    if column is None:
        return {file.stem: table for file, table in zip(files, tables, strict=True)}, str(target), None
    return _by_client(tables, column), str(target), column


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path} is of no known kind: give a file that ends in {', '.join(SUFFIXES)}")
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable") from None
    if not files:
        raise UserError(
            f"{path} holds no data: put a file per client there ({', '.join(SUFFIXES)}), or images as client/class/"
        )
    stems = [file.stem for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UserError(f"{path} has two files called {stem!r}, and a file is a client: rename or remove one")
    return files


def _require_column(table: Table, name: str) -> None:
    if name not in table.columns:
        close = difflib.get_close_matches(name, table.columns, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {_some(table.columns)}"
        raise UserError(f"{table.where} has no column {name!r}: {hint}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:12]) + (f", … ({len(listed)} in all)" if len(listed) > 12 else "")


def _by_client(tables: Sequence[Table], column: str) -> dict[str, Table]:
    """The rows of all files, told apart by a column."""
    parts: dict[str, list[Table]] = {}
    for table in tables:
        clients = table.columns[column]
        if len(absent := np.flatnonzero(missing(clients))):
            raise UserError(f"{table.place(int(absent[0]))}: {column!r} is missing: say whose row it is, or remove it")
        if not len(table):
            raise UserError(f"{table.where} has no rows: give some or remove the file")
        if set(table.columns) != set(tables[0].columns):
            odd = next(iter(set(table.columns) ^ set(tables[0].columns)))
            raise UserError(f"{table.where} and {tables[0].where} differ in the column {odd!r}: give both the same")
        assert isinstance(clients, Texts)  # noqa: S101, it is declared so
        order = np.argsort(clients.codes, kind="stable")
        counts = np.bincount(clients.codes, minlength=len(clients.levels))
        for level, rows in zip(clients.levels, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            parts.setdefault(level, []).append(table.without(column).take(rows))
    return {name: concatenate(parts[name]) for name in by_value(parts)}


def _shards(tables: Mapping[str, Table], target: str, config: DataConfig, others: Sequence[str]) -> Shards:
    """Cut the rows of each client, fit the preprocessing on those to train on, and encode all."""
    if not tables:
        raise UserError("no clients: give a table for each client")
    cuts = [_cut(i, name, table, target, config) for i, (name, table) in enumerate(tables.items())]
    own = {name: table.without(config.split_column) for name, table in tables.items()}
    fitted = combine(
        [
            summarise(name, table, target, cut["train"], config.task)
            for (name, table), cut in zip(own.items(), cuts, strict=True)
        ],
        config.task,
    )
    preprocessing = Preprocessing(fitted.inputs, fitted.shape, fitted.target, fitted.image, tuple(others))
    return _encoded(own, cuts, preprocessing, config.path or "the tables")


def _cut(client: int, name: str, table: Table, target: str, config: DataConfig) -> dict[str, Rows]:
    """`cut_rows` of a table that can be learnt from."""
    _require_column(table, target)
    if not len(table):
        raise UserError(f"{name} has no rows ({table.where}): give some or leave it out")
    if len(absent := np.flatnonzero(missing(table.columns[target]))):
        raise UserError(
            f"{table.place(int(absent[0]))}: the target {target!r} is missing: fill it in or remove the row"
        )
    cut = cut_rows(client, table, target, config)
    if not len(cut["train"]):
        raise UserError(f"{name} has no rows to train on ({table.where}): give some or leave it out")
    return cut


def _encoded(
    own: Mapping[str, Table], cuts: Sequence[Mapping[str, Rows]], preprocessing: Preprocessing, where: str
) -> Shards:
    """The shards of tables whose rows are cut."""
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
    )


def cut_rows(client: int, table: Table, target: str, config: DataConfig) -> dict[str, Rows]:
    """A client's rows to train on, to validate and to test: as its split column says, or by the fractions, evenly over
    the labels if the target looks like labels; and of the first those that are kept for a certificate."""
    column = table.columns[target]
    values = column.codes.astype(np.int64) if isinstance(column, Texts) else np.unique(column, return_inverse=True)[1]
    few = isinstance(column, Texts) or len(np.unique(values)) <= FEW_WHOLE_NUMBERS
    labels = values if few and config.task != "regression" else None
    cut: dict[str, Rows] = {"train": np.arange(len(table))}
    fractions = [
        ("test", config.test_fraction, Purpose.TEST_CUT),
        ("validation", config.validation, Purpose.VALIDATION_CUT),
    ]
    if config.split_column is not None:
        cut, fractions = _given_split(table, config.split_column), []
    if config.certify:
        fractions.append(("certify", config.certify, Purpose.CERTIFY_CUT))
    for part, fraction, purpose in fractions:
        rows = cut["train"]
        own = None if labels is None else labels[rows]
        held = held_out(own, len(rows), fraction, purpose.stream(client), config.seed)
        cut[part], cut["train"] = rows[held], rows[~held]
    return cut


def _given_split(table: Table, name: str) -> dict[str, Rows]:
    _require_column(table, name)
    column = table.columns[name]
    assert isinstance(column, Texts)  # noqa: S101, it is declared so
    parts = np.array([*(SPLITS.get(level.lower(), "") for level in column.levels), ""])[column.codes]
    if len(odd := np.flatnonzero(parts == "")):
        row = int(odd[0])
        said = repr(column.levels[column.codes[row]]) if column.codes[row] >= 0 else "missing"
        raise UserError(f"{table.place(row)}: {name!r} is {said}: write train, validation or test")
    return {part: np.flatnonzero(parts == part) for part in ("train", "validation", "test")}
