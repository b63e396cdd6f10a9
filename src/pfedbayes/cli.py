"""The command line: parses, calls, prints."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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
    from pfedbayes.engine import Federation
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
    own_data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Your own data: a table with a client column, or a folder with a file or images per client."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column of your data that is to be predicted.")] = None,
    client_column: Annotated[
        str | None, typer.Option(help="The column that says whose row it is, if files are not clients.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="classification or regression, if the guess is wrong.")] = None,
    net: Annotated[
        str | None, typer.Option(help="mlp, vgg, cnn, or a torch.nn.Module of yours as my_module:MyNet.")
    ] = None,
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

    pfedbayes run --data my_folder/ --target outcome --client-column hospital      your own data

    pfedbayes run --resume --out runs/DIR                go on after an interruption
    """
    from pfedbayes import execution, runs
    from pfedbayes.config import read_toml
    from pfedbayes.experiment import from_sections, load
    from pfedbayes.report import tables, words, write

    flags = {
        "data.path": own_data, "data.target": target, "data.client_column": client_column, "data.task": task,
        "net.name": net,
    }  # fmt: skip
    overrides = [
        *(f"{key}={json.dumps(str(value), ensure_ascii=False)}" for key, value in flags.items() if value is not None),
        *(settings or []),
    ]
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
    console.print(f"[bold]{setup.method.title}[/] on {_escape(setup.data.title)} → {_escape(str(folder))}")
    rounds = execution.execute(
        setup, folder, numbers, device, resume, data_dir, _show_download(console), partial(_show_data, console)
    )
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
    for sentence in words.stopping(result):
        typer.echo(sentence)
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


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="A folder of results such as docs/results.")],
) -> None:
    """Write the paper's tables and figures with our results beside them, from the JSON in a folder."""
    from pfedbayes.report.results import write

    for path in write(folder):
        typer.echo(path)


@app.command()
def figure3(
    out: Annotated[Path, typer.Argument(help="The JSON file to write, e.g. docs/results/figure3.json.")],
    experiment: Annotated[
        Path | None, typer.Option(help="The experiment file. Without one: the main job, small MNIST.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. auto takes a GPU if there is one.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie, if not in the usual places.")] = None,
) -> None:
    """Train for ten rounds and note how sure the personal models of five clients are at rounds 0, 1 and 10."""
    from pfedbayes.experiment import load
    from pfedbayes.figure3 import write

    write(load(experiment), out, device, data_dir)
    typer.echo(out)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file such as experiments/table1.toml.")],
    out: Annotated[Path, typer.Option(help="The folder of the sweep: runs under way and the results of cells.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. auto takes a GPU if there is one.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie, if not in the usual places.")] = None,
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
    """Run the cells of a table, each resumable, and keep their scores; call it again to go on.

    Examples:

    pfedbayes sweep experiments/table1.toml --out runs/table1 --only "mnist pfedbayes" --dry-run

    pfedbayes sweep experiments/table1.toml --out runs/table1 --minutes 9 --results table1.json

    pfedbayes sweep experiments/table1.toml --out runs/table1 --collect --import a.json --results table1.json
    """
    from pfedbayes.sweep.command import Options, command

    options = Options(out, device, data_dir, minutes, results, tuple(imports or ()), collect, choose, redo, dry_run)
    with _interruptible() as stop:
        outcome = command(file, only or [], part, options, lambda: bool(stop), Console(stderr=True, highlight=False))
    if as_json:
        typer.echo(json.dumps(outcome))
    if stop:
        raise typer.Exit(INTERRUPTED)
    if outcome["failed"]:
        raise typer.Exit(1)


@app.command()
def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run made with data.certify.")],
    delta: Annotated[float, typer.Option(help="How often a certificate may fail, at most.")] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="Steps on the examples kept back, from the personal model.")] = 100,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Networks drawn per example. Default: 20, or 1000 for convolutions.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificates as JSON.")] = False,
) -> None:
    """Bound the error of every client's own model, by examples that the run kept back.

    A bound needs examples that no model has seen, so the run has to set some apart:

    pfedbayes run --set data.certify=0.5 --out runs/DIR

    pfedbayes certify runs/DIR
    """
    from pfedbayes.certificate import CERTIFICATES, POSTERIORS, certify_run

    certificates = certify_run(folder, device, delta=delta, steps=steps, draws=draws)
    if as_json:
        typer.echo(json.dumps([certificate.as_json() for certificate in certificates]))
        return
    table = Table(title=f"Error of the certified models in %; each bound holds with probability {1 - delta:g}")
    for heading in ("client", "seed", "bound", "Gibbs", "averaged", "hold-out", "examples", "KL"):
        table.add_column(heading, justify="left" if heading == "client" else "right", no_wrap=True)
    for one in certificates:
        shown = ("vacuous " if one.vacuous else "") + f"{100 * one.bound:.1f}"
        test = (f"{100 * one.test.gibbs:.1f}", f"{100 * one.test.mc:.1f}") if one.test else ("–", "–")
        last = (f"{100 * one.hold_out:.1f}", str(one.certified.size), f"{one.kl:.1f}")
        table.add_row(one.client, str(one.seed), shown, *test, *last)
    Console().print(table)
    typer.echo(
        "bound: on the error of one network drawn from the certified model (Gibbs). Gibbs, averaged: its errors on "
        f"test data, by one draw and by the average of {certificates[0].draws}. hold-out: the plain bound on the "
        "averaged prediction of the model as the run left it. examples: kept back by the run. KL: how far the "
        "certified model has moved since, in nats. vacuous: no better than guessing.\n"
        f"certificates and certified models: {folder / CERTIFICATES}, {folder / POSTERIORS}"
    )


@app.command()
def uncertainty(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of finished runs.")],
    samples: Annotated[int, typer.Option(min=1, help="Weight draws averaged in a prediction.")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="Where the other data sets lie.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures of single clients as JSON.")] = False,
) -> None:
    """Compare how well runs know what they do not know: calibration, and telling strange inputs from their own.

    With validation data (--set data.validation=0.2 when running) also at a fitted temperature, with conformal sets and
    abstention.
    """
    from pfedbayes import execution, runs
    from pfedbayes import uncertainty as honesty

    results: dict[str, Any] = {}
    for folder in folders:
        data = runs.read(folder).config["data"]
        others = honesty.other_set(data["name"], data_dir or data.get("dir"))
        results[str(folder)] = honesty.assess(execution.load(folder, device=device), samples, others)
    if as_json:
        typer.echo(json.dumps(results))
        return
    for title, columns in honesty.TABLES.items():
        table = Table("run", "model", title=title)
        for heading in honesty.headings(columns):
            table.add_column(heading, justify="right")
        for name, assessed in results.items():
            for model, row in honesty.table_rows(assessed, columns):
                table.add_row(Path(name).name, model, *honesty.cells(row, columns))
        Console().print(table)
    for name, meaning in honesty.NAMES.items():
        typer.echo(f"{name}: {meaning}")


@app.command()
def bound(
    source: Annotated[
        Path | None, typer.Argument(help="An experiment file or a run folder. Without one: the paper's medium MNIST.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="Examples of a client.")] = None,
    layers: Annotated[int | None, typer.Option(help="L, the number of hidden layers.")] = None,
    width: Annotated[int | None, typer.Option(help="M, the width of each.")] = None,
    inputs: Annotated[int | None, typer.Option(help="s_0, the numbers that go in.")] = None,
    outputs: Annotated[int | None, typer.Option(help="The numbers that come out.")] = None,
    weight_bound: Annotated[float | None, typer.Option("--bound", help="B, the largest weight.")] = None,
    zeta: Annotated[float | None, typer.Option(help="Weight of the KL term, at least 1.")] = None,
    smoothness: Annotated[float | None, typer.Option("--beta", help="Smoothness of the true functions.")] = None,
    dimension: Annotated[
        float | None, typer.Option("--d", help="Intrinsic dimension of the data. Default: that of the inputs.")
    ] = None,
    constants: Annotated[
        list[str] | None,
        typer.Option(
            "--constant",
            metavar="NAME=VALUE",
            help="C, C_prime, C_second, C_0, C_1, C_2, delta: what the paper leaves open. Default: 1, and delta 1.01.",
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie, if not in the usual places.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Print the terms of the paper's Theorem 1 and what they say about a network and its data.

    Examples:

    pfedbayes bound                                       the paper's medium MNIST

    pfedbayes bound experiments/mnist_small.toml --d 13   another experiment, of data of intrinsic dimension 13

    pfedbayes bound --n 1000000 --width 20 --inputs 2 --outputs 1 --beta 2
    """
    from pfedbayes import theorem

    case = theorem.case_of(source, data_dir)
    given = {
        "size": n, "layers": layers, "width": width, "inputs": inputs, "outputs": outputs, "zeta": zeta,
        "weight_bound": weight_bound, "smoothness": smoothness, "dimension": dimension,
        "constants": theorem.constants_of(constants) if constants else None,
    }  # fmt: skip
    case = case._replace(setting=theorem.adapted(case.setting, **given))
    if as_json:
        typer.echo(json.dumps(theorem.as_json(case)))
        return
    s = case.setting
    table = Table(title=f"n = {s.size:,}, L = {s.layers}, M = {s.width}, s_0 = {s.inputs}, ζ = {s.zeta:g}")
    for heading in ("term", "equation", "value", "what it is"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for term in theorem.terms(s):
        value = f"{term.value:,}" if isinstance(term.value, int) else f"{term.value:.4g}"
        table.add_row(term.letter, term.equation, value, term.meaning)
    Console().print(table)
    for sentence in [*theorem.words(s), *(f"Note: {note}." for note in case.notes)]:
        typer.echo(sentence)


@app.command()
def predict(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the file of one client.")],
    rows: Annotated[
        Path, typer.Option("--input", help="New rows: CSV, Parquet or NPZ with x; for image runs also images.")
    ],
    client: Annotated[str | None, typer.Option(help="Whose model is asked.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Ask the shared model instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .csv, .tsv, .parquet or .npz file. Default: CSV to the output."),
    ] = None,
    error: Annotated[
        float | None, typer.Option(help="At most this share of the answers may be wrong; abstain else. Default: 0.05.")
    ] = None,
    abstain_at: Annotated[
        float | None,
        typer.Option(help="Abstain below this probability, or above this deviation of a number, without a promise."),
    ] = None,
    coverage: Annotated[float, typer.Option(help="How often conformal sets and intervals hold the truth.")] = 0.9,
    samples: Annotated[int, typer.Option(min=1, help="Weight draws averaged in a prediction.")] = 100,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of the output is one JSON object with what is guaranteed.")
    ] = False,
) -> None:
    """Predict new rows by a client's own model: probabilities, doubt, whether to abstain, conformal sets.

    Examples:

    pfedbayes predict runs/clinics-pfedbayes --client north --input new.csv -o predicted.csv

    pfedbayes predict runs/clinics-pfedbayes --client north --input new.csv --error 0.02 --coverage 0.95

    pfedbayes predict runs/clinics-pfedbayes --shared --input new.csv
    """
    from pfedbayes.opening import open_client
    from pfedbayes.serving import Wish, predict_file

    asked = open_client(source, client, shared, device).ask(Wish(samples, coverage, error, abstain_at))
    outcome = predict_file(asked, rows, out)
    abstained = "" if outcome.abstained is None else f"; it abstains from {outcome.abstained:,} of them"
    where = f" → {out}" if out else ""
    typer.echo(f"{outcome.rows:,} rows by {asked.client.title}{abstained}{where}", err=True)
    for statement in asked.statements():
        typer.echo(f"- {statement}", err=True)
    if as_json:
        typer.echo(json.dumps({**outcome._asdict(), "model": asked.client.title, **asked.as_json()}))


@app.command()
def personalize(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    own_data: Annotated[Path, typer.Option("--data", help="The newcomer's rows with the target: a table, or images.")],
    client: Annotated[str | None, typer.Option(help="Its name. Default: that of the file.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .safetensors file. Default: RUN/newcomers/NAME.safetensors.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps from the shared model.")] = 200,
    zeta: Annotated[float | None, typer.Option(min=0, help="Weight of the KL term. Default: the run's.")] = None,
    hold_out: Annotated[float, typer.Option(help="Share of the rows that are kept for calibration.")] = 0.3,
    certificate: Annotated[bool, typer.Option(help="Bound its error; slow for convolutions of many rows.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The last line of the output is one JSON object.")] = False,
) -> None:
    """Give a client that was not in a run its own model, in seconds, from the shared one.

    Examples:

    pfedbayes personalize runs/clinics-pfedbayes --data east.csv

    pfedbayes predict runs/clinics-pfedbayes --client east --input new.csv
    """
    from pfedbayes.export import export as write
    from pfedbayes.newcomers import join
    from pfedbayes.opening import newcomer_file

    path = out or newcomer_file(folder, client or own_data.stem)
    joined = join(folder, own_data, client, steps, zeta, hold_out, certificate, device)
    if out is None:
        path.parent.mkdir(exist_ok=True)
    write(joined.client, path)
    for line in joined.words():
        typer.echo(line)
    typer.echo(f"model: {path}")
    if as_json:
        bound = joined.certificate and joined.certificate.as_json()
        figures = {"own": joined.own, "shared": joined.shared, "certificate": bound}
        typer.echo(json.dumps({"client": joined.client.name, "path": str(path), **figures}))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the file of one client.")],
    client: Annotated[str | None, typer.Option(help="Whose model.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="The shared model instead.")] = False,
    everybody: Annotated[bool, typer.Option("--all", help="One file for each client of the run.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; with --all the folder. Default: NAME.safetensors.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="The mean network alone, as ONNX.")] = False,
    torch_export: Annotated[
        bool, typer.Option("--torch-export", help="The mean network alone, as a .pt2 file of torch.export.")
    ] = False,
    error: Annotated[float | None, typer.Option(help="Of the abstention threshold in the file. Default: 0.05.")] = None,
    coverage: Annotated[float, typer.Option(help="Of the conformal threshold in the file.")] = 0.9,
) -> None:
    """Write a client's model to one file that needs neither the run nor this package.

    examples/load_export.py reads it with torch alone. ONNX and .pt2 files hold the mean network, without uncertainty,
    and are for running elsewhere: pfedbayes does not read them.
    """
    from pfedbayes import opening
    from pfedbayes.export import FORMATS
    from pfedbayes.export import export as write
    from pfedbayes.serving import Wish

    if onnx and torch_export:
        raise UserError("--onnx and --torch-export are two kinds of files: choose one")
    kind = "onnx" if onnx else "torch" if torch_export else "safetensors"
    if everybody and (client or shared):
        raise UserError("--all is every client of the run: leave --client and --shared out")
    wish = Wish(coverage=coverage, error=error)
    if everybody:
        folder = out or Path()
        folder.mkdir(parents=True, exist_ok=True)
        for one in opening.open_all(source):
            path = folder / opening.newcomer_file(Path(), str(one.name)).with_suffix(FORMATS[kind]).name
            write(one, path, kind, wish)
            typer.echo(path)
        return
    one = opening.open_client(source, client, shared)
    path = out or Path(f"{one.name or 'shared'}{FORMATS[kind]}")
    write(one, path, kind, wish)
    typer.echo(path)


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


def _data_words(federation: Federation) -> list[str]:
    """What was made of one's own data."""
    shards = federation.shards
    if shards.preprocessing is None:
        return []
    sizes = [f"{sum(map(len, getattr(shards, part))):,} {part}" for part in ("train", "validation", "test")]
    count = federation.model.net.num_params
    return [
        f"data: {shards.preprocessing.words()}",
        f"clients: {len(shards.names)}, with {', '.join(sizes)} rows; a model has {count:,} parameters",
    ]


def _show_data(console: Console, federation: Federation) -> None:
    for line in _data_words(federation):
        console.print(_escape(line), soft_wrap=True)


def _default_folder(setup: Experiment, experiment: Path | None, resume: bool) -> Path:
    """runs/NAME, or NAME-2, NAME-3, … if taken; to resume, the newest of them."""
    from pfedbayes.experiment import method_name

    parts = [
        experiment.stem if experiment else setup.data.title.replace(" ", "_"),
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
    table = Table(title=f"round {tables.final(result)['round']}, {tables.estimator_title(rows[0].estimator)}")
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
    for line in _data_words(cost.federation):
        typer.echo(line)
    typer.echo(
        f"plan: {', '.join(cost.plan.words())}, {len(seeds)} seed(s)\n"
        f"time: about {cost.seconds:.0f} s ({cost.seconds_to_start:.0f} s to start, "
        f"{cost.seconds_per_round:.2g} s a round, "
        f"{cost.evaluations} evaluations of {cost.seconds_per_evaluation:.2f} s)\n"
        f"memory: about {cost.bytes / 1e9:.1f} GB for data and states"
        + (f"\ndisk: about {cost.file_bytes / 1e9:.1f} GB for resting clients" if cost.file_bytes else "")
    )
