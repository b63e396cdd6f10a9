"""Train the methods of this package on a machine that has neither pandas nor scikit-learn.

    python -m benchmarks.silos.elsewhere pack DATA_DIR FOLDER [--tables heart,cars]
    python -m benchmarks.silos.elsewhere run FOLDER RECORDS --protocols rates --workers 14
    python -m benchmarks.silos.elsewhere choose RECORDS
    python -m benchmarks.silos.elsewhere run FOLDER RECORDS --workers 14 --minutes 5
    python -m benchmarks.silos DATA_DIR --records RECORDS

The first command writes the tables with their splits as text. The others but the last one run on the other machine:
they try learning rates on validation rows, choose them (see rates.py; leave this out to keep them), and train on the
splits. Every job leaves a record. `--protocols activity --device cuda` trains the CNN for activities on a GPU. Copy the
records back: the last command counts them as done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from benchmarks.silos import activity, jobs, newcomers, ours, rates, text
from benchmarks.silos.jobs import Circumstances, Job
from benchmarks.silos.records import collect, read_records
from benchmarks.silos.tables import TABLES, Table, read_tables
from pfedbayes.errors import UserError, nearest
from pfedbayes.runs import write_file

SPLITS = 10
PROTOCOLS = ("tables", "newcomers", "activity", rates.PROTOCOL)
WINDOWS = "har.npz"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.silos.elsewhere",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write tables and their splits as text")
    packing.add_argument("data_dir", type=Path, help="the folder with the tables")
    packing.add_argument("folder", type=Path, help="where the text goes")
    choosing = commands.add_parser("choose", help="choose learning rates by the records of the protocol rates")
    choosing.add_argument("records", type=Path, help="the folder of the records")
    running = commands.add_parser("run", help="train on them")
    running.add_argument("folder", type=Path, help="the folder that `pack` wrote")
    running.add_argument("records", type=Path, help="the folder of the records")
    running.add_argument("--methods", type=_names, default=list(ours.METHODS), help="methods of the protocol tables")
    running.add_argument("--protocols", type=_names, default=["tables", "newcomers"], help=", ".join(PROTOCOLS))
    running.add_argument(
        "--splits", type=_numbers, help="numbers of splits or draws, separated by commas (default: all)"
    )
    running.add_argument("--workers", type=int, default=1, help="processes, of one thread each (default: 1)")
    running.add_argument("--minutes", type=float, default=float("inf"), help="start no job after this time")
    running.add_argument("--device", default="cpu", help="cpu or cuda, for activities (default: cpu)")
    for each in (packing, running):
        each.add_argument("--tables", type=_names, help="names of tables, separated by commas (default: all)")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def main(argv: list[str] | None = None) -> None:
    wanted = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers, which start afresh
    if wanted.command == "pack":
        pack(wanted.data_dir, wanted.folder, wanted.tables)
        return
    if wanted.command == "choose":
        found = rates.choose(collect(read_records(wanted.records)).get(rates.PROTOCOL, {}))
        write_file(rates.FILE, json.dumps(found, indent=1) + "\n")
        return
    left = jobs.unfinished(plan(wanted), wanted.records, retry=False)
    here = Circumstances.here(wanted.records, wanted.workers, wanted.device)
    for number, record in enumerate(jobs.finished(left, here, 60 * wanted.minutes), start=1):
        print(f"{number} of {len(left)}: {jobs.result_text(record)}", flush=True)


def pack(data_dir: Path, folder: Path, names: list[str] | None) -> None:
    """Write the tables with all splits, and the windows of the protocol for activities."""
    known = read_tables(TABLES, data_dir)
    for name in _chosen(names, known):
        text.write(folder, known[name], range(SPLITS), range(newcomers.SEEDS))
    if names is None:
        shutil.copyfile(data_dir / "silos" / WINDOWS, folder / WINDOWS)


def plan(wanted: argparse.Namespace) -> list[Job]:
    """Return the jobs split by split, so that a stopped run has whole splits."""
    for name in wanted.protocols:
        if name not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r}: {nearest(name, PROTOCOLS)}")
    for name in wanted.methods:
        if name not in ours.METHODS:
            raise UserError(f"there is no method {name!r}: {nearest(name, ours.METHODS)}")
    planned: list[Job] = []
    if set(wanted.protocols) - {"activity"}:
        known = text.tables(wanted.folder)
        chosen = _chosen(wanted.tables, known)
    if "tables" in wanted.protocols:
        planned += [
            Job("tables", known[name], split, method)
            for split in wanted.splits or range(SPLITS)
            for name in chosen
            for method in wanted.methods
        ]
    if rates.PROTOCOL in wanted.protocols:
        largest = sorted(chosen, key=lambda name: -known[name].path.stat().st_size)  # the slowest first
        planned += [
            Job(rates.PROTOCOL, known[name], 0, rates.label(method, rate))
            for name in largest
            for rate in rates.GRID
            for method in wanted.methods
            if method != ours.DEFAULT
        ]
    if "newcomers" in wanted.protocols:
        draws = wanted.splits or range(newcomers.SEEDS)
        planned += [Job("newcomers", known[name], draw, ours.DEFAULT) for draw in draws for name in chosen]
    if "activity" in wanted.protocols:
        planned += activity_jobs(wanted.folder / WINDOWS)
    return planned


def activity_jobs(path: Path, quick: bool = False) -> list[Job]:
    """Return the jobs of the protocol for activities."""
    folds = 1 if quick else activity.FOLDS
    return [
        Job("activity", Table(name, path, "y", "person"), seed, activity.METHOD, quick)
        for name, seeds in ((activity.RANDOM, range(1)), (activity.LEFT_OUT, range(folds)))
        for seed in seeds
    ]


def _chosen(names: list[str] | None, known: dict[str, Table]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no table {name!r}: {nearest(name, known)}")
    return names or list(known)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
