"""The walks of docs/design.md lead through functions that exist."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import pfedbayes
from scripts import hops

PAGE = Path(__file__).parents[1] / "docs" / "design.md"
SOURCE = Path(pfedbayes.__file__).parent
STEPS = re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE.read_text())


def names(path: Path) -> set[str]:
    """Functions, classes and methods of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "function"), STEPS)
def test_a_step_of_a_walk_exists(file, function):
    assert function in names(SOURCE / file)


def test_the_hops_of_the_training_run_are_counted_right():
    page = PAGE.read_text()
    walk = page[page.index("### A training run") : page.index("### A prediction")]
    files = re.findall(r"^\d+\. `([\w/]+\.py):", walk, re.MULTILINE)
    hops = [after for before, after in itertools.pairwise(files) if before != after]
    back = [file for k, file in enumerate(files) if file in files[:k] and files[k - 1] != file]
    assert f"{len(hops)} changes of file, {len(back)} of them back" in walk
    assert len(hops) < 35
    assert len(back) <= 3


def test_the_training_run_takes_the_steps_of_its_walk(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [])  # which the trace sets
    hops.main()
    printed = capsys.readouterr().out
    called, listed, ordered = re.search(r"(\d+) of (\d+) steps called, (\d+) in the listed order", printed).groups()
    assert called == listed, printed
    assert f"calls all {listed} steps and {ordered} of them in this order" in " ".join(PAGE.read_text().split())


def test_every_room_is_in_the_table():
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    page = PAGE.read_text()
    table = page[page.index("## Rooms") : page.index("## Three walks")]
    assert rooms == set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
