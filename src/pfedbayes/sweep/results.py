"""What is kept of the cells of a sweep: records in JSON files, of one cell or of many."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.runs.execution import other_config
from pfedbayes.sweep import scores
from pfedbayes.sweep.cells import Cell
from pfedbayes.sweep.scores import Record

Results = dict[str, list[Record]]  # by cell
LONGEST_BYTES = 240  # of a name, which "." and ".json.part" go around; most file systems allow 255


def read_results(path: Path) -> Results:
    """The records of a file by cell."""
    results: Results = {}
    for record in scores.read(path):
        results.setdefault(record["cell"], []).append(record)
    return results


def write_results(path: Path, results: Results) -> None:
    """All records in one file, a line each, in an order that does not depend on who ran what."""
    records = sorted(
        (record for records in results.values() for record in records),
        key=lambda record: (record["cell"], record["seed"], record["variant"]),
    )
    lines = ",\n".join(json.dumps(record, allow_nan=False, ensure_ascii=False) for record in records)
    with runs.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_file(path, f"[\n{lines}\n]\n")


def result_file(out: Path, name: str) -> Path:
    """Where a sweep keeps the results of a cell."""
    return out / "cells" / f"{_for_files(name)}.json"


def run_folder(out: Path, name: str) -> Path:
    """Where a sweep keeps a cell that is under way."""
    return out / "runs" / _for_files(name)


def _for_files(name: str) -> str:
    """A cell is named after all that it varies: where that is too long for a file, the end is a digest."""
    encoded = name.encode()
    if len(encoded) <= LONGEST_BYTES:
        return name
    digest = "_" + hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: LONGEST_BYTES - len(digest)].decode(errors="ignore") + digest


def gather(out: Path, files: Iterable[Path] = ()) -> Results:
    """What is known already: from these files and, before them, from the folder of the sweep."""
    results: Results = {}
    for path in [*files, *sorted((out / "cells").glob("*.json"))]:
        results = merge(results, read_results(path))
    return results


def merge(results: Results, later: Results) -> Results:
    """Both of them. Of a seed of a cell that is in both, the later records; of a cell that was made again with other
    settings, the later ones alone."""
    both = dict(results)
    for name, records in later.items():
        before, anew = results.get(name, []), {record["seed"] for record in records}
        if _made_with(before) != _made_with(records):
            before = []
        both[name] = [record for record in before if record["seed"] not in anew] + records
    return both


def _made_with(records: Iterable[Record]) -> dict[str, Any]:
    """The settings of a cell but for its seeds."""
    settings: dict[str, Any] = next((record["settings"] for record in records if "settings" in record), {})
    return {key: value for key, value in settings.items() if key != "seeds"}


def seeds_to_do(cell: Cell, results: Results) -> tuple[int, ...]:
    """The seeds of a cell that have no results yet: all, none, or those that it was given later."""
    done = {record["seed"] for record in results.get(cell.name, [])}
    return tuple(seed for seed in cell.seeds if seed not in done)


def changed(cells: Iterable[Cell], results: Results) -> dict[str, str]:
    """Cells whose results were made with other settings, or for seeds that they no longer have, and which those were.
    That they now have more seeds is no change."""
    differing: dict[str, str] = {}
    for cell in cells:
        records, now = results.get(cell.name, []), cell.settings
        seeds = sorted({record["seed"] for record in records})
        for made in (record["settings"] for record in records if "settings" in record):
            before = made | {"seeds": now["seeds"] if set(seeds) <= set(cell.seeds) else seeds}
            for key in sorted(before.keys() | now.keys()):
                if before.get(key) != now.get(key):
                    was, is_now = (json.dumps(settings.get(key, "default")) for settings in (before, now))
                    differing.setdefault(cell.name, f"{key} was {was} and is {is_now}")
    return differing


def changed_under_way(cells: Iterable[Cell], out: Path, results: Results) -> list[str]:
    """Cells that were begun with other settings."""
    found = []
    for cell in cells:
        folder, seeds = run_folder(out, cell.name), seeds_to_do(cell, results)
        begun = seeds and (folder / runs.INFO).exists()
        if begun and other_config(runs.read(folder), cell.experiment, seeds):
            found.append(cell.name)
    return found


def refuse_changed(cells: Iterable[Cell], results: Results) -> None:
    """Results of one name but of different settings are never mixed."""
    for name, how in changed(cells, results).items():
        raise UserError(
            f"{name} was made with other settings ({how}): add --redo to run it again, or give another --out"
        )


def forget(out: Path, names: Iterable[str], results: Results) -> Results:
    """The results without these cells, and the folder of the sweep without what it has of them."""
    dropped = set(names)
    for name in dropped:
        result_file(out, name).unlink(missing_ok=True)
        shutil.rmtree(run_folder(out, name), ignore_errors=True)
    return {name: records for name, records in results.items() if name not in dropped}
