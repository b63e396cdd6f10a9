"""Making numbers for a network out of the columns of a table, fitted without bringing rows together.

Each client summarises its own rows (`summarise`); the summaries alone are combined (`combine`). A column of numbers is
standardised, its missing cells become the mean and, where training data miss some, set an indicator beside it. A column
of categories becomes one input per category and one more for what is missing or was never seen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data.config import Task
from pfedbayes.data.own.readers import (
    MOST_CATEGORIES,
    Column,
    Kind,
    Numbers,
    Rows,
    Schema,
    Table,
    Texts,
    as_text,
    by_value,
    missing,
    take,
)
from pfedbayes.errors import UserError

FORMAT = 1
MOST_CLASSES = 1000  # of a target
FEW_WHOLE_NUMBERS = 20  # a target with at most so many different values, all whole numbers, is taken for classes


@dataclass(frozen=True)
class ColumnSummary:
    """What one client says about a column. kind is None where all cells are missing.

    count cells are there, with this mean and sum of squared deviations from it if they are numbers; missing cells are
    not. values: the different values, if they are few. whole: they are all whole numbers.
    """

    name: str
    kind: Kind | None
    count: int
    missing: int
    mean: float = 0.0
    squares: float = 0.0
    values: tuple[str, ...] | None = None
    whole: bool = False


@dataclass(frozen=True)
class Summary:
    """All that leaves a client so that the preprocessing can be fitted: aggregates of its columns, and the shape of an
    example where inputs are no columns."""

    client: str
    columns: tuple[ColumnSummary, ...]
    target: ColumnSummary
    shape: tuple[int, ...] | None = None
    image: bool = False

    def to_json(self) -> str:
        """As text, to be sent."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Summary:
        """What `to_json` has written."""
        fields = json.loads(text)
        columns = tuple(_column_summary(column) for column in fields.pop("columns"))
        shape = fields.pop("shape")
        target = _column_summary(fields.pop("target"))
        return Summary(columns=columns, target=target, shape=None if shape is None else tuple(shape), **fields)


def _column_summary(fields: Mapping[str, Any]) -> ColumnSummary:
    values = fields["values"]
    return ColumnSummary(**{**fields, "values": None if values is None else tuple(values)})


def summarise(client: str, table: Table, target: str, train: Rows, task: Task | None = None) -> Summary:
    """What a client tells of its table: inputs and the target's mean from the rows to train on alone; which values the
    target has from all rows, and only if they are classes or, without a task, may be."""
    whole = table.columns[target]
    return Summary(
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
    """The aggregates of one column."""
    present = ~missing(column)
    count = int(present.sum())
    kind = _kind(column)
    if isinstance(column, Texts):
        return ColumnSummary(name, kind, count, len(present) - count, values=_categories(column, MOST_CATEGORIES))
    numbers = column[present]
    mean = float(numbers.mean()) if count else 0.0
    return ColumnSummary(name, kind, count, len(present) - count, mean, float(np.square(numbers - mean).sum()))


def _kind(column: Column) -> Kind | None:
    if missing(column).all():
        return None
    return "category" if isinstance(column, Texts) else "number"


def _categories(column: Texts, most: int) -> tuple[str, ...] | None:
    """The different texts of a column, if they are at most so many."""
    codes = np.unique(column.codes[column.codes >= 0])
    return None if len(codes) > most else tuple(by_value(column.levels[code] for code in codes))


def _target_values(column: Column, task: Task | None) -> dict[str, Any]:
    """The different values of a target, if they are classes or may be, and whether they are whole numbers."""
    if isinstance(column, Texts):
        return {"values": _categories(column, MOST_CLASSES), "whole": False}
    numbers = np.unique(column[~np.isnan(column)])
    whole = bool((numbers == np.rint(numbers)).all())
    most = {"classification": MOST_CLASSES, "regression": 0, None: FEW_WHOLE_NUMBERS if whole else 0}[task]
    return {"values": None if len(numbers) > most else tuple(map(as_text, numbers)), "whole": whole}


def combine(summaries: Sequence[Summary], task: Task | None = None) -> Preprocessing:
    """The preprocessing for all clients from what they say of themselves."""
    for one, other in pairwise(summaries):
        _refuse_unequal(one, other)
    first = summaries[0]
    columns = [_merge([summary.columns[k] for summary in _in_one_order(summaries)], summaries)
               for k in range(len(first.columns))]  # fmt: skip
    inputs = tuple(_input(column) for column in columns if column.kind)
    shape = first.shape or (sum(column.width for column in inputs),)
    if not inputs and first.shape is None:
        raise UserError("there is no column to predict from: give some beside the target")
    target = _merge([summary.target for summary in summaries], summaries)
    return Preprocessing(inputs, shape, _target(target, task), image=first.image)


def _in_one_order(summaries: Sequence[Summary]) -> list[Summary]:
    """Columns of all clients in the order of the first one."""
    names = [column.name for column in summaries[0].columns]
    by_name = [{column.name: column for column in summary.columns} for summary in summaries]
    return [
        dataclasses.replace(summary, columns=tuple(columns[name] for name in names))
        for summary, columns in zip(summaries, by_name, strict=True)
    ]


def _refuse_unequal(one: Summary, other: Summary) -> None:
    for has, lacks in ((one, other), (other, one)):
        known = {column.name for column in lacks.columns}
        for column in has.columns:
            if column.name not in known:
                raise UserError(
                    f"{has.client} has the column {column.name!r} and {lacks.client} has not: give it to all clients, "
                    f"or leave it out with data.ignore=[{column.name!r}]"
                )
    if (one.shape, one.image) != (other.shape, other.image):
        raise UserError(
            f"one example of {one.client} has the shape {one.shape} and one of {other.client} {other.shape}: "
            "bring all to one shape and type"
        )


def _merge(columns: Sequence[ColumnSummary], summaries: Sequence[Summary]) -> ColumnSummary:
    """One column of all clients: means and squares as by Chan, Golub and LeVeque, so that no precision is lost."""
    by_kind = {c.kind: s.client for c, s in zip(columns, summaries, strict=True) if c.kind}
    if len(by_kind) > 1:
        raise UserError(
            f"the column {columns[0].name!r} holds numbers for {by_kind['number']} and texts for "
            f"{by_kind['category']}: write it in one way everywhere, or list it in data.categories"
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


@dataclass(frozen=True)
class Input:
    """How one column becomes inputs of the network."""

    name: str
    kind: Kind
    mean: float = 0.0
    deviation: float = 1.0
    indicator: bool = False
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return len(self.categories) + 1 if self.kind == "category" else 1 + self.indicator

    def encode(self, column: Column) -> NDArray[np.float32]:
        """The inputs (n, width)."""
        if isinstance(column, Texts):
            return self._encode_texts(column)
        absent = np.isnan(column)
        standard = np.where(absent, 0.0, (column - self.mean) / self.deviation)
        return np.stack([standard, absent][: self.width], axis=1).astype(np.float32)

    def _encode_texts(self, column: Texts) -> NDArray[np.float32]:
        unknown = len(self.categories)
        place = {category: k for k, category in enumerate(self.categories)}
        # Code -1, a missing cell, finds the last entry.
        lookup = np.array([*(place.get(level, unknown) for level in column.levels), unknown])
        inputs: NDArray[np.float32] = np.eye(unknown + 1, dtype=np.float32)[lookup[column.codes]]
        return inputs


def _input(column: ColumnSummary) -> Input:
    if column.kind == "number":
        return Input(column.name, "number", column.mean, _deviation(column), indicator=column.missing > 0)
    if column.values is None or len(column.values) > MOST_CATEGORIES:
        raise UserError(
            f"the column {column.name!r} has more than {MOST_CATEGORIES} different texts: leave it out with "
            f"data.ignore=[{column.name!r}], or write numbers or fewer categories"
        )
    return Input(column.name, "category", categories=column.values)


def _deviation(column: ColumnSummary) -> float:
    """The standard deviation; 1 where all values are equal up to rounding."""
    deviation = math.sqrt(column.squares / column.count) if column.count else 0.0
    return deviation if deviation > 1e-9 * abs(column.mean) else 1.0


@dataclass(frozen=True)
class Target:
    """What is predicted: one of the classes, or a number, which is standardised for training."""

    name: str
    task: Task
    classes: tuple[str, ...] | None = None
    mean: float = 0.0
    deviation: float = 1.0

    def encode(self, table: Table) -> NDArray[Any]:
        """Labels (n,) or standardised numbers (n, 1)."""
        column = table.columns[self.name]
        if self.classes is None:
            if isinstance(column, Texts):
                raise UserError(f"{table.where}: the target {self.name!r} holds texts, and numbers are to be predicted")
            return ((column - self.mean) / self.deviation).astype(np.float32)[:, None]
        place = {name: label for label, name in enumerate(self.classes)}
        texts = _as_texts(column)
        unknown = [level for level in texts.levels if level not in place]
        for level in unknown:
            rows = np.flatnonzero(texts.codes == texts.levels.index(level))
            if len(rows):
                raise UserError(
                    f"{table.place(int(rows[0]))}: {self.name!r} is {level!r}, which is none of the classes"
                )
        labels: NDArray[np.int64] = np.array([place.get(level, -1) for level in texts.levels])[texts.codes]
        return labels


def _as_texts(column: Column) -> Texts:
    if isinstance(column, Texts):
        return column
    numbers, codes = np.unique(column, return_inverse=True)
    return Texts(codes.astype(np.int32), tuple(as_text(number) for number in numbers))


def infer_task(column: ColumnSummary) -> Task:
    """Texts, and few different whole numbers, are classes; other numbers are numbers."""
    few = column.values is not None and len(column.values) <= FEW_WHOLE_NUMBERS
    return "classification" if column.kind == "category" or (column.whole and few) else "regression"


def _target(column: ColumnSummary, task: Task | None) -> Target:
    task = task or infer_task(column)
    if task == "regression":
        if column.kind == "category":
            raise UserError(f"the target {column.name!r} holds texts: leave --task out, or give numbers")
        return Target(column.name, task, None, column.mean, _deviation(column))
    if column.values is None or len(column.values) > MOST_CLASSES:
        raise UserError(
            f"the target {column.name!r} has more than {MOST_CLASSES} different values: use --task regression if it is "
            "a number, or give fewer classes"
        )
    if len(column.values) < 2:
        raise UserError(
            f"the target {column.name!r} is {column.values[0]!r} everywhere, so there is nothing to learn: give rows "
            "of another class too, or another target"
        )
    return Target(column.name, task, column.values)


@dataclass(frozen=True)
class Preprocessing:
    """From a table to what a network sees and predicts.

    inputs: the columns, none if examples are images or arrays; shape: of one example; others: columns that a table may
    have without being inputs.
    """

    inputs: tuple[Input, ...]
    shape: tuple[int, ...]
    target: Target
    image: bool = False
    others: tuple[str, ...] = ()

    @property
    def schema(self) -> Schema:
        """What is known of a table that is read for prediction; its target, if it has one, does not matter."""
        kinds: dict[str, Kind] = {column.name: column.kind for column in self.inputs}
        return Schema(ignore=(*self.others, self.target.name), kinds=kinds)

    def reading(self, *others: str) -> Schema:
        """How to read no more of a table than the inputs and these other columns; unseen categories may be many."""
        names = tuple(column.name for column in self.inputs)
        return Schema(roles=(*names, *others), kinds=self.schema.kinds, only=(*names, *others))

    def encode(self, table: Table) -> Tensor:
        """The inputs (n, *shape) of a table that has just the columns that are wanted."""
        if table.x is not None or not self.inputs:
            return self._encode_arrays(table)
        names = [column.name for column in self.inputs]
        known = {*names, *self.others, self.target.name}
        for name in names:
            if name not in table.columns:
                raise UserError(f"{table.where} lacks the column {name!r}: the models were trained with {_list(names)}")
        for name in table.columns:
            if name not in known:
                raise UserError(f"{table.where} has the column {name!r}, which the models do not know: remove it")
        parts = []
        for column in self.inputs:
            cells = table.columns[column.name]
            if isinstance(cells, Texts) != (column.kind == "category") and not missing(cells).all():
                held, wanted = ("numbers", "texts") if column.kind == "category" else ("texts", "numbers")
                raise UserError(
                    f"{table.where}: the column {column.name!r} holds {held}, and the models were trained with "
                    f"{wanted}: write it as in the training data"
                )
            parts.append(column.encode(_like(cells, column.kind)))
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def _encode_arrays(self, table: Table) -> Tensor:
        found = (len(table.columns),) if table.x is None else table.x.shape[1:]
        if self.inputs or table.x is None or found != self.shape:
            raise UserError(f"{table.where}: an example has the shape {found}, and the models take {self.shape}")
        if self.image != (table.x.dtype == np.uint8):
            wanted = "bytes (uint8)" if self.image else "floating-point numbers"
            raise UserError(f"{table.where}: examples are {table.x.dtype}, and the models take {wanted}")
        return torch.from_numpy(table.x)

    def words(self) -> str:
        """What was made of the data, for people."""
        if self.inputs:
            kinds = [column.kind for column in self.inputs]
            parts = [f"{kinds.count(kind)} of {words}" for kind, words in
                     (("number", "numbers"), ("category", "categories")) if kind in kinds]  # fmt: skip
            what = f"{len(kinds)} columns ({', '.join(parts)}) as {self.shape[0]} inputs"
        else:
            what = f"{'images' if self.image else 'arrays'} of shape {' x '.join(map(str, self.shape))}"
        if self.target.classes is not None:
            aim = f"classification into {_list(self.target.classes)}"
        else:
            aim = f"regression (mean {self.target.mean:.4g}, standard deviation {self.target.deviation:.4g})"
        return f"{what}; {self.target.name}: {aim}"

    def to_json(self) -> str:
        """As text, for a run folder."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def of_arrays(x: Tensor, num_classes: int | None) -> Preprocessing:
        """That of examples which are taken as they are: x (n, ...), and labels 0, 1, ... or numbers."""
        target = Target("y", "regression")
        if num_classes is not None:
            target = Target("y", "classification", tuple(map(str, range(num_classes))))
        shape = tuple(x.shape[1:])
        inputs = tuple(Input(f"x{k}", "number") for k in range(shape[0])) if len(shape) == 1 else ()
        return Preprocessing(inputs, shape, target, image=x.dtype == torch.uint8)

    @staticmethod
    def from_json(text: str, where: str) -> Preprocessing:
        """What `to_json` has written."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise UserError(f"{where} has another format: read it with the version that wrote it")
            target = fields["target"]
            classes = target["classes"]
            return Preprocessing(
                tuple(Input(**{**column, "categories": tuple(column["categories"])}) for column in fields["inputs"]),
                tuple(fields["shape"]),
                Target(**{**target, "classes": None if classes is None else tuple(classes)}),
                fields["image"],
                tuple(fields["others"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{where} is damaged ({error}): put back the file of the run") from None


def _like(column: Column, kind: Kind) -> Column:
    """A column of nothing but missing cells as one of the wanted kind."""
    if kind == "number":
        numbers: Numbers = np.full(len(column.codes), np.nan) if isinstance(column, Texts) else column
        return numbers
    return column if isinstance(column, Texts) else Texts(np.full(len(column), -1, np.int32), ())


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
