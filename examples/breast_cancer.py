"""Classify breast tumours (569 tumours, scikit-learn): from a CSV file to predictions that may abstain.

    python examples/breast_cancer.py [FOLDER] [options of pfedbayes run]

The data have no hospitals, so the script makes up five that see tumours of different sizes. Four train together, the
fifth joins later. Two of them have new tumours whose outcome the models do not know.
"""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = ("village", "town", "harbour", "city", "university")
NEWCOMER = "harbour"
COMMANDS = (
    "pfedbayes run --data tumours.csv --target outcome --client-column hospital --out run",
    "pfedbayes predict run --client town --input town_new.csv -o town_predicted.csv",
    "pfedbayes personalize run --data harbour.csv",
    "pfedbayes predict run --client harbour --input harbour_new.csv --error 0.15 -o harbour_predicted.csv",
)


def write_tables(folder: Path) -> None:
    """Write the CSV files.

    tumours.csv, harbour.csv: 30 measurements, the hospital and the outcome.
    town_new.csv, harbour_new.csv: every sixth tumour of these two hospitals, without the outcome.
    town_truth.csv, harbour_truth.csv: the outcomes of the new tumours.
    """
    data = load_breast_cancer()
    radius = data.data[:, 0] + np.random.default_rng(0).normal(0, 2, len(data.data))
    at = np.array(HOSPITALS)[np.digitize(radius, np.quantile(radius, [0.2, 0.4, 0.6, 0.8]))]
    new = {name: np.flatnonzero(at == name)[::6] for name in ("town", NEWCOMER)}
    known = np.setdiff1d(np.arange(len(at)), np.concatenate(list(new.values())))
    outcomes = data.target_names[data.target]
    rows = np.column_stack([data.data.astype(str), at, outcomes])
    measured, of_all = list(data.feature_names), [*data.feature_names, "hospital", "outcome"]
    tables = {
        "tumours": (of_all, rows[known[at[known] != NEWCOMER]]),
        NEWCOMER: (of_all, rows[known[at[known] == NEWCOMER]]),
        **{f"{name}_new": (measured, rows[chosen, :-2]) for name, chosen in new.items()},
        **{f"{name}_truth": (["outcome"], rows[chosen, -1:]) for name, chosen in new.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (columns, lines) in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([columns, *lines])


def compare(folder: Path, name: str) -> str:
    """Return how the given answers agree with the outcomes."""
    with (folder / f"{name}_predicted.csv").open() as predicted, (folder / f"{name}_truth.csv").open() as truth:
        pairs = list(zip(csv.DictReader(predicted), csv.DictReader(truth), strict=True))
    answers = [(row["label"], found["outcome"]) for row, found in pairs if row["abstain"] == "false"]
    right = sum(label == outcome for label, outcome in answers)
    covered = sum(found["outcome"] in row["conformal_set"].split("|") for row, found in pairs)
    return (
        f"{name}: {len(pairs)} new tumours, {len(answers)} of them answered, {right} of these right; "
        f"{covered} of {len(pairs)} conformal sets hold the truth"
    )


def main(folder: Path, options: list[str]) -> None:
    """Run the commands as you would type them, then compare the predictions with the outcomes."""
    write_tables(folder)
    for k, command in enumerate(COMMANDS):
        words = [*shlex.split(command), *(options if k == 0 else [])]
        print("$", shlex.join(words), flush=True)
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    print("$ # what was found out later")
    for name in ("town", NEWCOMER):
        print(compare(folder, name))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "breast_cancer"), sys.argv[2:])
