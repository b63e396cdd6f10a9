"""The folder of a sweep: records in JSON files, run folders, and the claims of the workers that share it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import BLANK, FIELD, seal
from pfedbayes.files.locking import lock
from pfedbayes.files.writing import open_to_write
from pfedbayes.runs.resume import other_config
from pfedbayes.sweep import scores
from pfedbayes.sweep.cells import Cell
from pfedbayes.sweep.scores import Record

Results = dict[str, list[Record]]  # by cell
LONGEST_BYTES = 240  # of a file name without its "." and ".json.part"; most file systems allow 255


def read_results(path: Path) -> Results:
    """Read the records of a file, by cell."""
    results: Results = {}
    for record in scores.read_records(path):
        results.setdefault(record["cell"], []).append(record)
    return results


def write_results(path: Path, results: Results) -> None:
    """Write all records to one file, a line each, in an order that does not depend on the order of the runs."""
    records = sorted(
        (record for records in results.values() for record in records),
        key=lambda record: (record["cell"], record["seed"], record["variant"]),
    )
    lines = ",\n".join(json.dumps(record, allow_nan=False, ensure_ascii=False) for record in records)
    with runs.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_file(path, seal(f'{{"{FIELD}": "{BLANK}", "records": [\n{lines}\n]}}') + "\n")


def result_file(out: Path, name: str) -> Path:
    """Return the file with the results of a cell."""
    return out / "cells" / f"{_for_files(name)}.json"


def run_folder(out: Path, name: str) -> Path:
    """Return the run folder of an unfinished cell."""
    return out / "runs" / _for_files(name)


def _for_files(name: str) -> str:
    """Return a cell name as a file name: a name that is too long is cut and ends in a digest."""
    encoded = name.encode()
    if len(encoded) <= LONGEST_BYTES:
        return name
    digest = "_" + hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: LONGEST_BYTES - len(digest)].decode(errors="ignore") + digest


@contextmanager
def claim(out: Path, name: str, wait: bool = False) -> Iterator[bool]:
    """Claim a cell, so that no other worker touches it; yield whether it was free.

    The claim ends with this context, or with the process. wait: wait until it is free.
    """
    path = out / "locks" / _for_files(name)
    with runs.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_write(path)
    with file:
        yield lock(file, wait=wait)


def read_cell(out: Path, name: str) -> Results:
    """Read the results of a cell that are in the folder of the sweep now; another worker may have written them."""
    path = result_file(out, name)
    return read_results(path) if path.exists() else {}


def gather(out: Path, files: Iterable[Path] = ()) -> Results:
    """Merge the results of the files with those of the sweep folder, which take precedence."""
    results: Results = {}
    for path in [*files, *sorted((out / "cells").glob("*.json"))]:
        results = merge(results, read_results(path))
    return results


def merge(results: Results, later: Results) -> Results:
    """Merge two results; the later records of a seed win, and those of a cell with other settings stand alone."""
    both = dict(results)
    for name, records in later.items():
        before, anew = results.get(name, []), {record["seed"] for record in records}
        if _made_with(before) != _made_with(records):
            before = []
        both[name] = [record for record in before if record["seed"] not in anew] + records
    return both


def _made_with(records: Iterable[Record]) -> dict[str, Any]:
    """Return the settings of a cell without its seeds."""
    settings: dict[str, Any] = next((record["settings"] for record in records if "settings" in record), {})
    return {key: value for key, value in settings.items() if key != "seeds"}


def seeds_to_do(cell: Cell, results: Results) -> tuple[int, ...]:
    """Return the seeds of a cell that have no results yet."""
    done = {record["seed"] for record in results.get(cell.name, [])}
    return tuple(seed for seed in cell.seeds if seed not in done)


def changed(cells: Iterable[Cell], results: Results) -> dict[str, str]:
    """Return the cells whose results have other settings, or seeds that the cell no longer has, with the difference.

    Additional seeds of a cell are not a change.
    """
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
    """Return the unfinished cells that were started with other settings."""
    found = []
    for cell in cells:
        folder, seeds = run_folder(out, cell.name), seeds_to_do(cell, results)
        begun = seeds and (folder / runs.INFO).exists()
        if begun and other_config(runs.read_run(folder), cell.experiment, seeds):
            found.append(cell.name)
    return found


def refuse_changed(cells: Iterable[Cell], results: Results) -> None:
    """Raise UserError if a cell has results with other settings."""
    for name, how in changed(cells, results).items():
        raise UserError(
            f"{name} was made with other settings ({how}): add --redo to run it again, or give another --out"
        )


def redo(cells: Iterable[Cell], out: Path, results: Results) -> Results:
    """Delete the cells that were made with other settings, finished or not; return the results without them.

    A cell that another worker holds is left to it, and so is one that another worker has made again meanwhile.
    """
    kept = dict(results)
    for cell in cells:
        if not changed([cell], results) and not changed_under_way([cell], out, results):
            continue
        kept.pop(cell.name, None)
        with claim(out, cell.name) as free:
            now = read_cell(out, cell.name) if free else {}
            if now and not changed([cell], now):
                kept |= now
            elif free:
                result_file(out, cell.name).unlink(missing_ok=True)
                shutil.rmtree(run_folder(out, cell.name), ignore_errors=True)
    return kept
