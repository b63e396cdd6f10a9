"""The uncertainty of the models: by round, by client with possible reasons, and as a risk-coverage curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pfedbayes.evaluation.estimators import ENSEMBLE
from pfedbayes.report import charts, tables
from pfedbayes.report.charts import Figure, Series
from pfedbayes.report.describe import axis_label
from pfedbayes.runs.folder import Run

# By task: the metric of total uncertainty, and that of model uncertainty.
UNCERTAINTY = {
    "classification": ("entropy", "mutual_information"),
    "regression": ("deviation", "model_deviation"),
    "ordinal": ("entropy", "mutual_information"),
    "count": ("deviation", "model_deviation"),
}
_MOST_LINES = 20  # clients that a line chart still separates
_HIGH = 1.25  # times the median: the uncertainty of a client that gets a sentence
_MOST_SENTENCES = 3


def risk_coverage(run: Run) -> Figure | None:
    """Draw the error rate among the most confident predictions against their share."""
    curves = {model: curve for model, curve in (run.summary.risk_coverage if run.summary else {}).items() if curve}
    if not curves:
        return None
    series = [
        Series(
            label=f"{model} (AURC {100 * curve.aurc:.2f} %)",
            x=[100 * share for share in curve.coverage],
            y=[100 * risk for risk in curve.risk],
            spread=[0.0] * len(curve.risk),
            style=tables.STYLE[model],
        )
        for model, curve in curves.items()
    ]
    title = "Error rate by coverage"
    description = "; ".join(f"{model}: area under the curve {curve.aurc:.4f}" for model, curve in curves.items())
    svg = charts.line_chart(
        title,
        series,
        x_label="coverage, % (most confident predictions first)",
        y_label="error rate, %",
        description=description,
    )
    return Figure(title, svg, "AURC: area under the risk-coverage curve, the mean error rate over all coverages.")


def by_round(run: Run) -> list[Figure]:
    """Draw the total and the model uncertainty of every client by round, as in the paper's Figure 3."""
    shown = tables.models(run)
    figures = []
    for name in UNCERTAINTY.get(run.info.task, ())[: 1 + _draws_samples(run)] if shown else ():
        metric, title = tables.metric(name), f"{tables.metric(name).label} by round"
        series = _client_lines(run, shown[0], name)
        for model in shown:
            points = tables.curve(run, model, tables.estimators(run, model)[0], name)
            if points:
                series.append(
                    Series(
                        label=f"{model}, mean over clients",
                        x=[number for number, _ in points],
                        y=[estimate.value for _, estimate in points],
                        spread=[0.0] * len(points),
                        style=tables.STYLE[model],
                    )
                )
        if not series:
            continue
        description = f"{metric.label} of single clients and of their mean by round."
        svg = charts.line_chart(title, series, x_label="round", y_label=axis_label(name), description=description)
        caption = f"Thin lines: single clients, {shown[0]} model. {metric.label}: {metric.meaning}."
        figures.append(Figure(title, svg, caption))
    return figures


def _draws_samples(run: Run) -> bool:
    """Return whether the headline averages several samples, which model uncertainty needs."""
    return tables.estimators(run, tables.models(run)[0])[0].startswith(("mc", ENSEMBLE))


def _client_lines(run: Run, model: str, name: str) -> list[Series]:
    return [
        Series(
            label=run.info.clients[client],
            x=[number for number, _ in points],
            y=[value for _, value in points],
            spread=[0.0] * len(points),
            style=tables.STYLE[model],
            thin=True,
            in_legend=False,
        )
        for client, points in enumerate(tables.client_curves(run, model, name)[:_MOST_LINES])
    ]


def uncertain_clients(run: Run) -> list[str]:
    """Return sentences about the clients with clearly more uncertainty than the others, with possible reasons."""
    shown = tables.models(run)
    if not shown or run.info.task not in UNCERTAINTY:
        return []
    total_name, part_name = UNCERTAINTY[run.info.task]
    total = _last(tables.client_curves(run, shown[0], total_name))
    if not np.isfinite(total).any():
        return []
    part = _last(tables.client_curves(run, shown[0], part_name))
    median = float(np.nanmedian(total))
    unit = tables.metric(total_name).unit
    uncertain = [i for i in np.argsort(-np.nan_to_num(total)).tolist() if total[i] > _HIGH * median]
    label = tables.metric(total_name).label.lower()
    if not uncertain:
        return [f"All clients are about equally uncertain: the median {label} is {median:.2f} {unit}".strip() + "."]
    sentences = []
    for i in uncertain[:_MOST_SENTENCES]:
        amount = f"{label} {total[i]:.2f} {unit}".strip()
        share = part[i] / total[i] if total_name == "entropy" else (part[i] / total[i]) ** 2  # variances add up
        found = [*reasons(run, i), *_kind(share if _draws_samples(run) else math.nan)]
        why = "; ".join(found) or "the run records no reason"
        sentences.append(f"{run.info.clients[i]} is uncertain ({amount}, median {median:.2f}): {why}.")
    if len(uncertain) > _MOST_SENTENCES:
        more = len(uncertain) - _MOST_SENTENCES
        sentences.append(f"{more} more clients exceed {_HIGH:g} times the median.")
    return sentences


def _last(curves: Sequence[Sequence[tuple[int, float]]]) -> tables.Floats:
    return np.array([points[-1][1] for points in curves] or [math.nan])


def reasons(run: Run, client: int) -> list[str]:
    """Return how a client differs from the others."""
    info, facts = run.info, run.summary.clients if run.summary else None
    found = []
    size, usual = info.train_sizes[client], float(np.median(info.train_sizes))
    if size < 0.7 * usual:
        found.append(f"it has few training examples ({size:,}, median {usual:,.0f})")
    rarest = facts.rarest_label if facts else None
    if rarest and info.labels and rarest[client] < 0.2 * size / len(info.labels[client]):
        found.append(f"one of its labels is rare (training examples: {rarest[client]})")
    if info.labels:
        sharers = sum(bool(set(labels) & set(info.labels[client])) for labels in info.labels) - 1
        if not sharers and len(info.labels) > 1:
            found.append("no other client has any of its labels")
    distances = facts.distance if facts else None
    distance = distances[client] if distances else None
    if distance is not None:
        median = float(np.nanmedian(tables.numbers(distances)))
        if distance > 1.5 * median:
            far = f"KL {distance:,.0f} nats, median {median:,.0f}"
            found.append(f"its model is far from the shared one ({far}), so its data differ from the others’")
    return found


def _kind(share: float) -> list[str]:
    """Return what the uncertainty consists of, by the share of model uncertainty."""
    if not math.isfinite(share):
        return []
    if share >= 0.3:
        return [f"{share:.0%} of it is model uncertainty, which more data would reduce"]
    return [f"only {share:.0%} of it is model uncertainty: its examples are hard to tell apart"]
