"""The package's methods: what `pfedbayes run --data` does with them, and the predictions of their models.

The default method has its defaults. The others train for as many rounds and local steps, `BUDGET`, at learning rates
that were chosen by validation rows, see `rates`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.silos import rates
from benchmarks.silos.scores import Floats, Labels, Numbers, Predictions
from benchmarks.silos.tables import TRAIN, VALIDATION, Split, Task
from pfedbayes import runs
from pfedbayes.data import Shards, load_shards
from pfedbayes.maths.likelihoods import Likelihood, Regression
from pfedbayes.maths.metrics import log_average, moments
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import Experiment, read_experiment
from pfedbayes.runs.naming import method_name
from pfedbayes.serving.client import Client
from pfedbayes.serving.open import open_all, open_client
from pfedbayes.trust.calibration import DRAWS

DEFAULT = "default"
METHODS = (DEFAULT, "local", "fedavg", "fedavg-ft", "ditto", "fedrep", "pfedme", "pfedbayes")
BUDGET = (
    "training.rounds=50", "training.local_steps=8", "training.batch_size=1000000", "training.evaluate_every=5",
    "evaluation.alone=false",
)  # fmt: skip
"""Of all methods but the default one, as its own: 8 steps on all rows of a client in each of 50 rounds. They keep the
round with the lowest validation loss."""
PART = "split"  # the column with the part of each row


class Fit(NamedTuple):
    """A finished run."""

    predictions: Predictions
    """Of the test rows."""
    method: str
    """The name of the method in configs."""
    seconds: float
    """Wall-clock time from the file to the finished run folder."""


def fit(split: Split, method: str, folder: Path) -> Fit:
    """Run a method on a split in an empty folder. Without early stopping, it also trains on the validation rows."""
    table = folder / "table.csv"
    experiment = experiment_for(split.target, split.client, split.task, method, table)
    parts = split.parts
    if experiment.training.patience is None:
        parts = np.where(parts == VALIDATION, TRAIN, parts)
    split.lines.write(table, added={PART: parts.tolist()})
    seconds = train(experiment, folder / "run")
    predictions = predict(folder / "run", load_shards(experiment.data))
    return Fit(predictions, method_name(experiment.method), seconds)


def validate(split: Split, method: str, rate: float, folder: Path) -> tuple[float, float]:
    """Return the lowest validation loss of a method at a learning rate, and its seconds. No test row is read."""
    table = folder / "table.csv"
    changes = rates.at(method, rate)
    experiment = experiment_for(split.target, split.client, split.task, method, table, changes)
    split.lines.write(table, np.flatnonzero(~split.test).tolist(), {PART: split.parts.tolist()})
    seconds = train(experiment, folder / "run")
    losses = [record.validation_nll for record in runs.read_run(folder / "run").rounds]
    return min(loss for loss in losses if loss is not None), seconds


def experiment_for(
    target: str, client: str, task: Task, method: str, table: Path, changes: Sequence[str] = ()
) -> Experiment:
    """Return the experiment of a method for a table, as `pfedbayes run --data` resolves it with these changes."""
    data = {"path": str(table), "target": target, "client_column": client, "split_column": PART, "task": task}
    return read_experiment(None, [*own_data(data), *choose(method, task), *changes])


def own_data(data: dict[str, str]) -> list[str]:
    """Return overrides of the section [data]."""
    return [f"data.{name}={json.dumps(value, ensure_ascii=False)}" for name, value in data.items()]


def choose(method: str, task: str) -> list[str]:
    """Return the overrides of a method for a task; none for the default one."""
    if method == DEFAULT:
        return []
    return [f"method.name={method}", *BUDGET, *rates.at(method, rates.chosen().get(task, {}).get(method))]


@cache
def settings_digest(method: str, task: str) -> str:
    """Return a hash of the settings of a method for a task."""
    sections = read_experiment(None, ["data.path='table.csv'", *choose(method, task)]).sections()
    del sections["data"]
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def train(experiment: Experiment, folder: Path, resume: bool = False, device: str = "cpu") -> float:
    """Run an experiment with its first seed and return the seconds it took."""
    start = time.monotonic()
    for _ in execute(experiment, folder, [experiment.training.seed], device, resume):
        pass
    return time.monotonic() - start


def predict(run: Path, shards: Shards) -> Predictions:
    """Predict every client's test rows with its own model, or with the shared model if the method has no other."""
    return collect([
        (client.likelihood, outputs_of(client, shards.x[rows]), shards.y[rows], number)
        for number, (client, rows) in enumerate(zip(models(run, shards.names), shards.test, strict=True))
        if len(rows)
    ])  # fmt: skip


def models(run: Path, names: Sequence[str], trust_module: bool = False, device: str = "cpu") -> Iterator[Client]:
    """Yield the model with which each client predicts. trust_module: see `open_client`."""
    if runs.read_info(run).method.personal:
        yield from open_all(run, device, trust_module)
    else:
        shared = open_client(run, shared=True, device=device, trust_module=trust_module)
        yield from (shared for _ in names)


def outputs_of(client: Client, x: Tensor) -> Tensor:
    """Return outputs (K, n, ...) for inputs x (n, ...), with as many draws as `pfedbayes predict` takes."""
    return client.outputs(DRAWS)(x).cpu()


def collect(parts: Sequence[tuple[Likelihood, Tensor, Tensor, int]]) -> Predictions:
    """Return the predictions for several clients, given likelihood, outputs (K, n, ...), targets and number of each."""
    likelihoods, outputs, targets, numbers = zip(*parts, strict=True)
    client = np.repeat(numbers, [len(y) for y in targets])
    if not isinstance(likelihoods[0], Regression):
        p = torch.cat([log_average(each.double()).exp() for each in outputs]).numpy()
        return Labels(p, torch.cat(targets).numpy(), client)
    unit = likelihoods[0].unit
    pairs = list(zip(likelihoods, outputs, strict=True))
    gaussians = [moments(likelihood, each) for likelihood, each in pairs]
    nll = [log_loss(likelihood, each, y) for likelihood, each, y in zip(likelihoods, outputs, targets, strict=True)]
    return Numbers(
        unit * _flat([each.mean for each in gaussians]), unit * _flat([each.deviation for each in gaussians]),
        unit * _flat(targets), client, _flat(nll) + np.log(unit),
    )  # fmt: skip


def log_loss(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-density (n,) of targets under the mixture of K predictions."""
    densities = -likelihood.nll(outputs.double(), y.double().unsqueeze(0).expand(len(outputs), *y.shape))
    return math.log(len(outputs)) - densities.logsumexp(0)


def _flat(parts: Sequence[Any]) -> Floats:
    flat: Floats = torch.cat(list(parts)).double().flatten().numpy()
    return flat
