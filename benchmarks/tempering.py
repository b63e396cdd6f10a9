"""What tempering does to the hierarchical method on images: every pair of weights of its two KL terms.

    python -m benchmarks.tempering [--sets mnist] [--sizes small medium] [--out docs/results/tempering.md]

All pairs train as one run (`engine/settings.py`), with the same batches. Beside them pFedBayes takes as many steps. The
page shows every pair on test data, so nothing is chosen by them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from pfedbayes.data import DataConfig, Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.settings import federation_of_settings
from pfedbayes.engine.training import Training
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.methods import Hierarchical, PFedBayes
from pfedbayes.nets import Model, Net, mlp

WEIGHTS = ((1.0, 1.0), (0.1, 1.0), (0.1, 0.1), (0.01, 1.0), (0.01, 0.1))
SCORES = ("accuracy", "nll")
CLASSES = 10
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
HEAD = """# Tempering the hierarchical method on images

{verdict}

The weights of KL(q(μ)) and KL(q(δ)) are `method.kl_shared` and `method.kl_personal`. With 1 and 1, the method
maximises a bound of the evidence. The network is the paper's, 784-100-10, with {rounds} rounds of {steps} steps.
pFedBayes has ζ = 1 and as many steps. Accuracy in percent and NLL are on test data, means over clients, with ten draws
and one seed.
"""
TABLE = """
## {title}, {size}

| method | KL(q(μ)) | KL(q(δ)) | personal: accuracy | NLL | shared: accuracy | NLL |
|---|---|---|---|---|---|---|
"""


def methods() -> list[Hierarchical]:
    """Return the hierarchical method with every pair of weights."""
    return [Hierarchical(kl_shared=shared, kl_personal=personal) for shared, personal in WEIGHTS]


def scores(federation: Federation, settings: int) -> list[dict[str, float]]:
    """Return the mean over clients of each score, by setting."""
    found = federation.evaluate(estimators=("mc10",))
    means = {
        f"{which} {name}": torch.tensor(found[which]["mc10"][name]).mean(1)
        for which in federation.models()
        for name in SCORES
    }
    return [{name: float(values[k]) for name, values in means.items()} for k in range(settings)]


def measure(shards: Shards, rounds: int, steps: int) -> list[dict[str, float]]:
    """Train all pairs, and pFedBayes, and return their scores in this order."""
    model = Model(Net(mlp([shards.x[0].numel(), 100, CLASSES])), Classification())
    training = Training(rounds=rounds, local_steps=steps, batch_size=100)
    federations: Sequence[tuple[Federation, int]] = (
        (federation_of_settings(shards, model, methods(), training), len(WEIGHTS)),
        (Federation(shards, model, PFedBayes(zeta=1.0), training, init="normal"), 1),
    )
    found = []
    for federation, settings in federations:
        for _ in federation.rounds():
            pass
        found += scores(federation, settings)
    return found


def rows(found: list[dict[str, float]]) -> list[str]:
    """Return the rows of a table."""
    labels = [f"hierarchical | {shared:g} | {personal:g}" for shared, personal in WEIGHTS] + ["pFedBayes |  | "]
    columns = ("personal accuracy", "personal nll", "shared accuracy", "shared nll")
    return [
        f"| {label} | " + " | ".join(f"{one[name]:.{1 if 'accuracy' in name else 3}f}" for name in columns) + " |"
        for label, one in zip(labels, found, strict=True)
    ]


def verdict(measured: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """Return what the tables show of all pairs; the best pair would be chosen by test data."""
    better = sum(
        min(one["personal accuracy"] for one in found[1 : len(WEIGHTS)]) > found[0]["personal accuracy"]
        for found in measured.values()
    )
    losing = sum(
        max(one["shared accuracy"] for one in found[: len(WEIGHTS)]) < found[-1]["shared accuracy"]
        for found in measured.values()
    )
    return (
        f"Every tempered pair of weights makes personal models more accurate on {better} of {len(measured)} data sets. "
        f"On {losing} of {len(measured)}, the shared model of every pair is behind that of pFedBayes."
    )


def main() -> None:
    """Train on each data set and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["mnist"], choices=list(TITLES))
    parser.add_argument("--sizes", nargs="+", default=["small", "medium"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured: dict[tuple[str, str], list[dict[str, float]]] = {}
    for name in args.sets:
        for size in args.sizes:
            shards = load_shards(DataConfig(name=name, size=size), args.data_dir)
            measured[name, size] = measure(shards, args.rounds, args.steps)
            print("\n".join([f"{name} {size}", *rows(measured[name, size])]), flush=True)
    text = HEAD.format(verdict=verdict(measured), rounds=args.rounds, steps=args.steps)
    for (name, size), found in measured.items():
        text += TABLE.format(title=TITLES[name], size=size) + "\n".join(rows(found)) + "\n"
    options = f"--sets {' '.join(args.sets)} --sizes {' '.join(args.sizes)} --rounds {args.rounds} --steps {args.steps}"
    text += f"\nWritten by `python -m benchmarks.tempering {options}`; do not edit.\n"
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
