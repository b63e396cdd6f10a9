"""What a run keeps so that the strangeness of new inputs can be measured, as tensors of calibration.safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.estimators import Served, Which
from pfedbayes.trust.calibration import Fold
from pfedbayes.trust.strangeness import COMPONENTS, Inputs, fit_inputs, held_out_distances, held_out_scores

MOST_NUMBERS = 2**24  # of the principal components of all clients: 64 MB
DISTANCES = "strange.distance"


def reference_tensors(
    federation: Federation, models: Mapping[Served, tuple[Which, Sequence[Fold]]], folds: Sequence[Fold]
) -> dict[str, Tensor]:
    """Return the Gaussians of all clients' inputs, and the scores of their held-out rows.

    models: by name, a model of the federation and its folds. folds: those of the distances.
    """
    shards = federation.shards
    most = min(COMPONENTS, MOST_NUMBERS // max(1, len(shards.train) * shards.x[0].numel()))
    every = [fit_inputs(shards.x[rows], most) for rows in shards.train]
    tensors = {
        "inputs.mean": torch.stack([each.mean for each in every]),
        "inputs.components": torch.cat([each.components for each in every]),
        "inputs.variances": torch.cat([each.variances for each in every]),
        "inputs.rest": torch.stack([each.rest for each in every]),
        "inputs.sizes": torch.tensor([len(each.variances) for each in every]),
        DISTANCES: torch.cat(held_out_distances(federation, folds, most)),
    }
    for name, (which, of_model) in models.items():
        tensors[f"strange.{name}"] = torch.cat(held_out_scores(federation, which, of_model))
    return tensors


def inputs_tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a file with the Gaussian of one client's inputs."""
    return {
        "inputs.mean": inputs.mean[None],
        "inputs.components": inputs.components,
        "inputs.variances": inputs.variances,
        "inputs.rest": inputs.rest[None],
        "inputs.sizes": torch.tensor([len(inputs.variances)]),
    }


def read_inputs(tensors: dict[str, Tensor], clients: int, width: int) -> tuple[Inputs, ...]:
    """Return the Gaussians of the clients' inputs in a file; none if it has none."""
    if "inputs.sizes" not in tensors:
        return ()
    sizes = tensors["inputs.sizes"]
    if sizes.dtype != torch.int64 or sizes.shape != (clients,) or bool((sizes < 0).any() | (sizes > COMPONENTS).any()):
        raise ValueError("the numbers of components of its inputs are wrong")
    count = int(sizes.sum())
    shapes = {"mean": (clients, width), "components": (count, width), "variances": (count,), "rest": (clients,)}
    found = {name: tensors.get(f"inputs.{name}", torch.empty(0)) for name in shapes}
    for name, shape in shapes.items():
        values = found[name]
        if values.dtype != torch.float32 or values.shape != shape or not bool(values.isfinite().all()):
            raise ValueError(f"the {name} of its inputs have another shape or type")
    if bool((torch.cat([found["variances"], found["rest"]]) <= 0).any()):
        raise ValueError("a variance of its inputs is not positive")
    counts = sizes.tolist()
    parts = zip(
        found["mean"], found["components"].split_with_sizes(counts), found["variances"].split_with_sizes(counts),
        found["rest"], strict=True,
    )  # fmt: skip
    return tuple(Inputs(*each) for each in parts)


def read_scores(tensors: dict[str, Tensor], name: str, size: int) -> Tensor:
    """Return the scores (n,) of held-out rows in a file."""
    values = tensors.get(name)
    if values is None or values.dtype != torch.float32 or values.shape != (size,) or not bool(values.isfinite().all()):
        raise ValueError(f"the scores {name} are missing or have another shape or type")
    return values
