"""Predict with a client that `pfedbayes export` has written. This needs torch, but not pfedbayes.

python load_export.py town.safetensors new.csv
"""

import csv
import json
import math
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

MISSING = {"", "?", "na", "n/a", "#n/a", "nan", "-nan", "nat", "null", "<na>"}
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def load(path: str) -> tuple[dict, dict[str, Tensor]]:
    """Return the description of a client, and the means and standard deviations (T,) of its weights.

    If its predictions are gated, also those of the shared model, and the numbers of the gate.
    """
    content = Path(path).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    about = json.loads(header["__metadata__"]["client"])
    weights = {}
    models = {f"{prefix}{name}" for prefix in ("", "shared.") for name in ("mean", "deviation")}
    gate = {f"gate.{name}" for name in ("own", "usual", "bias", "weight")}
    for name in (models | gate) & header.keys():
        dtype = {"F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool}[header[name]["dtype"]]
        begin, end = header[name]["data_offsets"]
        weights[name] = torch.frombuffer(bytearray(content[start + begin : start + end]), dtype=dtype)
    return about, weights


def canonical(text: str) -> str:
    """Return the form of a category that is the same for 1, 1.0 and 1e0, or for true and True."""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if re.match(r"[+-]?0\d", text) or not NUMBER.fullmatch(text) or abs(float(text)) == float("inf"):
        return text  # leading zeros make a code
    if text.lstrip("+-").isdecimal():
        return text.lstrip("+") if float(text) else "0"
    number = float(text)
    return str(int(number)) if number.is_integer() else repr(number)


def encode(about: dict, rows: list[dict[str, str]]) -> Tensor:
    """Return the inputs (n, d) of table rows: numbers standardised, categories as indicators; then the pieces."""
    inputs, pieces = [], []
    for column in about["preprocessing"]["inputs"]:
        cells = [row[column["name"]].strip() for row in rows]
        there = torch.tensor([cell.lower() not in MISSING for cell in cells])
        if column["kind"] == "category":
            categories = column["categories"]
            places = {canonical(category): k for k, category in enumerate(categories)}
            places |= {category: k for k, category in enumerate(categories)}
            found = [places.get(cell, places.get(canonical(cell), len(categories))) for cell in cells]
            inputs.append(torch.eye(len(categories) + 1)[found])
            continue
        numbers = torch.tensor([float(cell) if ok else 0.0 for cell, ok in zip(cells, there, strict=True)]).double()
        standard = torch.where(there, (numbers - column["mean"]) / column["deviation"], 0.0)
        inputs.append(torch.stack([standard, ~there][: 1 + column["indicator"]], dim=1).float())
        if edges := column.get("edges"):  # of the bins of the piecewise-linear encoding
            ends = torch.tensor(edges).double()
            filled = torch.where(there, numbers, column["mean"])[:, None]
            ramps = ((filled - ends[:-1]) / ends.diff()).clamp(0, 1)
            pieces.append(2 * (ramps - torch.tensor(column["centres"]).double()).float())
    return torch.cat([*inputs, *pieces], dim=1)


class TableNet(nn.Module):
    """The package's network for tables: f(x, z) = b + W x + Z z + U silu(V x + c)."""

    def __init__(self, plain: int, pieces: int, hidden: int, outputs: int, constants: int, reference: bool) -> None:
        super().__init__()
        self.plain, self.reference = plain, reference
        self.hidden = nn.Linear(plain, hidden)
        self.constants = nn.Parameter(torch.zeros(constants)) if constants else None
        self.head = nn.Linear(plain + pieces + hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        units = nn.functional.silu(self.hidden(x[:, : self.plain]))
        parts = [self.head(torch.cat([x, units], dim=1))]
        if self.reference:
            parts.insert(0, torch.zeros(len(x), 1, dtype=x.dtype))
        if self.constants is not None:
            parts.append(self.constants.expand(len(x), -1))
        return torch.cat(parts, dim=1)


def build(layers: list) -> nn.Module:
    """Return the network that the layers describe."""
    if layers[0][0] == "TableNet":
        return TableNet(**layers[0][1])
    return nn.Sequential(*(getattr(nn, name)(**arguments) for name, arguments in layers))


def outputs(about: dict, weights: dict[str, Tensor], x: Tensor, network: nn.Module | None = None) -> Tensor:
    """Return the outputs (K, n, ...) of K networks drawn from the client's model, at inputs (n, ...).

    Pass `network` if the client's network is not a sequence of torch's own layers.
    """
    if about["preprocessing"]["image"]:
        x = x / 255 if about["pixels"] == "unit" else x * (2 / 255) - 1
    thetas = weights["mean"][None]
    if "deviation" in weights:
        generator = torch.Generator().manual_seed(about["seed"])
        noise = torch.randn(about["draws"], len(weights["mean"]), dtype=thetas.dtype, generator=generator)
        thetas = thetas + weights["deviation"] * noise
    network = network or build(about["layers"])
    shapes = [torch.Size(shape) for _, shape in about["parameters"]]
    results = []
    for theta in thetas:
        parts = [part.view(shape) for part, shape in zip(theta.split([s.numel() for s in shapes]), shapes, strict=True)]
        rho = parts.pop(0) if about["learned_noise"] else None  # noise of a regression
        names = [name for name, _ in network.named_parameters()]
        said = torch.func.functional_call(network, dict(zip(names, parts, strict=True)), (x,))
        results.append(said if rho is None else torch.cat([said, rho.expand(len(said), 1)], dim=1))
    return torch.stack(results).detach()


def gated(personal: Tensor, shared: Tensor, weights: dict[str, Tensor], share: float | None) -> tuple[Tensor, float]:
    """Return gated probabilities (..., n, C), and the share of labels that the client has no rows of.

    The shared model says whether the label is one of the client's own, and both models which of them.
    """
    own, usual, weight = weights["gate.own"], float(weights["gate.usual"]), float(weights["gate.weight"])
    shared = (shared.log() + weights["gate.bias"]).softmax(-1)
    mass, rest = (shared * own).sum(-1, keepdim=True), (shared * ~own).sum(-1, keepdim=True)
    ratio = mass / rest * usual / (1 - usual)
    if share is None:  # estimated from the rows
        share = usual
        for _ in range(50):
            others = (share / (share + (1 - share) * ratio)).sum()
            share = float((others + 2 * usual) / (others.new_tensor(len(ratio)) + 2))
    is_own = (1 - share) * ratio / (share + (1 - share) * ratio)
    within = weight * personal * own / (personal * own).sum(-1, keepdim=True) + (1 - weight) * shared / mass
    return torch.where(own, is_own * within, (1 - is_own) * shared / rest), share


def predict(about: dict, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (n, C) and their spread over draws; for regression, means and deviations (n, d).

    For survival, they are the probabilities of no event until each of the target's edges.
    """
    drawn, target = outputs(about, weights, x), about["preprocessing"]["target"]
    if about["which"] == "gated":
        names = ("mean", "deviation")
        of_all = {name: weights[f"shared.{name}"] for name in names if f"shared.{name}" in weights}
        shared = outputs(about | {"seed": about["shared_seed"]}, of_all, x).softmax(-1)
        chances, share = gated(drawn.softmax(-1).mean(0), shared.mean(0), weights, None)
        return chances, gated(drawn.softmax(-1), shared, weights, share)[0].std(0, correction=0)
    if target["classes"] is not None:
        if (about.get("likelihood") or {}).get("name") == "ordinal":
            equal = torch.logit(torch.arange(1, drawn.shape[-1]) / drawn.shape[-1])
            steps = equal.diff() * drawn[..., 2:].clamp(-15, 15).exp()
            first = equal[:1] + drawn[..., 1:2]
            ends = torch.cat([first, first + steps.cumsum(-1)], -1) - drawn[..., :1]
            below = nn.functional.pad(nn.functional.pad(ends.sigmoid(), (0, 1), value=1.0), (1, 0))
            drawn = below.diff().log()
        chances = drawn.softmax(-1)
        # The map that makes the averaged prediction calibrated.
        bias = torch.tensor(about.get("bias") or [0.0])
        logits = math.exp(about.get("log_factor", 0.0)) * chances.mean(0).log() + bias
        return logits.softmax(-1), chances.std(0, correction=0)
    means, noise = drawn, torch.tensor(about["sigma_eps"] or 0.0)
    kind = (about.get("likelihood") or {}).get("name")
    if kind == "survival":
        edges = torch.tensor(about["likelihood"]["edges"]).double()
        starts = torch.cat([torch.zeros(1), edges[:-1]])
        times = torch.minimum(edges[:, None], edges).sub(starts).clamp(min=0)  # until each edge, in each interval
        hazards = about["likelihood"]["rate"] * (drawn[..., :1] + drawn[..., 1:]).clamp(max=15).exp().double()
        chances = (-hazards @ times.T).exp()
        return chances.mean(0), chances.std(0, correction=0)
    if kind == "student-t":
        location, varying, constant, tails = drawn.unbind(-1)
        freedom = 2 + 8 * tails.exp()
        means = location[..., None]
        noise = ((constant + 0.3 * varying).exp() * (freedom / (freedom - 2)).sqrt())[..., None]
    elif kind in ("poisson", "negative-binomial"):
        means = about["likelihood"]["unit"] * drawn[..., :1].clamp(max=15).exp()
        spread = 1e-6 + drawn[..., 1:].clamp(max=15).exp() if kind == "negative-binomial" else torch.tensor(0.0)
        noise = (means + spread * means.square()).sqrt()
    elif about["learned_noise"] or (kind == "gaussian" and about["sigma_eps"] is None):
        means, noise = drawn[..., :-1], nn.functional.softplus(drawn[..., -1:])
    variance = noise.square().expand_as(means).mean(0) + means.var(0, correction=0)
    factor = math.exp(about.get("log_factor", 0.0)) * target["deviation"]
    return means.mean(0) * target["deviation"] + target["mean"], variance.sqrt() * factor


if __name__ == "__main__":
    about, weights = load(sys.argv[1])
    with Path(sys.argv[2]).open(encoding="utf-8-sig", newline="") as file:
        x = encode(about, list(csv.DictReader(file)))
    values, spreads = predict(about, weights, x)
    target = about["preprocessing"]["target"]
    names = target["classes"] or [f"until {edge:g}" for edge in target.get("edges", ())] or ["mean"]
    for value, spread in zip(values.tolist(), spreads.tolist(), strict=True):
        print(", ".join(f"{n} {v:.6g} ± {s:.6g}" for n, v, s in zip(names, value, spread, strict=True)))
