"""Commands that assess models: certificates and uncertainty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pfedbayes.cli.common import MOST_DRAWS, Device, TrustModule, console, echo
from pfedbayes.errors import UserError, printable


def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with data.certify set.")],
    delta: Annotated[float, typer.Option(help="The probability that a certificate fails, at most.")] = 0.05,
    steps: Annotated[
        int,
        typer.Option(min=1, max=MOST_DRAWS, help="Training steps on the held-out examples, from the personal model."),
    ] = 100,
    draws: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_DRAWS, help="Weight draws per example. Default: 20, or 1000 for convolutions."),
    ] = None,
    device: Device = "auto",
    trust_module: TrustModule = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificates as JSON.")] = False,
) -> None:
    """Certify an upper bound on the error of every personal model.

    A bound needs examples that no model has seen, so the run must hold some out:

    pfedbayes run --set data.certify=0.5 --out runs/DIR

    pfedbayes certify runs/DIR
    """
    from pfedbayes.serving.certificates import CERTIFICATES, POSTERIORS, certify_run

    certificates = certify_run(folder, device, trust_module, delta=delta, steps=steps, draws=draws)
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
        table.add_row(printable(one.client), str(one.seed), shown, *test, *last)
    console().print(table)
    echo(
        "bound: upper bound on the error of one network drawn from the certified model (Gibbs). Gibbs, averaged: test "
        f"error of one draw, and of the average of {certificates[0].draws} draws. hold-out: hold-out bound on the "
        "averaged prediction of the model of the run. examples: held out by the run. KL: divergence of the certified "
        "model from that model, in nats. vacuous: no better than guessing."
    )
    echo(f"certificates and certified models: {folder / CERTIFICATES}, {folder / POSTERIORS}")


def uncertainty(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of finished runs.")],
    samples: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Weight draws averaged in a prediction.")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the out-of-distribution data sets.")] = None,
    device: Device = "auto",
    trust_module: TrustModule = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores of single clients as JSON.")] = False,
) -> None:
    """Compare the uncertainty of runs: calibration and detection of out-of-distribution inputs.

    Runs with validation data (--set data.validation=0.2) are also scored with temperature scaling, conformal sets and
    abstention.
    """
    from pfedbayes import runs
    from pfedbayes.runs import saving
    from pfedbayes.trust.shifts import NAMES, other_set
    from pfedbayes.trust.uncertainty import FURTHER, TABLES, assess, cells, headings, table_rows

    results: dict[str, Any] = {}
    for folder in folders:
        data = runs.read_run(folder).experiment.data
        others = other_set(data.name, data_dir or data.dir)
        results[str(folder)] = assess(saving.load(folder, device=device, trust_module=trust_module), samples, others)
    if as_json:
        typer.echo(json.dumps(results))
        return
    for title, columns in (TABLES | FURTHER).items():
        table = Table("run", "model", title=title)
        for heading in headings(columns):
            table.add_column(heading, justify="right")
        for name, assessed in results.items():
            for model, row in table_rows(assessed, columns):
                table.add_row(printable(Path(name).name), model, *cells(row, columns))
        console().print(table)
    for name, meaning in NAMES.items():
        typer.echo(f"{name}: {meaning}")


def forget(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    client: Annotated[str, typer.Option(help="The name of the client to forget.")],
    rounds: Annotated[
        int, typer.Option(min=0, max=10**6, help="Rounds to train after the client's contribution is out.")
    ] = 5,
    device: Device = "auto",
    trust_module: TrustModule = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Forget a client, and say how much of it is left.

    PVI and FedEP keep a factor per client and take it out. For other methods the honest answer is to train again, and
    how long that takes. Both are compared with a federation that is trained again without the client, for the first
    seed. The run folder stays as it is.

    pfedbayes forget runs/DIR --client site_3
    """
    from pfedbayes.runs import read_run
    from pfedbayes.runs.saving import load
    from pfedbayes.trust.forgetting import forget as take_out

    federation = load(folder, device=device, trust_module=trust_module)
    found, _ = take_out(federation, client, rounds, read_run(folder).experiment.net.init)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    for line in found.describe():
        echo(line)


def verify(
    path: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A run folder, a node's state folder, or a file.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object on the last line.")
    ] = False,
) -> None:
    """Check files for damage: compare each one with the checksum inside it.

    A checksum detects damage, such as a failing disk or an incomplete copy. It does not show who wrote a file.
    """
    from pfedbayes.runs.verify import verify as check

    checks = []
    for found in check(path):
        checks.append(found)
        echo(f"{found.verdict:<11}  {found.path}")
    if as_json:
        typer.echo(json.dumps({str(found.path): found.verdict for found in checks}))
    damaged = [found for found in checks if found.verdict == "damaged"]
    if damaged:
        raise UserError(f"{len(damaged)} of {len(checks)} checks failed: {damaged[0].reason}")
