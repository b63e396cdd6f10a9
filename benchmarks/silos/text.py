"""Tables with their splits as text, for a machine without pandas."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silos import newcomers
from benchmarks.silos.lines import Lines
from benchmarks.silos.newcomers import Newcomers
from benchmarks.silos.tables import TEST, TRAIN, VALIDATION, Split, Table, split_table
from pfedbayes.errors import UserError
from pfedbayes.runs import write_file

SUFFIX = ".json.gz"
LETTERS = {"r": TRAIN, "v": VALIDATION, "e": TEST}


def holds(path: Path) -> bool:
    """Return whether a file holds a table with its splits."""
    return path.name.endswith(SUFFIX)


def write(folder: Path, table: Table, splits: Iterable[int], draws: Iterable[int]) -> None:
    """Write a table with its random splits and draws of newcomers."""
    letters = {part: letter for letter, part in LETTERS.items()}
    found: dict[str, dict[int, Any]] = {"tables": {}, "newcomers": {}}
    content: dict[str, Any] = {"name": table.name, "target": table.target, "client": table.client, **found}
    for number in splits:
        split = split_table(table, number)
        content |= {"task": split.task, "text": split.lines.text()}
        parts = "".join(letters[part] for part in split.parts.tolist())
        found["tables"][number] = {"parts": parts, "digest": split.digest}
    for number in draws:
        drawn = newcomers.read(table, number)
        content |= {"task": drawn.task, "text": drawn.lines.text()}
        own = {name: [rows.tolist() for rows in pair] for name, pair in drawn.own.items()}
        found["newcomers"][number] = {"groups": drawn.groups, "own": own, "digest": drawn.digest}
    folder.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(content, ensure_ascii=False).encode(), mtime=0)
    write_file(folder / f"{table.name}{SUFFIX}", packed)


def tables(folder: Path) -> dict[str, Table]:
    """Return the tables of a folder by name."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        content = _content(path)
        found[content["name"]] = Table(content["name"], path, content["target"], content["client"], (), content["task"])
    if not found:
        raise UserError(f"{folder} holds no file that ends in {SUFFIX}: write them first")
    return found


def read(table: Table, protocol: str, number: int) -> Split | Newcomers:
    """Return a split of a table, or newcomers that were drawn from it."""
    content = _content(table.path)
    one = content.get(protocol, {}).get(str(number))
    if one is None:
        raise UserError(f"{table.path} has no split {number} for the protocol {protocol}: write the file again")
    lines, target, client, task = (content[key] for key in ("lines", "target", "client", "task"))
    if protocol == "tables":
        parts = np.array([LETTERS[letter] for letter in one["parts"]])
        return Split(content["name"], lines, target, client, task, parts, one["digest"])
    groups = tuple(map(tuple, one["groups"]))
    own = {
        name: (np.array(brought, dtype=np.intp), np.array(test, dtype=np.intp))
        for name, (brought, test) in one["own"].items()
    }
    return Newcomers(lines, target, client, task, groups, own, one["digest"])


@lru_cache(maxsize=2)
def _content(path: Path) -> dict[str, Any]:
    """Return what `write` wrote, with the table as `Lines`."""
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return {**content, "lines": Lines.read(content.pop("text"))}
