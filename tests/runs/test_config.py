from dataclasses import dataclass
from typing import Literal

import pytest

from pfedbayes.errors import UserError
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
