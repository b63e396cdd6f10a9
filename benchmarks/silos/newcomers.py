"""Clients that join later: what their models are worth with few rows, against starting alone.

Some clients of a table are left out, and the default method trains on the others. Then each left-out client brings 5,
20 or 100 rows, gets a model as `pfedbayes personalize` makes it, and is scored on its other rows. Without any row it
has the shared model. The models of all numbers of rows train in one batch.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.silos.lines import Lines
from benchmarks.silos.ours import DEFAULT, PART, collect, experiment_for, train
from benchmarks.silos.scores import Measured, Predictions, Scores, score
from benchmarks.silos.tables import TRAIN, Table, Task, read_frame, task_of
from pfedbayes import runs
from pfedbayes.data import Shards
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.engine.personalisation import personalise, start_alone
from pfedbayes.evaluation.posterior import TrainedModel, trained_model
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.serving.newcomers import STEPS
from pfedbayes.serving.saved_models import saved_models
from pfedbayes.trust.calibration import DRAWS

SIZES = (5, 20, 100)
MOST = 10  # newcomers per table and seed
BROUGHT = 0.7  # share of its rows that a newcomer can bring at most
LEFT_OUT = 10  # one of so many clients is left out at once, at least one
SEEDS = 3
RIVAL = "logistic regression or ridge"
METHODS = (DEFAULT, RIVAL)
MODELS = ("shared", "joined", "alone", "rival")  # the last one is that of `RIVAL`


@dataclass(frozen=True, eq=False)
class Newcomers:
    """A table, and the clients of it that join later."""

    lines: Lines
    """All rows."""
    target: str
    client: str
    task: Task
    groups: tuple[tuple[str, ...], ...]
    """The newcomers. Those of a group are left out together."""
    own: dict[str, tuple[NDArray[np.intp], NDArray[np.intp]]]
    """For each newcomer, the rows it can bring in their order, and the rows it is scored on."""
    digest: str
    frame: Any = None
    """All rows as a pandas frame; None if they came as text."""

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows that train at some time, none for validation, and rows that newcomers are scored on."""
        tested = sum(len(test) for _, test in self.own.values())
        return len(self.lines.rows) - tested, 0, tested

    @property
    def num_clients(self) -> int:
        """The number of clients of the table."""
        return len(set(self.lines.column(self.client)))


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
    text = frame.to_csv(index=False)
    content = f"{table.target}\n{table.client}\n{task}\n{text}\n{groups}\n{own}"
    content += " ".join(str(row) for pair in own.values() for part in pair for row in part)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Newcomers(Lines.read(text), table.target, table.client, task, groups, own, digest, frame)


def measure(data: Newcomers, folder: Path) -> Measured:
    """Train without each group and score its clients with every number of rows that they have."""
    start = time.monotonic()
    found: dict[str, Found] = {}
    for number, group in enumerate(data.groups):
        part = folder / str(number)
        part.mkdir(parents=True)
        run = federation(data, group, part)
        for name in group:
            found[name] = _ours(data, name, run, part)
    return summarise(found, time.monotonic() - start)


Found = dict[tuple[str, int], Predictions]
"""The predictions of a newcomer's models of `MODELS` by the number of rows that it brings."""


def summarise(found: dict[str, Found], seconds: float) -> Measured:
    """Score the models of each newcomer.

    Scores are called "joined 5 nll" and so on, see `MODELS`. Those of all clients are means over clients.
    """
    per_client: dict[str, Scores] = {
        name: {
            f"{model} {size} {key}": value
            for (model, size), predictions in own.items()
            for key, value in score(predictions)[0].items()
        }
        for name, own in found.items()
    }
    names = sorted({name for scores in per_client.values() for name in scores})
    means = {name: float(np.mean([scores[name] for scores in per_client.values() if name in scores])) for name in names}
    return Measured(means, means, seconds, per_client)


def federation(data: Newcomers, group: tuple[str, ...], folder: Path) -> Path:
    """Train the default method on all rows of the clients that are not in the group, and return the run folder."""
    path, client = folder / "others.csv", data.lines.column(data.client)
    others = [k for k, name in enumerate(client) if name not in group]
    data.lines.write(path, others, {PART: [TRAIN] * len(client)})
    changes = ["evaluation.folds=0", "evaluation.alone=false"]
    experiment = experiment_for(data.target, data.client, data.task, DEFAULT, path, changes)
    train(experiment, folder / "run")
    return folder / "run"


def _ours(data: Newcomers, name: str, run: Path, folder: Path) -> Found:
    """Predict with the shared model, and with the default method joined and alone, by the number of rows."""
    brought, tested = data.own[name]
    record, opened = read_calibration(run), runs.read_run(run)
    saved = saved_models(run, record, "cpu")

    def examples(rows: NDArray[np.intp]) -> tuple[torch.Tensor, torch.Tensor]:
        path = folder / "newcomer.csv"
        data.lines.write(path, rows.tolist(), without=(data.client,))
        return read_examples(path, record.preprocessing)

    sizes = sizes_of(brought)
    own, none = torch.arange(sizes[-1]), torch.empty(0, dtype=torch.int64)
    x, y = examples(brought[: sizes[-1]])
    classes = record.preprocessing.target.classes
    shards = Shards(
        x, y, (own,), (none,), (none,), (name,), None if classes is None else len(classes), record.preprocessing
    )
    # The largest number of rows is the federation itself; its copies leave out the rows beyond a smaller number.
    left_out = [(own[size:],) for size in sizes[:-1]]
    places = {size: (number + 1) % len(sizes) for number, size in enumerate(sizes)}
    prior = saved.shared_prior()
    joined = personalise(prior, shards, STEPS, left_out=left_out)
    alone = start_alone(prior, shards, opened.experiment.training, record.net.init, left_out)
    x, y = examples(tested)

    def predict(model: TrainedModel) -> Predictions:
        return collect([(joined.model.likelihood, model.outputs(DRAWS)(x).cpu(), y, 0)])

    found: Found = {("shared", 0): predict(saved.trained_model("shared", 0))}
    for size in sizes:
        found["joined", size] = predict(trained_model(joined, "personal", 0, places[size]))
        found["alone", size] = predict(trained_model(alone, "personal", 0, places[size]))
    return found


def sizes_of(brought: NDArray[np.intp]) -> list[int]:
    """Return the numbers of rows that a newcomer can bring."""
    return [size for size in SIZES if size <= len(brought)]
