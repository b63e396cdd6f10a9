"""Commands that assess models: certificates and uncertainty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from pfedbayes.cli.common import MOST_DRAWS, Device, TrustModule, console, echo
from pfedbayes.errors import UserError, printable

PAGE = "uncertainty.html"  # in the folder of a run


def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with data.certify set.")],
    delta: Annotated[float, typer.Option(help="The probability that a certificate fails, at most.")] = 0.05,
    steps: Annotated[
        int,
        typer.Option(min=1, max=MOST_DRAWS, help="Training steps on the held-out examples, from the personal model."),
    ] = 100,
    objective: Annotated[
        Literal["bound", "elbo"] | None,
        typer.Option(
            help="What these steps minimise: the bound, or the method's ELBO at two weights of the KL term. "
            "Default: the bound for labels, the ELBO for numbers."
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_DRAWS, help="Weight draws per example. Default: 200, or 1000 for convolutions."),
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

    certificates = certify_run(folder, device, trust_module, delta=delta, objective=objective, steps=steps, draws=draws)
    if as_json:
        typer.echo(json.dumps([certificate.as_json() for certificate in certificates]))
        return
    unit = "in %" if certificates[0].largest is None else "(RMSE)"
    table = Table(title=f"Error of the certified models {unit}; each bound holds with probability {1 - delta:g}")
    for heading in ("client", "seed", "bound", "Gibbs", "averaged", "hold-out", "examples", "KL"):
        table.add_column(heading, justify="left" if heading == "client" else "right", no_wrap=True)
    for one in certificates:
        number = ".1f" if one.largest is None else ".4g"
        shown = ("vacuous " if one.vacuous else "") + f"{one.shown(one.bound):{number}}"
        tested = (one.test.gibbs, one.test.mc) if one.test else ()
        test = [f"{one.shown(error):{number}}" for error in tested] or ["–", "–"]
        last = (f"{one.shown(one.hold_out):{number}}", str(one.certified.size), f"{one.kl:.1f}")
        table.add_row(printable(one.client), str(one.seed), shown, *test, *last)
    console().print(table)
    echo(
        "bound: upper bound on the error of one network drawn from the certified model (Gibbs). Gibbs, averaged: test "
        f"error of one draw, and of the average of {certificates[0].draws} draws. hold-out: hold-out bound on the "
        "averaged prediction of the model of the run. examples: held out by the run. KL: divergence of the certified "
        "model from the one before it trained on them, in nats. vacuous: no better than guessing."
    )
    trained = sum(one.objective is not None for one in certificates)
    echo(
        f"{trained} of {len(certificates)} certified models have trained on these examples; the others are the run's "
        "models, perhaps with narrower distributions (scale in the file)."
    )
    if certificates[0].largest is not None:
        end = certificates[0].shown(1.0)
        echo(f"numbers: errors above {end:.4g} count as {end:.4g}, since a bound needs a largest error.")
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

    Runs with validation data (--set data.validation=0.2) are also scored with temperature scaling, conformal sets,
    abstention and strangeness. The folder of each run gets a page with pictures, uncertainty.html.
    """
    from pfedbayes import runs
    from pfedbayes.report.assessed import Observed, page_of
    from pfedbayes.runs import saving
    from pfedbayes.trust.answers import Models
    from pfedbayes.trust.shifts import NAMES, other_set
    from pfedbayes.trust.uncertainty import (
        FURTHER,
        TABLES,
        assess_models,
        cells,
        filled,
        headings,
        table_rows,
        warnings,
    )

    results: dict[str, Any] = {}
    pages: list[Path] = []
    for folder in folders:
        run, observed = runs.read_run(folder), Observed()
        data = run.experiment.data
        models = Models.of(saving.load(folder, device=device, trust_module=trust_module), samples)
        results[str(folder)] = assess_models(models, other_set(data.name, data_dir or data.dir), observed.add)
        pages.append(folder / PAGE)
        runs.write_file(pages[-1], page_of(run, results[str(folder)], observed).encode(errors="backslashreplace"))
    if as_json:
        typer.echo(json.dumps(results))
        return
    for title, columns in (TABLES | FURTHER).items():
        rows = [(name, *row) for name, assessed in results.items() for row in table_rows(assessed, columns)]
        known = filled([row for *_, row in rows], columns)
        if not known:
            continue
        table = Table("run", "model", title=title)
        for heading in headings(known):
            table.add_column(heading, justify="right")
        for name, model, row in rows:
            table.add_row(printable(Path(name).name), model, *cells(row, known))
        console().print(table)
    for name, assessed in results.items():
        for sentence in warnings(assessed):
            echo(f"warning: {Path(name).name}: {sentence}")
    for name, meaning in NAMES.items():
        typer.echo(f"{name}: {meaning}")
    echo(f"pages: {', '.join(map(str, pages))}")


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
