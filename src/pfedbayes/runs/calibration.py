"""The file calibration.safetensors of a finished run: all that predictions need besides the trained state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Preprocessing, TaskShape
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.runs.experiment import Experiment, fit_net
from pfedbayes.runs.sections import NetConfig
from pfedbayes.trust.calibration import Scores, concatenate, score_clients

FORMAT = 1


@dataclass(frozen=True)
class CalibrationRecord:
    """What a run keeps for predictions. It holds no rows of the clients."""

    names: tuple[str, ...]
    """The names of all clients."""
    preprocessing: Preprocessing
    """How inputs and targets are encoded."""
    num_targets: int
    """Target dimensions d of a regression; 1 for labels."""
    net: NetConfig
    """The network, with all settings that depend on the data."""
    chose_round: bool
    """Whether early stopping chose the round on the same validation data."""
    scores: dict[str, list[Scores]]
    """By model, the scores of each client's validation data, for the first seed."""

    @property
    def task_shape(self) -> TaskShape:
        """The shapes of inputs and targets, for which the network was built."""
        target = self.preprocessing.target
        classes = None if target.classes is None else len(target.classes)
        return TaskShape(tuple(self.preprocessing.shape), classes, self.num_targets, target.deviation)


def calibration_bytes(federation: Federation, experiment: Experiment) -> bytes:
    """Score the models of a federation on validation data and return the content of the file."""
    shards = federation.shards
    preprocessing = shards.preprocessing or Preprocessing.of_arrays(shards.x, shards.num_classes)
    sets = federation.evaluation_sets("validation", experiment.evaluation.clients)
    tensors = {"sizes": torch.tensor([len(rows) for rows in sets])}
    for which in federation.models():
        scores = concatenate(list(score_clients(federation, which, sets)))
        tensors |= {f"{which}.{name}": values.contiguous() for name, values in scores._asdict().items()}
    net = fit_net(experiment.net, shards, experiment.method)
    about = {
        "format": FORMAT,
        "names": shards.names,
        "preprocessing": preprocessing.to_json(),
        "num_targets": shards.task_shape.num_targets,
        "net": {name: value for name, value in net.section().items() if value is not None},
        "chose_round": experiment.training.patience is not None,
    }
    content: bytes = save(tensors, {"run": json.dumps(about)})
    return content


def read_calibration(folder: Path) -> CalibrationRecord:
    """Read the file of a finished run."""
    path = folder / runs.CALIBRATION
    if runs.read_info(folder).digest is None:
        raise UserError(f"{folder} comes from pfedbayes.save, without data: load it in Python with pfedbayes.load")
    if not path.is_file():
        raise UserError(f"{folder} is not finished: continue it with pfedbayes run --resume --out {folder}")
    tensors, about = read_safetensors(path, "run")
    preprocessing = Preprocessing.from_json(about["preprocessing"], str(path))
    sizes = tensors["sizes"].tolist()
    scores = {}
    for which in ("personal", "shared"):
        if f"{which}.odd" in tensors:
            fields = [_split(tensors[f"{which}.{name}"], sizes) for name in Scores._fields]
            scores[which] = [Scores(*parts) for parts in zip(*fields, strict=True)]
    net = NetConfig.from_section(about["net"])
    return CalibrationRecord(
        tuple(about["names"]), preprocessing, about["num_targets"], net, about["chose_round"], scores
    )


def _split(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    # A regression has no labels, so `sure` and `wrong` are empty.
    return torch.split_with_sizes(values, sizes if len(values) else [0] * len(sizes))


def read_safetensors(path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and the JSON object in its metadata field `name`."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[name])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or of another kind ({error}): create it again") from None
    if about.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {about.get('format')}, not {FORMAT}: read it with the version that wrote it"
        )
    return tensors, about
