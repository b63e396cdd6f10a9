"""Inputs on which the uncertainty of a client's model is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pfedbayes.data import Shards, available, load_published

OTHER_SET = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
MAX_STRANGE = 1000  # out-of-distribution examples per kind and client: enough for an AUROC to a percent
NOISE = 0.5  # standard deviation of the noise, as a share of the range of a pixel or of a feature's own deviation
NAMES = {
    "unseen": "test examples of other clients whose labels the client has never trained on",
    "other": "test images of Fashion-MNIST for MNIST, and of MNIST for Fashion-MNIST",
    "rotated": "the client's own test images, turned by 90 degrees",
    "noisy": f"the client's own test data with Gaussian noise, {NOISE:g} of a pixel's range or a feature's deviation",
}


def strange_rows(shards: Shards, client: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return some of a client's own test rows and of those of labels that it lacks, and the generator used."""
    generator = torch.Generator().manual_seed(client)
    own, rows = some_rows(shards.test[client], generator), torch.cat(shards.test)
    if shards.num_classes is None:
        return own, rows[:0], generator
    unseen = rows[~torch.isin(shards.y[rows], shards.y[shards.train[client]])]
    return own, some_rows(unseen, generator) if len(unseen) else unseen, generator


def strange_inputs(shards: Shards, client: int, others: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs that a client's model should be uncertain about, by their names in NAMES; the same on every call."""
    own, unseen, generator = strange_rows(shards, client)
    if len(unseen):
        yield "unseen", shards.x[unseen]
    for name, x in others.items():
        yield name, x[some_rows(torch.arange(len(x)), generator)]
    x = shards.x[own]
    if x.dim() == 4 and x.shape[-1] == x.shape[-2]:
        yield "rotated", x.rot90(dims=(-2, -1))
    noise = torch.randn(x.shape, generator=generator)
    if x.dtype == torch.uint8:
        yield "noisy", (x + 255 * NOISE * noise).clamp(0, 255).to(torch.uint8)
    else:
        yield "noisy", x + NOISE * shards.x.std(0, correction=0) * noise.to(x.dtype)


def some_rows(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return at most MAX_STRANGE of the rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=generator)[:MAX_STRANGE]]


def other_set(name: str, data_dir: str | Path | None = None) -> dict[str, Tensor]:
    """Return the test images of the data set that is compared with a published one, if it is on this machine."""
    here = {source.name for source in available(data_dir) if source.found}
    if OTHER_SET.get(name) not in here:
        return {}
    pool = load_published(OTHER_SET[name], data_dir)
    return {"other": pool.x[pool.official_train_count :]}
