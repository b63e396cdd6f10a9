"""How the target of a table is encoded, and how that is fitted to the clients' summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data.config import Task
from pfedbayes.data.own.columns import Kind, Numbers, Table, Texts, as_texts, canonical, places
from pfedbayes.data.own.inputs import deviation_of
from pfedbayes.data.own.intervals import fit_intervals
from pfedbayes.data.own.summaries import MAX_CLASSES, MAX_INTEGER_CLASSES, ColumnSummary
from pfedbayes.data.own.times import read_events, read_times, require_soon
from pfedbayes.errors import UserError

OF_NUMBERS = ("regression", "count", "survival")  # tasks without classes
FARTHEST = 1e12  # standard deviations of a number from the mean of the training data; networks overflow beyond


@dataclass(frozen=True)
class Target:
    """How the target is encoded."""

    name: str
    task: Task
    classes: tuple[str, ...] | None = None
    """Names of the labels 0, 1, ...; None for a regression."""
    mean: float = 0.0
    """Mean of the numbers, which are standardised for training."""
    deviation: float = 1.0
    """Standard deviation of the numbers."""
    rate: float = 1.0
    """Mean of counts, which stay as they are; for survival, events per unit of time."""
    event: str | None = None
    """For survival, the column that says whether the event happened."""
    edges: tuple[float, ...] = ()
    """For survival, the ends of the intervals on which hazards are constant."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that hold the target."""
        return (self.name,) if self.event is None else (self.name, self.event)

    def strata(self, y: Tensor) -> NDArray[np.int64] | None:
        """Return the labels or events (n,) by which rows are split, for encoded targets y; None for other numbers."""
        if self.event is not None:
            return y[:, 1].long().numpy()
        return None if self.classes is None else y.numpy()

    def encode(self, table: Table) -> NDArray[Any]:
        """Return labels (n,), standardised numbers (n, 1), or times and events (n, 2)."""
        if self.event is not None:
            times = read_times(table, self.name)
            require_soon(table, self.name, times, self.rate)
            return np.stack([times, read_events(table, self.event)], axis=1).astype(np.float32)
        column = table.columns[self.name]
        if self.classes is None:
            if isinstance(column, Texts):
                raise UserError(
                    f"{table.where}: the target {self.name!r} holds text, but the models predict numbers: correct it"
                )
            if self.task == "count":
                _require_counts(table, self.name, column)
            standard = (column - self.mean) / self.deviation
            require_near(table, self.name, column, standard)
            return standard.astype(np.float32)[:, None]
        texts = as_texts(column)
        labels: NDArray[np.int64] = np.array(places(self.classes, texts.levels, -1), dtype=np.int64)[texts.codes]
        if len(unknown := np.flatnonzero(labels < 0)):
            row = int(unknown[0])
            raise UserError(
                f"{table.place(row)}: {self.name!r} is {texts.levels[texts.codes[row]]!r}, which is not a known class: "
                "correct the row or remove it"
            )
        return labels


def _require_counts(table: Table, name: str, column: Numbers) -> None:
    """Refuse numbers that are no counts."""
    if len(odd := np.flatnonzero((column < 0) | (column != np.rint(column)))):
        row = int(odd[0])
        raise UserError(
            f"{table.place(row)}: {name!r} is {column[row]:g}, but a count is a whole number of at least 0: correct "
            "the cell or remove the row, or use --task regression"
        )


def require_near(table: Table, name: str, column: Numbers, standard: NDArray[Any]) -> None:
    """Refuse a number that is so far from the training data that a network overflows."""
    if len(far := np.flatnonzero(np.abs(standard) > FARTHEST)):
        row = int(far[0])
        raise UserError(
            f"{table.place(row)}: {name!r} is {column[row]:g}, more than {FARTHEST:g} standard deviations from the "
            "training data: correct the cell or remove the row"
        )


def infer_task(column: ColumnSummary) -> Task:
    """Return the task: text and few different integers are classes, other numbers are a regression."""
    few = column.values is not None and len(column.values) <= MAX_INTEGER_CLASSES
    return "classification" if column.kind == "category" or (column.whole and few) else "regression"


def fit_target(column: ColumnSummary, task: Task | None, order: Sequence[str] = ()) -> Target:
    """Return how a target is encoded. task: inferred if not given. order: the classes of an ordinal target."""
    task = task or infer_task(column)
    if task in ("regression", "count"):
        if column.kind == "category":
            raise UserError(f"the target {column.name!r} holds text: leave --task out, or write numbers")
        if task == "count":
            return Target(column.name, task, rate=max(column.mean, 1 / max(column.count, 1)))
        return Target(column.name, task, None, column.mean, deviation_of(column))
    if column.values is None or len(column.values) > MAX_CLASSES:
        raise UserError(
            f"the target {column.name!r} has more than {MAX_CLASSES} different values: use --task regression if it is "
            "a number, or reduce the number of classes"
        )
    if len(column.values) < 2:
        raise UserError(
            f"the target {column.name!r} is {column.values[0]!r} in every row: add rows of another class, or choose "
            "another target"
        )
    if task == "ordinal":
        return Target(column.name, task, _ordered(column.name, column.values, column.kind, order))
    return Target(column.name, task, column.values)


def fit_survival(time: ColumnSummary, events: ColumnSummary, parts: Sequence[ColumnSummary]) -> Target:
    """Return the target of survival. events: of the times of events, merged from `parts`, those of the clients."""
    total = time.mean * time.count
    if not total:
        raise UserError(f"the times {time.name!r} of all training rows are 0: choose the column with the times")
    if not events.count:
        raise UserError(f"{events.name!r} says that no training row has an event: check the column, or add such rows")
    return Target(
        time.name, "survival", rate=events.count / total, event=events.name, edges=fit_intervals(events, parts)
    )


def _ordered(name: str, classes: tuple[str, ...], kind: Kind | None, order: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of an ordinal target in their order: as given, or numbers by value."""
    given = tuple(map(canonical, order))
    if not given and kind == "number":
        return classes
    if len(set(given)) < len(given) or not set(classes) <= set(given):
        raise UserError(
            f"the target {name!r} has the classes {listed(classes)}: list each of them once in --order, lowest first"
        )
    return given


def listed(names: Sequence[str]) -> str:
    """Return the first names as text."""
    return ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
