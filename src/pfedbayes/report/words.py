"""What the numbers of a run say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pfedbayes.report import tables
from pfedbayes.report.tables import Estimate, Row
from pfedbayes.runs.folder import Run

_TITLE = {"personal": "personal models", "shared": "shared model"}


def lead(run: Run) -> list[str]:
    """Two or three sentences: how good, for whom worst, how well calibrated."""
    rows = tables.headline(run)
    if not rows:
        return []
    name = tables.metric_names(run)[0]
    sentences = [_how_good(run, name, rows), _who_is_worst(run, name, rows)]
    if all("ece" in row.mean for row in rows):
        sentences.append(_how_calibrated(run, rows))
    return sentences + stopping(run)


def stopping(run: Run) -> list[str]:
    """A sentence on early stopping, where it changed something."""
    summary = run.summary or {}
    trained, kept = summary.get("rounds"), summary.get("kept_round")
    if trained is None or kept is None or kept == trained:
        return []
    return [f"The models of round {kept} are kept, the best on validation data of the {trained} rounds trained."]


def compare(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Which run is best, per model, by the first metric that ranks them."""
    if not tables.comparable(runs):
        return ["These runs were not scored on the same data, so none is called the best."]
    sentences = []
    for model in tables.MODELS:
        for name, i in list(tables.leaders(runs, model).items())[:1]:
            (row,) = [row for row in tables.headline(runs[i]) if row.model == model]
            best = f"{labels[i]}, {_label(name)} {amount(name, row.mean[name])}"
            sentences.append(f"Best {_TITLE[model]}: {best}.")
    return sentences


def amount(name: str, estimate: Estimate) -> str:
    """A number with its unit, kept on one line."""
    return f"{tables.text(name, estimate)} {tables.metric(name).unit}".strip().replace(" ", "\N{NO-BREAK SPACE}")


def calibration(ece: float) -> str:
    """An expected calibration error as a judgement; the bounds are conventions, not theory."""
    if not math.isfinite(ece):
        return "of unknown calibration"
    bounds = ((0.02, "very well calibrated"), (0.05, "well calibrated"), (0.1, "somewhat miscalibrated"))
    return next((words for bound, words in bounds if ece <= bound), "badly miscalibrated")


def _how_good(run: Run, name: str, rows: Sequence[Row]) -> str:
    numbers = " and ".join(f"{amount(name, row.mean[name])} for the {_TITLE[row.model]}" for row in rows)
    last = tables.final(run)["round"]
    start = f"After {last} rounds the mean {_label(name)} over clients is {numbers}"
    if len(rows) < 2:
        return f"{start}."
    personal, shared = (row.mean[name].value for row in rows)
    gain = personal - shared if tables.metric(name).larger_is_better else shared - personal
    if not math.isfinite(gain):
        return f"{start}."
    size = f"{abs(gain):.{tables.metric(name).decimals}f}"
    points = " points" if tables.metric(name).unit == "%" else ""
    return f"{start}: having a model of one’s own {'gains' if gain >= 0 else 'costs'} {size}{points}."


def _who_is_worst(run: Run, name: str, rows: Sequence[Row]) -> str:
    several_seeds = any(row.worst[name].std is not None for row in rows)
    numbers = []
    for row in rows:
        # Which client is worst can differ between seeds, so it is named only where there is one seed.
        who = "" if several_seeds else f" ({_worst_name(run, row.model, name)})"
        numbers.append(f"{amount(name, row.worst[name])} with the {row.model} model{who}")
    return f"The worst client{' of each seed' if several_seeds else ''} has {' and '.join(numbers)}."


def _worst_name(run: Run, model: str, name: str) -> str:
    values = np.array([[estimate.value for estimate in tables.per_client(run, model, name)]])
    sizes = tables.sizes(run, tables.evaluated(run)[-1])
    worst = tables.worst_client(name, values, sizes)[0]
    # A missing number is the worst there is, and NaN equals nothing, itself included.
    is_worst = (np.isnan(values[0]) if math.isnan(worst) else values[0] == worst) & (sizes > 0)
    return str(run.info["clients"][int(np.argmax(is_worst))])


def _how_calibrated(run: Run, rows: Sequence[Row]) -> str:
    clauses = []
    for row in rows:
        verb = "are" if row.model == "personal" else "is"
        ece = row.mean["ece"].value
        bins = ((run.summary or {}).get("reliability") or {}).get(row.model)
        lean = ""
        if bins and ece > 0.02:
            lean = f", erring towards too {'much' if tables.overconfidence(bins) > 0 else 'little'} confidence"
        judged = f"{calibration(ece)}{lean} (ECE\N{NO-BREAK SPACE}{amount('ece', row.mean['ece'])})"
        clauses.append(f"the {_TITLE[row.model]} {verb} {judged}")
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _label(name: str) -> str:
    """The label as it stands inside a sentence: abbreviations keep their capitals."""
    label = tables.metric(name).label
    return label if label.isupper() else label.lower()
