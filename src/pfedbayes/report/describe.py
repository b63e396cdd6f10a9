"""The results of a run in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.report import tables
from pfedbayes.report.tables import Estimate, Row
from pfedbayes.runs.folder import Run

_TITLE = {"personal": "personal models", "shared": "shared model"}
_MOST_NAMES = 6  # class names that a cell lists


def lead(run: Run) -> list[str]:
    """Return two to four sentences: the mean score, the worst client, the calibration, early stopping."""
    rows = tables.headline(run)
    if not rows:
        return []
    name = tables.metric_names(run)[0]
    sentences = [_mean_score(run, name, rows), _worst_client(run, name, rows)]
    if all("ece" in row.mean for row in rows):
        sentences.append(_calibration(run, rows))
    return sentences + stopping(run)


def stopping(run: Run) -> list[str]:
    """Return a sentence on early stopping, if an earlier round was kept."""
    if run.summary is None or run.summary.kept_round in (None, run.summary.rounds):
        return []
    kept, trained = run.summary.kept_round, run.summary.rounds
    return [f"Early stopping kept the models of round {kept} of {trained}, which have the lowest validation loss."]


def compare(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return a sentence per model about the best run, by the first metric that ranks the runs."""
    if not tables.comparable(runs):
        return ["These runs were not scored on the same data, so they are not ranked."]
    sentences = []
    for model in MODELS:
        for name, i in list(tables.leaders(runs, model).items())[:1]:
            (row,) = [row for row in tables.headline(runs[i]) if row.model == model]
            best = f"{labels[i]}, {_label(name)} {amount(name, row.mean[name])}"
            sentences.append(f"Best {_TITLE[model]}: {best}.")
    return sentences


def amount(name: str, estimate: Estimate) -> str:
    """Format a number with its unit, without line breaks."""
    formatted = f"{tables.format_estimate(name, estimate)} {tables.metric(name).unit}"
    return formatted.strip().replace(" ", "\N{NO-BREAK SPACE}")


def axis_label(name: str) -> str:
    """Return the label of a metric with its unit."""
    metric = tables.metric(name)
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label


def client_labels(run: Run, client: int) -> str:
    """Return the labels of a client, as class names if the data have any."""
    if not run.info.labels:
        return ""
    own, names = run.info.labels[client], run.info.class_names
    if not names:
        return " ".join(str(label) for label in own)
    more = [f"… ({len(own)} of {len(names)})"] if len(own) > _MOST_NAMES else []
    return ", ".join([*(names[label] for label in own[:_MOST_NAMES]), *more])


def judge_calibration(ece: float) -> str:
    """Return an expected calibration error as a judgement; the bounds are conventions."""
    if not math.isfinite(ece):
        return "of unknown calibration"
    bounds = ((0.02, "very well calibrated"), (0.05, "well calibrated"), (0.1, "somewhat miscalibrated"))
    return next((judgement for bound, judgement in bounds if ece <= bound), "badly miscalibrated")


def _mean_score(run: Run, name: str, rows: Sequence[Row]) -> str:
    metric = tables.metric(name)
    numbers = " and ".join(f"{amount(name, row.mean[name])} for the {_TITLE[row.model]}" for row in rows)
    start = f"After {tables.final(run).round} rounds the mean {_label(name)} over clients is {numbers}"
    if len(rows) < 2:
        return f"{start}."
    personal, shared = (row.mean[name].value for row in rows)
    gain = personal - shared if metric.larger_is_better else shared - personal
    if not math.isfinite(gain):
        return f"{start}."
    size = f"{abs(gain):.{metric.decimals}f}{' points' if metric.unit == '%' else ''}"
    if float(f"{gain:.{metric.decimals}f}") == 0:
        return f"{start}: both are equally good."
    return f"{start}: the personal models are {size} {'better' if gain > 0 else 'worse'}."


def _worst_client(run: Run, name: str, rows: Sequence[Row]) -> str:
    several_seeds = any(row.worst[name].std is not None for row in rows)
    numbers = []
    for row in rows:
        # Seeds may have different worst clients, so the client is named only if there is one seed.
        who = "" if several_seeds else f" ({_worst_name(run, row.model, name)})"
        numbers.append(f"{amount(name, row.worst[name])} with the {row.model} model{who}")
    return f"The worst client{' of each seed' if several_seeds else ''} has {' and '.join(numbers)}."


def _worst_name(run: Run, model: str, name: str) -> str:
    values = np.array([[estimate.value for estimate in tables.per_client(run, model, name)]])
    sizes = tables.sizes(run, tables.evaluated(run)[-1])
    worst = tables.worst_client(name, values, sizes)[0]
    # A missing number counts as the worst. NaN does not equal itself.
    is_worst = (np.isnan(values[0]) if math.isnan(worst) else values[0] == worst) & (sizes > 0)
    return run.info.clients[int(np.argmax(is_worst))]


def _calibration(run: Run, rows: Sequence[Row]) -> str:
    clauses = []
    for row in rows:
        several = row.model == "personal"
        bins = run.summary.reliability.get(row.model) if run.summary else None
        # The mean over clients of small test sets is too large: each bin of a client holds few predictions.
        ece = row.mean["ece"] if bins is None else Estimate(tables.pooled_ece(bins), None)
        shown = f"(ECE\N{NO-BREAK SPACE}{amount('ece', ece)})"
        if bins and ece.value <= tables.ece_by_chance(bins):
            count = f"{sum(bins.count):,.0f} test predictions"
            clauses.append(
                f"the {_TITLE[row.model]} show{'s' * (not several)} no miscalibration that {count} could prove {shown}"
            )
            continue
        tendency = ""
        if bins and ece.value > 0.02:
            tendency = f" and {'over' if tables.overconfidence(bins) > 0 else 'under'}confident"
        verb = "are" if several else "is"
        clauses.append(f"the {_TITLE[row.model]} {verb} {judge_calibration(ece.value)}{tendency} {shown}")
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _label(name: str) -> str:
    """Return the label of a metric inside a sentence: abbreviations keep their capitals."""
    label = tables.metric(name).label
    return label if label.isupper() else label.lower()
