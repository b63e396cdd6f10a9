"""Dates in many forms, and the numbers that a model sees of them."""

import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedbayes.data.own.dates import DateColumn, date_parts, needs_order, orders, read_date
from pfedbayes.data.own.writing import Writing

DAY = (datetime.date(2020, 4, 3) - datetime.date(1970, 1, 1)).days


@pytest.mark.parametrize(
    "text",
    ["2020-04-03", "2020/4/3", "2020.04.03", "3.4.2020", "03.04.2020", "3 Apr 2020", "3. April 2020", "03-Apr-2020",
     "April 3, 2020", "Apr. 3rd, 2020", "3/4/2020", "3-4-2020", "3/4/20", "2020-04-03T00:00:00Z",
     "2020-04-03 00:00:00+00:00"],
)  # fmt: skip
def test_forms(text):
    assert read_date(text, day_first=True) == DAY


@pytest.mark.parametrize(
    ("text", "hours"), [("2020-04-03 13:30", 13.5), ("4/3/2020 1:30 PM", 13.5), ("2020-04-03T12:00:00.5Z", 12),
                        ("4/3/2020 12:00 AM", 0)],
)  # fmt: skip
def test_times_are_fractions_of_a_day(text, hours):
    assert read_date(text, day_first=False) == pytest.approx(DAY + hours / 24)


@pytest.mark.parametrize(
    "text",
    ["", "2020", "2020-13-01", "2020-02-30", "31.02.2020", "3 Foo 2020", "1.2.20", "1-2-20", "1/2", "12:30", "2020-1/2",
     "1.2.3.4", "２０２０-01-01", "2020-01-01 25:00", "4/3/2020 13", "x" * 10_000],
)  # fmt: skip
def test_other_texts_are_no_dates(text):
    assert read_date(text, True) is None
    assert read_date(text, False) is None


def test_a_row_tells_the_order():
    assert orders(["3/4/2020", "13/4/2020"]) == {True}
    assert orders(["3/4/2020", "4/13/2020"]) == {False}
    assert orders(["13/4/2020", "4/13/2020"]) == set()
    assert orders(["3/4/2020", "2020-01-01"]) == {True, False}
    assert needs_order(["2020-01-01", "3/4/2020"])
    assert not needs_order(["2020-01-01", "4/4/2020", "3.4.2020"])


def test_two_digits_of_a_year():
    years = [datetime.date(1970, 1, 1) + datetime.timedelta(read_date(f"1/1/{y}", True)) for y in ("68", "69", "00")]
    assert [date.year for date in years] == [2068, 1969, 2000]


@given(st.dates(datetime.date(1000, 1, 1), datetime.date(2999, 12, 31)))
def test_parts_are_those_of_the_calendar(date):
    days = read_date(date.isoformat(), True)
    parts = [part[0] for part in date_parts(np.array([days]))]
    assert parts == [date.year, date.month, date.weekday(), (date - datetime.date(1970, 1, 1)).days]


def test_missing_dates_have_missing_parts():
    assert all(np.isnan(part).tolist() == [True, False] for part in date_parts(np.array([np.nan, 0.5])))


def test_how_several_tables_are_written():
    one, other = DateColumn("a", True), DateColumn("a", False)
    assert Writing.of_all([Writing((one,)), Writing((DateColumn("a"),), ("n",))]) == Writing((one,), ("n",))
    assert Writing.of_all([Writing((one,)), Writing((other,))]).dates == (DateColumn("a"),)
    writing = Writing((one,))
    assert writing.sources(["x", "a (month)", "a (days)"]) == ("x", "a")
    assert writing.date("b") is None
