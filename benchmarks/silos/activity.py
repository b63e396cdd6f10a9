"""Human activities from phone sensors (UCI HAR): 30 people, and a one-dimensional CNN trained with pFedBayes.

Two protocols. "random windows" splits the windows of each person. Neighbouring windows overlap by half, so this
flatters every method. "left-out people" trains on 24 people; each of the other six gets a model from 30 of its windows
and is scored on its other windows.
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
from torch import Tensor, nn

from benchmarks.silos.ours import PART, models, outputs_of, own_data, train
from benchmarks.silos.scores import Measured, label_scores
from benchmarks.silos.tables import TEST, TRAIN, VALIDATION, Parts
from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.maths.metrics import log_average
from pfedbayes.runs.experiment import Experiment, read_experiment
from pfedbayes.serving.newcomers import join
from pfedbayes.serving.open import open_client

RANDOM, LEFT_OUT = "random windows", "left-out people"
FOLDS = 5
OWN_WINDOWS = 30
METHOD = "pfedbayes"
PUBLISHED = {"FedU": 99.10, "MOCHA": 98.79, "local": 98.29, "one global model": 93.79}
"""Accuracy in % for 30 clients, from FedU's repository; another version of the features."""


def network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a CNN for windows of shape (channels, length)."""
    channels, length = shape
    for _ in range(2):
        length = (length - 5) // 2 + 1
    return nn.Sequential(
        nn.Conv1d(channels, 32, 5, stride=2), nn.ReLU(),
        nn.Conv1d(32, 32, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * length, outputs),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of all people, each assigned to a part."""

    x: NDArray[np.float32]
    """(n, channels, length)."""
    y: NDArray[np.int64]
    person: NDArray[Any]
    """The person of each window (n,)."""
    parts: Parts
    """"train", "validation" or "test"; empty for people who are left out."""
    split: int
    quick: bool
    digest: str
    task: str = "classification"

    @property
    def rows(self) -> tuple[int, int, int]:
        """Numbers of training, validation and test windows; all windows of people who are left out are test windows."""
        train, validation = (int((self.parts == part).sum()) for part in (TRAIN, VALIDATION))
        return train, validation, len(self.y) - train - validation

    @property
    def num_clients(self) -> int:
        """The number of people that train."""
        return len(np.unique(self.person[self.parts != ""]))


def read(path: Path, protocol: str, split: int, quick: bool) -> Windows:
    """Read the windows and split them. quick: six people with 60 windows each."""
    with np.load(path) as file:
        x, y, person = file["x"].astype(np.float32), file["y"].astype(np.int64), file["person"].astype(str)
    if quick:
        kept = np.concatenate([np.flatnonzero(person == one)[:60] for one in np.unique(person)[:6]])
        x, y, person = x[kept], y[kept], person[kept]
    parts = assign(person, protocol, split)
    digest = hashlib.sha256(x.tobytes() + y.tobytes() + " ".join([*person, *parts]).encode()).hexdigest()[:16]
    return Windows(x, y, person, parts, split, quick, digest)


def assign(person: NDArray[Any], protocol: str, split: int) -> Parts:
    """Split the windows of each person at random into 64 % training, 16 % validation and 20 % test windows.

    In the protocol "left-out people", every fifth person is left out, and the others have no test windows.
    """
    generator = np.random.default_rng(split)
    parts = np.full(len(person), "", dtype="<U10")
    for number, one in enumerate(np.unique(person)):
        rows = generator.permutation(np.flatnonzero(person == one))
        if protocol == LEFT_OUT and number % FOLDS == split % FOLDS:
            continue
        tested = 0 if protocol == LEFT_OUT else len(rows) // 5
        held = (len(rows) - tested) // 5
        parts[rows] = TRAIN
        parts[rows[:tested]], parts[rows[tested : tested + held]] = TEST, VALIDATION
    return parts


def measure(data: Windows, method: str, folder: Path, device: str = "cpu") -> Measured:
    """Train on the people that take part and score their models. A rerun with the same folder continues the training.

    Left-out people are scored with their own model, with the shared one (shared_accuracy and so on), and with the one
    that they train alone (alone_accuracy).
    """
    experiment = write(data, method, folder)
    seconds = train(experiment, folder / "run", (folder / "run" / runs.INFO).exists(), device)
    start = time.monotonic()
    left_out = bool((data.parts == "").any())
    if left_out:
        people, predicted = new_people(data, method, folder, device)
    else:
        people, predicted = own_windows(experiment, folder / "run", device)
    pooled = {name: label_scores(*map(np.concatenate, zip(*each, strict=True))) for name, each in predicted.items()}
    by_person = {name: [label_scores(*one) for one in each] for name, each in predicted.items()}
    names = ("accuracy", "nll", "ece", "balanced_accuracy")
    per_client = {
        person: {PREFIXES[model] + name: scores[k][name] for model, scores in by_person.items() for name in names}
        for k, person in enumerate(people)
    }
    return Measured(
        {PREFIXES[model] + name: scores[name] for model, scores in pooled.items() for name in names},
        {
            PREFIXES[model] + name: float(np.mean([one[name] for one in scores]))
            for model, scores in by_person.items()
            for name in names
        },
        seconds + (time.monotonic() - start if left_out else 0.0),
        per_client,
    )


PREFIXES = {"personal": "", "shared": "shared_", "alone": "alone_"}
Predicted = tuple[list[str], dict[str, list[tuple[NDArray[np.float64], NDArray[np.int64]]]]]
"""People, and for each model their class probabilities and labels."""


def write(data: Windows, method: str, folder: Path) -> Experiment:
    """Write the windows of the people that take part, and return the experiment that trains on them."""
    part = data.parts != ""
    return _experiment(data, method, folder, np.flatnonzero(part), data.parts[part])


def _experiment(data: Windows, method: str, folder: Path, rows: NDArray[np.int64], parts: Parts) -> Experiment:
    """Write these windows with their parts, and return the experiment that trains on them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "windows.npz"
    columns: Any = {PART: parts}
    np.savez(path, x=data.x[rows], y=data.y[rows], client=data.person[rows], **columns)
    short = ["training.rounds=2", "training.evaluate_every=2"] if data.quick else []
    return read_experiment(
        None,
        [
            *own_data({"path": str(path), "split_column": PART, "task": "classification"}),
            f"method.name={method}",
            'net.name="benchmarks.silos.activity:network"',
            "evaluation.alone=false",  # of no use here, and as slow as the federation
            "execution.compile=false",  # compiling takes as long as training
            *short,
        ],
    )


def own_windows(experiment: Experiment, run: Path, device: str) -> Predicted:
    """Predict the test windows of each person with its own model and with the shared one."""
    shards = load_shards(experiment.data)
    shared = open_client(run, shared=True, device=device, trust_module=True)
    predicted: Any = {"personal": [], "shared": []}
    for client, rows in zip(models(run, shards.names, True, device), shards.test, strict=True):
        x, y = shards.x[rows], shards.y[rows].numpy()
        predicted["personal"].append((_probabilities(outputs_of(client, x)), y))
        predicted["shared"].append((_probabilities(outputs_of(shared, x)), y))
    return list(shards.names), predicted


def new_people(data: Windows, method: str, folder: Path, device: str) -> Predicted:
    """Predict the windows of left-out people but 30, from which each joins, and also trains a model alone."""
    generator = np.random.default_rng(data.split)
    shared = open_client(folder / "run", shared=True, device=device, trust_module=True)
    labels = {name: k for k, name in enumerate(shared.preprocessing.target.classes or ())}
    predicted: Any = {name: [] for name in PREFIXES}
    people = np.unique(data.person[data.parts == ""]).tolist()
    for person in people:
        rows = generator.permutation(np.flatnonzero(data.person == person))
        own, others = rows[:OWN_WINDOWS], rows[OWN_WINDOWS:]
        path = folder / f"{person}.npz"
        np.savez(path, x=data.x[own], y=data.y[own])
        joined = join(folder / "run", path, person, hold_out=0.0, certify=False, device=device, trust_module=True)
        y = np.array([labels[str(label)] for label in data.y[others]])
        x = torch.from_numpy(data.x[others])
        for name, client in (("personal", joined.client), ("shared", shared)):
            predicted[name].append((_probabilities(outputs_of(client, x)), y))
        predicted["alone"].append(_alone(data, method, folder / person, own, others, device))
    return people, predicted


def _alone(
    data: Windows, method: str, folder: Path, own: NDArray[np.int64], others: NDArray[np.int64], device: str
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Train on the windows `own` of one person alone, and return the predictions of the others with their labels.

    A fifth of the windows is held out for early stopping, as `pfedbayes run --data` does.
    """
    parts = np.full(len(own) + len(others), TEST, dtype="<U10")
    parts[: len(own)] = TRAIN
    parts[: len(own) // 5] = VALIDATION
    experiment = _experiment(data, method, folder, np.concatenate([own, others]), parts)
    train(experiment, folder / "run", (folder / "run" / runs.INFO).exists(), device)
    (one,) = own_windows(experiment, folder / "run", device)[1]["personal"]
    return one


def _probabilities(outputs: Tensor) -> NDArray[np.float64]:
    p: NDArray[np.float64] = log_average(outputs.double()).exp().numpy()
    return p
