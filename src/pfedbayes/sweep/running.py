"""Run the cells of a sweep one after another."""

from __future__ import annotations

import gc
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pfedbayes import runs
from pfedbayes.errors import Diverged, UserError, one_line
from pfedbayes.memory import give_back_locked_memory
from pfedbayes.runs.execute import Progress, execute
from pfedbayes.sweep import scores
from pfedbayes.sweep.cells import Cell
from pfedbayes.sweep.results import (
    Results,
    claim,
    merge,
    read_cell,
    refuse_changed,
    result_file,
    run_folder,
    seeds_to_do,
    write_results,
)
from pfedbayes.sweep.scores import Record

START_SECONDS = 30.0  # do not start a cell with less time than this before the deadline


@dataclass(frozen=True)
class Status:
    """The state of a sweep after a round."""

    cell: Cell
    number: int
    """Number of the cell, from 1."""
    count: int
    """Number of cells."""
    round: int
    cell_left: float | None
    """Estimated seconds until the cell is done; None if unknown."""
    sweep_left: float | None
    """Estimated seconds until the sweep is done; None if unknown."""


@dataclass
class Outcome:
    """The end of a sweep."""

    results: Results
    failed: dict[str, str] = field(default_factory=dict)
    """Failed cells with the reason in one line."""
    held: list[str] = field(default_factory=list)
    """Cells that another worker was running."""


def run(
    cells: Sequence[Cell],
    out: Path,
    results: Results,
    device: str = "auto",
    data_dir: Path | None = None,
    deadline: float = float("inf"),
    stopped: Callable[[], bool] = lambda: False,
    tell: Callable[[Status], None] = lambda status: None,
    keep: Callable[[Results], None] = lambda results: None,
    complain: Callable[[str, str], None] = lambda name, reason: None,
) -> Outcome:
    """Run the cells that lack results of some seeds.

    deadline: stop at this time of time.monotonic.
    stopped: returns whether to stop after the current round.
    tell: called after every round.
    keep: called with all results after every cell.
    complain: called with the name of a failed cell and the reason.
    """
    outcome = Outcome(dict(results))
    with runs.writing(out):
        (out / "cells").mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(cells, 1):
        if seeds_to_do(cell, outcome.results):
            if stopped() or time.monotonic() > deadline - START_SECONDS:
                continue
            ahead = [other for other in cells[number:] if seeds_to_do(other, outcome.results)]
            with claim(out, cell.name) as free:
                if not free:
                    outcome.held.append(cell.name)
                    continue
                try:
                    outcome.results = merge(outcome.results, read_cell(out, cell.name))
                    refuse_changed([cell], outcome.results)
                    if seeds := seeds_to_do(cell, outcome.results):
                        part = replace(cell, seeds=seeds)
                        clock = _TimeLeft(part, number, len(cells), ahead, outcome.results)
                        records = _run_cell(
                            part, out, device, data_dir, lambda: stopped() or time.monotonic() > deadline, clock, tell
                        )
                        if records is None:
                            continue
                        outcome.results = merge(outcome.results, {cell.name: records})
                        write_results(result_file(out, cell.name), {cell.name: outcome.results[cell.name]})
                        keep(outcome.results)
                except Exception as error:  # an error in one cell does not stop the others
                    if not isinstance(error, UserError):
                        traceback.print_exc()
                    outcome.failed[cell.name] = _describe(error)
                    complain(cell.name, _describe(error))
                    continue
                finally:
                    _free_memory()
        reasons = [record["diverged"] for record in outcome.results[cell.name] if "diverged" in record]
        if reasons:
            outcome.failed[cell.name] = reasons[0]
        _remove_run(cell, out)
    return _look_again(cells, out, outcome)


def _remove_run(cell: Cell, out: Path) -> None:
    """Delete the run folder of a finished cell, unless another worker runs further seeds in it."""
    folder = run_folder(out, cell.name)
    if folder.exists():
        with claim(out, cell.name) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)


def _look_again(cells: Sequence[Cell], out: Path, outcome: Outcome) -> Outcome:
    """Return the outcome with the cells that other workers have finished meanwhile."""
    for name in outcome.held:
        outcome.results = merge(outcome.results, read_cell(out, name))
    outcome.held = [cell.name for cell in cells if cell.name in outcome.held and seeds_to_do(cell, outcome.results)]
    return outcome


def _free_memory() -> None:
    """Free what a cell has left behind: the next cell compiles other programs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()
        give_back_locked_memory()


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"


def _run_cell(
    cell: Cell,
    out: Path,
    device: str,
    data_dir: Path | None,
    enough: Callable[[], bool],
    clock: _TimeLeft,
    tell: Callable[[Status], None],
) -> list[Record] | None:
    """Return the records of a cell, or None if it was interrupted: its run folder then holds a checkpoint."""
    if cell.lacks:
        raise UserError(cell.lacks)
    folder = run_folder(out, cell.name)
    names = {**cell.facts, "cell": cell.name, "varied": cell.varied}
    resume = (folder / runs.INFO).exists()
    rounds = execute(cell.experiment, folder, cell.seeds, device, resume, data_dir)
    try:
        for step in rounds:
            tell(clock.after(step))
            if enough() and step.round < step.rounds:
                rounds.close()
                return None
    except Diverged as error:
        return scores.diverged(names, cell.settings, runs.read_run(folder), str(error))
    return scores.records(names, cell.settings, runs.read_run(folder))


class _TimeLeft:
    """Estimate how long a cell and the cells after it take, from finished cells of the same kind."""

    def __init__(self, cell: Cell, number: int, count: int, ahead: Sequence[Cell], results: Results) -> None:
        self._cell, self._number, self._count, self._ahead = cell, number, count, ahead
        self._known: dict[tuple[str, str], list[float]] = {}
        for records in results.values():
            kind = records[0]["method"], records[0]["dataset"]
            self._known.setdefault(kind, []).append(scores.seconds(records))
        self._start: tuple[int, float] | None = None

    def after(self, step: Progress) -> Status:
        """Return the state of the sweep after a round of the cell."""
        now = time.monotonic()
        self._start = self._start or (step.round, now)
        first, begun = self._start
        left = None
        if step.round > first:  # the first round also compiles
            left = (now - begun) / (step.round - first) * (step.rounds - step.round)
        own = step.seconds + left if left is not None else None
        ahead = [self._expected(other, own) for other in self._ahead]
        total = None if left is None or None in ahead else left + sum(seconds for seconds in ahead if seconds)
        return Status(self._cell, self._number, self._count, step.round, left, total)

    def _expected(self, cell: Cell, own: float | None) -> float | None:
        """Return the mean time of cells of the same kind, else of the same method, else that of the current cell."""
        same_kind = self._known.get(cell.kind, [])
        same_method = [s for (method, _), each in self._known.items() if method == cell.kind[0] for s in each]
        for known in (same_kind, same_method):
            if known:
                return sum(known) / len(known)
        return own
