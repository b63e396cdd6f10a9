"""The output of `pfedbayes run`: the data, the progress, the final scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pfedbayes.cli.common import console as plain_console
from pfedbayes.cli.common import echo
from pfedbayes.errors import printable

MOST_COLUMNS = 40  # of a summary

if TYPE_CHECKING:
    from pfedbayes.engine.federation import Federation
    from pfedbayes.runs.execute import Progress as RunProgress
    from pfedbayes.runs.folder import Run
    from pfedbayes.runs.schema import RoundRecord


def describe_data(federation: Federation) -> list[str]:
    """Return lines about the user's own data; none for a published data set."""
    shards = federation.shards
    if shards.preprocessing is None:
        return []
    rows = {part: sum(map(len, getattr(shards, part))) for part in ("train", "validation", "test")}
    sizes = [f"{count:,} {part}" for part, count in rows.items() if count or part != "validation"]
    parameters = federation.model.net.num_params
    return [
        *(f"note: {note}" for note in shards.notes),
        f"data: {shards.preprocessing.describe()}",
        f"clients: {len(shards.names)}, with {', '.join(sizes)} rows; a model has {parameters:,} parameters",
    ]


def column_table(federation: Federation) -> Table | None:
    """Return a table of what each column of the user's tables is taken for; None for other data."""
    uses = federation.shards.columns
    if not uses:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("column", "taken for", "missing", ""):
        table.add_column(heading, overflow="fold", justify="right" if heading == "missing" else "left")
    shown = sorted(uses, key=lambda use: use.taken_for != "left out")[:MOST_COLUMNS]
    for use in (use for use in uses if use in shown):
        share = f"{use.missing:.1%}" if use.missing else "–"
        table.add_row(*(printable(text) for text in (use.name, use.taken_for, share, use.about)))
    if len(uses) > len(shown):
        table.add_row(f"… and {len(uses) - len(shown):,} more", "", "", "")
    return table


def show_data(console: Console, federation: Federation) -> None:
    """Print what each column is taken for, and `describe_data`, on a console."""
    if (columns := column_table(federation)) is not None:
        console.print(columns)
    for line in describe_data(federation):
        console.print(printable(line), soft_wrap=True)


def show_download(console: Console) -> Callable[[str, int, int], None]:
    """Return a callback that prints the progress of a download every 10 %."""
    shown: dict[str, float] = {}

    def show(name: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        if share - shown.get(name, -1.0) >= 0.1 or done == total:
            shown[name] = share
            console.print(f"downloading {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", soft_wrap=True)

    return show


@contextmanager
def progress(console: Console, folder: Path, rounds: int) -> Iterator[Callable[[RunProgress], None]]:
    """Show a live progress bar on a terminal, else a line per evaluation."""
    from pfedbayes import runs

    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"), BarColumn(),
        TextColumn("{task.fields[scores]}", markup=False),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    read_once = cache(runs.read_run)  # once: only clients and sizes are read from it
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rounds, scores="")

        def show(step: RunProgress) -> None:
            bar.update(task, completed=step.round)
            if step.record is None:
                return
            scores = _short_scores(read_once(folder), step.record)
            bar.update(task, scores=scores)
            if not console.is_terminal:
                left = step.seconds / step.round * (step.rounds - step.round)
                text = f"round {step.round}/{step.rounds}  {scores}  {step.seconds:.0f} s, about {left:.0f} s left"
                console.print(text, soft_wrap=True)

        yield show


def _short_scores(run: Run, record: RoundRecord) -> str:
    """Return the first metric of each model, reduced as in the final table."""
    from pfedbayes.report import tables

    parts = []
    for row in tables.headline(dataclasses.replace(run, rounds=[record], summary=None)):
        name, estimate = next(iter(row.mean.items()))
        parts.append(f"{row.model} {name} {tables.format_estimate(name, estimate)}")
    return "  ".join(parts)


def print_table(result: Run) -> None:
    """Print the final scores of each model: the mean over clients, and the worst client."""
    from pfedbayes.report import tables

    rows = tables.headline(result)
    if not rows:
        typer.echo("no client has test data, so there are no scores")
        return
    names = tables.metric_names(result)
    table = Table(title=f"round {tables.final(result).round}, {tables.estimator_title(rows[0].estimator)}")
    table.add_column("model", no_wrap=True)
    for name in names:
        label = tables.metric(name)
        table.add_column(label.label + (f" ({label.unit})" if label.unit else ""), justify="right", overflow="fold")
    for row in rows:
        lines = {"mean": row.mean, "worst": row.worst, "all rows": tables.pooled(result, row.model)}
        for title, estimates in lines.items():
            cells = (tables.format_estimate(name, estimates[name]) if name in estimates else "" for name in names)
            if estimates:
                table.add_row(f"{row.model}, {title}", *cells)
    plain_console().print(table)


def print_window(result: Run) -> None:
    """Print best, mean and last over the window of rounds, if the experiment has one."""
    from pfedbayes.report import tables

    rows, window = tables.window(result), result.experiment.training.evaluate_window
    if not rows or window is None:
        return
    name = tables.metric_names(result)[0]
    split = result.experiment.evaluation.split
    table = Table(title=f"{tables.metric(name).label} over rounds {window[0]} to {window[1]}")
    for heading in ("model", "prediction", f"best (picked on {split} data)", "mean", "last"):
        table.add_column(heading)
    for row in rows:
        figures = (tables.format_estimate(name, estimate) for estimate in (row.best, row.mean, row.last))
        table.add_row(row.model, tables.estimator_title(row.estimator), *figures)
    plain_console().print(table)


def print_joining(result: Run) -> None:
    """Print what joining bought the clients, if the run trained models alone too."""
    from pfedbayes.report import joining

    lines = joining.sentences(result)
    if lines:
        echo("what joining bought, by cross-validation:")
    for line in lines:
        echo(f"  {line}")
