"""Measure the rate and write the page.

    python -m benchmarks.rate [--device cuda] [--replicates 5] [--out docs/results/theory.md]

What is measured is kept beside the page, one point of a curve after another; run again, it goes on from there.
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
from benchmarks.rate.page import chart, render
from benchmarks.rate.units import CHANGED, CHANGED_REPLICATES, CHANGES, MAIN, Unit, unit_of
from benchmarks.worker import cores
from pfedbayes.errors import UserError
from pfedbayes.plan import choose_device
from pfedbayes.runs import describe_code, describe_machine, now, write_file

PAGE = ROOT / "docs" / "results" / "theory.md"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--replicates", type=int, default=5, help="federations per point, each with its own functions")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="only these n")
    parser.add_argument("--rounds", type=int, help="other than the default, to see that it works")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page; what was measured lies beside it")
    parser.add_argument("--render", action="store_true", help="measure nothing, make the page from what there is")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    wanted = arguments(argv)
    raw = wanted.out.with_name(f"{wanted.out.stem}.json")
    kept = json.loads(raw.read_text()) if raw.exists() else {"records": []}
    if not wanted.render:
        units = [unit for unit in (*MAIN, *CHANGED) if not wanted.sizes or unit.size in wanted.sizes]
        if wanted.rounds:
            units = [dataclasses.replace(unit, rounds=wanted.rounds) for unit in units]
        device = choose_device(wanted.device)
        kept["about"] = {"date": now(), "commit": describe_code()["commit"], "machine": describe_machine()}
        for records in missing(units, wanted.replicates, kept["records"], device):
            kept["records"] += records
            write_file(
                raw, json.dumps(kept, indent=None, ensure_ascii=False).replace('{"series"', '\n{"series"') + "\n"
            )
    if not kept["records"]:
        raise UserError(f"{raw} holds no measurements: run it without --render")
    write_file(wanted.out.with_suffix(".svg"), chart(kept["records"]))
    write_file(wanted.out, render(kept))
    say(f"wrote {wanted.out}")


def to_do(units: list[Unit], replicates: int, records: list[dict[str, Any]]) -> dict[Unit, list[int]]:
    """The replicates of each unit that are not among the records."""
    have = {(unit_of(record), record["replicate"]) for record in records}
    most = {unit: min(replicates, CHANGED_REPLICATES) if unit.series in CHANGES else replicates for unit in units}
    left = {unit: [r for r in range(1, most[unit] + 1) if (unit, r) not in have] for unit in units}
    return {unit: numbers for unit, numbers in left.items() if numbers}


def missing(
    units: list[Unit], replicates: int, records: list[dict[str, Any]], device: str
) -> Iterator[list[dict[str, Any]]]:
    """Measure what is not there yet, unit by unit: one process per core, or one for a GPU."""
    work = to_do(units, replicates, records)
    began = time.monotonic()
    workers = 1 if device == "cuda" else cores()
    context = multiprocessing.get_context("spawn")  # a forked process must not use torch's threads
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
