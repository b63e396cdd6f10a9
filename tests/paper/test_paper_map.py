"""docs/paper_map.md leads from every equation, table and figure of the paper to the code."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from pfedbayes.cli.paper import app

PAGE = (Path(__file__).parents[2] / "docs" / "paper_map.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \|[^|]+\| `([\w.]+)` \|$", PAGE, re.MULTILINE)
HEAD = "paper"  # of the first column


def labels(text):
    return [label for label in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) if label != HEAD]


LABELS = labels(PAGE)
WITHOUT = labels(PAGE[PAGE.index("## Without a function") :])


def find(path):
    """Return the object of a dotted path."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def numbers(labels):
    return {int(number) for label in labels for number in re.findall(r"\((\d+)\)", label)}


def test_every_row_of_every_table_is_read():
    by_command = re.findall(r"^\|.*`pfedbayes paper results`", PAGE, re.MULTILINE)
    assert len(ROWS) + len(by_command) + len(WITHOUT) == len(LABELS)


@pytest.mark.parametrize(("label", "path"), ROWS)
def test_the_function_exists_and_names_its_equation(label, path):
    assert label in (inspect.getdoc(find(path)) or "")


def test_every_equation_is_there_and_has_a_function_or_a_reason():
    """The paper numbers its equations from 1 to 28 before the appendix."""
    assert numbers(LABELS) == set(range(1, 29))
    assert numbers(label for label, _ in ROWS).isdisjoint(numbers(WITHOUT))


@pytest.mark.parametrize(
    "label",
    ["Algorithm 1", "Lemma 1", "Lemma 2", "Lemma A.1", "Lemma A.2", "Theorem 1", "Table 1", "Table 2", "Table 3",
     "Figure 1", "Figure 2", "Figure 3"],
)  # fmt: skip
def test_every_result_table_and_figure_is_there(label):
    assert any(label in each.split(", ") for each in LABELS)


def test_the_commands_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"`pfedbayes paper ([\w-]+)`", PAGE))
    assert {"table1", "table2", "table3", "figure3", "results", "bound"} <= named <= known


def test_the_pages_exist():
    pages = re.findall(r"\]\((results/\w+\.md)\)", PAGE)
    assert len(pages) == 5
    assert all((Path(__file__).parents[2] / "docs" / page).exists() for page in pages)
