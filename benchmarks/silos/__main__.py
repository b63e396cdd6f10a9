"""Compare methods on real tables with what one would do without this package, and write the page on the results.

    python -m benchmarks.silos DATA_DIR [--workers 2]
    python -m benchmarks.silos DATA_DIR --tables heart,cars --splits 3
    python -m benchmarks.silos --table clinics.csv:outcome:hospital --out clinics.json
    python -m benchmarks.silos --render

DATA_DIR holds the files that benchmarks/silos/tables.toml names. Every finished job leaves a record under --records;
run the command again to continue after a stop. It adds the records to the results and keeps what is there already. It
needs the packages of requirements/dev.txt; `python -m benchmarks.silos.elsewhere` trains on a machine without them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.silos import flamby, jobs, newcomers, ours, rivals, survival
from benchmarks.silos.elsewhere import WINDOWS, activity_jobs
from benchmarks.silos.jobs import Circumstances, Job
from benchmarks.silos.merging import merged
from benchmarks.silos.page import render
from benchmarks.silos.records import collect, read_records
from benchmarks.silos.tables import TABLES, Table, parse_table, read_frame, read_reasons, read_tables, task_of
from pfedbayes.errors import UserError, nearest
from pfedbayes.runs import write_file

PAGE = Path("docs/results/silos.json")
RECORDS, QUICK = Path("runs/silos"), Path("runs/silos-quick")
PROTOCOLS = ("tables", "newcomers", "heart", "survival", "activity")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.silos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_dir", type=Path, nargs="?", help="the folder with the tables")
    parser.add_argument("--tables", type=_names, help="names of tables, separated by commas (default: all)")
    parser.add_argument(
        "--table", action="append", default=[], metavar="FILE:TARGET:CLIENT", help="a table of your own; repeatable"
    )
    parser.add_argument("--tables-file", type=Path, help="a TOML file with tables of your own, as tables.toml")
    parser.add_argument("--splits", type=int, default=10, help="random splits per table (default: 10)")
    parser.add_argument(
        "--methods", type=_names, help="methods and rivals of tables and heart, separated by commas (default: all)"
    )
    parser.add_argument(
        "--protocols", type=_names, help=f"{', '.join(PROTOCOLS)} (default: all; with chosen tables: tables)"
    )
    parser.add_argument("--out", type=Path, help=f"the results, with the page beside (default: {PAGE})")
    parser.add_argument("--records", type=Path, help=f"the folder of the records (default: {RECORDS})")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each (default: 1)")
    parser.add_argument("--retry", action="store_true", help="run failed jobs again")
    parser.add_argument("--again", action="store_true", help="run the chosen jobs again, also finished ones")
    parser.add_argument(
        "--quick", action="store_true", help=f"a trial: one split, little activity data, results in {QUICK}"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing: write the page from the results")
    wanted = parser.parse_args(argv)
    wanted.records = wanted.records or (QUICK if wanted.quick else RECORDS)
    wanted.out = wanted.out or (QUICK / PAGE.name if wanted.quick else PAGE)
    return wanted


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: list[str] | None = None) -> None:
    wanted = arguments(argv)
    # For the workers, which start afresh: one thread each.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

    if wanted.render:
        results: dict[str, Any] = json.loads(wanted.out.read_text())
    else:
        planned = plan(wanted)
        if wanted.workers < 1:
            raise UserError(f"--workers is {wanted.workers}: give at least 1")
        left = planned if wanted.again else jobs.unfinished(planned, wanted.records, wanted.retry)
        print(f"{len(planned) - len(left)} of {len(planned)} jobs are done", file=sys.stderr, flush=True)
        jobs.run(left, Circumstances.here(wanted.records, wanted.workers))
        results = collect(read_records(wanted.records))
        if wanted.out.exists():
            results = merged(json.loads(wanted.out.read_text()), results)
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        write_file(wanted.out, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page = render(results, read_reasons())
    write_file(wanted.out.with_suffix(".md"), page)
    print(page)


def plan(wanted: argparse.Namespace) -> list[Job]:
    """Return the jobs of a call, split by split, so that a stopped benchmark has whole splits."""
    own = {table.name: table for table in map(parse_table, wanted.table)}
    if wanted.tables_file:
        own |= read_tables(wanted.tables_file)
    tables = own | (read_tables(TABLES, wanted.data_dir) if wanted.data_dir else {})
    if not tables:
        raise UserError("there are no tables: give DATA_DIR, --table or --tables-file")
    chosen = wanted.tables or (list(tables) if not own or wanted.data_dir is None else list(own))
    for name in chosen:
        if name not in tables:
            raise UserError(f"there is no table {name!r}: {nearest(name, tables)}")
    protocols = wanted.protocols or (PROTOCOLS if wanted.data_dir and not wanted.tables and not own else ("tables",))
    for name in protocols:
        if name not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r}: {nearest(name, PROTOCOLS)}")
    if set(protocols) - {"tables", "newcomers"} and not wanted.data_dir:
        raise UserError(f"the protocols {', '.join(PROTOCOLS[2:])} need DATA_DIR: give it first")
    names = {task: [*ours.METHODS, *rivals.rivals_for(task)] for task in rivals.LOCAL}
    asked = wanted.methods and [name.replace("_", "-") if "_" in name else name for name in wanted.methods]
    everything = {*flamby.RIVALS, *(name for known in names.values() for name in known)}
    for name in asked or ():
        if name not in everything:
            raise UserError(f"there is no method {name!r}: {nearest(name, everything)}")

    def selected(methods: Any) -> list[str]:
        return [name for name in methods if asked is None or name in asked]

    splits = range(1 if wanted.quick else wanted.splits)
    planned: list[Job] = []
    if "tables" in protocols:
        tasks = {name: task_of(tables[name], read_frame(tables[name])) for name in chosen}
        planned += [
            Job("tables", tables[name], split, method)
            for split in splits
            for name in chosen
            for method in selected(names[tasks[name]])
        ]
    if "newcomers" in protocols:
        seeds = range(1 if wanted.quick else min(wanted.splits, newcomers.SEEDS))
        planned += [
            Job("newcomers", tables[name], seed, method)
            for seed in seeds
            for name in chosen
            for method in newcomers.METHODS
        ]
    if "heart" in protocols:
        methods = selected([*ours.METHODS, *flamby.RIVALS])
        seeds = range(1 if wanted.quick else flamby.SEEDS)
        planned += [Job("heart", tables["heart"], seed, method) for seed in seeds for method in methods]
    if "survival" in protocols:
        table = Table("tcga_brca", wanted.data_dir / "silos/tcga_brca.csv", survival.DAYS, survival.REGION)
        planned += [Job("survival", table, 0, method) for method in survival.methods(survival.read(table.path))]
    if "activity" in protocols:
        planned += activity_jobs(wanted.data_dir / "silos" / WINDOWS, wanted.quick)
    return planned


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
