"""The paper's tables and figures, and the sweeps that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pfedbayes.cli.common import INTERRUPTED, DataDir, TrainingDevice, interruptible


def results(
    folder: Annotated[Path, typer.Argument(help="A folder of results such as docs/results.")],
) -> None:
    """Write the paper's tables and figures with our results beside them, from the JSON in a folder."""
    from pfedbayes.paper.results import write

    for path in write(folder):
        typer.echo(path)


def figure3(
    out: Annotated[Path, typer.Argument(help="The JSON file to write, e.g. docs/results/figure3.json.")],
    experiment: Annotated[
        Path | None, typer.Option(help="The experiment file. Without one: the main job, small MNIST.")
    ] = None,
    device: TrainingDevice = "auto",
    data_dir: DataDir = None,
) -> None:
    """Train for ten rounds and note how sure the personal models of five clients are at rounds 0, 1 and 10."""
    from pfedbayes.paper.figure3 import write
    from pfedbayes.runs.experiment import read_experiment

    write(read_experiment(experiment), out, device, data_dir)
    typer.echo(out)


def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file such as experiments/table1.toml.")],
    out: Annotated[Path, typer.Option(help="The folder of the sweep: runs under way and the results of cells.")],
    device: TrainingDevice = "auto",
    data_dir: DataDir = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Only cells whose names have all these words. Repeatable: any of them."),
    ] = None,
    part: Annotated[str, typer.Option(help="2/3: the second of three machines that share the cells.")] = "1/1",
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop in time; call again to go on.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="One JSON file with all results: its cells count as done, new ones are added.")
    ] = None,
    imports: Annotated[
        list[Path] | None, typer.Option("--import", metavar="FILE", help="Results from elsewhere. Repeatable.")
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing: merge what there is into --results, name what is missing.")
    ] = False,
    choose: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train nothing: write the best settings by validation accuracy to a preset."),
    ] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Run cells again whose settings have changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of the output is one JSON object with what came of it.")
    ] = False,
) -> None:
    """Run the cells of a table, each resumable, and keep their scores; call it again to go on, also after you have
    raised `seeds` in the file: only the new ones are run.

    Examples:

    pfedbayes sweep experiments/table1.toml --out runs/table1 --only "mnist pfedbayes" --dry-run

    pfedbayes sweep experiments/table1.toml --out runs/table1 --minutes 9 --results table1.json

    pfedbayes sweep experiments/table1.toml --out runs/table1 --collect --import a.json --results table1.json
    """
    from pfedbayes.sweep.command import Options, command

    options = Options(out, device, data_dir, minutes, results, tuple(imports or ()), collect, choose, redo, dry_run)
    with interruptible() as stop:
        outcome = command(file, only or [], part, options, lambda: bool(stop), Console(stderr=True, highlight=False))
    if as_json:
        typer.echo(json.dumps(outcome))
    if stop:
        raise typer.Exit(INTERRUPTED)
    if outcome["failed"]:
        raise typer.Exit(1)
