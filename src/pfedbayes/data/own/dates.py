"""Dates in the many forms in which people write them, and the numbers that a model sees of them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
PARTS = ("year", "month", "weekday", "days")
_TIME = r"(?:[T ]\s*(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,]\d+)?)?\s?(?P<half>[ap]m)?" \
        r"\s?(?:Z|UTC|[+-]\d{2}:?\d{2})?)?"  # fmt: skip
_FLAGS = re.ASCII | re.IGNORECASE
_YEAR_FIRST = re.compile(r"(?P<year>\d{4})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})" + _TIME, _FLAGS)
_DOTTED = re.compile(r"(?P<day>\d{1,2})\.\s?(?P<month>\d{1,2})\.\s?(?P<year>\d{4})" + _TIME, _FLAGS)
_DAY_NAMED = re.compile(
    r"(?P<day>\d{1,2})(?:st|nd|rd|th)?\.?[- ]?(?P<name>[a-z]{3,9})\.?,?[- ]?(?P<year>\d{4})" + _TIME, _FLAGS
)
_MONTH_NAMED = re.compile(r"(?P<name>[a-z]{3,9})\.? (?P<day>\d{1,2})(?:st|nd|rd|th)?,? (?P<year>\d{4})" + _TIME, _FLAGS)
_NUMERIC = re.compile(r"(?P<one>\d{1,2})([-/])(?P<other>\d{1,2})\2(?P<year>\d{4}|(?<=/)\d{2})" + _TIME, _FLAGS)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_GERMAN = {"mai": 5, "okt": 10, "dez": 12}
_SHORT_YEARS = 69  # 69 is 1969, and 68 is 2068, as in POSIX


@dataclass(frozen=True)
class DateColumn:
    """A column of dates."""

    name: str
    day_first: bool | None = None
    """Whether 3/4/2020 is the third of April; None if no row needs to know."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the columns of numbers that stand for it."""
        return tuple(f"{self.name} ({part})" for part in PARTS)


def read_date(text: str, day_first: bool) -> float | None:
    """Return the days since 1970-01-01 that a text means, with the time as a fraction; None if it is not a date."""
    match = _YEAR_FIRST.fullmatch(text) or _DOTTED.fullmatch(text)
    if match:
        day, month = int(match["day"]), int(match["month"])
    elif match := _DAY_NAMED.fullmatch(text) or _MONTH_NAMED.fullmatch(text):
        name = match["name"].lower()[:3]
        day, month = int(match["day"]), _MONTHS.index(name) + 1 if name in _MONTHS else _GERMAN.get(name, 0)
    elif match := _NUMERIC.fullmatch(text):
        day, month = (int(match["one"]), int(match["other"])) if day_first else (int(match["other"]), int(match["one"]))
    else:
        return None
    year = int(match["year"])
    if len(match["year"]) == 2:
        year += 1900 if year >= _SHORT_YEARS else 2000
    hour = int(match["hour"] or 0)
    if match["half"]:
        hour = hour % 12 + 12 * (match["half"].lower() == "pm")
    try:
        moment = datetime.datetime(year, month, day, hour, int(match["minute"] or 0), int(match["second"] or 0))
    except ValueError:
        return None
    return (moment - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)


def orders(texts: Sequence[str]) -> set[bool]:
    """Return which of True (day first) and False (month first) make dates of all texts like 3/4/2020."""
    numeric = [text for text in texts if _NUMERIC.fullmatch(text)]
    return {first for first in (True, False) if all(read_date(text, first) is not None for text in numeric)}


def needs_order(texts: Sequence[str]) -> bool:
    """Return whether day and month of some text could be exchanged."""
    return any(read_date(text, True) != read_date(text, False) for text in texts)


def date_parts(days: Numbers) -> tuple[Numbers, ...]:
    """Return year, month (1-12), weekday (0 is Monday) and days since 1970-01-01 (n,), NaN for missing dates."""
    absent = np.isnan(days)
    whole = np.floor(np.where(absent, 0.0, days)).astype(np.int64).astype("M8[D]")
    months = whole.astype("M8[M]").astype(np.int64)
    weekdays = (whole.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
    plain = (months // 12 + 1970, months % 12 + 1, weekdays)
    return (*(np.where(absent, np.nan, part.astype(np.float64)) for part in plain), days)
