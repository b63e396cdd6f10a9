"""The nodes' own scores put together, in the shape in which the engine logs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedbayes.prediction import MODELS


def table(scores: dict[int, dict[str, Any]], num_clients: int) -> dict[str, Any]:
    """{model: {estimator: {metric: [[figure of each client]]}}} from each client's own such table of one."""
    first = next(iter(scores.values()))
    return {
        which: first.get(which)
        and {
            way: {name: [[figure(scores.get(i), which, way, name) for i in range(num_clients)]] for name in metrics}
            for way, metrics in first[which].items()
        }
        for which in MODELS
    }


def is_table(scores: Any) -> bool:
    return isinstance(scores, dict) and all(isinstance(scores.get(which), dict | None) for which in MODELS)


def figure(scores: dict[str, Any] | None, which: str, way: str, name: str) -> float:
    """One figure of a node's own table [seed][client]; NaN if it has none."""
    try:
        return float(scores[which][way][name][0][0]) if scores else float("nan")
    except (KeyError, TypeError, ValueError, IndexError):
        return float("nan")


def pooled(diagrams: list[dict[str, Any]]) -> dict[str, Any]:
    """The calibration of all nodes' predictions together, from that of each: bins are weighed by their counts."""
    pooled: dict[str, Any] = {}
    for which in MODELS:
        own = [
            np.array([d[which][k] for k in ("confidence", "accuracy", "count")], float)
            for d in diagrams
            if d.get(which)
        ]
        if not own:
            continue
        bins = np.stack(own)
        counts = bins[:, 2]
        total = counts.sum(0)
        with np.errstate(invalid="ignore"):
            means = (np.nan_to_num(bins[:, :2]) * counts[:, None]).sum(0) / total
        pooled[which] = {"confidence": means[0].tolist(), "accuracy": means[1].tolist(), "count": total.tolist()}
    return pooled
