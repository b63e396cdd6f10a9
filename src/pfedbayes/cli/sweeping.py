"""The command that runs a sweep, also for the tables of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pfedbayes.cli.common import INTERRUPTED, DataDir, Number, TrainingDevice, console, interruptible

if TYPE_CHECKING:
    from pfedbayes.sweep.command import Options

Only = Annotated[
    list[str] | None,
    typer.Option(metavar="WORDS", help="Run only cells whose names contain all these words. Repeatable: any of them."),
]
Minutes = Annotated[
    float | None,
    typer.Option(click_type=Number(0), help="Stop after this many minutes; call the command again to continue."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object on the last line.")]


def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file such as experiments/table1.toml.")],
    out: Annotated[Path, typer.Option(help="The folder of the sweep: its runs and the scores of its cells.")],
    device: TrainingDevice = "auto",
    data_dir: DataDir = None,
    only: Only = None,
    part: Annotated[str, typer.Option(help="2/3: the second of three machines that share the cells.")] = "1/1",
    minutes: Minutes = None,
    results: Annotated[
        Path | None,
        typer.Option(help="One JSON file with all scores: its cells count as finished, new ones are added."),
    ] = None,
    imports: Annotated[
        list[Path] | None, typer.Option("--import", metavar="FILE", help="Scores from another machine. Repeatable.")
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing: merge all scores into --results, name missing cells.")
    ] = False,
    choose: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train nothing: write the best settings by validation accuracy to a preset."),
    ] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Run cells again whose settings have changed.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run the cells of a sweep and keep their scores.

    Every cell can be resumed: call the command again to continue, also after you raised `seeds` in the file. Then only
    the new seeds run.

    Examples:

    pfedbayes sweep experiments/table1.toml --out runs/table1 --only "mnist pfedbayes" --dry-run

    pfedbayes sweep experiments/table1.toml --out runs/table1 --minutes 9 --results table1.json

    pfedbayes sweep experiments/table1.toml --out runs/table1 --collect --import a.json --results table1.json
    """
    from pfedbayes.sweep.command import Options

    options = Options(out, device, data_dir, minutes, results, tuple(imports or ()), collect, choose, redo, dry_run)
    run_sweep(file, options, only, part, as_json)


def run_sweep(file: Path, options: Options, only: list[str] | None, part: str = "1/1", as_json: bool = False) -> None:
    """Run a sweep until it ends or is interrupted, and exit with 1 if a cell failed."""
    from pfedbayes.sweep.command import command

    with interruptible() as stop:
        outcome = command(file, only or [], part, options, lambda: bool(stop), console(stderr=True))
    if as_json:
        typer.echo(json.dumps(outcome))
    if stop:
        raise typer.Exit(INTERRUPTED)
    if outcome["failed"]:
        raise typer.Exit(1)
