"""How far models can be trusted: certificates and uncertainty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pfedbayes.cli.common import Device


def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run made with data.certify.")],
    delta: Annotated[float, typer.Option(help="How often a certificate may fail, at most.")] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="Steps on the examples kept back, from the personal model.")] = 100,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Networks drawn per example. Default: 20, or 1000 for convolutions.")
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificates as JSON.")] = False,
) -> None:
    """Bound the error of every client's own model, by examples that the run kept back.

    A bound needs examples that no model has seen, so the run has to set some apart:

    pfedbayes run --set data.certify=0.5 --out runs/DIR

    pfedbayes certify runs/DIR
    """
    from pfedbayes.trust.certificate import CERTIFICATES, POSTERIORS, certify_run

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


def uncertainty(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of finished runs.")],
    samples: Annotated[int, typer.Option(min=1, help="Weight draws averaged in a prediction.")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="Where the other data sets lie.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures of single clients as JSON.")] = False,
) -> None:
    """Compare how well runs know what they do not know: calibration, and telling strange inputs from their own.

    With validation data (--set data.validation=0.2 when running) also at a fitted temperature, with conformal sets and
    abstention.
    """
    from pfedbayes import runs
    from pfedbayes.runs import execution
    from pfedbayes.trust import uncertainty as honesty

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
