"""A client in one safetensors file, with JSON as metadata. It can be used without the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from pfedbayes.data import Preprocessing
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import Weights
from pfedbayes.maths.likelihoods import Classification, Likelihood, Regression
from pfedbayes.nets import Model, Net, WithNoise
from pfedbayes.nets.import_path import build_module
from pfedbayes.nets.layers import describe, rebuild
from pfedbayes.runs.calibration import FORMAT, read_safetensors
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.client import Client, Options, Predictor
from pfedbayes.trust.calibration import DRAWS, Scores


def client_bytes(client: Client, options: Options | None = None) -> bytes:
    """Return the content of a client's file: means and deviations (T,) of its weights and its calibration scores.

    A JSON object in the metadata field "client" holds the rest. examples/load_export.py reads the file with torch
    alone.
    """
    weights = client.weights
    if weights is None:
        raise UserError(f"{client.title} is more than the weights of a network: predict with the run folder instead")
    predictor = client.predictor(options or Options())
    module = weights.model.net.module(weights.mean)
    layers, likelihood = describe(module), client.likelihood
    about = {
        "format": FORMAT,
        "client": client.name,
        "which": client.which,
        "task": likelihood.task,
        "layers": layers,
        "module": None if layers is not None else {k: v for k, v in client.net.section().items() if v is not None},
        "learned_noise": isinstance(module, WithNoise),
        "sigma_eps": likelihood.sigma_eps if isinstance(likelihood, Regression) else None,
        "parameters": [[name, list(part.shape)] for name, part in module.named_parameters()],
        "pixels": weights.model.pixels,
        "seed": weights.seed,
        "draws": DRAWS,
        "preprocessing": json.loads(client.preprocessing.to_json()),
        "thresholds": _thresholds(predictor),
        "statements": predictor.statements(),
        "notes": client.notes,
    }
    if layers is None and about["module"] is not None and ":" not in str(about["module"].get("name")):
        raise UserError("the network has layers that are not torch's: name your module by its import path (--net)")
    tensors = {"mean": weights.mean}
    if weights.deviation is not None:
        tensors["deviation"] = weights.deviation
    for whose, scores in (("own", client.own), ("of_all", client.of_all)):
        tensors |= {f"{whose}.{name}": values for name, values in scores._asdict().items()}
    copies = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    content: bytes = save(copies, {"client": json.dumps(about)})
    return content


def _thresholds(predictor: Predictor) -> dict[str, Any]:
    """Return the thresholds of the guarantees; None if no finite threshold gives the guarantee.

    A set holds the labels of probability >= 1 - sets; an interval is mean -+ sets * deviation. The client answers if
    -log(1 - p) of the label exceeds `answer`.
    """
    sets, rule = predictor.guarantees
    return {
        "coverage": predictor.options.coverage,
        "sets": None if sets.is_trivial else sets.threshold,
        "error": rule and rule.target,
        "answer": rule.threshold if rule and rule.answered and math.isfinite(rule.threshold) else None,
        "answers": "none" if rule and not rule.answered else "all" if rule and rule.threshold == -math.inf else "some",
    }


def read_client(path: Path, device: str = "auto") -> Client:
    """Read a file that holds `client_bytes`."""
    where = choose_device(device)
    tensors, about = read_safetensors(path, "client")
    try:
        preprocessing = Preprocessing.from_json(json.dumps(about["preprocessing"]), str(path))
        likelihood: Likelihood = Classification()
        if about["task"] == "regression":
            likelihood = Regression(about["sigma_eps"], preprocessing.target.deviation)
        net = NetConfig.from_section(about["module"] or {})
        module = _module(about, preprocessing, net)
        model = Model(Net(module), likelihood, about["pixels"])
        mean, deviation = tensors["mean"].to(where), tensors.get("deviation")
        weights = Weights(model, mean, None if deviation is None else deviation.to(where), about["seed"])
        own, of_all = (Scores(*(tensors[f"{whose}.{name}"] for name in Scores._fields)) for whose in ("own", "of_all"))
        return Client(
            about["client"], about["which"], preprocessing, likelihood, weights.outputs, own, of_all,
            tuple(about["notes"]), weights, net,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): export the client again") from None


def _module(about: dict[str, Any], preprocessing: Preprocessing, net: NetConfig) -> torch.nn.Module:
    if about["layers"] is not None:
        module = rebuild(about["layers"])
    else:
        outputs = len(preprocessing.target.classes or (0,))
        module = build_module(str(net.name), preprocessing.shape, outputs, net.settings)
    return WithNoise(module) if about["learned_noise"] else module
