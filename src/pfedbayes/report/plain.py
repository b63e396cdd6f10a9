"""The result in plain words, for readers who do not know the field, and how precise the scores are."""

from __future__ import annotations

import math

import numpy as np

from pfedbayes.maths.intervals import binomial_lower, binomial_upper
from pfedbayes.report import tables
from pfedbayes.report.tables import Floats
from pfedbayes.runs.folder import Run

LEVEL = 0.95
FEWEST_CLIENTS = 5  # fewer differences have no useful standard error
TWO_SIDED = 1.96  # standard errors at this level


def accuracy_interval(percent: float, rows: int) -> tuple[float, float] | None:
    """Return the Clopper–Pearson interval of an accuracy, both in percent; None without rows."""
    if rows < 1 or not 0 <= percent <= 100:
        return None
    right = round(percent / 100 * rows)
    delta = (1 - LEVEL) / 2
    return 100 * binomial_lower(right, rows, delta), 100 * binomial_upper(right, rows, delta)


def format_interval(percent: float, rows: int) -> str:
    """Return the interval of an accuracy as text; a dash if there is none."""
    found = accuracy_interval(percent, rows)
    return "–" if found is None else f"{found[0]:.0f}–{found[1]:.0f}"


def difference(run: Run, name: str) -> tuple[float, float] | None:
    """Return by how much the personal models are better than the shared one, and its standard error over clients.

    Clients count by their scored rows. None if the run has only one kind of model, or too few clients.
    """
    if tables.models(run) != ["personal", "shared"]:
        return None
    sizes = tables.sizes(run, tables.final(run))
    values = [[each.value for each in tables.per_client(run, model, name)] for model in ("personal", "shared")]
    gains = np.array(values[0]) - np.array(values[1])
    if not tables.metric(name).larger_is_better:
        gains = -gains
    known = np.isfinite(gains) & (sizes > 0)
    if (count := int(known.sum())) < FEWEST_CLIENTS:
        return None
    return _mean_and_error(gains[known], sizes[known] / sizes[known].sum(), count)


def _mean_and_error(gains: Floats, weights: Floats, count: int) -> tuple[float, float]:
    mean = float(weights @ gains)
    error = math.sqrt(float((weights**2) @ (gains - mean) ** 2) * count / (count - 1))
    return mean, error


def summary(run: Run) -> list[str]:
    """Return a few sentences that need no knowledge of the field."""
    if run.summary is None or not tables.headline(run):
        return []
    name = tables.metric_names(run)[0]
    count = len(run.info.clients)
    clients = f"{count:,} clients" if count > 1 else "one client"
    sentences = [f"The models were trained together by {clients}; each kept its data."]
    sentences += [*_quality(run, name), *_personal_or_shared(run, name), *_joining(run)]
    return sentences


def _quality(run: Run, name: str) -> list[str]:
    row = tables.headline(run)[0]
    value, rows = row.mean[name].value, int(sum(run.info.test_sizes))
    if not math.isfinite(value):
        return []
    if name == "rmse":
        return [f"On {rows:,} rows that no model was trained on, predictions are typically off by {value:.3g}."]
    found = accuracy_interval(value, rows) if name == "accuracy" else None
    if found is None:
        return []
    return [
        f"Of 100 new cases like the {rows:,} test cases, about {value:.0f} are answered correctly (95 % interval: "
        f"{found[0]:.0f} to {found[1]:.0f})."
    ]


def _personal_or_shared(run: Run, name: str) -> list[str]:
    found = difference(run, name)
    if found is None:
        return []
    mean, half = found[0], TWO_SIDED * found[1]
    metric = tables.metric(name)
    unit = " points" if metric.unit == "%" else ""
    size = f"{abs(mean):.{metric.decimals}f} ± {half:.{metric.decimals}f}{unit} of {metric.label}"
    if abs(mean) <= half:
        return [f"A model of one's own and the shared model are indistinguishable here (difference {size})."]
    better = "better" if mean > 0 else "worse"
    return [f"On average over the clients, a model of one's own is {better} than the shared one (by {size})."]


def _joining(run: Run) -> list[str]:
    records = (run.summary.joining if run.summary else None) or []
    if not records:
        return []
    better = sum(each.folds.conclusion == "better" for each in records)
    worse = sum(each.folds.conclusion == "worse" for each in records)
    open_ = len(records) - better - worse
    return [
        f"Joining helped {better:,} of {len(records):,} clients measurably and harmed {worse:,}; for {open_:,} the "
        "data cannot tell. Each client may use the model that is better for it."
    ]
