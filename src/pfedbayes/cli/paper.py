"""The commands under `pfedbayes paper`: the paper's tables, figures and bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedbayes.cli.common import Command, DataDir, TrainingDevice, console, echo
from pfedbayes.cli.sweeping import AsJson, DryRun, Minutes, Only, run_sweep

app = typer.Typer(
    help="Reproduce the paper: Tables 1 to 3, Figures 2 and 3, Theorem 1.", no_args_is_help=True, add_completion=False
)


# The sweep files of the repository, by the name of the command.
TABLES = {
    "table1": "Table 1, all methods, data sets and sizes at the paper's settings",
    "table1-tuned": "Table 1 with settings that were chosen on validation data",
    "table2": "Table 2, settings of pFedBayes on medium MNIST",
    "table3": "Table 3, settings of the other methods on medium MNIST",
}


def _train_table(name: str) -> Callable[..., None]:
    """Return the command that runs the sweep of a table."""

    def train(
        only: Only = None,
        minutes: Minutes = None,
        results: Annotated[
            Path | None,
            typer.Option(help="One JSON file with all scores: its cells count as finished, new ones are added."),
        ] = None,
        out: Annotated[Path, typer.Option(help="The folder of the sweep.")] = Path("runs") / name,
        experiments: Annotated[Path, typer.Option(help="The folder of the sweep file.")] = Path("experiments"),
        device: TrainingDevice = "auto",
        data_dir: DataDir = None,
        dry_run: DryRun = False,
        as_json: AsJson = False,
    ) -> None:
        from pfedbayes.sweep.command import Options

        options = Options(out, device, data_dir, minutes, results, dry_run=dry_run)
        run_sweep(experiments / f"{name}.toml", options, only, as_json=as_json)

    return train


for _name, _content in TABLES.items():
    app.command(
        _name,
        cls=Command,
        help=f"Train the cells of {_content}.\n\n"
        f"Short for `pfedbayes sweep experiments/{_name}.toml --out runs/{_name}`. All cells take hours: choose some "
        "with --only, and call the command again to continue.\n\n"
        f"Example: pfedbayes paper {_name} --only pfedbayes --dry-run",
        short_help=f"Train the cells of {_content}.",
    )(_train_table(_name))


@app.command(cls=Command)
def results(
    folder: Annotated[Path, typer.Argument(help="A folder of results such as docs/results.")],
) -> None:
    """Write the paper's tables and figures, with our results beside them, from the JSON files in a folder."""
    from pfedbayes.paper.results import write

    for path in write(folder):
        echo(path)


@app.command(cls=Command)
def figure3(
    out: Annotated[Path, typer.Argument(help="The JSON file to write, e.g. docs/results/figure3.json.")],
    experiment: Annotated[Path | None, typer.Option(help="The experiment file. Default: small MNIST.")] = None,
    device: TrainingDevice = "auto",
    data_dir: DataDir = None,
) -> None:
    """Train for ten rounds and record the predictive uncertainty of five clients at rounds 0, 1 and 10."""
    from pfedbayes.paper.figure3 import write
    from pfedbayes.runs.experiment import read_experiment

    write(read_experiment(experiment), out, device, data_dir)
    echo(out)


@app.command(cls=Command)
def bound(
    source: Annotated[
        Path | None, typer.Argument(help="An experiment file or a run folder. Default: the paper's medium MNIST.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="Training examples of a client.")] = None,
    layers: Annotated[int | None, typer.Option(help="L, the number of hidden layers.")] = None,
    width: Annotated[int | None, typer.Option(help="M, the width of every hidden layer.")] = None,
    inputs: Annotated[int | None, typer.Option(help="s_0, the number of inputs.")] = None,
    outputs: Annotated[int | None, typer.Option(help="The number of outputs.")] = None,
    weight_bound: Annotated[float | None, typer.Option("--bound", help="B, the largest absolute weight.")] = None,
    zeta: Annotated[float | None, typer.Option(help="ζ, the weight of the KL term, at least 1.")] = None,
    smoothness: Annotated[float | None, typer.Option("--beta", help="Smoothness of the true functions.")] = None,
    dimension: Annotated[
        float | None, typer.Option("--d", help="Intrinsic dimension of the data. Default: the number of inputs.")
    ] = None,
    constants: Annotated[
        list[str] | None,
        typer.Option(
            "--constant",
            metavar="NAME=VALUE",
            help="C, C_prime, C_second, C_0, C_1, C_2 (default 1) or delta (default 1.01): the paper gives no values.",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the terms of the paper's Theorem 1 for a network and its data.

    Examples:

    pfedbayes paper bound                                       the paper's medium MNIST

    pfedbayes paper bound experiments/mnist_small.toml --d 13   an experiment, with intrinsic dimension 13

    pfedbayes paper bound --n 1000000 --width 20 --inputs 2 --outputs 1 --beta 2
    """
    from pfedbayes.paper.bound import as_json as bound_as_json
    from pfedbayes.paper.bound import explain, parse_constants, read_case, terms, with_changes

    case = read_case(source, data_dir)
    given = {
        "size": n, "layers": layers, "width": width, "inputs": inputs, "outputs": outputs, "zeta": zeta,
        "weight_bound": weight_bound, "smoothness": smoothness, "dimension": dimension,
        "constants": parse_constants(constants) if constants else None,
    }  # fmt: skip
    case = case._replace(setting=with_changes(case.setting, **given))
    if as_json:
        typer.echo(json.dumps(bound_as_json(case)))
        return
    s = case.setting
    table = Table(title=f"n = {s.size:,}, L = {s.layers}, M = {s.width}, s_0 = {s.inputs}, ζ = {s.zeta:g}")
    for heading in ("term", "equation", "value", "meaning"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for term in terms(s):
        value = f"{term.value:,}" if isinstance(term.value, int) else f"{term.value:.4g}"
        table.add_row(term.letter, term.equation, value, term.meaning)
    console().print(table)
    for sentence in [*explain(s), *(f"Note: {note}." for note in case.notes)]:
        echo(sentence)
