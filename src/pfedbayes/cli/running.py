"""Commands that train a federation and write reports."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from pfedbayes.cli.common import (
    INTERRUPTED,
    ClientColumn,
    DataDir,
    ExperimentFile,
    OwnData,
    Settings,
    Target,
    TrainingDevice,
    TrustModule,
    console,
    echo,
    interruptible,
    overrides_of,
)
from pfedbayes.cli.output import (
    column_table,
    describe_data,
    print_joining,
    print_table,
    print_window,
    progress,
    show_data,
    show_download,
)
from pfedbayes.cli.tuning import print_search, search
from pfedbayes.errors import UserError, printable

if TYPE_CHECKING:
    from pfedbayes.runs.experiment import Experiment
    from pfedbayes.runs.folder import Run


def run(
    experiment: ExperimentFile = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder. Default: a new one under runs/, named after the experiment."),
    ] = None,
    device: TrainingDevice = "auto",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of federations to train at once, with seeds training.seed, +1, +2, …"),
    ] = None,
    data_dir: DataDir = None,
    resume: Annotated[bool, typer.Option(help="Resume an interrupted run from its last checkpoint.")] = False,
    own_data: OwnData = None,
    target: Target = None,
    client_column: ClientColumn = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column of your data to leave out. Repeatable.")
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text that means a missing value in your data, such as 99. Repeatable."),
    ] = None,
    drop_missing_target: Annotated[
        bool, typer.Option("--drop-missing-target", help="Leave out the rows of your data without a target.")
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(help="classification, regression, count, ordinal or survival. Default: inferred."),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            help="For survival: the column that is 1 where the event happened at the time in --target, and 0 where it "
            "had not happened by then."
        ),
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="The classes of an ordinal target, lowest first: low,mid,high.")
    ] = None,
    net: Annotated[
        str | None, typer.Option(help="mlp, vgg, cnn, or your own torch.nn.Module as my_module:MyNet.")
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1000,
            metavar="N",
            help="First try N settings of the method at once, see [cyan]pfedbayes tune[/], and train with the best.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config and an estimate of time and memory, then exit."),
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Copy scores to tensorboard, mlflow or wandb while it trains. Repeatable."),
    ] = None,
    trust_module: TrustModule = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object on the last line.")
    ] = False,
) -> None:
    """Train a federation, and write its run folder and report.

    Examples:

    pfedbayes run                                        pFedBayes on small MNIST: a few minutes on two cores

    pfedbayes run experiments/mnist_medium.toml          the paper's settings (800 rounds)

    pfedbayes run --set method.name=fedavg --seeds 5     another method, five seeds at once

    pfedbayes run --data my_folder/ --target outcome --client-column hospital      your own data

    pfedbayes run --data my.csv --target y --client-column site --tune 16          tuned on your own data

    pfedbayes run --resume --out runs/DIR                resume an interrupted run
    """
    from pfedbayes import runs
    from pfedbayes.nets.import_path import refuse_untrusted
    from pfedbayes.report import describe, tables, write
    from pfedbayes.runs.config import parse_override
    from pfedbayes.runs.execute import execute
    from pfedbayes.runs.experiment import from_sections, read_experiment, seed_numbers
    from pfedbayes.runs.naming import method_name
    from pfedbayes.runs.resume import refuse_other_files
    from pfedbayes.runs.tracking import tracking
    from pfedbayes.sweep.tuning import tuned

    flags = {
        "data.path": own_data, "data.target": target, "data.client_column": client_column, "data.task": task,
        "data.event": event, "net.name": net, "data.order": order.split(",") if order else None,
        "data.ignore": ignore, "data.missing": missing,
        "data.drop_missing_target": drop_missing_target or None,
    }  # fmt: skip
    overrides = overrides_of(flags, settings)
    if resume and out is not None and (experiment is None or tune) and (out / runs.INFO).exists():
        previous = runs.read_run(out, log_bytes=0)
        if previous.info.federation is not None:
            raise UserError(f"{out} was made on Flower: start the app again with flwr run to resume it")
        given = {parse_override(text)[:2] for text in overrides}
        before = previous.experiment
        refuse_untrusted(before.net.name, out, trust_module or ("net", "name") in given)
        refuse_untrusted(method_name(before.method), out, trust_module or ("method", "name") in given, "method")
        setup = from_sections(previous.sections, overrides)
        numbers = previous.info.seeds if seeds is None else None
    else:
        setup = read_experiment(experiment, overrides)
        numbers = None
    if numbers is None:
        numbers = seed_numbers(setup.training.seed, seeds or 1)
    if dry_run:
        _print_estimate(setup, numbers, device, data_dir)
        return
    folder = out or _default_folder(setup, experiment, resume)

    terminal = console(stderr=True)
    title = (setup.method.about.title, "bold")
    terminal.print(Text.assemble(title, printable(f" on {setup.data.title} → {folder}")), soft_wrap=True)
    if tune is not None and not (folder / runs.INFO).exists():
        if folder.exists():
            refuse_other_files(folder)
        how = f"add --resume --out {folder}"
        found = search(setup, folder, tune, [], device, data_dir, terminal, how)
        print_search(found)
        setup = tuned(setup, found)
    rounds = execute(
        setup, folder, numbers, device, resume, data_dir, show_download(terminal), partial(show_data, terminal)
    )
    interrupted = False
    with (
        tracking(track or (), folder, setup.sections(), partial(echo, err=True)) as send,
        interruptible() as stop,
        progress(terminal, folder, setup.training.rounds) as show,
    ):
        for step in rounds:
            show(step)
            if step.record is not None:
                send(step.record)
            if stop and step.round < step.rounds:
                rounds.close()
                interrupted = True
                break
    if interrupted:
        echo(f"stopped after round {step.round}; resume with: pfedbayes run --resume --out {folder}", err=True)
        raise typer.Exit(INTERRUPTED)

    result = runs.read_run(folder)
    page = write([folder], folder / runs.REPORT)
    print_table(result)
    print_window(result)
    for sentence in describe.stopping(result):
        echo(sentence)
    print_joining(result)
    echo(f"run folder: {folder}")
    echo(f"report:     {page}")
    if as_json:
        rows = {row.model: row for row in tables.headline(result)}
        typer.echo(json.dumps(_json_result(result, rows)))


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="One run folder, or several folders to compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: DIR/report.html for one run, report.html for several."),
    ] = None,
) -> None:
    """Write the HTML report of a run, or one page that compares several runs.

    The page is a single file that loads nothing from elsewhere.
    """
    from pfedbayes import runs
    from pfedbayes.report import write

    default = folders[0] / runs.REPORT if len(folders) == 1 else Path("report.html")
    echo(f"report: {write(folders, out or default)}")


def board(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]…", help="Run folders, or folders that hold some. Default: runs/."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. Default: a free one.")] = 0,
) -> None:
    """Show runs and federations in a browser while they train, and compare them.

    The page is for this machine alone, and changes nothing. Stop it with Ctrl-C.
    """
    from pfedbayes.board import open_board

    with open_board(folders or [Path("runs")], port) as server:
        echo(f"board: {server.address}  (stop with Ctrl-C)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _default_folder(setup: Experiment, experiment: Path | None, resume: bool) -> Path:
    """Return runs/NAME, or NAME-2, NAME-3, … if it exists; to resume, the newest of them."""
    from pfedbayes.runs.naming import method_name

    parts = [
        experiment.stem if experiment else setup.data.title.replace(" ", "_"),
        method_name(setup.method).rpartition(":")[2],
    ]
    base = Path("runs") / "-".join(parts)
    last, number = None, 1
    folder = base
    while folder.exists():
        last, number = folder, number + 1
        folder = base.with_name(f"{base.name}-{number}")
    return last if resume and last else folder


def _print_estimate(setup: Experiment, seeds: list[int], device: str, data_dir: Path | None) -> None:
    """Print the resolved config, and the measured estimate of time and memory."""
    from pfedbayes.runs.config import to_toml
    from pfedbayes.runs.estimate import estimate

    typer.echo(to_toml(setup.sections()))
    cost = estimate(setup, seeds, device, data_dir)
    if (columns := column_table(cost.federation)) is not None:
        console().print(columns)
    for line in describe_data(cost.federation):
        echo(line)
    typer.echo(
        f"plan: {', '.join(cost.plan.describe())}, {len(seeds)} seed(s)\n"
        f"time: about {cost.seconds:.0f} s ({cost.seconds_to_start:.0f} s to start, "
        f"{cost.seconds_per_round:.2g} s a round, "
        f"{cost.evaluations} evaluations of {cost.seconds_per_evaluation:.2f} s)\n"
        f"memory: about {cost.bytes / 1e9:.1f} GB for data and states"
        + (f"\ndisk: about {cost.file_bytes / 1e9:.1f} GB for resting clients" if cost.file_bytes else "")
    )


def _json_result(result: Run, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the object of --json: scores per model; null for no model, and for a score that no client has.

    …_std are standard deviations over seeds, and …_pooled scores of the rows of all clients together.
    """
    from pfedbayes.report import tables

    models: dict[str, Any] = {}
    for model in ("personal", "shared"):
        row = rows.get(model)
        if row is None:
            models[model] = None
            continue
        of_all = {f"{name}_pooled": estimate.value for name, estimate in tables.pooled(result, model).items()}
        values = {name: estimate.value for name, estimate in row.mean.items()} | of_all
        spreads = {f"{name}_std": each.std for name, each in row.mean.items() if each.std is not None}
        models[model] = {name: _finite(name, value) for name, value in values.items()} | spreads
    last = result.summary
    return {**models, "rounds": last and last.rounds, "seconds": last and last.seconds}


def _finite(name: str, value: float) -> float | None:
    """Return the value; None for a score that is not defined for any client."""
    from pfedbayes.report import tables

    undefined = tables.metric(name.removesuffix("_pooled")).undefined and not math.isfinite(value)
    return None if undefined else value
