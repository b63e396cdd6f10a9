import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "paper_map.md"
ROWS = re.findall(r"^\| ([^|]+) \|[^|]+\| `([\w.]+)` \|$", PAGE.read_text(), re.MULTILINE)


def find(path):
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


def test_every_line_of_the_table_is_read():
    assert len(ROWS) == sum(line.startswith("| ") for line in PAGE.read_text().splitlines()) - 1 >= 15


@pytest.mark.parametrize(("label", "path"), ROWS)
def test_the_function_exists_and_names_its_equation(label, path):
    assert label in (inspect.getdoc(find(path)) or "")
