"""A client's mean network for programs that know nothing of this package: ONNX, or torch.export.

Both are for running elsewhere; this package does not read them. The whole model with its uncertainty is a safetensors
file, see `portable`.
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

from pfedbayes.data.own.readers import optional
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.nets import Pixels
from pfedbayes.runs.files import write_file
from pfedbayes.serving.client import Client, Wish
from pfedbayes.serving.portable import client_bytes
from pfedbayes.serving.sheets import require_folder

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}


class MeanNetwork(nn.Module):
    """The network of the mean weights, from inputs (n, ...) as numbers to probabilities (n, C), or to the predicted
    numbers (n, d) in their own units. Images are bytes 0 to 255 as numbers."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        if client.weights is None:
            raise UserError(
                f"{client.title} is more than the weights of a network: predict with the run folder instead"
            )
        self.module = client.weights.model.net.module(client.weights.mean).float()
        self.pixels: Pixels | None = client.weights.model.pixels if client.preprocessing.image else None
        self.target = client.preprocessing.target
        self.learned_noise = isinstance(client.likelihood, Regression) and client.likelihood.sigma_eps is None

    def forward(self, x: Tensor) -> Tensor:
        """What is predicted."""
        if self.pixels is not None:
            x = x / 255 if self.pixels == "unit" else x * (2 / 255) - 1
        outputs: Tensor = self.module(x)
        if self.target.classes is not None:
            return outputs.softmax(-1)
        return (outputs[:, :-1] if self.learned_noise else outputs) * self.target.deviation + self.target.mean


def export(client: Client, path: Path, kind: str = "safetensors", wish: Wish | None = None) -> None:
    """Write a client to a file: "safetensors" for the whole model, "onnx" or "torch" for its mean network."""
    if path.suffix.lower() != FORMATS[kind]:
        raise UserError(f"{path} does not end in {FORMATS[kind]}: give a name that does")
    require_folder(path)
    write_file(path, {"safetensors": lambda: client_bytes(client, wish), "onnx": lambda: onnx_bytes(client),
                      "torch": lambda: torch_bytes(client)}[kind]())  # fmt: skip


def onnx_bytes(client: Client) -> bytes:
    """The mean network as ONNX: input "x", output "probabilities" or "mean"; preprocessing in its metadata."""
    for module in ("onnx", "onnxscript"):
        optional(module, "onnx", "writing ONNX")
    network, example = _traced(client)
    output = "probabilities" if client.preprocessing.target.classes is not None else "mean"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about packages that are not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # and about itself
        program: Any = torch.onnx.export(
            network, (example,), input_names=["x"], output_names=[output], dynamo=True, verbose=False,
            dynamic_shapes={"x": {0: torch.export.Dim("rows")}},
        )  # fmt: skip
    program.model.metadata_props["preprocessing"] = json.dumps(json.loads(client.preprocessing.to_json()))
    content: bytes = program.model_proto.SerializeToString()
    return content


def torch_bytes(client: Client) -> bytes:
    """The mean network by torch.export, with the preprocessing as an extra file."""
    network, example = _traced(client)
    program = torch.export.export(network, (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"preprocessing.json": client.preprocessing.to_json()})
    return file.getvalue()


def _traced(client: Client) -> tuple[nn.Module, Tensor]:
    return MeanNetwork(client).eval(), torch.zeros(2, *client.preprocessing.shape)
