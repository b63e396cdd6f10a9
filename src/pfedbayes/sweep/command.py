"""The command `pfedbayes sweep`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedbayes import runs
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.sweep import scores
from pfedbayes.sweep.cells import Cell, parse_part, read_cells, select
from pfedbayes.sweep.choosing import choose
from pfedbayes.sweep.results import (
    Results,
    claim,
    gather,
    merge,
    read_results,
    redo,
    refuse_changed,
    run_folder,
    seeds_to_do,
    write_results,
)
from pfedbayes.sweep.running import Outcome, Status, run

SHOW_SECONDS = 10.0  # seconds between two progress lines
ALL_RESULTS = ".results"  # the claim on the file of --results


@dataclass(frozen=True)
class Options:
    """The options of the command; see its help."""

    out: Path
    device: str = "auto"
    data_dir: Path | None = None
    minutes: float | None = None
    results: Path | None = None
    imports: tuple[Path, ...] = ()
    collect: bool = False
    choose: Path | None = None
    redo: bool = False
    dry_run: bool = False


def command(
    file: Path,
    only: Sequence[str],
    part: str,
    options: Options,
    stopped: Callable[[], bool],
    console: Console,
) -> dict[str, Any]:
    """Run the command; return the object of --json."""
    begun = time.monotonic()
    cells = read_cells(file)
    chosen = select(cells, only, parse_part(part))
    if not chosen:
        console.print(f"part {part} is empty: there are more parts than cells", soft_wrap=True)
    if options.collect and options.results is None:
        raise UserError("--collect needs a file to write: give --results FILE")
    kept = read_results(options.results) if options.results and options.results.exists() else {}
    results = merge(kept, gather(options.out, options.imports))
    if options.redo and not options.dry_run:
        results = redo(chosen, options.out, results)
    refuse_changed(chosen, results)
    if options.dry_run:
        _list(chosen, results, options.out)
        return _outcome(chosen, Outcome(results), begun)

    if options.choose:
        for line in choose(chosen, results, options.choose):
            console.print(line, soft_wrap=True, markup=False, emoji=False)
        return _outcome(chosen, Outcome(results), begun)

    def keep(known: Results) -> None:
        if options.results:
            with claim(options.out, ALL_RESULTS, wait=True):  # workers that share the folder may share the file
                write_results(options.results, merge(known, gather(options.out)))

    outcome = Outcome(results)
    if not options.collect:
        choose_device(options.device)
        deadline = math.inf if options.minutes is None else begun + 60 * options.minutes
        outcome = run(
            chosen, options.out, results, options.device, options.data_dir, deadline, stopped, _Teller(console), keep,
            lambda name, reason: _tell_failure(name, reason, console),
        )  # fmt: skip
    if outcome.results:
        keep(outcome.results)
    found = _outcome(chosen, outcome, begun)
    _sum_up(found, outcome, console)
    return found


def _outcome(cells: Sequence[Cell], outcome: Outcome, begun: float) -> dict[str, Any]:
    return {
        "done": [cell.name for cell in cells if not seeds_to_do(cell, outcome.results)],
        "missing": [cell.name for cell in cells if seeds_to_do(cell, outcome.results)],
        "failed": outcome.failed,
        "held": outcome.held,
        "seconds": time.monotonic() - begun,
    }


def _list(cells: Sequence[Cell], results: Results, out: Path) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    for number, cell in enumerate(cells, 1):
        seeds = seeds_to_do(cell, results)
        state = "to do" if len(seeds) == len(cell.seeds) else f"{len(seeds)} to do"
        if not seeds:
            state = f"done in {scores.seconds(results[cell.name]):.0f} s"
        elif (run_folder(out, cell.name) / runs.INFO).exists():
            state = "started"
        rounds = cell.experiment.training.rounds
        console.print(f"{number:3} {cell.name}  {len(cell.seeds)} seeds, {rounds} rounds: {state}", soft_wrap=True)


class _Teller:
    """Print a line when a cell starts, and then every SHOW_SECONDS."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cell: Cell | None = None
        self._due = 0.0

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        if status.cell is not self._cell:
            self._cell, self._due = status.cell, now + SHOW_SECONDS
            seeds = f"{len(status.cell.seeds)} seed{'s'[: len(status.cell.seeds) > 1]}"
            title = f"cell {status.number} of {status.count}: {status.cell.name}, {seeds}"
            self._console.print(title, soft_wrap=True, markup=False, emoji=False)
        rounds = status.cell.experiment.training.rounds
        if now > self._due or status.round == rounds:
            self._due = now + SHOW_SECONDS
            left = [
                f"about {_duration(seconds)} left for {what}"
                for what, seconds in (("the cell", status.cell_left), ("the sweep", status.sweep_left))
                if seconds is not None
            ]
            self._console.print("  " + ", ".join([f"round {status.round}/{rounds}", *left]), soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _sum_up(found: dict[str, Any], outcome: Outcome, console: Console) -> None:
    total = len(found["done"]) + len(found["missing"])
    counts = [f"{len(found['done'])} of {total} cells done", *([f"{len(outcome.held)} held"] if outcome.held else [])]
    console.print(f"{', '.join(counts)}, in {_duration(found['seconds'])}", soft_wrap=True, markup=False, emoji=False)
    for name in found["missing"]:
        if name in outcome.held:
            console.print(f"held:    {name}: another worker is running it", soft_wrap=True, markup=False, emoji=False)
        elif name not in outcome.failed:
            console.print(f"missing: {name}", soft_wrap=True, markup=False, emoji=False)
    for name, reason in outcome.failed.items():
        _tell_failure(name, reason, console)


def _tell_failure(name: str, reason: str, console: Console) -> None:
    console.print(f"failed:  {name}: {reason}", soft_wrap=True, markup=False, emoji=False)
