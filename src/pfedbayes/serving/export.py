"""Export a client: the whole model as safetensors (see `portable`), or its mean network as ONNX or by torch.export.

The mean network has no uncertainty, and its probabilities are not calibrated: the map of a client is for the average of
its draws. It runs in other programs; this package does not read it.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfedbayes.data.own.sheets import optional
from pfedbayes.errors import UserError
from pfedbayes.files.writing import write_file
from pfedbayes.nets import Pixels
from pfedbayes.serving.client import Client
from pfedbayes.serving.options import Options
from pfedbayes.serving.portable import client_bytes
from pfedbayes.serving.tables import require_folder
from pfedbayes.trust.gate import gated

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}


class MeanNetwork(nn.Module):
    """The network with the mean weights.

    It maps inputs (n, ...) to probabilities (n, C), or to predicted numbers (n, d) in the units of the target. For
    survival, these are the probabilities of no event until each edge of the target. Images are numbers from 0 to 255.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        if client.weights is None:
            raise UserError(
                f"{client.title} is more than the weights of a network: predict with the run folder instead"
            )
        self.module = client.weights.model.net.module(client.weights.mean).float()
        self.gated, self.shared = client.gated, None
        if client.gated is not None and client.gated.weights is not None:
            self.shared = client.gated.weights.model.net.module(client.gated.weights.mean).float()
        self.pixels: Pixels | None = client.weights.model.pixels if client.preprocessing.image else None
        self.target = client.preprocessing.target
        self.likelihood = client.likelihood

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions."""
        if self.pixels is not None:
            x = x / 255 if self.pixels == "unit" else x * (2 / 255) - 1
        outputs: Tensor = self.module(x)
        predicted = self.likelihood.point(outputs)
        if self.shared is not None and self.gated is not None:
            shared = self.likelihood.point(self.shared(x))
            predicted = gated(predicted.log(), shared.log(), self.gated.gate).exp()
        return predicted if self.target.classes is not None else predicted * self.target.deviation + self.target.mean


def export(client: Client, path: Path, kind: str = "safetensors", options: Options | None = None) -> None:
    """Write a client to a file: "safetensors" for the whole model, "onnx" or "torch" for its mean network.

    options: settings of the thresholds in a safetensors file.
    """
    if path.suffix.lower() != FORMATS[kind]:
        raise UserError(f"{path} does not end in {FORMATS[kind]}: choose a file name that does")
    require_folder(path)
    if kind == "safetensors":
        content = client_bytes(client, options)
    else:
        content = onnx_bytes(client) if kind == "onnx" else torch_bytes(client)
    write_file(path, content)


def onnx_bytes(client: Client) -> bytes:
    """Return the mean network as ONNX, with the preprocessing in the metadata.

    The input is "x", and the output "probabilities", "mean" or "survival".
    """
    for module in ("onnx", "onnxscript"):
        optional(module, "onnx", "writing ONNX")
    network, example = _traced(client)
    output = {"labels": "probabilities", "numbers": "mean"}.get(client.likelihood.predicts, "survival")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # warns about packages that are not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            network, (example,), input_names=["x"], output_names=[output], dynamo=True, verbose=False,
            dynamic_shapes={"x": {0: torch.export.Dim("rows")}},
        )  # fmt: skip
    program.model.metadata_props["preprocessing"] = json.dumps(client.preprocessing.as_object())
    content: bytes = program.model_proto.SerializeToString()
    return content


def torch_bytes(client: Client) -> bytes:
    """Return the mean network by torch.export, with the preprocessing as an extra file."""
    network, example = _traced(client)
    program = torch.export.export(network, (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"preprocessing.json": client.preprocessing.to_json()})
    return file.getvalue()


def _traced(client: Client) -> tuple[nn.Module, Tensor]:
    """Return the mean network and an example input."""
    return MeanNetwork(client).eval(), torch.zeros(2, *client.preprocessing.shape)
