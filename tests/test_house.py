"""The countable goals of the code base are met, and the rule that counts look-ups finds them."""

import importlib.util
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
assert spec is not None
assert spec.loader is not None
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)


@pytest.mark.parametrize("number", house.count(), ids=lambda number: number.name)
def test_the_goal_is_met(number):
    assert number.met, f"{number.value} {number.name}, at most {number.at_most}: {number.where}"


def test_look_ups_into_run_files_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    text = """
        run.info["seeds"]
        run.info["hardware"]["gpu"]
        (run.summary or {}).get("clients")
        run.rounds[-1]["personal"]
        "federation" in run.info
        record["round"]
        run.sections["data"]
        run.info.seeds, scores["mean"], sections["data"], record[name], run.rounds[0], "a" in names
    """
    for room, lines in (("report", {2, 3, 4, 5, 6, 7, 8}), ("paper", {2, 3, 4, 5, 6, 8})):
        (tmp_path / room).mkdir()
        path = tmp_path / room / "file.py"
        path.write_text(textwrap.dedent(text))
        assert set(house.look_ups(path)) == lines


def test_a_missed_goal_is_told(monkeypatch, capsys):
    monkeypatch.setattr(house, "count", lambda: [house.Number("doors", 3, 2, "the hall"), house.Number("roofs", 1, 1)])
    assert house.main() == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split() for line in told] == [
        ["doors", "3", "at", "most", "2", "missed:", "the", "hall"], ["roofs", "1", "at", "most", "1"],
    ]  # fmt: skip
    monkeypatch.setattr(house, "count", lambda: [house.Number("roofs", 1, 1)])
    assert house.main() == 0
