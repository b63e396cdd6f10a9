"""Progression of diabetes (442 patients, scikit-learn): regression from tables in memory, a model per age group.

python examples/diabetes.py [ROUNDS]
"""

import sys

import numpy as np
from sklearn.datasets import load_diabetes

import pfedbayes

AGES = {"under 38": (0, 38), "38 to 49": (38, 50), "50 to 59": (50, 60), "60 and more": (60, 200)}


def tables() -> dict[str, dict[str, np.ndarray]]:
    """Per age group a column for each measurement and one for the progression; a pandas frame would do as well."""
    data = load_diabetes(scaled=False)
    columns = dict(zip(data.feature_names, data.data.T, strict=True)) | {"progression": data.target}
    age = columns["age"]
    groups = {name: (low <= age) & (age < high) for name, (low, high) in AGES.items()}
    return {name: {key: values[rows] for key, values in columns.items()} for name, rows in groups.items()}


def main(rounds: int) -> None:
    """Train, score on held-out patients, and predict one of them with an interval."""
    shards = pfedbayes.shards_from_tables(tables(), target="progression")
    target = shards.preprocessing.target
    model = pfedbayes.Model(
        pfedbayes.Net(pfedbayes.WithNoise(pfedbayes.mlp([shards.x.shape[1], 16, 1]))),
        pfedbayes.Regression(unit=target.deviation),
    )
    federation = pfedbayes.Federation(
        shards, model, pfedbayes.PFedBayes(zeta=1.0), pfedbayes.Training(rounds=rounds, batch_size=32)
    )
    for _ in federation.rounds():
        pass
    rmse = federation.evaluate()["personal"]["mc10"]["rmse"][0]
    for name, error in zip(shards.names, rmse, strict=True):
        print(f"{name}: off by {error:.0f} (the target has standard deviation {target.deviation:.0f})")

    patient = shards.test[0][:1]
    means, noise = model.likelihood.mean_and_noise(federation.predict("personal", 0, shards.x[patient], samples=200))
    mean, deviation = float(means.mean()), float((means.var() + noise.square().mean()).sqrt())
    truth = float(shards.y[patient])
    low, guess, high, truth = (
        target.mean + target.deviation * value
        for value in (mean - 1.645 * deviation, mean, mean + 1.645 * deviation, truth)
    )
    print(
        f"a patient of {shards.names[0]}: {guess:.0f}, with 90 % between {low:.0f} and {high:.0f}; it was {truth:.0f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
