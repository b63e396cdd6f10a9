"""Predict the progression of diabetes (442 patients, scikit-learn): regression with one model per age group.

python examples/diabetes.py [FOLDER] [ROUNDS]
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes

import pfedbayes
from pfedbayes.maths.metrics import moments

AGES = {"under 38": (0, 38), "38 to 49": (38, 50), "50 to 59": (50, 60), "60 and more": (60, 200)}


def tables() -> dict[str, dict[str, np.ndarray]]:
    """Return one table per age group, a mapping from names to columns; a pandas frame works as well."""
    data = load_diabetes(scaled=False)
    columns = dict(zip(data.feature_names, data.data.T, strict=True)) | {"progression": data.target}
    age = columns["age"]
    groups = {name: (low <= age) & (age < high) for name, (low, high) in AGES.items()}
    return {name: {key: values[rows] for key, values in columns.items()} for name, rows in groups.items()}


def train(rounds: int) -> pfedbayes.Federation:
    """Train a federation of the age groups, with a small network that predicts a mean and a noise level."""
    shards = pfedbayes.shards_from_tables(tables(), target="progression")
    model = pfedbayes.Model(
        pfedbayes.Net(pfedbayes.WithNoise(pfedbayes.mlp([shards.x.shape[1], 16, 1]))),
        pfedbayes.Regression(unit=shards.preprocessing.target.deviation),
    )
    training = pfedbayes.Training(rounds=rounds, batch_size=32)
    federation = pfedbayes.Federation(shards, model, pfedbayes.PFedBayes(zeta=1.0), training)
    for _ in federation.rounds():
        pass
    return federation


def predict(federation: pfedbayes.Federation, client: int) -> np.ndarray:
    """Return rows (prediction, lower, upper, truth) of the held-out patients, in units of the target, at 90 %."""
    shards, target = federation.shards, federation.shards.preprocessing.target
    patients = shards.test[client]
    outputs = federation.predict("personal", client, shards.x[patients], samples=200)
    mean, deviation, _ = moments(federation.model.likelihood, outputs)
    half = 1.645 * deviation
    rows = torch.cat([mean, mean - half, mean + half, shards.y[patients].reshape(-1, 1)], 1)
    return (target.mean + target.deviation * rows).numpy()


def main(folder: Path, rounds: int) -> None:
    """Train, score the held-out patients, and write their predictions."""
    federation = train(rounds)
    shards, spread = federation.shards, federation.shards.preprocessing.target.deviation
    scores = federation.evaluate()
    personal, shared = (scores[model]["mc10"]["rmse"][0] for model in ("personal", "shared"))
    print(f"the target has standard deviation {spread:.0f}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "predictions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "predicted", "low", "high", "measured"])
        for client, name in enumerate(shards.names):
            predictions = predict(federation, client)
            table.writerows([name, *(f"{value:.0f}" for value in row)] for row in predictions)
            _, low, high, truth = predictions.T
            inside = ((low <= truth) & (truth <= high)).mean()
            print(
                f"{name}: off by {personal[client]:.0f} with its own model, by {shared[client]:.0f} with the shared "
                f"one; {inside:.0%} of {len(truth)} patients within their 90 % interval"
            )
    print(f"predictions: {file.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "diabetes"), int(sys.argv[2]) if len(sys.argv) > 2 else 30)
