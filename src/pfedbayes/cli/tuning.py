"""The search for settings: `pfedbayes tune`, and `pfedbayes run --tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pfedbayes.cli.common import (
    INTERRUPTED,
    ClientColumn,
    DataDir,
    ExperimentFile,
    OwnData,
    Settings,
    Target,
    TrainingDevice,
    console,
    echo,
    interruptible,
    overrides_of,
)
from pfedbayes.cli.output import show_download

if TYPE_CHECKING:
    from pfedbayes.runs.experiment import Experiment
    from pfedbayes.sweep.tuning import Tuning

SHOWN = 5  # settings in the printed table

Space = Annotated[
    list[str] | None,
    typer.Option(
        "--space",
        metavar="method.NAME=LOW..HIGH",
        help="Tune this hyper-parameter, and only those given so. Repeatable. Default: the space of the method.",
    ),
]


def tune(
    out: Annotated[Path, typer.Option(help="The folder of the results; call the command again to continue.")],
    experiment: ExperimentFile = None,
    count: Annotated[int, typer.Option("--settings", min=2, max=1000, help="How many settings to try.")] = 16,
    settings: Settings = None,
    space: Space = None,
    device: TrainingDevice = "auto",
    data_dir: DataDir = None,
    own_data: OwnData = None,
    target: Target = None,
    client_column: ClientColumn = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the search as one JSON object on the last line.")
    ] = False,
) -> None:
    """Try settings of a method at once, and write an experiment file with the best one.

    Rows that no model was trained on decide: validation rows, or else the rows that the folds of a cross-validation
    leave out. After a quarter and after a half of the rounds the better half of the settings goes on. The experiment's
    own setting always takes part; another is chosen only if it is better by more than a standard error.

    Examples:

    pfedbayes tune --data patients.csv --target outcome --client-column hospital --out runs/tuning

    pfedbayes tune experiments/mnist_small.toml --set data.validation=0.2 --settings 32 --out runs/tuning

    pfedbayes tune --set method.name=ditto --set data.validation=0.2 --space method.prox=0.1..10 --out runs/tuning

    pfedbayes run runs/tuning/tuned.toml                 train with the chosen setting
    """
    from pfedbayes.files.typed import to_json
    from pfedbayes.files.writing import write_file
    from pfedbayes.runs import TUNING_PAGE
    from pfedbayes.runs.config import to_toml
    from pfedbayes.runs.experiment import read_experiment
    from pfedbayes.sweep.tuning import tuned

    flags = {"data.path": own_data, "data.target": target, "data.client_column": client_column}
    setup = read_experiment(experiment, overrides_of(flags, settings))
    found = search(setup, out, count, space or [], device, data_dir, console(stderr=True))
    path = out / "tuned.toml"
    write_file(path, to_toml(tuned(setup, found).sections()))
    print_search(found)
    echo(f"experiment: {path}")
    echo(f"report:     {out / TUNING_PAGE}")
    if as_json:
        typer.echo(json.dumps(to_json(found)))


def search(
    setup: Experiment,
    out: Path,
    count: int,
    ranges: list[str],
    device: str,
    data_dir: Path | None,
    terminal: Console,
    resume: str = "",
) -> Tuning:
    """Search, show the progress, write the page, and return the search; exit if it is interrupted."""
    from pfedbayes.files.writing import write_file
    from pfedbayes.report.tuning import page_of
    from pfedbayes.runs import TUNING, TUNING_PAGE
    from pfedbayes.runs.naming import method_name
    from pfedbayes.sweep.space import space_of
    from pfedbayes.sweep.tuning import read_tuning, tune

    space = space_of(method_name(setup.method), setup.method, ranges)
    steps = tune(setup, out, space, count, device, data_dir, show_download(terminal))
    columns = (
        TextColumn("{task.fields[settings]} settings, round {task.completed:.0f}/{task.total:.0f}"), BarColumn(),
        TimeElapsedColumn(), TextColumn("left, at most"), TimeRemainingColumn(),
    )  # fmt: skip
    shown = 0
    with interruptible() as stop, Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("", total=setup.training.rounds, settings=count)
        for step in steps:
            bar.update(task, completed=step.round, settings=step.settings)
            if not terminal.is_terminal and step.tuning.done > shown:
                shown = step.tuning.done
                terminal.print(f"round {step.round}/{step.rounds}: {step.settings} settings go on", soft_wrap=True)
            if stop and step.round < step.rounds:
                steps.close()
                echo(f"stopped after round {step.round}; to continue, {resume or 'call the command again'}", err=True)
                raise typer.Exit(INTERRUPTED)
    found = read_tuning(out / TUNING)
    write_file(out / TUNING_PAGE, page_of(found))
    return found


def print_search(found: Tuning) -> None:
    """Print the best settings, and what was chosen."""
    from pfedbayes.report.tuning import ranked, verdict

    table = Table(title=f"{found.method}: the best of {len(found.trials)} settings")
    table.add_column("setting", justify="right")
    for name in found.space:
        table.add_column(name, justify="right")
    table.add_column("validation NLL", justify="right")
    for k in ranked(found)[:SHOWN]:
        trial = found.trials[k]
        values = (f"{value:.3g}" for value in trial.values.values())
        table.add_row("as given" if k == 0 else str(k), *values, f"{trial.scores[-1]:.4f}")
    console().print(table)
    echo(verdict(found))
