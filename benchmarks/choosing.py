"""The effect of ζ and of the initial width ρ₀: pFedBayes on small MNIST with one change at a time.

    python -m benchmarks.choosing [--rounds 100] [--seeds 1]

Train the missing runs (some minutes on a CPU), write docs/results/choosing.json, and write choosing.md from it and the
curves in table1.json. Run the command again to continue after a stop.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pfedbayes import runs
from pfedbayes.report import tables
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.sweep.scores import read_records

RESULTS = Path("docs/results")
PRIORS = [(0.1, -2.5), (1.0, -2.5), (10.0, -2.5), (100.0, -2.5), (1.0, -1.0), (1.0, -4.0), (1.0, -6.0)]
PAGE = """# ζ and the prior width, measured

[Choosing ζ](../choosing.md) draws the conclusions from these tables. The first changes one setting at a time on small
MNIST; the second follows the personal models at the paper's ζ = 10 over 800 rounds.

## One setting changed at a time

| ζ | ρ₀ | σ₀ | personal accuracy, % | NLL | ECE | shared accuracy, % | NLL | KL |
|---|---|---|---|---|---|---|---|---|
{rows}

pFedBayes on small MNIST ({train} training images and five labels per client), {rounds} rounds, {seeds} seed(s),
{device}. Means over clients, average of ten draws. σ₀ = softplus(ρ₀) is the initial standard deviation of every weight.
KL is KL(personal ‖ shared) in nats, median over clients. With so few seeds, differences of half a point are noise.

## Over the rounds, at the paper's ζ = 10

| data | size | best round | personal there, % | ahead of shared | personal at 800, % | ahead of shared |
|---|---|---|---|---|---|---|
{curves}

The curves of Table 1: preset paper, two-block labels, mean over seeds, average of ten draws. The columns compare the
personal with the shared model at the best evaluated round and at round 800. The best round is picked on test data, so
it shows where the curve turns, not an achievable accuracy.

Written by `python -m benchmarks.choosing` from choosing.json and table1.json beside it; do not edit.
"""


def measure(zeta: float, rho0: float, rounds: int, seeds: int) -> dict[str, Any]:
    """Train one run and return its final scores."""
    settings = [f"method.zeta={zeta}", f"method.rho0={rho0}", f"training.rounds={rounds}"]
    experiment = read_experiment(
        None, [*settings, f"training.evaluate_every={rounds}", "evaluation.estimators=['mc10']"]
    )
    with tempfile.TemporaryDirectory() as folder:
        for step in execute(experiment, Path(folder), range(1, seeds + 1)):
            if step.round % 20 == 0:
                print(f"zeta {zeta:g}, rho0 {rho0:g}: round {step.round} of {step.rounds}", flush=True)
        run = runs.read_run(Path(folder))
    assert run.summary is not None
    assert run.summary.clients is not None
    return {
        "zeta": zeta,
        "rho0": rho0,
        "rounds": rounds,
        "seeds": seeds,
        "train": run.info.train_sizes[0],
        "device": run.info.hardware.processor,
        "commit": run.info.commit,
        "kl": float(np.nanmedian(tables.numbers(run.summary.clients.distance))),
        "scores": {row.model: {name: each.value for name, each in row.mean.items()} for row in tables.headline(run)},
    }


def render(measured: list[dict[str, Any]], table1: list[dict[str, Any]]) -> str:
    """Return the page, from the measurements only."""
    first = measured[0]
    return PAGE.format(
        train=first["train"],
        rounds=first["rounds"],
        seeds=first["seeds"],
        device=first["device"],
        rows="\n".join(_row(one) for one in measured),
        curves="\n".join(_curve_rows(table1)),
    )


def _row(one: dict[str, Any]) -> str:
    personal, shared = one["scores"]["personal"], one["scores"]["shared"]
    return (
        f"| {one['zeta']:g} | {one['rho0']:g} | {math.log1p(math.exp(one['rho0'])):.3f} "
        f"| {personal['accuracy']:.2f} | {personal['nll']:.3f} | {personal['ece']:.3f} "
        f"| {shared['accuracy']:.2f} | {shared['nll']:.3f} | {one['kl']:,.0f} |"
    )


def _curve_rows(table1: list[dict[str, Any]]) -> list[str]:
    rows = []
    for dataset in ("mnist", "fashion-mnist"):
        for size in ("small", "medium", "large"):
            curves = [
                record["curve"]
                for record in table1
                if (record["method"], record["preset"], record["variant"]) == ("pfedbayes", "paper", "default")
                and (record["dataset"], record["size"], record["split"]) == (dataset, size, "two-block")
            ]
            personal, shared = (np.mean([curve[model] for curve in curves], 0) for model in ("personal", "shared"))
            ahead = personal[:, 1] - shared[:, 1]
            best = int(personal[:, 1].argmax())
            rows.append(
                f"| {dataset} | {size} | {personal[best, 0]:.0f} | {personal[best, 1]:.2f} | {ahead[best]:+.2f} "
                f"| {personal[-1, 1]:.2f} | {ahead[-1]:+.2f} |"
            )
    return rows


def main() -> None:
    """Measure the missing settings and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    data = RESULTS / "choosing.json"
    done = json.loads(data.read_text()) if data.exists() else []
    asked = {"rounds": args.rounds, "seeds": args.seeds}
    measured = []
    for zeta, rho0 in PRIORS:
        wanted = asked | {"zeta": zeta, "rho0": rho0}
        known = [one for one in done if wanted.items() <= one.items()]
        measured.append(known[0] if known else measure(zeta, rho0, args.rounds, args.seeds))
        runs.write_file(data, json.dumps(measured, indent=1) + "\n")
    page = render(measured, read_records(RESULTS / "table1.json"))
    runs.write_file(RESULTS / "choosing.md", page)
    print(page)


if __name__ == "__main__":
    main()
