"""Encode the columns of a table as inputs of a network, fitted without collecting the rows of the clients.

Each client summarises its own rows (`summaries`); `combine` fits the encoding to the summaries alone. A column of
numbers is standardised; missing cells become the mean, and set an indicator input if training data miss some. A column
of categories becomes one input per category, and one for missing cells and unseen categories. After all of these come
piecewise-linear inputs of the columns of numbers (`pieces`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data.config import MAX_PIECES, PIECES, Task
from pfedbayes.data.own.columns import (
    MAX_CATEGORIES,
    Column,
    Kind,
    Numbers,
    Schema,
    Table,
    Texts,
    missing,
)
from pfedbayes.data.own.inputs import Input, fit_input
from pfedbayes.data.own.intervals import require_sound_intervals
from pfedbayes.data.own.pieces import Pieces, require_sound_pieces
from pfedbayes.data.own.summaries import (
    ClientSummary,
    ColumnSummary,
    in_one_order,
    merge,
    require_equal_columns,
    require_sound,
    with_dates,
)
from pfedbayes.data.own.target import OF_NUMBERS, Target, fit_survival, fit_target, listed, require_near
from pfedbayes.data.own.writing import Writing
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.files.reading import parse_object, reading
from pfedbayes.files.typed import from_json

FORMAT = 1
ROWS_TO_IDENTIFY = 20  # fewer rows may differ by chance
RESTORE = "restore the file of the run"
MAX_NUMBERS = 2**28  # of one example


@dataclass(frozen=True)
class LeftOut:
    """A column that the fit left out."""

    name: str
    reason: str


def combine(
    summaries: Sequence[ClientSummary],
    task: Task | None = None,
    pieces: int = PIECES,
    order: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Preprocessing:
    """Fit the preprocessing to the summaries of all clients.

    task: inferred from the target if not given. pieces: bins of the piecewise-linear encoding of a column of numbers,
    or 0. There are none for summaries without quantiles. order: the classes of an ordinal target, lowest first. keep:
    columns to use although they look like identifiers.
    """
    if not 0 <= pieces <= MAX_PIECES:
        raise UserError(f"pieces is {pieces}: give a number between 0 and {MAX_PIECES}")
    if not summaries:
        raise UserError("there are no clients: give the summary of each client")
    names = set[str]()
    for summary in summaries:
        require_sound(summary)
        if summary.client in names:
            raise UserError(f"there are two summaries of {summary.client!r}: give one per client")
        names.add(summary.client)
    writing = Writing.of_all([summary.writing for summary in summaries])
    summaries = [with_dates(summary, writing) for summary in summaries]
    require_equal_columns(summaries)
    first, ordered = summaries[0], in_one_order(summaries)
    parts = list(zip(*(summary.columns for summary in ordered), strict=True))
    columns = [merge(own, summaries) for own in parts]
    reasons = {column.name: _reason_to_leave(column, keep) for column in columns}
    inputs = tuple(
        fit_input(column, own, pieces) for column, own in zip(columns, parts, strict=True) if not reasons[column.name]
    )
    left_out = tuple(LeftOut(name, reason) for name, reason in reasons.items() if reason)
    shape = first.shape or (_width(inputs),)
    if not inputs and first.shape is None:
        why = f" ({listed([f'{each.name} {each.reason}' for each in left_out])})" if left_out else ""
        raise UserError(f"there is no column to predict from{why}: add columns besides the target")
    target = merge([summary.target for summary in summaries], summaries)
    if first.events is None:
        fitted = fit_target(target, task, order)
    else:
        parts_of_events = [summary.events for summary in summaries if summary.events]
        fitted = fit_survival(target, merge(parts_of_events, summaries), parts_of_events)
    others = tuple(each.name for each in left_out)
    return Preprocessing(inputs, shape, fitted, first.image, others, writing, left_out)


def _reason_to_leave(column: ColumnSummary, keep: Sequence[str]) -> str:
    """Return why a column cannot help a model; empty if it may."""
    if not column.kind:
        return "has no value in any training row"
    if column.name in keep:
        return ""
    if column.kind == "category" and (column.values is None or len(column.values) > MAX_CATEGORIES):
        return f"has more than {MAX_CATEGORIES} categories, as names and identifiers do"
    if column.identifies and column.count >= ROWS_TO_IDENTIFY:
        return "has another value in every row, as names and identifiers do"
    return ""


def _width(inputs: Sequence[Input]) -> int:
    return sum(column.width + column.pieces for column in inputs)


@dataclass(frozen=True)
class Preprocessing:
    """How tables or images become inputs and targets of a network."""

    inputs: tuple[Input, ...]
    """The input columns; empty if examples are images or arrays."""
    shape: tuple[int, ...]
    """Shape of one example."""
    target: Target
    image: bool = False
    """Whether examples are images of bytes."""
    others: tuple[str, ...] = ()
    """Columns that a table may have but that are not inputs."""
    writing: Writing = dataclasses.field(default_factory=Writing)
    """How the cells of tables are written."""
    left_out: tuple[LeftOut, ...] = ()
    """Which of the other columns the fit left out, and why."""

    @property
    def pieces(self) -> int:
        """Number of piecewise-linear inputs, which are the last ones."""
        return sum(column.pieces for column in self.inputs)

    @property
    def schema(self) -> Schema:
        """The schema of a table that is read for prediction, without its target."""
        kinds: dict[str, Kind] = {column.name: column.kind for column in self.inputs}
        needed = self.writing.sources(kinds)
        ignore = [name for name in self.writing.sources(self.others) if name not in needed]
        return Schema(ignore=(*ignore, *self.target.columns), kinds=kinds, writing=self.writing)

    def inputs_schema(self, *others: str) -> Schema:
        """Return the schema to read only the inputs and these other columns, with any number of unseen categories."""
        names = self.writing.sources(column.name for column in self.inputs)
        kinds: dict[str, Kind] = {name: "category" for name in others if name == self.target.event}
        return Schema(
            roles=(*names, *others), kinds={**self.schema.kinds, **kinds}, only=(*names, *others), writing=self.writing
        )

    def encode(self, table: Table) -> Tensor:
        """Return the inputs (n, *shape) of a table: the plain inputs of all columns, then the piecewise-linear ones."""
        if table.x is not None or not self.inputs:
            return self._encode_arrays(table)
        names = [column.name for column in self.inputs]
        known = {*names, *self.others, *self.target.columns, *self.writing.parts}
        needed = self.writing.sources(names)
        if lacking := self.writing.sources(name for name in names if name not in table.columns):
            raise UserError(
                f"{table.where} lacks {_columns(lacking)}: add it; the models were trained with {listed(needed)}"
            )
        if unknown := [name for name in table.columns if name not in known]:
            named = table.writing.sources(unknown)
            raise UserError(f"{table.where} has {_columns(named)}, which the models were not trained with: remove it")
        parts, pieces = [], []
        for column in self.inputs:
            cells = table.columns[column.name]
            if isinstance(cells, Texts) != (column.kind == "category") and not missing(cells).all():
                held, wanted = ("numbers", "text") if column.kind == "category" else ("text", "numbers")
                raise UserError(
                    f"{table.where}: the column {column.name!r} holds {held}, but the models were trained with "
                    f"{wanted}: write it as in the training data"
                )
            parts.append(column.encode(like := _like(cells, column.kind)))
            if not isinstance(like, Texts):
                require_near(table, column.name, like, parts[-1][:, 0])
                if column.pieces:
                    pieces.append(column.encode_pieces(like))
        return torch.from_numpy(np.concatenate([*parts, *pieces], axis=1))

    def _encode_arrays(self, table: Table) -> Tensor:
        found = (len(table.columns),) if table.x is None else table.x.shape[1:]
        if self.inputs or table.x is None or found != self.shape:
            raise UserError(
                f"{table.where}: an example has shape {found}, but the models take {self.shape}: reshape the data"
            )
        if self.image != (table.x.dtype == np.uint8):
            wanted = "bytes (uint8)" if self.image else "floating-point numbers"
            raise UserError(f"{table.where}: examples are {table.x.dtype}, but the models take {wanted}: convert them")
        return torch.from_numpy(table.x)

    def describe(self) -> str:
        """Return the encoding as one line of text."""
        if self.inputs:
            kinds = [column.kind for column in self.inputs]
            parts = [f"{kinds.count(kind)} {name}" for kind, name in
                     (("number", "numeric"), ("category", "categorical")) if kind in kinds]  # fmt: skip
            what = f"{len(kinds)} columns ({', '.join(parts)}) as {self.shape[0]} inputs"
            what += f", {self.pieces} of them piecewise linear" if self.pieces else ""
        else:
            what = f"{'images' if self.image else 'arrays'} of shape {' x '.join(map(str, self.shape))}"
        if self.target.classes is not None:
            kind = "ordered classes" if self.target.task == "ordinal" else "classification into"
            task = f"{kind} {listed(self.target.classes)}"
        elif self.target.task == "count":
            task = f"counts (mean {self.target.rate:.4g})"
        elif self.target.event is not None:
            task = (
                f"survival, with events in {self.target.event} (one in {1 / self.target.rate:.4g} units of time, up to "
                f"{self.target.edges[-1]:.4g})"
            )
        else:
            task = f"regression (mean {self.target.mean:.4g}, standard deviation {self.target.deviation:.4g})"
        return f"{what}; {self.target.name}: {task}"

    def as_object(self) -> dict[str, Any]:
        """Return the preprocessing as a JSON object."""
        content = dataclasses.asdict(self)
        for column in content["inputs"]:
            if not column["edges"]:  # the object and its digest are those of earlier versions
                del column["edges"], column["centres"]
        for name, empty in (("writing", Writing()), ("left_out", ())):
            if getattr(self, name) == empty:
                del content[name]
        if self.target.task not in ("count", "survival"):
            del content["target"]["rate"]
        if self.target.event is None:
            del content["target"]["event"], content["target"]["edges"]
        return {"format": FORMAT, **content}

    def to_json(self) -> str:
        """Return the preprocessing as JSON, for a run folder."""
        return dump_json(self.as_object(), indent=1)

    def digest(self) -> str:
        """Return a hash that identifies the preprocessing."""
        plain = json.dumps(self.as_object(), indent=1, ensure_ascii=False) + "\n"
        return hashlib.sha256(plain.encode()).hexdigest()

    @staticmethod
    def of_arrays(x: Tensor, num_classes: int | None) -> Preprocessing:
        """Return the preprocessing of examples that need none: x (n, ...), and labels 0, 1, ... or numbers."""
        target = Target("y", "regression")
        if num_classes is not None:
            target = Target("y", "classification", tuple(map(str, range(num_classes))))
        shape = tuple(x.shape[1:])
        inputs = tuple(Input(f"x{k}", "number") for k in range(shape[0])) if len(shape) == 1 else ()
        return Preprocessing(inputs, shape, target, image=x.dtype == torch.uint8)

    @staticmethod
    def from_json(text: str, where: str) -> Preprocessing:
        """Read what `to_json` returns; where: the source, for messages."""
        with reading(Path(where), RESTORE):
            content, _ = parse_object(text.encode())
        return Preprocessing.from_object(content, where)

    @staticmethod
    def from_object(content: dict[str, Any], where: str) -> Preprocessing:
        """Read what `as_object` returns; where: the source, for messages."""
        with reading(Path(where), RESTORE):
            if content.get("format") != FORMAT:
                raise UserError(f"{where} has another format: read it with the version that wrote it")
            preprocessing = from_json(Preprocessing, content)
            preprocessing.check()
        return preprocessing

    def check(self) -> None:
        """Raise ValueError unless the parts fit each other."""
        names = [column.name for column in self.inputs]
        every: tuple[Input | Target, ...] = (*self.inputs, self.target)
        for each in every:
            if not (math.isfinite(each.mean) and 0 < each.deviation < math.inf):
                raise ValueError(f"{each.name!r} has the mean {each.mean} and the deviation {each.deviation}")
        lists = [names, *(column.categories for column in self.inputs), self.target.classes or ()]
        if any(len(set(own)) < len(own) for own in lists):
            raise ValueError("a column, category or class is listed twice")
        if not 0 < self.target.rate < math.inf:
            raise ValueError(f"the mean of the counts, or the rate, of {self.target.name!r} is {self.target.rate}")
        if (self.target.task == "survival") != (self.target.event is not None):
            raise ValueError(f"the target of a {self.target.task} has the events {self.target.event!r:.40}")
        if self.target.event is not None:
            require_sound_intervals(self.target.edges)
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) > MAX_NUMBERS:
            raise ValueError(f"shape is {self.shape}")
        for column in self.inputs:
            require_sound_pieces(Pieces(column.edges, column.centres), MAX_PIECES if column.kind == "number" else 0)
        if self.inputs and self.shape != (_width(self.inputs),):
            raise ValueError(f"shape is {self.shape}, but the columns have other widths")
        if (self.target.task in OF_NUMBERS) != (self.target.classes is None) or self.target.classes == ():
            raise ValueError(f"the target of a {self.target.task} has the classes {self.target.classes}")


def _columns(names: Sequence[str]) -> str:
    return f"the column {names[0]!r}" if len(names) == 1 else f"the columns {listed([repr(name) for name in names])}"


def _like(column: Column, kind: Kind) -> Column:
    """Return a column, converted to the wanted kind if all its cells are missing."""
    if kind == "number":
        numbers: Numbers = np.full(len(column.codes), np.nan) if isinstance(column, Texts) else column
        return numbers
    return column if isinstance(column, Texts) else Texts(np.full(len(column), -1, np.int32), ())
