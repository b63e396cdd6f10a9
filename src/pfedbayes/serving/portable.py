"""A client in one safetensors file, with JSON as metadata. It can be used without the run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Preprocessing
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Served
from pfedbayes.evaluation.posterior import Weights
from pfedbayes.files.reading import reading
from pfedbayes.files.tensors import tensor_bytes
from pfedbayes.files.typed import OMIT_NONE, from_json, to_json
from pfedbayes.maths.likelihoods import Classification, Likelihood, Regression
from pfedbayes.nets import Model, Net, Pixels, WithNoise
from pfedbayes.nets.import_path import build_module, is_import_path, refuse_untrusted
from pfedbayes.nets.layers import describe, rebuild
from pfedbayes.runs.calibration import (
    LARGEST,
    gate_tensors,
    read_calibration_scores,
    read_gates,
    read_safetensors,
    read_summaries,
)
from pfedbayes.runs.outcomes import as_object, of_object, require_width
from pfedbayes.runs.references import inputs_tensors, read_inputs
from pfedbayes.runs.schema import FORMAT
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.client import Client, Gated, Predictor
from pfedbayes.serving.options import Options
from pfedbayes.trust.calibration import DRAWS
from pfedbayes.trust.conformal import Calibration
from pfedbayes.trust.recalibration import Map
from pfedbayes.trust.strangeness import Reference


@dataclass(frozen=True)
class _About:
    """The JSON object in the metadata."""

    format: int
    client: str | None
    which: Served
    task: str
    layers: list[Any] | None
    """The layers of the network; None if only the code of its module describes it."""
    module: dict[str, Any] | None
    """The import path of the module and its settings."""
    learned_noise: bool
    """Whether a `WithNoise` around the layers adds the learned noise of a regression."""
    sigma_eps: float | None
    parameters: list[Any]
    """Name and shape of each parameter, for other programs."""
    pixels: Pixels
    seed: int
    draws: int
    preprocessing: dict[str, Any]
    thresholds: dict[str, Any]
    """For other programs; this package computes them from the scores."""
    statements: list[str]
    notes: list[str]
    likelihood: dict[str, Any] | None = None
    """The distribution of the target and its numbers, see `outcomes.of_object`; None in files of early versions."""
    shared_seed: int | None = field(default=None, metadata=OMIT_NONE)
    """The seed of the shared model in the file, which gates the client's; None without one."""
    log_factor: float = 0.0
    """The map that makes predictions calibrated, see `recalibration.Map`."""
    bias: list[float] | None = None


def client_bytes(client: Client, options: Options | None = None) -> bytes:
    """Return the content of a client's file: means and deviations (T,) of its weights and its calibration scores.

    If its predictions are gated, the file also holds the shared model, its gate, and what calibrates it.

    A JSON object in the metadata field "client" holds the rest. examples/load_export.py reads the file with torch
    alone.
    """
    weights, gated = client.weights, client.gated
    shared = gated and gated.weights
    if weights is None or (gated is not None and shared is None):
        raise UserError(f"{client.title} is more than the weights of a network: predict with the run folder instead")
    predictor = client.predictor(options or Options())
    module = weights.model.net.module(weights.mean)
    layers, likelihood = describe(module), client.likelihood
    own_module = None if layers is not None else {k: v for k, v in client.net.section().items() if v is not None}
    about = _About(
        format=FORMAT,
        client=client.name,
        which=client.which,
        task=likelihood.task,
        layers=layers,
        module=own_module,
        learned_noise=isinstance(module, WithNoise),
        sigma_eps=likelihood.sigma_eps if isinstance(likelihood, Regression) else None,
        likelihood=as_object(likelihood),
        parameters=[[name, list(part.shape)] for name, part in module.named_parameters()],
        pixels=weights.model.pixels,
        seed=weights.seed,
        draws=DRAWS,
        preprocessing=client.preprocessing.as_object(),
        thresholds=_thresholds(predictor),
        statements=predictor.statements(),
        notes=list(client.notes),
        shared_seed=None if shared is None else shared.seed,
        log_factor=client.map.log_factor,
        bias=None if client.map.bias is None else client.map.bias.tolist(),
    )
    if own_module is not None and not is_import_path(str(own_module.get("name"))):
        raise UserError("the network has layers that are not torch's: name your module by its import path (--net)")
    tensors = _named(weights, "")
    if gated is not None and shared is not None:
        tensors |= {**_named(shared, "shared."), **gate_tensors([gated.gate])}
        for whose, rows in (("own", gated.own), ("of_all", gated.of_all)):
            tensors |= {f"gated.{whose}.{name}": values.contiguous() for name, values in rows._asdict().items()}
    if client.reference is not None:
        tensors |= inputs_tensors(client.reference.inputs) | {"strange": client.reference.held_out.contiguous()}
    for whose, scores in (("own", client.own), ("of_all", client.of_all)):
        tensors |= {f"{whose}.{name}": values for name, values in scores._asdict().items()}
    return tensor_bytes(tensors, {"client": json.dumps(to_json(about))})


def _named(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a model by their names in the file."""
    tensors = {f"{prefix}mean": weights.mean}
    return tensors if weights.deviation is None else tensors | {f"{prefix}deviation": weights.deviation}


def _thresholds(predictor: Predictor) -> dict[str, Any]:
    """Return the thresholds of the guarantees; None if no finite threshold gives the guarantee.

    A set holds the most probable label and those of probability >= 1 - sets; an interval is mean -+ sets * deviation; a
    time is bounded from below by that until which there is no event with the probability sets. The client answers if
    -log(1 - p) of the label exceeds `answer`.
    """
    sets, rule = predictor.guarantees
    assert isinstance(sets, Calibration)  # noqa: S101, exports have one threshold
    return {
        "coverage": predictor.options.coverage,
        "sets": None if sets.is_trivial else sets.threshold,
        "error": rule and rule.target,
        "answer": rule.threshold if rule and rule.answered and math.isfinite(rule.threshold) else None,
        "answers": "none" if rule and not rule.answered else "all" if rule and rule.threshold == -math.inf else "some",
    }


def read_client(path: Path, device: str = "auto", trust_module: bool = False) -> Client:
    """Read a file that holds `client_bytes`. trust_module: whether the file may name the code of its network."""
    where = choose_device(device)
    tensors, content = read_safetensors(path, "client")
    with reading(path, "export the client again"):
        about = from_json(_About, content)
        preprocessing = Preprocessing.from_object(about.preprocessing, str(path))
        likelihood: Likelihood = Classification()
        if about.likelihood is not None:
            likelihood = of_object(about.likelihood)
        elif about.task == "regression":
            likelihood = Regression(about.sigma_eps, preprocessing.target.deviation)
        noise = about.sigma_eps
        if not 0 <= about.seed < 2**64 or (noise is not None and not 0 < noise < math.inf):
            raise ValueError("its seed or its noise is not a number that it can have")
        early = about.likelihood is None and about.task == "regression"
        if early and about.learned_noise != (noise is None):
            raise ValueError("its noise must be either known or learned")
        if about.task != preprocessing.target.task or about.task != likelihood.task:
            raise ValueError("its task does not fit its target")
        net = NetConfig.from_section(about.module or {})
        if about.layers is None and not is_import_path(net.name):
            raise ValueError("it has no network")
        mean, deviation = _weights(tensors)
        refuse_untrusted(net.name if about.layers is None else None, path, trust_module)
        model = Model(Net(_module(about, preprocessing, net, mean.numel())), likelihood, about.pixels)
        require_width(likelihood, model.net)
        if model.net.num_params != mean.numel():
            raise ValueError(f"it holds {mean.numel():,} parameters of {model.net.num_params:,}")
        weights = Weights(model, mean.to(where), None if deviation is None else deviation.to(where), about.seed)
        own, of_all = (read_calibration_scores(tensors, whose) for whose in ("own", "of_all"))
        gated = _gated(about, tensors, weights, len(preprocessing.target.classes or ()))
        return Client(
            about.client, about.which, preprocessing, likelihood, weights.outputs, own, of_all,
            tuple(about.notes), weights, net, gated, _reference(tensors, preprocessing, gated is not None),
            _map(about, preprocessing.target.classes),
        )  # fmt: skip


def _map(about: _About, classes: tuple[Any, ...] | None) -> Map:
    bias = about.bias
    numbers = [about.log_factor, *(bias or ())]
    if not all(abs(number) <= LARGEST for number in numbers) or (bias is not None and len(bias) != len(classes or ())):
        raise ValueError("its calibration is not one that it can have")
    return Map(about.log_factor, None if bias is None else torch.tensor(bias, dtype=torch.float64))


def _reference(tensors: dict[str, Tensor], preprocessing: Preprocessing, gated: bool) -> Reference | None:
    """Return what the strangeness of new rows needs; None in files of early versions."""
    inputs = read_inputs(tensors, 1, math.prod(preprocessing.shape))
    if not inputs:
        return None
    scores = tensors.get("strange", torch.empty(0))
    if scores.dtype != torch.float32 or scores.shape[1:] != (2,) or not bool(scores.isfinite().all()):
        raise ValueError("the scores of its strangeness are missing or have another shape or type")
    return Reference(inputs[0], scores, gated)


def _gated(about: _About, tensors: dict[str, Tensor], personal: Weights, classes: int) -> Gated | None:
    """Return what gates the client's predictions; None if they are not gated."""
    if (about.which == "gated") != (about.shared_seed is not None):
        raise ValueError("it holds a part of a gated model")
    if about.shared_seed is None:
        return None
    if not 0 <= about.shared_seed < 2**64:
        raise ValueError("the seed of the shared model is not a number that it can have")
    mean, deviation = _weights(tensors, "shared.")
    if mean.shape != personal.mean.shape or mean.dtype != personal.mean.dtype:
        raise ValueError("its two models differ in their number or type of parameters")
    on = personal.mean.device
    shared = Weights(personal.model, mean.to(on), None if deviation is None else deviation.to(on), about.shared_seed)
    own, of_all = (read_summaries(tensors, f"gated.{whose}") for whose in ("own", "of_all"))
    return Gated(read_gates(tensors, 1, classes)[0], shared.outputs, shared, own, of_all)


def _weights(tensors: dict[str, Tensor], prefix: str = "") -> tuple[Tensor, Tensor | None]:
    """Return the mean (T,) of the weights and, unless the model is one network, their deviation (T,)."""
    mean, deviation = tensors.get(f"{prefix}mean"), tensors.get(f"{prefix}deviation")
    if mean is None or mean.dim() != 1:
        raise ValueError("the mean of its weights is missing or has another shape")
    for values in (mean, mean if deviation is None else deviation):
        if values.shape != mean.shape or values.dtype not in (torch.float32, torch.float64):
            raise ValueError("its weights have another shape or type")
        if not bool(values.isfinite().all()):
            raise ValueError("its weights are not finite")
    if deviation is not None and bool((deviation < 0).any()):
        raise ValueError("a deviation of its weights is negative")
    return mean, deviation


def _module(about: _About, preprocessing: Preprocessing, net: NetConfig, num_params: int) -> torch.nn.Module:
    classes = preprocessing.target.classes
    if about.layers is not None:
        layers_params = num_params - 1 if about.learned_noise else num_params
        module = rebuild(about.layers, layers_params, preprocessing.shape, len(classes) if classes else None)
    else:
        module = build_module(str(net.name), preprocessing.shape, len(classes or (0,)), net.settings)
    return WithNoise(module) if about.learned_noise else module
