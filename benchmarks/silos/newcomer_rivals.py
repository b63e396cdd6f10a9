"""What newcomers do without this package: logistic regression or ridge on their few rows."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.silos.encoding import Design, encode
from benchmarks.silos.newcomers import Found, Newcomers, sizes_of, summarise
from benchmarks.silos.rivals import class_probabilities, gaussian, logistic, quietly, ridge
from benchmarks.silos.scores import Labels, Measured, Numbers
from benchmarks.silos.tables import TEST, TRAIN, Split, make_split

LEAST_VARIANCE = 1e-4  # of a ridge regression whose few rows it fits exactly; targets are standardised


def measure(data: Newcomers) -> Measured:
    """Score the rivals of all newcomers, with the encoding of the federation that each newcomer joins."""
    start = time.monotonic()
    found: dict[str, Found] = {}
    for group in data.groups:
        design = encode(without(data, group))
        found |= {name: predict(data, name, design) for name in group}
    return summarise(found, time.monotonic() - start)


def without(data: Newcomers, group: tuple[str, ...]) -> Split:
    """Return the table with the scored rows of a group as test rows."""
    parts = np.full(len(data.frame), TRAIN, dtype="<U10")
    for name in group:
        parts[data.own[name][1]] = TEST
    return make_split("newcomers", data.frame, data.target, data.client, data.task, parts)


def predict(data: Newcomers, name: str, design: Design) -> Found:
    """Predict with logistic regression or ridge, fitted to the newcomer's rows."""
    brought, tested = data.own[name]
    test = _mask(tested, len(design.y))
    found: Found = {}
    for size in sizes_of(brought):
        own = _mask(brought[:size], len(design.y))
        with quietly():
            if data.task == "classification":
                p = class_probabilities(design, logistic, design.x, own, test)
                found["rival", size] = Labels(p, design.y[test], design.client[test])
            else:
                mean, variance = gaussian(ridge, design.x, design.y, own, test)
                deviation = np.full(len(mean), design.unit * max(variance, LEAST_VARIANCE) ** 0.5)
                found["rival", size] = Numbers(
                    design.unit * mean, deviation, design.unit * design.y[test], design.client[test]
                )
    return found


def _mask(rows: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=np.bool_)
    mask[rows] = True
    return mask
