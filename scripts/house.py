"""Print the countable goals of the code base; exit with 1 if one is missed.

    python scripts/house.py

| number | how it is counted |
|---|---|
| flat modules | files `src/pfedbayes/*.py` other than `__init__` and `__main__` |
| names on Method | public attributes of `pfedbayes.methods.Method` |
| largest source file | lines of the longest file in `src/pfedbayes` |
| string-key look-ups into run files | see `look_ups` |
| README lines | lines of `README.md` |
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pfedbayes.methods import Method

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pfedbayes"
ENTRANCES = {"__init__", "__main__"}
# Names of variables and attributes that hold the content of a run folder.
RUN_FILES = {"info", "config", "summary", "journal", "rounds", "record", "entry"}
# Names that mean it as attributes only, as in `run.sections`: the variable holds a config that is still being read.
ATTRIBUTES = {"sections"}
# Rooms whose `record` belongs to other files: the results of sweeps and of measurements.
OTHER_RECORDS = {"sweep", "paper"}


class Number(NamedTuple):
    """A counted property of the code base."""

    name: str
    value: int
    at_most: int
    where: str = ""
    """What to look at if the goal is missed."""

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.value <= self.at_most


def look_ups(path: Path) -> Iterator[int]:
    """Yield the lines of a file that look a value of a run folder up by a string key.

    A look-up is `X["key"]`, `X.get("key")` or `"key" in X`. X is a variable or an attribute named in RUN_FILES, or
    is reached from one through subscripts, calls of `get`, and `or`. Examples: `run.info["seeds"]`,
    `(run.summary or {}).get("clients")`, `run.rounds[-1]["personal"]`.
    """
    names = RUN_FILES - ({"record"} if path.relative_to(SOURCE).parts[0] in OTHER_RECORDS else set())
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Subscript(value=holder, slice=ast.Constant(value=str()))
                | ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str()), *_])
                | ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()], comparators=[holder])
            ):
                if _holds_run_file(holder, names):
                    yield holder.lineno


def _holds_run_file(holder: ast.expr, names: set[str]) -> bool:
    match holder:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(attr=name):
            return name in names | ATTRIBUTES
        case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner, attr="get")):
            return _holds_run_file(inner, names)
        case ast.BoolOp(values=[first, *_]):
            return _holds_run_file(first, names)
    return False


def count() -> list[Number]:
    """Count everything."""
    files = sorted(SOURCE.rglob("*.py"))
    flat = [path.stem for path in SOURCE.glob("*.py") if path.stem not in ENTRANCES]
    on_method = [name for name in dir(Method) if not name.startswith("_")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    longest = max(lengths, key=lambda path: lengths[path])
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in look_ups(path)]
    readme = len((ROOT / "README.md").read_text().splitlines())
    return [
        Number("flat modules", len(flat), 4, ", ".join(sorted(flat))),
        Number("names on Method", len(on_method), 18, ", ".join(on_method)),
        Number("largest source file, lines", lengths[longest], 400, str(longest.relative_to(ROOT))),
        Number("string-key look-ups into run files", len(found), 0, ", ".join(found)),
        Number("README lines", readme, 120, "README.md"),
    ]


def main() -> int:
    """Print a line per number; return the exit code."""
    numbers = count()
    for number in numbers:
        missed = "" if number.met else f"  missed: {number.where}"
        print(f"{number.name:<36}{number.value:>5}  at most {number.at_most}{missed}")
    return 0 if all(number.met for number in numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
