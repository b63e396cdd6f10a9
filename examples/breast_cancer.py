"""Breast cancer (569 tumours, scikit-learn): from a CSV file with a hospital column to a model for each hospital.

    python examples/breast_cancer.py [FOLDER] [options of pfedbayes run]

The data have no hospitals, so five are made up: they differ in the size of the tumours that they see. Four train
together; a few tumours of one of them are kept for later.
"""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import pfedbayes

HOSPITALS = ("village", "town", "harbour", "city", "university")
NEWCOMER = "harbour"  # joins when the others are done
ASKED = "town"  # has new tumours: every ninth of its rows is set apart for that


def write_tables(folder: Path) -> None:
    """tumours.csv: 30 measurements, the hospital and the outcome; newcomer.csv: the same of the hospital that comes
    later; new.csv: tumours whose outcome nobody has told the model."""
    data = load_breast_cancer()
    radius = data.data[:, 0] + np.random.default_rng(0).normal(0, 2, len(data.data))
    at = np.digitize(radius, np.quantile(radius, [0.2, 0.4, 0.6, 0.8]))
    new = np.flatnonzero(at == HOSPITALS.index(ASKED))[::9]
    late = np.flatnonzero(at == HOSPITALS.index(NEWCOMER))
    tables = {"tumours": np.setdiff1d(np.arange(len(at)), [*new, *late]), "newcomer": late, "new": new}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        columns = [] if name == "new" else ["hospital", "outcome"]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*data.feature_names, *columns])
            for row in rows:
                facts = (HOSPITALS[at[row]], data.target_names[data.target[row]])
                writer.writerow([*data.data[row], *(facts if columns else ())])


def pfedbayes_command(folder: Path, line: str, options: list[str]) -> None:
    """Show a command and run it in the folder."""
    words = [*shlex.split(line), *options]
    print("$", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)


def main(folder: Path, options: list[str]) -> None:
    """Train by the command line, then ask the model of the town for its opinion on a few tumours."""
    write_tables(folder)
    train = "pfedbayes run --data tumours.csv --target outcome --client-column hospital --out run"
    pfedbayes_command(folder, train, options)

    run = folder / "run"
    federation = pfedbayes.load(run)
    x = pfedbayes.read_inputs(folder / "new.csv", pfedbayes.read_preprocessing(run))
    outputs = federation.predict("personal", federation.shards.names.index(ASKED), x, samples=100).softmax(-1)
    for mean, spread in zip(outputs.mean(0), outputs.std(0), strict=True):
        chances = zip(federation.shards.class_names or (), mean.tolist(), spread.tolist(), strict=True)
        print(", ".join(f"{name} {chance:.3f} ± {deviation:.3f}" for name, chance, deviation in chances))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "breast_cancer"), sys.argv[2:])
