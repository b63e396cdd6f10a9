"""The command line: parses, calls, prints."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

# Idle OpenMP threads that spin make rounds take seconds on a busy machine; it has to be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import pfedbayes
from pfedbayes.errors import UserError

if TYPE_CHECKING:
    from pfedbayes.experiment import Experiment
    from pfedbayes.runs import Run

# Heavy imports (torch) stand inside the commands, so that --help and errors of usage answer at once.

app = typer.Typer(
    help="Personalised Bayesian federated learning.\n\n"
    "Clients with small, different, private data sets train a model of their own that borrows strength from the "
    "others and says how sure it is. Start with [bold]pfedbayes run[/bold]: it trains pFedBayes on a part of MNIST "
    "that comes with the package, and takes a few minutes.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130


def main() -> None:
    """Run the command line; what the user can mend is one line and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]pfedbayes:[/] {_escape(str(error))}")
        sys.exit(2)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pfedbayes {pfedbayes.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before any command."""


@app.command()
def run(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file such as experiments/mnist_medium.toml. Without one: the main job, small MNIST."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting, e.g. [cyan]--set method.zeta=5[/]. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder. Default: a new one under runs/, named after the experiment."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. auto takes a GPU if there is one.")] = "auto",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Train so many federations at once, with seeds training.seed, +1, +2, …"),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie, if not in the usual places.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run, from its last saved state.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config and an estimate of time and memory, and stop."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of the output is one JSON object with the result.")
    ] = False,
) -> None:
    """Train one federation and write its run folder and report.

    Examples:

    pfedbayes run                                        pFedBayes on small MNIST, a few minutes on two cores

    pfedbayes run experiments/mnist_medium.toml          the paper's settings (800 rounds)

    pfedbayes run --set method.name=fedavg --seeds 5     another method, five seeds at once

    pfedbayes run --resume --out runs/DIR                go on after an interruption
    """
    from pfedbayes import execution, runs
    from pfedbayes.config import read_toml
    from pfedbayes.experiment import from_sections, load
    from pfedbayes.report import tables, write

    overrides = settings or []
    if resume and experiment is None and out is not None and (out / runs.INFO).exists():
        if "federation" in runs.read(out).info:
            raise UserError(f"{out} was made on Flower: start the app again to go on, with flwr run")
        setup = from_sections(read_toml(out / runs.CONFIG), overrides)
        numbers = runs.read(out).info["seeds"] if seeds is None else None
    else:
        setup = load(experiment, overrides)
        numbers = None
    if numbers is None:
        numbers = [setup.training.seed + k for k in range(seeds or 1)]
    if dry_run:
        _print_estimate(setup, numbers, device, data_dir)
        return
    folder = out or _default_folder(setup, experiment, resume)

    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]{setup.method.title}[/] on {_data_title(setup)} → {folder}")
    rounds = execution.execute(setup, folder, numbers, device, resume, data_dir, _show_download(console))
    with _interruptible() as stop, _progress(console, folder, setup.training.rounds) as show:
        for step in rounds:
            show(step)
            if stop and step.round < step.rounds:
                rounds.close()
                break
    if stop and not (folder / runs.SUMMARY).exists():
        console.print(f"stopped after round {step.round}; go on with: pfedbayes run --resume --out {folder}")
        raise typer.Exit(INTERRUPTED)

    result = runs.read(folder)
    page = write([folder], folder / runs.REPORT)
    _print_table(result)
    _print_window(result)
    typer.echo(f"run folder: {folder}")
    typer.echo(f"report:     {page}")
    if as_json:
        rows = {row.model: row for row in tables.headline(result)}
        typer.echo(json.dumps(_json_result(result, rows)))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="One run folder, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page. Default: DIR/report.html, or report.html.")
    ] = None,
) -> None:
    """Write the HTML report of a run, or one page that compares several runs. Opens offline."""
    from pfedbayes import runs
    from pfedbayes.report import write

    default = folders[0] / runs.REPORT if len(folders) == 1 else Path("report.html")
    typer.echo(f"report: {write(folders, out or default)}")


@app.command()
def methods() -> None:
    """List the methods: what each learns, where it comes from, its settings and their defaults."""
    from pfedbayes.methods import METHODS

    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("learns", ratio=3)
    table.add_column("models", no_wrap=True)
    table.add_column("settings (method.…) and defaults", ratio=4)
    for name, method in METHODS.items():
        settings = ", ".join(f"{field.name}={json.dumps(field.default)}" for field in dataclasses.fields(method))
        models = "\n".join(which for which in ("personal", "shared") if getattr(method, which))
        table.add_row(name, f"{method.learns} ({method.title}: {method.reference})", models, settings)
    Console().print(table)


@app.command()
def data(
    data_dir: Annotated[Path | None, typer.Option(help="Look here first.")] = None,
) -> None:
    """Show which data sets are there, where they were found, and how to get the rest."""
    from pfedbayes.data import available

    table = Table(show_lines=True)
    for heading in ("name", "images", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for source in available(data_dir):
        table.add_row(source.name, f"{source.images:,}", source.found or "–", source.how_to_get)
    Console().print(table)


federation = typer.Typer(help="Federations over several machines, on Flower.", no_args_is_help=True)
app.add_typer(federation, name="federation")


@federation.command("new")
def federation_new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a Flower app to be filled with your data loader and your network: DIR/federation/task.py."""
    from pfedbayes.flower.apps import write_app

    for path in write_app(folder):
        typer.echo(path)
    typer.echo(f"next: edit {folder / 'federation' / 'task.py'}, then: flwr run {folder} --stream")


@federation.command("keys")
def federation_keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    hosts: Annotated[
        list[str], typer.Option("--host", help="Name or address under which nodes reach the server. Repeatable.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes there are.")],
) -> None:
    """Make a certificate for the server and a key for each node."""
    from pfedbayes.flower.keys import make_keys

    for path in make_keys(folder, hosts, nodes):
        typer.echo(path)


@federation.command("leave")
def federation_leave(
    state_dir: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The state-dir of the node.")],
) -> None:
    """Let a client leave for good, on its node: its state is deleted, and the server is told in the next round."""
    from pfedbayes.flower.state import StateFolder

    StateFolder(state_dir).leave()
    typer.echo(f"{state_dir}: the state is deleted; keep the SuperNode running until the server has named the client")


def _data_title(setup: Experiment) -> str:
    return " ".join(filter(None, [setup.data.name, setup.data.size]))


def _default_folder(setup: Experiment, experiment: Path | None, resume: bool) -> Path:
    """runs/NAME, or NAME-2, NAME-3, … if taken; to resume, the newest of them."""
    from pfedbayes.experiment import method_name

    parts = [
        experiment.stem if experiment else _data_title(setup).replace(" ", "_"),
        method_name(setup.method),
    ]
    base = Path("runs") / "-".join(parts)
    last, number = None, 1
    folder = base
    while folder.exists():
        last, number = folder, number + 1
        folder = base.with_name(f"{base.name}-{number}")
    return last if resume and last else folder


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask for a stop after the round; a second one stops at once."""
    received: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(console: Console, folder: Path, rounds: int) -> Iterator[Any]:
    """A live line on a terminal, else a line per evaluation."""
    from pfedbayes import runs

    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"), BarColumn(), TextColumn("{task.fields[scores]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    read_once = cache(runs.read)  # the log grows, but only clients and sizes are wanted of it
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rounds, scores="")

        def show(step: Any) -> None:
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


def _show_download(console: Console) -> Callable[[str, int, int], None]:
    """A line that says how much of a file has come, now and then."""
    shown: dict[str, float] = {}

    def show(name: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        if share - shown.get(name, -1.0) >= 0.1 or done == total:
            shown[name] = share
            console.print(f"downloading {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", soft_wrap=True)

    return show


def _short_scores(run: Run, record: dict[str, Any]) -> str:
    """The first metric of each model, reduced as in the final table."""
    from pfedbayes.report import tables

    parts = []
    for row in tables.headline(dataclasses.replace(run, rounds=[record])):
        name, estimate = next(iter(row.mean.items()))
        parts.append(f"{row.model} {name} {tables.text(name, estimate)}")
    return "  ".join(parts)


def _print_table(result: Run) -> None:
    from pfedbayes.report import tables

    rows = tables.headline(result)
    if not rows:
        typer.echo("no test data, so nothing was scored")
        return
    names = tables.metric_names(result)
    table = Table(title=f"round {result.rounds[-1]['round']}, {tables.estimator_title(rows[0].estimator)}")
    table.add_column("model")
    table.add_column("over clients")
    for name in names:
        label = tables.metric(name)
        table.add_column(label.label + (f" ({label.unit})" if label.unit else ""), justify="right")
    for row in rows:
        for title, estimates in (("mean", row.mean), ("worst", row.worst)):
            table.add_row(row.model, title, *(tables.text(name, estimates[name]) for name in names))
    Console().print(table)


def _print_window(result: Run) -> None:
    """Best, mean and last over the window of rounds, where the experiment has one."""
    from pfedbayes.report import tables

    if not (rows := tables.window(result)):
        return
    name = tables.metric_names(result)[0]
    first, last = result.config["training"]["evaluate_window"]
    table = Table(title=f"{tables.metric(name).label} over rounds {first} to {last}")
    for heading in ("model", "prediction", "best (picked on test data)", "mean", "last"):
        table.add_column(heading)
    for row in rows:
        figures = (tables.text(name, estimate) for estimate in (row.best, row.mean, row.last))
        table.add_row(row.model, tables.estimator_title(row.estimator), *figures)
    Console().print(table)


def _json_result(result: Run, rows: dict[str, Any]) -> dict[str, Any]:
    """The object of --json: figures per model, the spread over seeds as …_std; a model that is not there is null."""
    models: dict[str, Any] = {}
    for model in ("personal", "shared"):
        row = rows.get(model)
        models[model] = row and {
            key: value
            for name, estimate in row.mean.items()
            for key, value in ((name, estimate.value), (f"{name}_std", estimate.std))
            if value is not None
        }
    last = result.summary or {}
    return {**models, "rounds": last["rounds"], "seconds": last["seconds"]}


def _print_estimate(setup: Experiment, seeds: list[int], device: str, data_dir: Path | None) -> None:
    """The resolved config, and what the run will take, from a round and an evaluation measured here and now."""
    from pfedbayes.config import to_toml
    from pfedbayes.execution import estimate

    typer.echo(to_toml(setup.sections()))
    cost = estimate(setup, seeds, device, data_dir)
    typer.echo(
        f"plan: {', '.join(cost.plan.words())}, {len(seeds)} seed(s)\n"
        f"time: about {cost.seconds:.0f} s ({cost.seconds_to_start:.0f} s to start, "
        f"{cost.seconds_per_round:.2g} s a round, "
        f"{cost.evaluations} evaluations of {cost.seconds_per_evaluation:.2f} s)\n"
        f"memory: about {cost.bytes / 1e9:.1f} GB for data and states"
        + (f"\ndisk: about {cost.file_bytes / 1e9:.1f} GB for resting clients" if cost.file_bytes else "")
    )
