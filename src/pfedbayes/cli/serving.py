"""Commands that use the models of a run: predict, personalize, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from pfedbayes.cli.common import MOST_DRAWS, Device, Number, TrustModule, echo
from pfedbayes.errors import UserError

WhichModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="personal (or joined): the client's model of the federation; gated: the same, with the shared model for "
        "labels that the client has no rows of; alone: the one that it trained alone; shared. Default: alone if "
        "cross-validation found it to be better, else gated if the client lacks labels, else personal.",
    ),
]


def predict(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the exported file of one client.")],
    rows: Annotated[
        Path,
        typer.Option("--input", help="New rows: CSV, Parquet, or NPZ with an array x; for image models also images."),
    ],
    client: Annotated[str | None, typer.Option(help="The client whose model predicts.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Use the shared model instead.")] = False,
    model: WhichModel = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .csv, .tsv, .parquet or .npz file. Default: CSV to standard output."),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(help="Abstain so that at most this share of the answers is wrong. Default: from the menu."),
    ] = None,
    abstain_at: Annotated[
        float | None,
        typer.Option(
            help="Abstain below this probability (regression: above this standard deviation), without a guarantee."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave out the map that makes the probabilities calibrated.")
    ] = False,
    coverage: Annotated[
        float, typer.Option(help="Probability that a conformal set or interval contains the truth.")
    ] = 0.9,
    at: Annotated[
        str | None, typer.Option(help="For survival: the times whose probabilities are predicted, such as 365,730.")
    ] = None,
    sets: Annotated[
        Literal["lac", "aps", "raps"],
        typer.Option(help="Sets of labels: smallest on average (lac), or growing with the uncertainty (aps, raps)."),
    ] = "lac",
    class_conditional: Annotated[
        bool, typer.Option("--class-conditional", help="Let sets cover each label as often as all labels together.")
    ] = False,
    intervals: Annotated[
        Literal["normalised", "quantile"],
        typer.Option(help="Intervals from the mean and the deviation, or from quantiles of the prediction."),
    ] = "normalised",
    samples: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Weight draws averaged in a prediction.")] = 100,
    others: Annotated[
        float | None,
        typer.Option(
            help="Share of the new rows with labels that the client has no rows of. Default: estimated from the rows."
        ),
    ] = None,
    device: Device = "auto",
    trust_module: TrustModule = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the guarantees as a JSON object on the last line.")
    ] = False,
) -> None:
    """Predict new rows with a client's model: probabilities, uncertainty, abstention, conformal sets.

    Examples:

    pfedbayes predict runs/clinics-pfedbayes --client north --input new.csv -o predicted.csv

    pfedbayes predict runs/clinics-pfedbayes --client north --input new.csv --error 0.02 --coverage 0.95

    pfedbayes predict runs/clinics-pfedbayes --shared --input new.csv
    """
    from pfedbayes.serving.client import predict_file
    from pfedbayes.serving.open import open_client
    from pfedbayes.serving.options import Options
    from pfedbayes.serving.times import parse_times

    predictor = open_client(source, client, shared, device, trust_module, model, raw).predictor(
        Options(samples, coverage, error, abstain_at, parse_times(at), others, sets, class_conditional, intervals)
    )
    outcome = predict_file(predictor, rows, out)
    abstained = "" if outcome.abstained is None else f"; it abstains on {outcome.abstained:,} of them"
    where = f" → {out}" if out else ""
    echo(f"{outcome.rows:,} rows by {predictor.client.title}{abstained}{where}", err=True)
    warnings = outcome.familiarity.warnings()
    if warnings:
        warnings.append("so the following may not hold for these rows")
    for statement in (*(f"warning: {warning}" for warning in warnings), *predictor.statements()):
        echo(f"- {statement}", err=True)
    if as_json:
        counts = {"rows": outcome.rows, "abstained": outcome.abstained, "columns": outcome.familiarity.as_json()}
        about = {"model": predictor.client.title, **predictor.as_json(), "warnings": warnings}
        typer.echo(json.dumps({**counts, **about}))


def personalize(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    own_data: Annotated[
        Path, typer.Option("--data", help="The rows of the new client, with the target: a table, or images.")
    ],
    client: Annotated[str | None, typer.Option(help="Its name. Default: the name of the file.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .safetensors file. Default: RUN/newcomers/NAME.safetensors.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, max=MOST_DRAWS, help="Training steps from the shared model.")] = 200,
    zeta: Annotated[
        float | None, typer.Option(click_type=Number(0), help="Weight of the KL term. Default: the run's.")
    ] = None,
    folds: Annotated[
        int, typer.Option(help="Folds of a cross-validation over its rows, for calibration and comparisons; 0: none.")
    ] = 5,
    hold_out: Annotated[float, typer.Option(help="Share of the rows to hold out for calibration, not folds.")] = 0.0,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Start from the shared model (joined) or from nothing (alone). Default: joined, unless the comparison "
            "shows that it is worse.",
        ),
    ] = None,
    certificate: Annotated[
        bool, typer.Option(help="Certify a bound on its error; slow for convolutions with many rows.")
    ] = True,
    device: Device = "auto",
    trust_module: TrustModule = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object on the last line.")
    ] = False,
) -> None:
    """Train a personal model for a client that was not in the run, starting from the shared model.

    With 20 rows or more it compares this model with the shared one and with one that starts alone. Without any row,
    predict with the shared model: pfedbayes predict RUN --shared.

    Examples:

    pfedbayes personalize runs/clinics-pfedbayes --data east.csv

    pfedbayes predict runs/clinics-pfedbayes --client east --input new.csv
    """
    from pfedbayes.files.writing import writing
    from pfedbayes.serving.export import export as write
    from pfedbayes.serving.newcomers import join
    from pfedbayes.serving.open import newcomer_file

    path = out or newcomer_file(folder, client or own_data.stem)
    joined = join(
        folder, own_data, client, steps, zeta, hold_out, certificate, device, trust_module, folds=folds, model=model
    )
    if out is None:
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
    write(joined.client, path)
    for line in joined.describe():
        echo(line)
    echo(f"model: {path}")
    if as_json:
        bound = joined.certificate and joined.certificate.as_json()
        verdicts = {name: one and vars(one) for name, one in joined.verdicts.items()}
        figures = {"own": joined.own, "shared": joined.shared, "alone": joined.alone, **verdicts, "certificate": bound}
        use = "alone" if joined.client.which == "alone" else "joined"
        typer.echo(json.dumps({"client": joined.client.name, "path": str(path), "model": use, **figures}))


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the exported file of one client.")],
    client: Annotated[str | None, typer.Option(help="The client whose model is exported.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Export the shared model instead.")] = False,
    model: WhichModel = None,
    every_client: Annotated[bool, typer.Option("--all", help="Export one file per client of the run.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file, or with --all the folder. Default: NAME.safetensors.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Export the mean network only, as ONNX.")] = False,
    torch_export: Annotated[
        bool, typer.Option("--torch-export", help="Export the mean network only, as a .pt2 file of torch.export.")
    ] = False,
    error: Annotated[
        float | None, typer.Option(help="Error rate of the abstention threshold in the file. Default: from the menu.")
    ] = None,
    coverage: Annotated[float, typer.Option(help="Coverage of the conformal threshold in the file.")] = 0.9,
    trust_module: TrustModule = False,
) -> None:
    """Export a client's model to one file that needs neither the run nor this package.

    examples/load_export.py reads it with torch alone. ONNX and .pt2 files hold the mean network only, without
    uncertainty, for other programs; pfedbayes does not read them.
    """
    from pfedbayes.files.writing import writing
    from pfedbayes.serving.export import FORMATS
    from pfedbayes.serving.export import export as write
    from pfedbayes.serving.open import file_name, open_all, open_client
    from pfedbayes.serving.options import Options

    if onnx and torch_export:
        raise UserError("--onnx and --torch-export are two file formats: choose one")
    kind = "onnx" if onnx else "torch" if torch_export else "safetensors"
    if every_client and (client or shared or model):
        raise UserError("--all exports every client: leave --client, --shared and --model out")
    options = Options(coverage=coverage, error=error)
    if every_client:
        folder = out or Path()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for one in open_all(source, trust_module=trust_module):
            path = folder / file_name(str(one.name), FORMATS[kind], "export this run client by client, with --out")
            write(one, path, kind, options)
            echo(path)
        return
    one = open_client(source, client, shared, trust_module=trust_module, model=model)
    path = out or Path(file_name("shared" if one.name is None else one.name, FORMATS[kind], "give the file with --out"))
    write(one, path, kind, options)
    echo(path)
