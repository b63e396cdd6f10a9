"""Numbers with units and separators, in one convention per column, and the many spellings of yes and no."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedbayes.data.own.spelling import unified, written_numbers, yes_or_no


@pytest.mark.parametrize(
    ("texts", "numbers", "comma"),
    [
        (["1,234", "12"], [1234, 12], False),
        (["1,234,567.5"], [1234567.5], False),
        (["1,5", "1,234"], [1.5, 1.234], True),
        (["1.234,50", "1.234"], [1234.5, 1234], True),
        (["1 234", "12\u00a0345,5"], [1234, 12345.5], True),
        (["1'234.5"], [1234.5], False),
        (["0,123"], [0.123], True),
        (["-1,200", "+3"], [-1200, 3], False),
        (["12%", "7.5 %"], [12, 7.5], False),
        (["$1,200.50", "$ 3", "-$4", "$-5"], [1200.5, 3, -4, -5], False),
        (["1.000,50 €", "EUR 7"], [1000.5, 7], True),
        (["1e3", ".5", "5."], [1000, 0.5, 5], False),
        (["1,234", "x", "1 2", "1,23,4", "1.2.3", "--1", "$1$", "12_3", ""], [1234] + [None] * 8, False),
    ],
)
def test_a_column_has_one_convention(texts, numbers, comma):
    found = written_numbers(texts)
    assert found.numbers == numbers
    assert found.comma == comma


def test_a_known_convention_is_kept():
    assert written_numbers(["1,234"], comma=True).numbers == [1.234]
    assert written_numbers(["1.5", "1.234"], comma=True).numbers == [1.5, 1234]


def test_units_are_named():
    assert written_numbers(["12%", "$5", "5 usd"]).units == ("$", "%", "USD")
    assert written_numbers(["12", "5"]).units == ()


@given(st.integers(0, 10**12), st.sampled_from(["en", "de", "fr"]))
def test_what_is_formatted_is_read_back(number, country):
    text = f"{number:,}.25"
    if country == "de":
        text = text.translate(str.maketrans(",.", ".,"))
    elif country == "fr":
        text = text.translate(str.maketrans(",.", "\u202f,"))
    assert written_numbers([text]).numbers == [number + 0.25]


def test_yes_and_no():
    assert {yes_or_no(text) for text in ("Yes", "Y", "TRUE", "1", "ja", "SÍ", "oui")} == {"yes"}
    assert {yes_or_no(text) for text in ("No", "n", "False", "0", "Nein", "non")} == {"no"}
    assert yes_or_no("maybe") is None


def test_only_columns_with_several_spellings_are_unified():
    assert unified({"Yes", "yes", "No"}) == {"no", "yes"}
    assert unified({"Y", "N"}) == {"Y", "N"}  # two values need no help, and keep their names
    assert unified({"Y", "N", "maybe"}) == {"Y", "N", "maybe"}
    assert unified({"Y", "yes", "TRUE"}) == {"Y", "yes", "TRUE"}
