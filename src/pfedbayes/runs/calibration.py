"""The file calibration.safetensors of a finished run: all that predictions need besides the trained state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Preprocessing, TaskShape
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError, one_line
from pfedbayes.evaluation.estimators import Served, Which
from pfedbayes.files.checksums import note_unchecked
from pfedbayes.files.reading import parse_json, reading
from pfedbayes.files.tensors import open_tensors, tensor_bytes
from pfedbayes.files.typed import OMIT_NONE, from_json, to_json
from pfedbayes.runs.experiment import Experiment, copies_of_run, fit_net
from pfedbayes.runs.kept_model import KeptModel
from pfedbayes.runs.references import DISTANCES, read_inputs, read_scores, reference_tensors
from pfedbayes.runs.schema import FORMAT, UNCHECKED_FORMAT
from pfedbayes.runs.sections import NetConfig
from pfedbayes.trust import gate
from pfedbayes.trust.calibration import (
    Fold,
    Scores,
    concatenate,
    concatenate_summaries,
    fit_maps,
    hold_clients,
    predict_held_out,
    score_gated,
)
from pfedbayes.trust.gate import Gate, Summaries
from pfedbayes.trust.recalibration import Maps
from pfedbayes.trust.strangeness import Inputs

# Names of tensors besides the scores.
RAW_SCORES, FACTORS, BIAS = "raw", "log_factors", "bias"
LARGEST = 20.0  # absolute value of a log factor or a bias in a file


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
    scores: dict[Served, list[Scores]]
    """By model, the scores of each client's validation data, for the first seed."""
    rounds: int | None
    """Rounds trained; None in files of early versions."""
    folds: int = 0
    """The number of folds whose left-out rows were scored; 0 for validation rows."""
    alone: int | None = None
    """The federation of the run in which clients trained alone; None if there is none."""
    gates: tuple[Gate, ...] = ()
    """How the shared model gates the predictions of each client; none if there is nothing to gate."""
    gated: tuple[Summaries, ...] = ()
    """By client, the gated predictions of its validation data."""
    inputs: tuple[Inputs, ...] = ()
    """By client, a Gaussian of its training inputs; none in files of early versions."""
    strange: dict[Served, list[Tensor]] = field(default_factory=dict)
    """By model and client, the scores (n, 2) that its strangeness needs, see `trust.strangeness`."""
    raw_scores: dict[Served, list[Scores]] = field(default_factory=dict)
    """By model with maps, the scores of predictions without a map."""
    maps: dict[Served, Maps] = field(default_factory=dict)
    """By model, how its predictions are calibrated; models that are missing have no map."""
    model: KeptModel | None = None
    """The network of a federation that was made in Python; None if `net` describes it."""

    @property
    def task_shape(self) -> TaskShape:
        """The shapes of inputs and targets, for which the network was built."""
        target, pieces = self.preprocessing.target, self.preprocessing.pieces
        classes = None if target.classes is None else len(target.classes)
        shape = tuple(self.preprocessing.shape)
        return TaskShape(shape, classes, self.num_targets, target.deviation, pieces, target)


@dataclass(frozen=True)
class _About:
    """The JSON object in the metadata."""

    format: int
    names: list[str]
    preprocessing: str
    num_targets: int
    net: dict[str, Any]
    chose_round: bool
    rounds: int | None = None
    folds: int = 0
    alone: int | None = None
    model: KeptModel | None = field(default=None, metadata=OMIT_NONE)


def calibration_bytes(
    federation: Federation, experiment: Experiment, rounds: int, model: KeptModel | None = None
) -> bytes:
    """Score the models of a federation on validation data and return the content of the file.

    rounds: rounds trained, of which the federation may hold an earlier one. model: a network that the experiment does
    not describe.
    """
    shards = federation.shards
    preprocessing = shards.preprocessing or Preprocessing.of_arrays(shards.x, shards.num_classes)
    copies = copies_of_run(experiment, shards, len(federation.seeds))
    validation = federation.evaluation_sets("validation", experiment.evaluation.clients)
    folds: list[Fold] = copies.folds() or [(0, validation)]
    tensors = {"sizes": torch.tensor([sum(map(len, sets)) for sets in zip(*(fold for _, fold in folds), strict=True)])}
    models: dict[Served, Sequence[Fold]] = dict.fromkeys(federation.models(), folds)
    if copies.alone is not None:
        models["alone"] = copies.folds(alone=True) or [(copies.alone, validation)]
    for which, of_model in models.items():
        held = hold_clients(federation, _model_of(federation, which), of_model)
        fitted = fit_maps(federation.model.likelihood, held, len(of_model) > 1)
        raw = [each.scores(federation.model.likelihood) for each in held]
        tensors |= _score_tensors(which if fitted is None else f"{RAW_SCORES}.{which}", raw)
        if fitted is not None:
            calibrated = [each.scores(federation.model.likelihood, fitted, i) for i, each in enumerate(held)]
            tensors |= _score_tensors(which, calibrated)
            tensors[f"{which}.{FACTORS}"] = fitted.maps.log_factors.contiguous()
            if fitted.maps.bias is not None:
                tensors[f"{which}.{BIAS}"] = fitted.maps.bias.contiguous()
    bases = {which: (_model_of(federation, which), of_model) for which, of_model in models.items()}
    tensors |= reference_tensors(federation, bases, folds)
    if gate.applies(federation):
        tensors |= _fitted_gates(federation, folds)
    net = fit_net(experiment.net, shards, experiment.method)
    about = _About(
        format=FORMAT,
        names=list(shards.names),
        preprocessing=preprocessing.to_json(),
        num_targets=shards.task_shape.num_targets,
        net={name: value for name, value in net.section().items() if value is not None},
        chose_round=experiment.training.patience is not None,
        rounds=rounds,
        folds=len(copies.left_out),
        alone=copies.alone,
        model=model,
    )
    return tensor_bytes(tensors, {"run": json.dumps(to_json(about))})


def _score_tensors(prefix: str, scores: Sequence[Scores]) -> dict[str, Tensor]:
    together = concatenate(scores)._asdict()
    return {f"{prefix}.{name}": values.contiguous() for name, values in together.items()}


def _fitted_gates(federation: Federation, folds: Sequence[Fold]) -> dict[str, Tensor]:
    """Fit the gates of all clients, and return them with the gated predictions of the held-out rows."""
    rows = predict_held_out(federation, folds)
    gates = gate.fit(gate.gates(federation.data), rows)
    every = [score_gated(fitted, rows.get(i, [])) for i, fitted in enumerate(gates)]
    of_all = concatenate_summaries(every)
    return gate_tensors(gates) | {f"gated.{name}": values for name, values in of_all._asdict().items()}


def gate_tensors(gates: Sequence[Gate]) -> dict[str, Tensor]:
    """Return the tensors of a file with gates, which have one bias in common."""
    return {
        "gate.own": torch.stack([each.own for each in gates]),
        "gate.usual": torch.tensor([each.usual for each in gates], dtype=torch.float64),
        "gate.bias": gates[0].bias,
        "gate.weight": torch.tensor([each.weight for each in gates], dtype=torch.float64),
    }


def _model_of(federation: Federation, which: Served) -> Which:
    """Return the model of a federation that predicts for a client; alone it is the shared one of a client's own."""
    if which == "shared" or (which == "alone" and not federation.method.about.personal):
        return "shared"
    return "personal"


def read_calibration(folder: Path) -> CalibrationRecord:
    """Read the file of a finished run."""
    path = folder / runs.CALIBRATION
    if not path.is_file() and runs.read_info(folder).digest is None:
        raise UserError(
            f"{folder} comes from pfedbayes.save, and its network is more than layers of torch: load it in Python with "
            "pfedbayes.load"
        )
    if not path.is_file():
        raise UserError(f"{folder} is not finished: continue it with pfedbayes run --resume --out {folder}")
    tensors, content = read_safetensors(path, "run", follow=False)
    with reading(path, "finish the run again with pfedbayes run --resume"):
        about = from_json(_About, content)
        preprocessing = Preprocessing.from_json(about.preprocessing, str(path))
        sizes = _sizes(tensors, len(about.names))
        scores: dict[Served, list[Scores]] = {}
        raw_scores: dict[Served, list[Scores]] = {}
        maps: dict[Served, Maps] = {}
        served: tuple[Served, ...] = ("personal", "shared", "alone")
        for which in served:
            if f"{which}.odd" in tensors:
                scores[which] = _read_scores(tensors, which, sizes)
            if f"{which}.{FACTORS}" in tensors:
                classes = preprocessing.target.classes
                maps[which] = _read_maps(tensors, which, len(about.names), len(classes or ()))
                raw_scores[which] = _read_scores(tensors, f"{RAW_SCORES}.{which}", sizes)
        net = NetConfig.from_section(about.net)
        gates: tuple[Gate, ...] = ()
        gated: tuple[Summaries, ...] = ()
        of_all = gate.NO_SUMMARIES
        if "gate.own" in tensors:
            gates = read_gates(tensors, len(about.names), len(preprocessing.target.classes or ()))
            of_all = read_summaries(tensors, "gated")
            if len(of_all.true) != sum(sizes):
                raise ValueError("the scores of gated predictions do not fit")
            gated = tuple(
                Summaries(*parts)
                for parts in zip(*(torch.split_with_sizes(values, sizes) for values in of_all), strict=True)
            )
        inputs = read_inputs(tensors, len(about.names), math.prod(preprocessing.shape))
        strange: dict[Served, list[Tensor]] = {}
        for which in (*scores, *(("gated",) if gates else ())) if inputs else ():
            # The gate's own evidence is the score of gated predictions.
            by_model = -of_all.evidence if which == "gated" else read_scores(tensors, f"strange.{which}", sum(sizes))
            both = torch.stack([by_model, read_scores(tensors, DISTANCES, sum(sizes))], dim=1)
            strange[which] = list(torch.split_with_sizes(both, sizes))
        if about.num_targets < 1:
            raise ValueError(f"num_targets is {about.num_targets}")
        if about.folds < 0 or (about.alone or 0) < 0:
            raise ValueError(f"folds is {about.folds} and alone is {about.alone}")
    return CalibrationRecord(
        tuple(about.names), preprocessing, about.num_targets, net, about.chose_round, scores, about.rounds,
        about.folds, about.alone, gates, gated, inputs, strange, raw_scores, maps, about.model,
    )  # fmt: skip


def _read_scores(tensors: dict[str, Tensor], prefix: str, sizes: list[int]) -> list[Scores]:
    fields = read_calibration_scores(tensors, prefix, sum(sizes))
    # A regression has no labels, so `sure` and `wrong` are empty.
    parts = (torch.split_with_sizes(each, sizes if len(each) else [0] * len(sizes)) for each in fields)
    return [Scores(*each) for each in zip(*parts, strict=True)]


def read_calibration_scores(tensors: dict[str, Tensor], prefix: str, size: int | None = None) -> Scores:
    """Return calibration scores in a file, `size` of them if it is given; a regression has not all kinds."""
    found = [tensors.get(f"{prefix}.{name}", Scores._field_defaults.get(name)) for name in Scores._fields]
    known = [values for values in found if values is not None and values.dim() == 1]
    if len(known) < len(found) or any(len(values) not in (0, len(known[0])) for values in known):
        raise ValueError(f"the scores {prefix!r} are missing or have another shape")
    scores = Scores(*known)
    kinds = {"wrong": torch.bool, "label": torch.int64}
    if any(
        values.dtype != kinds[name] if name in kinds else not values.is_floating_point()
        for name, values in scores._asdict().items()
        if len(values)
    ):
        raise ValueError(f"the scores {prefix!r} have another type")
    if len(scores.sure) != len(scores.wrong) or (size is not None and len(scores.odd) not in (0, size)):
        raise ValueError(f"the scores {prefix!r} do not fit each other or their clients")
    if any(bool(values.isnan().any()) for values in scores):
        raise ValueError(f"the scores {prefix!r} are not numbers")
    return scores


def _read_maps(tensors: dict[str, Tensor], which: Served, clients: int, classes: int) -> Maps:
    """Return the maps of a model for this number of clients and classes (0 for numbers)."""
    factors, bias = tensors[f"{which}.{FACTORS}"], tensors.get(f"{which}.{BIAS}")
    for values, size in ((factors, clients + 1), (bias, classes)):
        if values is not None and (values.dtype != torch.float64 or values.shape != (size,) or not size):
            raise ValueError(f"the calibration of the {which} model has another shape")
        if values is not None and not bool((values.abs() <= LARGEST).all()):
            raise ValueError(f"the calibration of the {which} model is no number that it can have")
    return Maps(factors, bias)


def _sizes(tensors: dict[str, Tensor], clients: int) -> list[int]:
    """Return how many scores each client has."""
    sizes = tensors.get("sizes")
    if sizes is None or sizes.dtype != torch.int64 or sizes.shape != (clients,) or bool((sizes < 0).any()):
        raise ValueError("the number of scores of each client is wrong")
    counts: list[int] = sizes.tolist()
    return counts


def read_gates(tensors: dict[str, Tensor], clients: int, classes: int) -> tuple[Gate, ...]:
    """Return the gates of the clients in a file."""
    expected = {
        "own": (torch.bool, (clients, classes)),
        "usual": (torch.float64, (clients,)),
        "bias": (torch.float32, (classes,)),
        "weight": (torch.float64, (clients,)),
    }
    found = {name: tensors.get(f"gate.{name}") for name in expected}
    known = {name: values for name, values in found.items() if values is not None}
    if not classes or any(
        name not in known or (known[name].dtype, tuple(known[name].shape)) != kind for name, kind in expected.items()
    ):
        raise ValueError("its gates are missing or have another shape or type")
    shares = torch.cat([known["usual"], known["weight"]])
    if not bool(((shares >= 0) & (shares <= 1)).all()) or not bool(known["bias"].isfinite().all()):
        raise ValueError("its gates hold numbers that they cannot have")
    numbers = zip(known["own"], known["usual"].tolist(), known["weight"].tolist(), strict=True)
    return tuple(Gate(own, usual, known["bias"], weight) for own, usual, weight in numbers)


def read_summaries(tensors: dict[str, Tensor], prefix: str) -> Summaries:
    """Return the summaries of gated predictions in a file."""
    found = Summaries(*(tensors.get(f"{prefix}.{name}", torch.empty(0, 0)) for name in Summaries._fields))
    kinds = [(values.dtype, values.shape) for values in found]
    shape = torch.Size([found.lacking.numel()])
    if kinds != [*[(torch.float32, shape)] * 4, (torch.bool, shape)]:
        raise ValueError(f"the scores {prefix} are missing or have another shape or type")
    chances = torch.stack([found.true, found.top, found.other])
    if bool(found.evidence.isnan().any()) or not bool(((chances >= 0) & (chances <= 1 + 1e-5)).all()):
        raise ValueError(f"the scores {prefix} are not numbers that they can be")
    return found


def read_safetensors(path: Path, name: str, follow: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and the JSON object in its metadata field `name`."""
    with open_tensors(path, "create it again", "is damaged or of another kind", follow) as file:
        if name not in file.about:
            raise ValueError(f"it has no {name!r} in its metadata")
        about = parse_json(file.about[name])
        if not isinstance(about, dict):
            raise ValueError(f"{name!r} in its metadata is no JSON object")
        format = about.get("format")
        if format not in (UNCHECKED_FORMAT, FORMAT):
            shown = one_line(repr(format), 40)
            raise UserError(f"{path} has format {shown}, not {FORMAT}: read it with the version that wrote it")
        if format == UNCHECKED_FORMAT:
            note_unchecked(str(path))
        elif not file.checked:
            raise ValueError("its checksum is missing")
        return file.tensors(), about
