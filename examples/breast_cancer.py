"""Breast cancer (569 tumours, scikit-learn): from a CSV file with a hospital column to a model for each hospital.

    python examples/breast_cancer.py [FOLDER] [options of pfedbayes run]

The data have no hospitals, so four are made up: they differ in the size of the tumours that they see.
"""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import pfedbayes

HOSPITALS = ("village", "town", "city", "university")


def write_csv(path: Path) -> Path:
    """One row per tumour: 30 measurements, the hospital and the outcome."""
    data = load_breast_cancer()
    radius = data.data[:, 0] + np.random.default_rng(0).normal(0, 2, len(data.data))
    hospitals = np.digitize(radius, np.quantile(radius, [0.25, 0.5, 0.75]))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "hospital", "outcome"])
        for row, hospital, label in zip(data.data, hospitals, data.target, strict=True):
            writer.writerow([*row, HOSPITALS[hospital], data.target_names[label]])
    return path


def main(folder: Path, options: list[str]) -> None:
    """Train by the command line, then ask the model of the town for its opinion on a few tumours."""
    folder.mkdir(parents=True, exist_ok=True)
    table, run = write_csv(folder / "tumours.csv"), folder / "run"
    columns = ["--target", "outcome", "--client-column", "hospital"]
    command = [sys.executable, "-m", "pfedbayes", "run", "--data", table, *columns, "--out", run, *options]
    subprocess.run(command, check=True)

    federation = pfedbayes.load(run)
    x = pfedbayes.read_inputs(table, pfedbayes.read_preprocessing(run))[::120]
    outputs = federation.predict("personal", federation.shards.names.index("town"), x, samples=100).softmax(-1)
    for mean, spread in zip(outputs.mean(0), outputs.std(0), strict=True):
        chances = zip(federation.shards.class_names or (), mean.tolist(), spread.tolist(), strict=True)
        print(", ".join(f"{name} {chance:.3f} ± {deviation:.3f}" for name, chance, deviation in chances))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "breast_cancer"), sys.argv[2:])
