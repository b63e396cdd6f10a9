"""Read times to an event, some of them censored."""

from __future__ import annotations

import math

import numpy as np

from pfedbayes.data.own.columns import Numbers, Table, Texts, as_texts, canonical, missing
from pfedbayes.errors import UserError

YES, NO = ("1", "true", "yes"), ("0", "false", "no")
FARTHEST = 1e9  # expected events of a row; networks overflow beyond


def read_events(table: Table, name: str) -> Numbers:
    """Return 1 for the rows (n,) of a table that had the event and 0 for the censored ones; refuse anything else."""
    texts = as_texts(table.columns[name])
    if len(absent := np.flatnonzero(missing(texts))):
        raise UserError(f"{table.place(int(absent[0]))}: {name!r} is missing: fill it in or remove the row")
    forms = [canonical(level).lower() for level in texts.levels]
    values = np.array([1.0 if form in YES else 0.0 if form in NO else math.nan for form in forms])
    events: Numbers = values[texts.codes]
    if len(odd := np.flatnonzero(np.isnan(events))):
        row = int(odd[0])
        raise UserError(
            f"{table.place(row)}: {name!r} is {texts.levels[texts.codes[row]][:80]!r}: write 1, true or yes where the "
            "event happened, and 0, false or no where the row was observed for so long without it"
        )
    return events


def read_times(table: Table, name: str) -> Numbers:
    """Return the times (n,) of a table; refuse negative ones. A row censored at time 0 says nothing, but is allowed."""
    column = table.columns[name]
    if isinstance(column, Texts):
        raise UserError(f"{table.where}: the target {name!r} holds text, but times are numbers: correct it")
    if len(odd := np.flatnonzero(column < 0)):
        row = int(odd[0])
        raise UserError(
            f"{table.place(row)}: {name!r} is {column[row]:g}, but a time cannot be negative: correct the cell or "
            "remove the row"
        )
    return column


def require_soon(table: Table, name: str, times: Numbers, rate: float) -> None:
    """Refuse a time that is so far beyond the training data that a network overflows."""
    if len(far := np.flatnonzero(times * rate > FARTHEST)):
        row = int(far[0])
        raise UserError(
            f"{table.place(row)}: {name!r} is {times[row]:g}, more than {FARTHEST:g} times the mean time between events"
            " of the training data: correct the cell or remove the row"
        )
