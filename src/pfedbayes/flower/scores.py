"""The nodes' scores combined, in the shape in which `pfedbayes run` logs them. Malformed scores are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.maths.metrics import BINS, METRICS
from pfedbayes.runs.schema import Reliability


def table(scores: dict[int, dict[str, Any]], num_clients: int, models: Sequence[str], task: str) -> dict[str, Any]:
    """Combine the scores of single clients into `{model: {estimator: {metric: [[score of each client]]}}}`.

    Only these models and the metrics of the task are kept. A client without test data has no estimators.
    """
    whole: dict[str, Any] = dict.fromkeys(MODELS)
    for which in models:
        estimators = dict.fromkeys(name for one in scores.values() for name in one.get(which) or ())
        whole[which] = {
            estimator: {
                metric: [[score_of(scores.get(i), which, estimator, metric) for i in range(num_clients)]]
                for metric in METRICS[task]
            }
            for estimator in estimators
        }
    return whole


def is_table(scores: Any) -> bool:
    """Return whether these have the structure of scores."""
    tables = [scores.get(which) for which in MODELS] if isinstance(scores, dict) else [()]
    return all(
        one is None or (isinstance(one, dict) and all(isinstance(metrics, dict) for metrics in one.values()))
        for one in tables
    )


def score_of(scores: dict[str, Any] | None, which: str, estimator: str, metric: str) -> float:
    """Return one score from a node's own table [seed][client]; NaN if it has none."""
    try:
        return float(scores[which][estimator][metric][0][0]) if scores else float("nan")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return float("nan")


def pooled(diagrams: list[Any]) -> dict[str, Reliability | None]:
    """Combine the nodes' reliability diagrams: bins are weighted by their counts."""
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
    """Return confidence, accuracy and count (3, bins) of a node's diagram; None if it is malformed."""
    try:
        bins = np.array([diagram[which][name] for name in ("confidence", "accuracy", "count")], float)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return bins if bins.shape == (3, BINS) and np.isfinite(bins[2]).all() and (bins[2] >= 0).all() else None
