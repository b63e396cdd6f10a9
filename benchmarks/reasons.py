"""The numbers of docs/results/reasons.md that no table holds.

python -m benchmarks.reasons draws      accuracy of single weight draws on both label blocks (trains for 100 rounds)
python -m benchmarks.reasons settings   validation accuracy of the settings of pFedBayes over seeds 1 to 3
python -m benchmarks.reasons older      Table 1 with the rows of pFedBayes and pFedMe from an older commit
python -m benchmarks.reasons pixels     mean squared length of an image of every data set
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pfedbayes.data import load_shards
from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.paper.extensions import EXTENDED
from pfedbayes.paper.ranks import SCORES, count_firsts
from pfedbayes.paper.source import DATASETS, MEAN, SIZES, read_source, setting_text
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.saving import load
from pfedbayes.sweep.scores import Record, headline, overall

RESULTS = Path("docs/results")
OLDER = "f957e5a"  # the commit before the settings of pFedMe and of pFedBayes last changed


def draws() -> None:
    """Print the accuracy of ten draws of the shared model on labels 0 to 4 and 5 to 9, and their correlation."""
    folder = Path("runs/draws")
    experiment = read_experiment(Path("experiments/mnist_medium.toml"), ["training.rounds=100"])
    for _ in execute(experiment, folder, [1], resume=folder.exists()):
        pass
    federation = load(folder)
    halves = []
    for half in (0, 1):
        rows = torch.cat([federation.shards.test[client] for client in range(half, 10, 2)])
        answers = federation.predict("shared", 0, federation.shards.x[rows], samples=10).argmax(-1)
        halves.append((answers.cpu() == federation.shards.y[rows]).double().mean(1))
    print((100 * torch.stack(halves)).round(decimals=1), torch.corrcoef(torch.stack(halves))[0, 1])


def settings() -> None:
    """Print the validation accuracy of every setting that ran on all sizes, over seeds 1 to 3."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in read_source(RESULTS).records["tuning"]:
        if record["method"] == "pfedbayes" and record["dataset"] != "cifar10" and record["seed"] <= 3:
            rows.setdefault((record["dataset"], setting_text(record["varied"])), []).append(record)
    for setting, records in rows.items():
        if {record["size"] for record in records} == set(SIZES):
            means = [
                fmean(headline(record[model])[MEAN] for record in records if record["size"] == size)
                for size in SIZES
                for model in MODELS
            ]
            print(*setting, *(f"{value:.2f}" for value in means), f"{overall(records):.2f}")


def older() -> None:
    """Print in how many columns extended pFedBayes is among the first, with older or present rows of two methods."""
    source = read_source(RESULTS)
    command = ["git", "show", f"{OLDER}:docs/results/table1.json"]
    before = subprocess.run(command, capture_output=True, check=True).stdout
    rows: dict[str, list[dict[str, Any]]] = {"older": json.loads(before), "present": source.records["table1"]}
    for ours, pfedme in itertools.product(rows, rows):
        age = {"pfedbayes": ours, "pfedme": pfedme}
        mixed = [row for name, each in rows.items() for row in each if age.get(row["method"], "present") == name]
        changed = replace(source, records=source.records | {"table1": mixed})
        counts = [count_firsts(changed, score)[EXTENDED] for score in SCORES]
        print(f"pFedBayes {ours}, pFedMe {pfedme}:", *counts, sep="  ")


def pixels() -> None:
    """Print the mean squared length of an image with pixels from 0 to 1."""
    for name in DATASETS:
        images = load_shards(read_experiment(None, [f"data.name={name}"]).data).x
        print(name, (images / 255).square().flatten(1).sum(1).mean())


COMMANDS = {command.__name__: command for command in (draws, settings, older, pixels)}


def main() -> None:
    """Print the numbers of one paragraph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    COMMANDS[parser.parse_args().what]()


if __name__ == "__main__":
    main()
