"""The measurements behind Figure 3: predictive uncertainty of personal models during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.maths.metrics import entropy, log_average, mutual_information
from pfedbayes.runs.experiment import Experiment, build_federation

ROUNDS = (0, 1, 10)
CLIENTS = 5
SAMPLES = 100
IMAGES = 500  # about this many test images per client enter the mean entropy
DIGITS = 4


def write(experiment: Experiment, path: Path, device: str = "auto", data_dir: Path | None = None) -> None:
    """Train and write the measurements to a JSON file."""
    runs.refuse_folder(path)  # before training
    content = dump_json(measure(experiment, device, data_dir), indent=1)
    with runs.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_file(path, content)


def measure(experiment: Experiment, device: str = "auto", data_dir: Path | None = None) -> dict[str, Any]:
    """Figure 3: the predictions of five personal models for one test image each, at rounds 0, 1 and 10."""
    if not experiment.method.about.stochastic or not experiment.method.about.personal:
        raise UserError(f"{experiment.method.about.title} has no personal weight draws: use method.name=pfedbayes")
    shards = load_shards(experiment.data, data_dir)
    federation = build_federation(experiment, shards, [experiment.training.seed], device=device)
    clients = range(min(CLIENTS, len(shards.names)))
    answers: dict[int, list[dict[str, Any]]] = {i: [] for i in clients}
    for until in ROUNDS:
        for _ in federation.rounds(until):
            pass
        for i in clients:
            answers[i].append(_answer(federation, i))
    return {
        "data": " ".join(filter(None, [experiment.data.name, experiment.data.size])),
        "seed": experiment.training.seed,
        "samples": SAMPLES,
        "rounds": list(ROUNDS),
        "clients": [
            {"name": shards.names[i], "label": int(shards.y[_image(federation, i)]), "answers": answers[i]}
            for i in clients
        ],
    }


def _image(federation: Federation, client: int) -> int:
    """Return the test image for a client. Test sets are sorted by label, so every client gets another label."""
    own = federation.shards.test[client]
    return int(own[len(own) * (2 * client + 1) // (2 * CLIENTS)])


def _answer(federation: Federation, client: int) -> dict[str, Any]:
    """Return label probabilities of one image, their spread over draws, and the mean uncertainty over many images."""
    shards, own = federation.shards, federation.shards.test[client]
    rows = torch.cat([torch.tensor([_image(federation, client)]), own[:: max(1, len(own) // IMAGES)]])
    outputs = federation.predict("personal", client, shards.x[rows], SAMPLES).cpu()
    draws, outputs = outputs[:, 0].softmax(-1), outputs[:, 1:]
    return {
        "probabilities": [round(value, DIGITS) for value in draws.mean(0).tolist()],
        "spread": [round(value, DIGITS) for value in draws.std(0, correction=0).tolist()],
        "entropy": round(float(entropy(log_average(outputs)).mean()), DIGITS),
        "mutual_information": round(float(mutual_information(outputs).mean()), DIGITS),
    }
