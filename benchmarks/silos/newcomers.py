"""Clients that join later: what their models are worth with few rows, against starting alone.

Some clients of a table are left out, and the default method trains on the others. Then each left-out client brings 5,
20 or 100 rows, gets a model as `pfedbayes personalize` makes it, and is scored on its other rows. Without any row it
has the shared model.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.silos.encoding import Design, encode
from benchmarks.silos.ours import DEFAULT, collect, experiment_for, outputs_of, train
from benchmarks.silos.rivals import class_probabilities, gaussian, logistic, quietly, ridge
from benchmarks.silos.scores import Labels, Measured, Numbers, Predictions, Scores, score
from benchmarks.silos.tables import TEST, TRAIN, Split, Table, Task, make_split, read_frame, task_of
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.serving.client import Client
from pfedbayes.serving.newcomers import join
from pfedbayes.serving.open import open_client

SIZES = (5, 20, 100)
MOST = 10  # newcomers per table and seed
BROUGHT = 0.7  # share of its rows that a newcomer can bring at most
LEFT_OUT = 10  # one of so many clients is left out at once, at least one
SEEDS = 3
LEAST_VARIANCE = 1e-4  # of a ridge regression whose few rows it fits exactly; targets are standardised
MODELS = ("shared", "joined", "alone", "rival")


@dataclass(frozen=True, eq=False)
class Newcomers:
    """A table, and the clients of it that join later."""

    frame: Any
    """A pandas frame with all rows."""
    target: str
    client: str
    task: Task
    groups: tuple[tuple[str, ...], ...]
    """The newcomers. Those of a group are left out together."""
    own: dict[str, tuple[NDArray[np.intp], NDArray[np.intp]]]
    """For each newcomer, the rows it can bring in their order, and the rows it is scored on."""
    digest: str

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows that train at some time, none for validation, and rows that newcomers are scored on."""
        tested = sum(len(test) for _, test in self.own.values())
        return len(self.frame) - tested, 0, tested

    @property
    def num_clients(self) -> int:
        """The number of clients of the table."""
        return int(self.frame[self.client].nunique())


def read(table: Table, seed: int) -> Newcomers:
    """Read a table and draw its newcomers: ten clients, or all if there are fewer.

    A client can bring 70 % of its rows, but at most 100, and is scored on the others. It must be able to bring the
    smallest number of rows.
    """
    frame = read_frame(table)
    names = frame[table.client].to_numpy()
    generator = np.random.default_rng(seed)
    own: dict[str, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
    clients = sorted(set(names))
    for name in generator.permutation(clients).tolist():
        rows = generator.permutation(np.flatnonzero(names == name))
        most = min(SIZES[-1], int(BROUGHT * len(rows)))
        if most >= SIZES[0] and len(own) < MOST:
            own[name] = rows[:most], rows[most:]
    together = max(1, len(clients) // LEFT_OUT)
    drawn = list(own)
    groups = tuple(tuple(drawn[start : start + together]) for start in range(0, len(drawn), together))
    task = task_of(table, frame)
    content = f"{table.target}\n{table.client}\n{task}\n{frame.to_csv(index=False)}\n{groups}\n{own}"
    content += " ".join(str(row) for pair in own.values() for part in pair for row in part)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Newcomers(frame, table.target, table.client, task, groups, own, digest)


def measure(data: Newcomers, folder: Path) -> Measured:
    """Train without each group and score its clients with every number of rows that they have.

    Scores are called "joined 5 nll" and so on, see `MODELS`. Those of all clients are means over clients.
    """
    start = time.monotonic()
    per_client: dict[str, Scores] = {}
    for number, group in enumerate(data.groups):
        part = folder / str(number)
        part.mkdir(parents=True)
        run, design = federation(data, group, part), encode(_split(data, group))
        for name in group:
            found = {**_ours(data, name, run, part), **_rival(data, name, design)}
            per_client[name] = {
                f"{model} {size} {key}": value
                for (model, size), predictions in found.items()
                for key, value in score(predictions)[0].items()
            }
    names = sorted({name for scores in per_client.values() for name in scores})
    means = {name: float(np.mean([scores[name] for scores in per_client.values() if name in scores])) for name in names}
    return Measured(means, means, time.monotonic() - start, per_client)


def federation(data: Newcomers, group: tuple[str, ...], folder: Path) -> Path:
    """Train the default method on all rows of the clients that are not in the group, and return the run folder."""
    split, path = _split(data, group), folder / "others.csv"
    others = ~data.frame[data.client].isin(group)
    data.frame[others].assign(split=TRAIN).to_csv(path, index=False)
    experiment = experiment_for(split, DEFAULT, path, ["evaluation.folds=0", "evaluation.alone=false"])
    train(experiment, folder / "run")
    return folder / "run"


def _split(data: Newcomers, group: tuple[str, ...]) -> Split:
    """Return the table with the scored rows of a group as test rows."""
    parts = np.full(len(data.frame), TRAIN, dtype="<U10")
    for name in group:
        parts[data.own[name][1]] = TEST
    return make_split("newcomers", data.frame, data.target, data.client, data.task, parts)


Found = dict[tuple[str, int], Predictions]


def _ours(data: Newcomers, name: str, run: Path, folder: Path) -> Found:
    """Predict with the shared model, and with the default method joined and alone, by the number of rows."""
    brought, tested = data.own[name]
    path = folder / "newcomer.csv"
    inputs = data.frame.drop(columns=[data.client])
    shared = open_client(run, shared=True, device="cpu")
    inputs.iloc[tested].to_csv(path, index=False)
    x, y = read_examples(path, shared.preprocessing)

    def predict(client: Client) -> Predictions:
        return collect([(client.likelihood, outputs_of(client, x), y, 0)])

    found: Found = {("shared", 0): predict(shared)}
    for size in _sizes(brought):
        inputs.iloc[brought[:size]].to_csv(path, index=False)
        for model in ("joined", "alone"):
            made = join(run, path, name, folds=0, certify=False, device="cpu", model=model)
            found[model, size] = predict(made.client)
    return found


def _rival(data: Newcomers, name: str, design: Design) -> Found:
    """Predict with logistic regression or ridge, fitted to the newcomer's rows."""
    brought, tested = data.own[name]
    test = _mask(tested, len(design.y))
    found: Found = {}
    for size in _sizes(brought):
        own = _mask(brought[:size], len(design.y))
        with quietly():
            if data.task == "classification":
                p = class_probabilities(design, logistic, design.x, own, test)
                found["rival", size] = Labels(p, design.y[test], design.client[test])
            else:
                mean, variance = gaussian(ridge, design.x, design.y, own, test)
                deviation = np.full(len(mean), design.unit * max(variance, LEAST_VARIANCE) ** 0.5)
                found["rival", size] = Numbers(
                    design.unit * mean, deviation, design.unit * design.y[test], design.client[test]
                )
    return found


def _sizes(brought: NDArray[np.intp]) -> list[int]:
    return [size for size in SIZES if size <= len(brought)]


def _mask(rows: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=np.bool_)
    mask[rows] = True
    return mask
