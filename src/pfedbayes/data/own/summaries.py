"""Aggregates of a client's table: all that leaves a client for the fit of the preprocessing.

Of a column of numbers these are counts, mean, sum of squared deviations and interior quantiles of the training rows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pfedbayes.data.config import Task
from pfedbayes.data.own.columns import (
    LARGEST,
    MAX_CATEGORIES,
    Column,
    Kind,
    Numbers,
    Table,
    Texts,
    as_text,
    by_value,
    canonical,
    missing,
    require_name,
    take,
)
from pfedbayes.data.own.spelling import unified
from pfedbayes.data.own.times import read_events, read_times
from pfedbayes.data.own.writing import Writing
from pfedbayes.data.splits import Rows
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.checksums import dump_json
from pfedbayes.files.reading import parse_object
from pfedbayes.files.typed import from_json

MAX_CLASSES = 1000  # of a target
MAX_ROWS = 10**10  # of a client
MAX_INTEGER_CLASSES = 20  # a target with at most this many different values, all integers, holds classes
MAX_QUANTILES = 33
IDENTIFIER = re.compile(
    r"(?i:(^|[\W_])(ids?|uuid|guid|nr|number|key|index|idx|row|rownames?|mrn)$)|[a-z]I[Dd]$|^column 1$|^Unnamed: 0$"
)  # names of columns whose numbers say nothing, if they are all different
ROWS_PER_QUANTILE = 4  # at least; so the smallest and the largest row of a client do not leave it


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
    quantiles: tuple[float, ...] = ()
    """Numbers of K rows, at the levels (k + 1/2) / K of the sorted numbers; empty for text and for few rows."""
    identifies: bool = False
    """Whether every row has another value, as names and patient numbers do."""


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
    events: ColumnSummary | None = None
    """For survival, aggregates of the times of events; censored rows count as missing."""
    writing: Writing = dataclasses.field(default_factory=Writing)
    """How the cells of the table are written."""

    @property
    def every(self) -> tuple[ColumnSummary, ...]:
        """The summaries of all columns."""
        return (*self.columns, self.target, *([self.events] if self.events else []))

    def to_json(self) -> str:
        """Return the summary as JSON, to be sent."""
        return dump_json(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ClientSummary:
        """Read what `to_json` returns; raise UserError if it is damaged or cannot be true."""
        try:
            content, _ = parse_object(text.encode())
            summary = from_json(ClientSummary, content)
        except ValueError as error:
            raise UserError(
                f"a client's summary is damaged ({one_line(error)}): make it again with data.summarise"
            ) from None
        require_sound(summary)
        return summary


def require_sound(summary: ClientSummary) -> None:
    """Refuse a summary that no table has."""
    where = f"the summary of {one_line(summary.client, 100)!r}"
    require_name(summary.client, where, "the client")
    names = [column.name for column in summary.every]
    rows = summary.target.count + summary.target.missing
    shape = summary.shape
    try:
        _require(len(set(names)) == len(names), "two columns have the same name")
        _require(1 <= rows <= MAX_ROWS, f"it has {rows} rows")
        _require(shape is None or (len(shape) > 0 and min(shape) >= 1), f"examples have the shape {shape}")
        if summary.events is not None:
            _require(summary.events.kind != "category", "its events have no times")
            least = min(summary.target.mean, summary.events.mean, *summary.events.quantiles)
            _require(least >= 0, f"it has the time {least}")
        _require(not summary.image or shape is not None, "images have no shape")
        for text in (*(date.name for date in summary.writing.dates), *summary.writing.decimal_comma):
            require_name(text, where, "the column")
        for text in summary.writing.missing:
            require_name(text, where, "the text")
        for column in summary.every:
            require_name(column.name, where, "the column")
            _require_sound_column(column, rows, MAX_CLASSES if column is summary.target else MAX_CATEGORIES)
            for value in column.values or ():
                require_name(value, where, "the category")
    except ValueError as error:
        raise UserError(f"{where} cannot be true ({one_line(error)}): make it again with data.summarise") from None


def _require_sound_column(column: ColumnSummary, rows: int, most: int) -> None:
    about = f"the column {column.name!r}"
    _require(min(column.count, column.missing) >= 0, f"{about} has a negative count")
    _require(column.count + column.missing == rows, f"{about} has {column.count + column.missing} of {rows} rows")
    _require((column.kind is None) == (column.count == 0), f"{about} has {column.count} cells of kind {column.kind}")
    _require(abs(column.mean) <= LARGEST, f"{about} has the mean {column.mean}")
    # A variance is at most the square of half the range.
    _require(0 <= column.squares <= column.count * LARGEST**2, f"{about} has the squares {column.squares}")
    _require(column.kind == "number" or (column.mean, column.squares) == (0, 0), f"{about} is text but has a mean")
    values = column.values
    _require(values is None or len(values) == len(set(values)) <= most, f"{about} repeats values or has too many")
    _require(values is None or len(values) >= (column.kind is not None), f"{about} has cells but no values")
    _require_sound_quantiles(column, about)


def _require_sound_quantiles(column: ColumnSummary, about: str) -> None:
    quantiles = column.quantiles
    most = min(column.count // ROWS_PER_QUANTILE, MAX_QUANTILES) if column.kind == "number" else 0
    _require(len(quantiles) <= most, f"{about} has {len(quantiles)} quantiles of {column.count} numbers")
    for quantile in quantiles:
        # Each is the number of a row, so its squared deviation is part of the sum. This also refuses NaN.
        off = quantile - column.mean
        _require(abs(quantile) <= LARGEST and off * off <= column.squares, f"{about} has the quantile {quantile}")
    _require(all(a <= b for a, b in pairwise(quantiles)), f"{about} has quantiles that are not sorted")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def summarise(
    client: str,
    table: Table,
    target: str,
    train: Rows,
    task: Task | None = None,
    quantiles: bool = True,
    event: str | None = None,
) -> ClientSummary:
    """Summarise a client's table.

    The inputs and the mean of the target come from the training rows alone. The values of the target come from all
    rows; they are included only if they are classes or, without a task, may be classes.

    quantiles: whether to include quantiles of the input columns that hold numbers, for their piecewise-linear encoding,
    and of the times of events. event: the column of events, for survival.
    """
    whole, events = table.columns[target], None
    if event is not None:
        task = "survival"
        happened = np.where(read_events(table, event) > 0, read_times(table, target), np.nan)
        events = summarise_column(event, happened[train], quantiles)
    return ClientSummary(
        client=client,
        columns=tuple(
            summarise_column(name, take(column, train), quantiles)
            for name, column in table.columns.items()
            if name not in (target, event)
        ),
        target=dataclasses.replace(
            summarise_column(target, take(whole, train)), **_target_values(whole, task), kind=_kind(whole)
        ),
        shape=None if table.x is None else table.x.shape[1:],
        image=table.x is not None and table.x.dtype == np.uint8,
        events=events,
        writing=table.writing,
    )


def summarise_column(name: str, column: Column, quantiles: bool = False) -> ColumnSummary:
    """Return the aggregates of one column. quantiles: whether to include quantiles of numbers."""
    present = ~missing(column)
    count = int(present.sum())
    kind = _kind(column)
    if isinstance(column, Texts):
        values = _categories(column, MAX_CATEGORIES)
        return ColumnSummary(
            name, kind, count, len(present) - count, values=values, identifies=values is None or len(values) == count
        )
    numbers = column[present]
    mean = float(numbers.mean()) if count else 0.0
    return ColumnSummary(
        name, kind, count, len(present) - count, mean, float(np.square(numbers - mean).sum()),
        quantiles=interior_quantiles(numbers) if quantiles else (),
        identifies=IDENTIFIER.search(name) is not None and _are_different_integers(numbers),
    )  # fmt: skip


def _are_different_integers(numbers: Numbers) -> bool:
    return bool((numbers == np.rint(numbers)).all()) and len(np.unique(numbers)) == len(numbers)


def interior_quantiles(numbers: Numbers) -> tuple[float, ...]:
    """Return the quantiles of numbers (n,) at the levels (k + 1/2) / K for k < K = min(n // 4, 33).

    Each is the number of a row and stands for at least four rows. At least one row lies on either side of all of
    them, so the smallest and the largest row are left out. Fewer than eight numbers have no quantiles.
    """
    n = len(numbers)
    if n < 2 * ROWS_PER_QUANTILE:
        return ()
    count = min(n // ROWS_PER_QUANTILE, MAX_QUANTILES)
    ranks = ((2 * np.arange(count) + 1) * n - 1) // (2 * count)
    return tuple(np.sort(numbers)[ranks].tolist())


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
    inferred = MAX_INTEGER_CLASSES if whole else 0
    classes: dict[Task | None, int] = {"classification": MAX_CLASSES, "ordinal": MAX_CLASSES, None: inferred}
    most = classes.get(task, 0)
    return {"values": None if len(numbers) > most else tuple(map(as_text, numbers)), "whole": whole}


def with_dates(summary: ClientSummary, dates: Writing) -> ClientSummary:
    """Return the summary with its empty columns as dates, where other clients have dates in columns of that name."""
    columns: list[ColumnSummary] = []
    for column in summary.columns:
        date = dates.date(column.name) if column.kind is None else None
        names = (column.name,) if date is None else date.parts
        columns += [dataclasses.replace(column, name=name) for name in names]
    return dataclasses.replace(summary, columns=tuple(columns))


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
    if (one.events and one.events.name) != (other.events and other.events.name):
        raise UserError(
            f"the summaries of {one.client} and {other.client} have different columns of events: make both with the "
            "same data.event"
        )
    if (one.shape, one.image) != (other.shape, other.image):
        raise UserError(
            f"examples of {one.client} have shape {one.shape} and those of {other.client} {other.shape}: "
            "convert all to one shape and type"
        )


def merge(columns: Sequence[ColumnSummary], summaries: Sequence[ClientSummary]) -> ColumnSummary:
    """Merge the summaries of one column over all clients.

    Means and squared deviations are merged by the method of Chan, Golub and LeVeque, which loses no precision. Sums
    are rounded once, so the order of the clients does not matter.
    """
    by_kind = {c.kind: s.client for c, s in zip(columns, summaries, strict=True) if c.kind}
    if len(by_kind) > 1:
        raise UserError(
            f"the column {columns[0].name!r} holds numbers for {by_kind['number']} and text for "
            f"{by_kind['category']}: write it in the same way everywhere, or list it in data.categories"
        )
    count = sum(column.count for column in columns)
    mean = math.fsum(column.mean * column.count for column in columns) / count if count else 0.0
    squares = math.fsum(column.squares + column.count * (column.mean - mean) ** 2 for column in columns)
    sets = [column.values for column in columns if column.kind]
    values = None if None in sets else tuple(by_value(unified({canonical(x) for own in sets for x in own or ()})))
    return ColumnSummary(
        columns[0].name,
        next(iter(by_kind), None),
        count,
        sum(column.missing for column in columns),
        mean,
        squares,
        values,
        all(column.whole for column in columns if column.kind),
        identifies=all(column.identifies for column in columns if column.kind)
        and (values is None or len(values) == count),
    )
