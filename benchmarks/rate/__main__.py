"""Measure the rate and write the page.

    python -m benchmarks.rate [--device cuda] [--replicates 5] [--out docs/results]

The measurements are kept in theory.json, one point of a curve after another. Run the command again to continue.
`pfedbayes paper results` also writes the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.race import ROOT
from benchmarks.rate.measure import measure_all
from benchmarks.rate.units import CHANGED, CHANGED_REPLICATES, MAIN, SIZES, Unit, unit_of
from benchmarks.worker import cores
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import BLANK, FIELD, seal
from pfedbayes.paper import rate, results
from pfedbayes.runs import describe_code, describe_machine, now, write_file

FOLDER = ROOT / "docs" / "results"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--replicates", type=int, default=5, help="federations per point, each with its own functions")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="measure only these n")
    parser.add_argument("--rounds", type=int, help="number of rounds, for a short trial")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of theory.json and the page")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    wanted = arguments(argv)
    raw = wanted.out / results.THEORY
    kept = rate.read_records(raw) if raw.exists() else {"records": []}
    units = [unit for unit in (*MAIN, *CHANGED) if not wanted.sizes or unit.size in wanted.sizes]
    if not units:
        raise UserError(f"no curve has a point at these n: choose from {', '.join(map(str, SIZES))}")
    if wanted.rounds:
        units = [dataclasses.replace(unit, rounds=wanted.rounds) for unit in units]
    device = choose_device(wanted.device)
    wanted.out.mkdir(parents=True, exist_ok=True)
    kept["about"] = {"date": now(), "commit": describe_code()["commit"], "machine": describe_machine()}
    for records in missing(units, wanted.replicates, kept["records"], device):
        kept["records"] += records
        text = json.dumps({FIELD: BLANK} | kept, ensure_ascii=False).replace('{"series"', '\n{"series"')
        write_file(raw, seal(text) + "\n")
    for path in results.write_theory(wanted.out):
        say(f"wrote {path}")


def to_do(units: list[Unit], replicates: int, records: list[dict[str, Any]]) -> dict[Unit, list[int]]:
    """Return the replicates of each unit that have no record."""
    have = {(unit_of(record), record["replicate"]) for record in records}
    most = {unit: min(replicates, CHANGED_REPLICATES) if unit.series in rate.CHANGES else replicates for unit in units}
    left = {unit: [r for r in range(1, most[unit] + 1) if (unit, r) not in have] for unit in units}
    return {unit: numbers for unit, numbers in left.items() if numbers}


def missing(
    units: list[Unit], replicates: int, records: list[dict[str, Any]], device: str
) -> Iterator[list[dict[str, Any]]]:
    """Measure the missing replicates unit by unit: one process per core, or one for a GPU."""
    work = to_do(units, replicates, records)
    began = time.monotonic()
    workers = 1 if device == "cuda" else cores()
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, context) as pool:
        waiting = [pool.submit(measure_all, unit, numbers, device) for unit, numbers in work.items()]
        for done, future in enumerate(as_completed(waiting), start=1):
            measured = future.result()
            yield measured
            spent = time.monotonic() - began
            unit = unit_of(measured[0])
            left = spent / done * (len(work) - done)
            say(f"{done}/{len(work)}  {unit.series}, n = {unit.size}  {spent:.0f} s, about {left:.0f} s left")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
