"""What a column is taken for is decided by all of its cells."""

import datetime

import numpy as np
import pytest

from pfedbayes.data.own.columns import Schema, Texts
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.data.own.writing import Writing
from pfedbayes.errors import Problems


def column(values, **schema):
    cells = np.empty(len(values), dtype=object)
    cells[:] = values
    table = table_of({"a": cells}, "here", Schema(**schema))
    return table, next(iter(table.columns.values()))


def problem(values, **schema):
    with pytest.raises(Problems) as caught:
        column(values, **schema)
    (only,) = caught.value.problems
    return only


def test_strings_of_digits_stay_text_and_formatted_numbers_do_not():
    assert column(["1", "2", "1"])[1].levels == ("1", "2")
    assert column(["1,200", "$5", None])[1].tolist()[:2] == [1200, 5]
    assert column([1, 2.5, None])[1].tolist()[:2] == [1, 2.5]


def test_numbers_among_few_texts_are_a_problem_and_so_is_the_reverse():
    text = problem([1, 2, 3, "old", "older", 4])
    assert "row 3: the column 'a' is 'old', but the column holds numbers elsewhere (row 0: '1')" in text
    assert "(other texts: 'older')" in text
    assert "--missing 'old'" in text
    assert "row 2: the column 'a' is '7', but the column holds text elsewhere (row 0: 'x')" in problem(["x", "y", 7])
    assert np.isnan(column([1, 2, "OLD"], writing=Writing(missing=("old",)))[1][2])


def test_two_units_are_not_one_column_of_numbers():
    assert "'$5'" in problem([1, "$5", "7 €", 2])
    assert isinstance(column(["$5", "7 €", "x"], kinds={"a": "category"})[1], Texts)


def test_dates_and_what_is_wrong_with_them():
    table, _ = column([datetime.date(2020, 1, 2), "2020-01-03", None])
    assert list(table.columns) == ["a (year)", "a (month)", "a (weekday)", "a (days)"]
    np.testing.assert_array_equal(table.columns["a (weekday)"], [3, 4, np.nan])
    assert "day_first" in problem(["3/4/2020", "5/6/2020"])
    assert column(["3/4/2020", "5/6/2020"], day_first=False)[0].columns["a (month)"].tolist() == [3, 5]
    assert "the day first in some rows and the month first in others" in problem(["13/4/2020", "4/13/2020"])
    assert "but the column must hold dates" in problem([*(f"2020-01-{k:02d}" for k in range(1, 10)), "soon"])
    assert isinstance(column(["2020-01-01", "soon", "later"])[1], Texts)


def test_a_target_is_never_a_date():
    table, _ = column(["2020-01-01", "2020-01-02"], roles=("a",))
    assert isinstance(table.columns["a"], Texts)


def test_placeholders_are_answers_in_text_only():
    assert column(["none", "mild", "-"])[1].levels == ("none", "mild", "-")
    assert np.isnan(column(["none", 1, "-", 2])[1][[0, 2]]).all()
    assert np.isnan(table_of({"a": ["unknown", "2020-01-01"]}, "here", Schema()).columns["a (year)"][0])


def test_a_column_that_dates_would_hide_is_refused():
    with pytest.raises(Problems, match=r"has a column 'a \(year\)', which 'a' would make: rename it"):
        table_of({"a (year)": [1, 2], "a": ["2020-01-01", "2020-01-02"]}, "here", Schema())


def test_differences_of_times_are_days():
    spans = np.array([36, "NaT"], dtype="m8[h]")
    np.testing.assert_array_equal(table_of({"a": spans}, "here", Schema()).columns["a"], [1.5, np.nan])
