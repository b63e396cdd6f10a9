"""The nodes' scores combined, in the shape in which `pfedbayes run` logs them. Malformed scores are left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.flower.messages import LARGEST_COUNT
from pfedbayes.maths.metrics import BINS
from pfedbayes.runs.schema import Reliability

LONGEST_NAME = 40  # characters of an estimator's name
MOST_ESTIMATORS = 20
LARGEST_SCORE = 1e12


def table(
    scores: dict[int, dict[str, Any]], num_clients: int, models: Sequence[str], metrics: Sequence[str]
) -> dict[str, Any]:
    """Combine the scores of single clients into `{model: {estimator: {metric: [[score of each client]]}}}`.

    Only these models and metrics, and estimators that most clients report are kept. A client without test
    data has no estimators.
    """
    whole: dict[str, Any] = dict.fromkeys(MODELS)
    for which in models:
        estimators = _common([one.get(which) or {} for one in scores.values()])
        whole[which] = {
            estimator: {
                metric: [[score_of(scores.get(i), which, estimator, metric) for i in range(num_clients)]]
                for metric in metrics
            }
            for estimator in estimators
        }
    return whole


def _common(tables: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names that more than half of the tables have, leaving out empty tables."""
    reporting = [table for table in tables if table]
    counts = Counter(name for table in reporting for name in table if len(name) <= LONGEST_NAME)
    return [name for name, count in counts.items() if 2 * count > len(reporting)][:MOST_ESTIMATORS]


def is_table(scores: Any) -> bool:
    """Return whether these have the structure of scores."""
    tables = [scores.get(which) for which in MODELS] if isinstance(scores, dict) else [()]
    return all(
        one is None or (isinstance(one, dict) and all(isinstance(metrics, dict) for metrics in one.values()))
        for one in tables
    )


def score_of(scores: dict[str, Any] | None, which: str, estimator: str, metric: str) -> float:
    """Return one score from a node's own table [seed][client]; NaN if it has none, or an impossible one."""
    try:
        score = float(scores[which][estimator][metric][0][0]) if scores else math.nan
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return math.nan
    return score if abs(score) <= LARGEST_SCORE else math.nan


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
    if bins.shape != (3, BINS) or not ((bins[2] >= 0) & (bins[2] <= LARGEST_COUNT)).all():
        return None
    shares = bins[:2][:, bins[2] > 0]
    return bins if ((shares >= 0) & (shares <= 1)).all() else None
