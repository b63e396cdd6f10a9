"""Calibration and out-of-distribution detection of pFedBayes, FedAvg and Local, with and without temperature scaling.

    python -m benchmarks.uncertainty [--device cuda] [--rounds 60] [--seeds 1] [--data-dir DIR]

MNIST and Fashion-MNIST, small and medium. Train the missing runs into folders under --runs, write the measurements to
OUT.json after every run, and write the tables to OUT.md. Run the command again to continue after a stop. Data sets
whose files are missing are skipped and named.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pfedbayes import runs
from pfedbayes.data import available
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.saving import load
from pfedbayes.trust import uncertainty as honesty
from pfedbayes.trust.shifts import NAMES, other_set

SETS, SIZES = ("mnist", "fashion-mnist"), ("small", "medium")
# One setting for all cells. FedAvg and Local use ten times the paper's learning rate, which is strong after few rounds.
METHODS = {
    "pfedbayes": ("pFedBayes", ["method.zeta=1.0"]),
    "fedavg": ("FedAvg", ["method.eta=0.1"]),
    "local": ("Local", ["method.eta=0.1"]),
}
VALIDATION = 0.2
PAGE = """# Uncertainty

The personal models of pFedBayes have the lowest NLL and AURC and detect unseen labels best, on all four data sets.
Temperature scaling narrows the gap to Local in NLL. Each method has one setting and one seed, so small differences are
noise.

The tables compare calibration, out-of-distribution detection, conformal sets and abstention of pFedBayes, FedAvg and
Local. Ten clients have five labels each (two-block split), and a fifth of their training data is held out.
[Reading the uncertainty](../uncertainty.md) explains what is guaranteed.
"""
NOTES = """## How to read the tables

Means over clients and seeds; pFedBayes averages ten draws.

{settings}

- scaled: with a temperature fitted on validation data, per client for personal models, one for all for shared models.
- by MI: the score is the mutual information between prediction and weights instead of the confidence.
- unseen labels: {unseen}.
  The shared model was trained on these labels by other clients, so 0.5 is expected for it.
- other set: {other}.
- rotated: {rotated}.
- noisy: {noisy}.
- sets: 90 % conformal sets (LAC), calibrated per client.
- answered: share of examples answered at a guaranteed error of at most 1 %, calibrated on the validation data of all
  clients; 0 where these data cannot support the guarantee.
- sets and answered exist only for unscaled models: the temperature has already used the calibration data.

Written by `python -m benchmarks.uncertainty` from the JSON file beside it; do not edit.
"""


def settings_of(args: argparse.Namespace, name: str, size: str, method: str) -> list[str]:
    """Return the settings of one run that differ from the defaults."""
    return [
        f"data.name={name}", f"data.size={size}", f"data.validation={VALIDATION}", f"method.name={method}",
        *METHODS[method][1], f"training.rounds={args.rounds}", f"training.evaluate_every={args.rounds}",
        "evaluation.estimators=['mean']",
    ]  # fmt: skip


def measure(args: argparse.Namespace, name: str, size: str, method: str) -> dict[str, Any]:
    """Train one run unless it is finished, and assess it."""
    folder = args.runs / f"{name}-{size}-{method}-{args.rounds}-rounds-{args.seeds}-seeds"
    settings = settings_of(args, name, size, method)
    where = [f"data.dir={json.dumps(str(args.data_dir))}"] if args.data_dir else []
    experiment = read_experiment(None, [*settings, *where])
    seeds, begun = range(1, args.seeds + 1), (folder / runs.INFO).exists()
    # A finished run is not trained again; a run with other settings is refused.
    for step in execute(experiment, folder, seeds, args.device, resume=begun):
        if step.round % 20 == 0:
            print(f"{folder.name}: round {step.round} of {step.rounds}", flush=True)
    run = runs.read_run(folder)
    assessed = honesty.assess(load(folder, device=args.device), strange=other_set(name, args.data_dir))
    return {
        "settings": settings,
        "seeds": args.seeds,
        "device": run.info.hardware.processor,
        "seconds": run.summary and run.summary.seconds,
        "commit": run.info.commit,
        # The mean over clients for every seed.
        "figures": {
            which: {way: [[honesty.mean_rows([clients])] for clients in seeds] for way, seeds in ways.items()}
            for which, ways in assessed.items()
        },
    }


def render(measured: dict[str, Any]) -> str:
    """Return the page, from the measurements only."""
    settings = sorted({_circumstances(cell) for cell in measured.values()})
    parts = [PAGE]
    for name in SETS:
        for size in SIZES:
            cells = {method: measured.get(f"{name}-{size}-{method}") for method in METHODS}
            if not any(cells.values()):
                parts.append(f"## {name}, {size}\n\nNot measured.\n")
                continue
            parts.append(f"## {name}, {size}\n")
            for title, columns in honesty.TABLES.items():
                parts += [f"{title}:\n", *_table(cells, columns), ""]
    parts.append(NOTES.format(settings="\n".join(f"- {each}" for each in settings), **NAMES))
    return "\n".join(parts)


def _circumstances(cell: dict[str, Any]) -> str:
    own = [setting for setting in cell["settings"] if setting.startswith(("method.", "training.rounds"))]
    shown = ", ".join(setting.partition(".")[2].replace("name=", "") for setting in own)
    return f"{shown}, {cell['seeds']} seed(s) on {cell['device']}"


def _table(cells: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    lines = [f"| | {' | '.join(honesty.headings(columns))} |", "|---" * (len(columns) + 1) + "|"]
    for method, cell in cells.items():
        if cell is None:
            lines.append(f"| {METHODS[method][0]}: not measured |" + " |" * len(columns))
            continue
        for title, row in honesty.table_rows(cell["figures"], columns):
            lines.append(f"| {METHODS[method][0]} {title} | {' | '.join(honesty.cells(row, columns))} |")
    return lines


def main() -> None:
    """Measure the missing cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/uncertainty"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/uncertainty"))
    args = parser.parse_args()
    data = args.out.with_suffix(".json")
    measured: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {}
    here = {source.name for source in available(args.data_dir) if source.found}
    for name in args.sets:
        if name not in here:
            print(f"{name} is missing and skipped: `pfedbayes data` says how to get it")
            continue
        for size in args.sizes:
            for method in METHODS:
                cell = f"{name}-{size}-{method}"
                asked = {"settings": settings_of(args, name, size, method), "seeds": args.seeds}
                if asked.items() <= measured.get(cell, {}).items():
                    continue
                measured[cell] = measure(args, name, size, method)
                write(data, json.dumps(measured, indent=1) + "\n")
                print(f"{cell}: done", flush=True)
    write(args.out.with_suffix(".md"), page := render(measured))
    print(page)


def write(path: Path, text: str) -> None:
    """Write a file atomically: a stop leaves either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text)
    aside.replace(path)


if __name__ == "__main__":
    main()
