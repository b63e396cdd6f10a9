"""Aggregates of a client's table: all that leaves a client for the fit of the preprocessing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pfedbayes.data.config import Task
from pfedbayes.data.own.columns import (
    MAX_CATEGORIES,
    Column,
    Kind,
    Table,
    Texts,
    as_text,
    by_value,
    missing,
    take,
)
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError

MAX_CLASSES = 1000  # of a target
MAX_INTEGER_CLASSES = 20  # a target with at most this many different values, all integers, holds classes


@dataclass(frozen=True)
class ColumnSummary:
    """Aggregates of one column of one client."""

    name: str
    kind: Kind | None
    """What the column holds; None if all cells are missing."""
    count: int
    """Cells that are not missing."""
    missing: int
    """Cells that are missing."""
    mean: float = 0.0
    """Mean of the numbers."""
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    values: tuple[str, ...] | None = None
    """The different values; None if there are too many."""
    whole: bool = False
    """Whether all values are integers."""


@dataclass(frozen=True)
class ClientSummary:
    """Aggregates of one client's table."""

    client: str
    columns: tuple[ColumnSummary, ...]
    target: ColumnSummary
    shape: tuple[int, ...] | None = None
    """Shape of one example, if inputs are not columns."""
    image: bool = False
    """Whether examples are images."""

    def to_json(self) -> str:
        """Return the summary as JSON, to be sent."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ClientSummary:
        """Read what `to_json` returns."""
        fields = json.loads(text)
        columns = tuple(_column_summary(column) for column in fields.pop("columns"))
        shape = fields.pop("shape")
        target = _column_summary(fields.pop("target"))
        return ClientSummary(columns=columns, target=target, shape=None if shape is None else tuple(shape), **fields)


def _column_summary(fields: Mapping[str, Any]) -> ColumnSummary:
    values = fields["values"]
    return ColumnSummary(**{**fields, "values": None if values is None else tuple(values)})


def summarise(client: str, table: Table, target: str, train: Rows, task: Task | None = None) -> ClientSummary:
    """Summarise a client's table.

    The inputs and the mean of the target come from the training rows alone. The values of the target come from all
    rows; they are included only if they are classes or, without a task, may be classes.
    """
    whole = table.columns[target]
    return ClientSummary(
        client=client,
        columns=tuple(
            summarise_column(name, take(column, train)) for name, column in table.columns.items() if name != target
        ),
        target=dataclasses.replace(
            summarise_column(target, take(whole, train)), **_target_values(whole, task), kind=_kind(whole)
        ),
        shape=None if table.x is None else table.x.shape[1:],
        image=table.x is not None and table.x.dtype == np.uint8,
    )


def summarise_column(name: str, column: Column) -> ColumnSummary:
    """Return the aggregates of one column."""
    present = ~missing(column)
    count = int(present.sum())
    kind = _kind(column)
    if isinstance(column, Texts):
        return ColumnSummary(name, kind, count, len(present) - count, values=_categories(column, MAX_CATEGORIES))
    numbers = column[present]
    mean = float(numbers.mean()) if count else 0.0
    return ColumnSummary(name, kind, count, len(present) - count, mean, float(np.square(numbers - mean).sum()))


def _kind(column: Column) -> Kind | None:
    if missing(column).all():
        return None
    return "category" if isinstance(column, Texts) else "number"


def _categories(column: Texts, most: int) -> tuple[str, ...] | None:
    """Return the different texts of a column; None if there are more than `most`."""
    codes = np.unique(column.codes[column.codes >= 0])
    return None if len(codes) > most else tuple(by_value(column.levels[code] for code in codes))


def _target_values(column: Column, task: Task | None) -> dict[str, Any]:
    """Return the values of a target, if they are or may be classes, and whether they are all integers."""
    if isinstance(column, Texts):
        return {"values": _categories(column, MAX_CLASSES), "whole": False}
    numbers = np.unique(column[~np.isnan(column)])
    whole = bool((numbers == np.rint(numbers)).all())
    most = {"classification": MAX_CLASSES, "regression": 0, None: MAX_INTEGER_CLASSES if whole else 0}[task]
    return {"values": None if len(numbers) > most else tuple(map(as_text, numbers)), "whole": whole}


def in_one_order(summaries: Sequence[ClientSummary]) -> list[ClientSummary]:
    """Return the summaries with the columns in the order of the first client's."""
    names = [column.name for column in summaries[0].columns]
    by_name = [{column.name: column for column in summary.columns} for summary in summaries]
    return [
        dataclasses.replace(summary, columns=tuple(columns[name] for name in names))
        for summary, columns in zip(summaries, by_name, strict=True)
    ]


def require_equal_columns(summaries: Sequence[ClientSummary]) -> None:
    """Refuse clients with different columns or shapes."""
    for one, other in pairwise(summaries):
        _require_equal(one, other)


def _require_equal(one: ClientSummary, other: ClientSummary) -> None:
    for has, lacks in ((one, other), (other, one)):
        known = {column.name for column in lacks.columns}
        for column in has.columns:
            if column.name not in known:
                raise UserError(
                    f"{has.client} has the column {column.name!r} but {lacks.client} has not: add it for all clients, "
                    f"or leave it out with data.ignore=[{column.name!r}]"
                )
    if (one.shape, one.image) != (other.shape, other.image):
        raise UserError(
            f"examples of {one.client} have shape {one.shape} and those of {other.client} {other.shape}: "
            "convert all to one shape and type"
        )


def merge(columns: Sequence[ColumnSummary], summaries: Sequence[ClientSummary]) -> ColumnSummary:
    """Merge the summaries of one column over all clients.

    Means and squared deviations are merged by the method of Chan, Golub and LeVeque, which loses no precision.
    """
    by_kind = {c.kind: s.client for c, s in zip(columns, summaries, strict=True) if c.kind}
    if len(by_kind) > 1:
        raise UserError(
            f"the column {columns[0].name!r} holds numbers for {by_kind['number']} and text for "
            f"{by_kind['category']}: write it in the same way everywhere, or list it in data.categories"
        )
    count = sum(column.count for column in columns)
    mean = sum(column.mean * column.count for column in columns) / count if count else 0.0
    squares = sum(column.squares + column.count * (column.mean - mean) ** 2 for column in columns)
    sets = [column.values for column in columns if column.kind]
    values = None if None in sets else tuple(by_value({value for own in sets for value in own or ()}))
    return ColumnSummary(
        columns[0].name,
        next(iter(by_kind), None),
        count,
        sum(column.missing for column in columns),
        mean,
        squares,
        values,
        all(column.whole for column in columns if column.kind),
    )
