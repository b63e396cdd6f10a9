"""Trace a small `pfedbayes run` and compare it with the walk in docs/design.md.

    python scripts/hops.py

It looks at the first call of every function in src/pfedbayes: how many files these functions are in, how often the next
one is in another file, and which steps of the walk are called in the order of the list.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pfedbayes
from pfedbayes.cli import main as command_line

SOURCE = f"{Path(pfedbayes.__file__).parent}/"
PAGE = Path(__file__).parents[1] / "docs" / "design.md"
SETTINGS = (
    "data.name=blobs", "data.clients=3", "data.validation=0.2", "net.hidden=[8]", "training.rounds=2",
    "training.local_steps=2",
)  # fmt: skip


def steps() -> list[str]:
    """Return the walk from `pfedbayes run` to report.html as `file:function`."""
    text = PAGE.read_text()
    walk = text[text.index("### A training run") : text.index("### A prediction")]
    return re.findall(r"^\d+\. `([\w/]+\.py:[\w.]+)`", walk, re.MULTILINE)


def trace(arguments: list[str]) -> list[str]:
    """Run a command; return the functions that it calls as `file:function`, each where it is called first."""
    first: dict[str, None] = {}

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code  # bodies of modules and classes, which imports execute, are not optimised
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_flags & inspect.CO_OPTIMIZED:
            file, function = code.co_filename.removeprefix(SOURCE), code.co_qualname
            first.setdefault(f"{file}:{function.removesuffix('.__init__')}")

    sys.argv = ["pfedbayes", *arguments]
    sys.setprofile(on_event)
    try:
        command_line()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return list(first)


def main() -> None:
    """Print the counts."""
    with tempfile.TemporaryDirectory() as folder:
        options = [part for setting in SETTINGS for part in ("--set", setting)]
        called = trace(["run", "--out", f"{folder}/run", "--device", "cpu", *options])
    files = [name.split(":")[0] for name in called]
    changes = sum(before != after for before, after in pairwise(files))
    at = [called.index(step) for step in steps() if step in called]
    early = [called[place] for k, place in enumerate(at) if place < max(at[: k + 1])]
    print(f"{len(called)} functions in {len(set(files))} files, {changes} changes of file")
    print(f"{len(at)} of {len(steps())} steps called, {len(at) - len(early)} in the listed order")
    print("not called:", *[step for step in steps() if step not in called])
    print("earlier than listed:", *early)


if __name__ == "__main__":
    main()
