"""The nodes' own scores put together, in the shape in which the engine logs them. What a node sends in another shape is
left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.evaluation.prediction import MODELS
from pfedbayes.maths.metrics import BINS, METRICS
from pfedbayes.runs.schema import Reliability


def table(scores: dict[int, dict[str, Any]], num_clients: int, models: Sequence[str], task: str) -> dict[str, Any]:
    """{model: {estimator: {metric: [[figure of each client]]}}} from each client's own such table of one, as far as it
    is about these models and these metrics; a client without test data has no estimators in its own."""
    whole: dict[str, Any] = dict.fromkeys(MODELS)
    for which in models:
        ways = dict.fromkeys(way for one in scores.values() for way in one.get(which) or ())
        whole[which] = {
            way: {
                name: [[figure(scores.get(i), which, way, name) for i in range(num_clients)]] for name in METRICS[task]
            }
            for way in ways
        }
    return whole


def is_table(scores: Any) -> bool:
    """Whether these are scores, whatever they say."""
    tables = [scores.get(which) for which in MODELS] if isinstance(scores, dict) else [()]
    return all(
        one is None or (isinstance(one, dict) and all(isinstance(metrics, dict) for metrics in one.values()))
        for one in tables
    )


def figure(scores: dict[str, Any] | None, which: str, way: str, name: str) -> float:
    """One figure of a node's own table [seed][client]; NaN if it has none."""
    try:
        return float(scores[which][way][name][0][0]) if scores else float("nan")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return float("nan")


def pooled(diagrams: list[Any]) -> dict[str, Reliability | None]:
    """The calibration of all nodes' predictions together, from that of each: bins are weighed by their counts."""
    pooled: dict[str, Reliability | None] = {}
    for which in MODELS:
        own = [bins for diagram in diagrams if (bins := _bins(diagram, which)) is not None]
        if not own:
            continue
        bins = np.stack(own)
        counts = bins[:, 2]
        total = counts.sum(0)
        with np.errstate(invalid="ignore"):
            means = (np.nan_to_num(bins[:, :2]) * counts[:, None]).sum(0) / total
        pooled[which] = Reliability(means[0].tolist(), means[1].tolist(), total.tolist())
    return pooled


def _bins(diagram: Any, which: str) -> NDArray[np.float64] | None:
    """Confidence, accuracy and count (3, bins) of a node's own diagram, if it has one."""
    try:
        bins = np.array([diagram[which][name] for name in ("confidence", "accuracy", "count")], float)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return bins if bins.shape == (3, BINS) and np.isfinite(bins[2]).all() and (bins[2] >= 0).all() else None
