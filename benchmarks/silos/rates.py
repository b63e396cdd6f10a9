"""The learning rates of the methods, chosen by validation rows.

Each method but the default one has one rate for all classification tables and one for all regression tables. It is the
one of `GRID` with the lowest mean rank of the validation loss over the tables, on the first split, whose test rows are
left out. A rate at which the method diverges on some table is out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silos.statistics import ranks
from pfedbayes.methods import METHODS

GRID = (0.01, 0.03, 0.1, 0.3)
PROTOCOL = "rates"
FILE = Path(__file__).with_name("rates.json")
FIELDS = ("eta", "eta_personal", "eta_global")  # of a method, which all get the same rate
_BETWEEN = " at "


@cache
def chosen() -> dict[str, dict[str, float]]:
    """Return the rate of each method by task; empty if none are chosen yet, so that methods have their defaults."""
    content: dict[str, dict[str, float]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return content


def at(method: str, rate: float | None) -> list[str]:
    """Return the overrides that give a method this learning rate; none for its default."""
    known = {field.name for field in dataclasses.fields(METHODS[method])}
    return [] if rate is None else [f"method.{name}={rate}" for name in FIELDS if name in known]


def label(method: str, rate: float) -> str:
    """Return the name under which a method at this rate is recorded."""
    return f"{method}{_BETWEEN}{rate}"


def parse(name: str) -> tuple[str, float]:
    """Return method and rate of a label."""
    method, rate = name.split(_BETWEEN)
    return method, float(rate)


def choose(tables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the rate of each method by task, given the collected results of the protocol.

    A table on which a method lacks a rate does not count for it.
    """
    losses: dict[tuple[str, str], list[dict[float, float]]] = {}
    for table in tables.values():
        by_method: dict[str, dict[float, float]] = {}
        for name, result in table["methods"].items():
            method, rate = parse(name)
            (loss,) = result.get("nll", [None])
            by_method.setdefault(method, {})[rate] = math.inf if loss is None else loss
        for method, by_rate in by_method.items():
            if len(by_rate) == len(GRID):
                losses.setdefault((table["task"], method), []).append(by_rate)
    found: dict[str, dict[str, float]] = {}
    for (task, method), complete in sorted(losses.items()):
        stable = [rate for rate in GRID if all(math.isfinite(by_rate[rate]) for by_rate in complete)]
        ranked = [ranks({str(rate): by_rate[rate] for rate in stable}) for by_rate in complete]
        if stable:
            means = {rate: float(np.mean([one[str(rate)] for one in ranked])) for rate in stable}
            found.setdefault(task, {})[method] = min(stable, key=lambda rate: (means[rate], rate))
    return found
