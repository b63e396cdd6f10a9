"""A client in one file: safetensors, with JSON as its metadata. Nothing of the run is needed to use it."""

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
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.client import Asked, Client, Wish
from pfedbayes.trust import calibration
from pfedbayes.trust.calibration import DRAWS, Scores, read_safetensors


def client_bytes(client: Client, wish: Wish | None = None) -> bytes:
    """A client as the content of one safetensors file: mean and deviation (T,) of its weights and its calibration
    scores, and as metadata "client" a JSON object with the rest. examples/load_export.py reads it by torch alone."""
    weights = client.weights
    if weights is None:
        raise UserError(f"{client.title} is more than the weights of a network: predict with the run folder instead")
    asked = client.ask(wish or Wish())
    module = weights.model.net.module(weights.mean)
    layers, likelihood = describe(module), client.likelihood
    about = {
        "format": calibration.FORMAT,
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
        "thresholds": _thresholds(asked),
        "statements": asked.statements(),
        "notes": client.notes,
    }
    if layers is None and about["module"] is not None and ":" not in str(about["module"].get("name")):
        raise UserError("the network is not made of torch's own layers: name your module by its import path (--net)")
    tensors = {"mean": weights.mean}
    if weights.deviation is not None:
        tensors["deviation"] = weights.deviation
    for whose, scores in (("own", client.own), ("of_all", client.of_all)):
        tensors |= {f"{whose}.{name}": values for name, values in scores._asdict().items()}
    copies = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    content: bytes = save(copies, {"client": json.dumps(about)})
    return content


def _thresholds(asked: Asked) -> dict[str, Any]:
    """A set holds labels of probability >= 1 - sets, or an interval is mean -+ sets * deviation; an answer is given
    where -log(1 - p) of its label exceeds `answer`. None: no finite threshold can promise it."""
    sets, rule = asked.promises
    return {
        "coverage": asked.wish.coverage,
        "sets": None if sets.says_nothing else sets.threshold,
        "error": rule and rule.target,
        "answer": rule.threshold if rule and rule.answered and math.isfinite(rule.threshold) else None,
        "answers": "none" if rule and not rule.answered else "all" if rule and rule.threshold == -math.inf else "some",
    }


def read_client(path: Path, device: str = "auto") -> Client:
    """What `client_bytes` has written."""
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
            about["client"], about["which"], preprocessing, likelihood, weights.drawn, own, of_all,
            tuple(about["notes"]), weights, net,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): make it again") from None


def _module(about: dict[str, Any], preprocessing: Preprocessing, net: NetConfig) -> torch.nn.Module:
    if about["layers"] is not None:
        module = rebuild(about["layers"])
    else:
        outputs = len(preprocessing.target.classes or (0,))
        module = build_module(str(net.name), preprocessing.shape, outputs, net.settings)
    return WithNoise(module) if about["learned_noise"] else module
