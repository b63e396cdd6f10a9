"""Tables and their splits into training, validation and test rows.

pandas reads tables. It is imported lazily, because a machine that was sent splits of them as text may not have it.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.silos.lines import Lines
from pfedbayes.errors import UserError, nearest

Task = Literal["classification", "regression"]
Parts = NDArray[np.str_]
TABLES = Path(__file__).with_name("tables.toml")
TRAIN, VALIDATION, TEST = "train", "validation", "test"
CYCLE = 25  # of 25 neighbouring rows of a sorted client, 5 are test, 4 validation and 16 training rows
MOST_CLASSES = 20  # different whole numbers in a target that holds classes, as in the package


@dataclass(frozen=True)
class Table:
    """A table with one column that names the client of each row."""

    name: str
    path: Path
    target: str
    client: str
    ignore: tuple[str, ...] = ()
    """Columns that are not inputs."""
    task: Task | None = None
    """Inferred from the target if not given."""


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of a table, each assigned to training, validation or test."""

    name: str
    lines: Lines
    """The table without the ignored columns."""
    target: str
    client: str
    task: Task
    parts: Parts
    """Part of each row (n,): "train", "validation" or "test"."""
    digest: str
    """Hash of the rows and of their parts."""
    frame: Any = None
    """The same table as a pandas frame, whose client column holds text; None if it came as text."""

    @property
    def test(self) -> NDArray[np.bool_]:
        """Which rows are test rows (n,)."""
        test: NDArray[np.bool_] = self.parts == TEST
        return test

    @property
    def clients(self) -> list[str]:
        """The names of the clients, sorted."""
        return sorted(set(self.lines.column(self.client)))


def read_tables(path: Path = TABLES, folder: Path | None = None) -> dict[str, Table]:
    """Read the tables of a TOML file. folder: where relative paths start; default: the folder of the file."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a TOML file with sections [tables.NAME]") from None
    return {name: _table(name, entry, folder or path.parent) for name, entry in content.get("tables", {}).items()}


def read_reasons(path: Path = TABLES) -> dict[str, str]:
    """Read the reasons, written by hand, for which the default method misses a goal on a table."""
    return {str(name): str(text) for name, text in tomllib.loads(path.read_text()).get("reasons", {}).items()}


def parse_table(text: str) -> Table:
    """Return the table that an option FILE:TARGET:CLIENT describes."""
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or not all(parts):
        raise UserError(f"--table is {text!r}: write FILE:TARGET:CLIENT, e.g. clinics.csv:outcome:hospital")
    return Table(Path(parts[0]).stem, Path(parts[0]), parts[1], parts[2])


def _table(name: str, entry: Mapping[str, Any], folder: Path) -> Table:
    known = {"file", "target", "client", "ignore", "task"}
    for key in entry:
        if key not in known:
            raise UserError(f"[tables.{name}] has an unknown key {key!r}: {nearest(key, known)}")
    for key in ("file", "target", "client"):
        if not isinstance(entry.get(key), str):
            raise UserError(f"[tables.{name}] needs {key}: give a text")
    task = entry.get("task")
    if task not in (None, "classification", "regression"):
        raise UserError(f"[tables.{name}] has the task {task!r}: give classification or regression, or leave it out")
    ignore = tuple(map(str, entry.get("ignore", ())))
    return Table(name, folder / entry["file"], entry["target"], entry["client"], ignore, task)


def read_frame(table: Table) -> Any:
    """Read a table as a pandas frame without ignored columns, with clients as text."""
    import pandas as pd  # noqa: PLC0415  (see above)

    try:
        frame = pd.read_csv(table.path)
    except (OSError, ValueError) as error:
        raise UserError(f"{table.path} cannot be read ({error}): correct the path of table {table.name}") from None
    for column in (table.target, table.client, *table.ignore):
        if column not in frame:
            raise UserError(f"{table.path} has no column {column!r}: {nearest(column, list(frame))}")
    for column in (table.target, table.client):
        if frame[column].isna().any():
            raise UserError(f"{table.path}: the column {column!r} has empty cells: fill them in or remove the rows")
    frame = frame.drop(columns=[*table.ignore, *(["split"] if "split" in frame else [])])
    frame[table.client] = frame[table.client].astype(str)
    return frame


def task_of(table: Table, frame: Any) -> Task:
    """Return the task of a table: as given, else inferred from the target as the package does."""
    if table.task is not None:
        return table.task
    import pandas as pd  # noqa: PLC0415  (see above)

    target = frame[table.target]
    if not pd.api.types.is_numeric_dtype(target) or pd.api.types.is_bool_dtype(target):
        return "classification"
    whole = bool((target == target.round()).all())
    return "classification" if whole and target.nunique() <= MOST_CLASSES else "regression"


def assign(clients: NDArray[Any], labels: NDArray[Any] | None, seed: int) -> Parts:
    """Assign each row to a part at random: 64 % training, 16 % validation and 20 % test rows within each client.

    clients: the client of each row (n,). labels: the class of each row (n,), by which clients of at least ten rows are
    stratified; None for a regression.
    """
    generator = np.random.default_rng(seed)
    parts = np.full(len(clients), TRAIN, dtype="<U10")
    for client in np.unique(clients):
        rows = generator.permutation(np.flatnonzero(clients == client))
        count = len(rows)
        if labels is not None and count >= 10:
            # Sorted by class, every 25 neighbours hold the same shares of the parts, so every class does too.
            rows = rows[np.argsort(labels[rows], kind="stable")]
            place = (np.arange(count) + generator.integers(CYCLE)) % CYCLE
            test, validation = place % 5 == 0, np.isin(place, (1, 7, 13, 19))
        else:
            tested = count // 5
            place = np.arange(count)
            test, validation = place < tested, (place >= tested) & (place < tested + (count - tested) // 5)
        parts[rows[test]], parts[rows[validation]] = TEST, VALIDATION
    return parts


def split_table(table: Table, seed: int) -> Split:
    """Read a table and split its rows."""
    frame = read_frame(table)
    task = task_of(table, frame)
    labels = frame[table.target].to_numpy() if task == "classification" else None
    parts = assign(frame[table.client].to_numpy(), labels, seed)
    return make_split(table.name, frame, table.target, table.client, task, parts)


def make_split(name: str, frame: Any, target: str, client: str, task: Task, parts: Parts) -> Split:
    """Return a split with the hash of its rows."""
    text = frame.to_csv(index=False)
    digest = hashlib.sha256(f"{target}\n{client}\n{task}\n{text}\n{' '.join(parts)}".encode()).hexdigest()[:16]
    return Split(name, Lines.read(text), target, client, task, parts, digest, frame)
