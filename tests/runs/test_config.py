import itertools
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedbayes.errors import UserError
from pfedbayes.files.reading import parse_toml
from pfedbayes.runs.config import build, parse_override, read_toml, to_toml


@dataclass(frozen=True)
class Section:
    rate: float = 0.1
    steps: int = 3
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    widths: tuple[int, ...] = (4,)
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


def test_values_are_checked_and_converted():
    section = build(Section, {"rate": 1, "widths": [3, 2], "window": [7, 8]}, "section")
    assert section == Section(rate=1.0, widths=(3, 2), window=(7, 8))
    assert isinstance(section.rate, float)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rat": 1}, ["section.rat", "did you mean 'rate'?"]),
        ({"zzz": 1}, ["section.zzz", "flag, kind, rate"]),
        ({"rate": "fast"}, ["section.rate", "'fast'", "a number"]),
        ({"rate": float("nan")}, ["section.rate", "not a number"]),
        ({"rate": True}, ["section.rate", "a number"]),
        ({"steps": 2.5}, ["section.steps", "2.5", "a whole number"]),
        ({"steps": True}, ["section.steps", "a whole number"]),
        ({"kind": "c"}, ["section.kind", "'c'", '"a", "b"']),
        ({"flag": 1}, ["section.flag", "true or false"]),
        ({"widths": 3}, ["section.widths", "a list"]),
        ({"window": [1, 2, 3]}, ["section.window", "2 values"]),
        ({"window": [1, "x"]}, ["section.window", "a whole number"]),
        ({"rate": -1.0}, ["[section]", "rate must not be negative"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(values, words):
    with pytest.raises(UserError) as caught:
        build(Section, values, "section")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_overrides_are_toml_values_or_texts():
    assert parse_override("training.rounds=100") == ("training", "rounds", 100)
    assert parse_override("training.evaluate_window=[700, 800]") == ("training", "evaluate_window", [700, 800])
    assert parse_override("data.labels=sliding") == ("data", "labels", "sliding")
    assert parse_override('data.labels="sliding"') == ("data", "labels", "sliding")
    assert parse_override("method.reset_personal=true") == ("method", "reset_personal", True)
    for text in ("rounds=3", "training.rounds", "=3", "training.=3"):
        with pytest.raises(UserError, match=r"section\.key=value"):
            parse_override(text)


def test_toml_reads_back(tmp_path):
    sections = {"one": {"a": 1e-05, "b": -2.5, "c": 'sa"y ü', "d": [1, 2], "e": True, "f": None}, "two": {"g": 3}}
    path = tmp_path / "x.toml"
    path.write_text(to_toml(sections))
    del sections["one"]["f"]
    assert read_toml(path) == sections


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.toml"):
        read_toml(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(UserError, match=r"broken\.toml is not valid TOML"):
        read_toml(broken)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, st.dictionaries(TEXTS, PLAIN, max_size=4), max_size=4))
def test_whatever_is_written_reads_back(sections):
    assert parse_toml(to_toml(sections)) == sections


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("inf"), "section.x is infinite"),
        ([1, float("nan")], r"section.x\[1\] is not a number"),
        (2**63, "section.x is larger than"),
        (10**5000, "section.x is larger than"),
        (date(1979, 5, 27), "section.x is datetime.date"),
        ("\udcff", "section.x is .*Unicode"),
        ("a\0b", "section.x is .*Unicode"),
        ({"y": [None]}, r"section.x.y\[0\] is None"),
        ({"y": object()}, "section.x.y is <object"),
    ],
    ids=itertools.count(),
)
def test_what_no_file_can_hold_is_refused_before_it_is_written(value, words):
    with pytest.raises(UserError, match=words):
        to_toml({"section": {"x": value}})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "x = " + "[" * 100_000,
        "x = " + "{a=" * 10_000,
        "a." * 50_000 + "b = 1",
        "'a'." * 50_000 + "b = 1",
        "[" + "a." * 50_000 + "b]",
        "x = " + "9" * 5000,
        "x = 0x" + "f" * 5000,
        "x = [9223372036854775808]",
        "x = 1\nx = 2",
        "\0",
    ],
    ids=itertools.count(),
)
def test_hostile_toml_is_one_line_and_takes_no_time(tmp_path, text):
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    with pytest.raises(UserError, match="is not valid TOML") as caught:
        read_toml(path)
    assert len(str(caught.value)) < 500


def test_a_file_that_is_no_text_or_no_file_is_one_line(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe = 1")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_toml(tmp_path / "bytes.toml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / ("x" * 5000)):
        with pytest.raises(UserError, match="cannot read"):
            read_toml(path)


@pytest.mark.parametrize(
    "value", ["9" * 5000, "[" * 100_000, "{a=" * 5000, "1\nother = 2", "1 2"], ids=itertools.count()
)
def test_an_override_that_is_no_toml_is_a_text(value):
    assert parse_override(f"training.rounds={value}") == ("training", "rounds", value)
    with pytest.raises(UserError, match=r"section\.steps is .*: give a whole number") as caught:
        build(Section, {"steps": parse_override(f"section.steps={value}")[2]}, "section")
    assert len(str(caught.value)) < 500
