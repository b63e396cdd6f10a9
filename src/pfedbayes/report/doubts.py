"""How unsure the models are: how it changed over the rounds, whether it pays to ask them, and who is unsure and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pfedbayes.report import charts, tables
from pfedbayes.report.charts import Figure, Series
from pfedbayes.runs.folder import Run

# What is logged of a model's doubt, by task: all of it, and the part that comes from not knowing the model.
DOUBTS = {
    "classification": ("entropy", "mutual_information"),
    "regression": ("deviation", "model_deviation"),
}
_MOST_LINES = 20  # clients that a chart of lines still keeps apart
_UNSURE = 1.25  # times the median doubt, and a client is worth a sentence
_MOST_SENTENCES = 3


def risk_coverage(run: Run) -> Figure | None:
    """Error among the surest predictions, against how many of them are taken."""
    curves = {model: curve for model, curve in ((run.summary or {}).get("risk_coverage") or {}).items() if curve}
    if not curves:
        return None
    series = [
        Series(
            label=f"{model} (mean {100 * curve['aurc']:.2f} %)",
            x=[100 * share for share in curve["coverage"]],
            y=[100 * risk for risk in curve["risk"]],
            spread=[0.0] * len(curve["risk"]),
            style=tables.STYLE[model],
        )
        for model, curve in curves.items()
    ]
    title = "Errors among the answers given"
    description = "; ".join(f"{model}: area under the curve {curve['aurc']:.4f}" for model, curve in curves.items())
    svg = charts.line_chart(
        title, series, x_label="answered, % (the surest first)", y_label="errors, %", description=description
    )
    return Figure(title, svg, "The mean over all shares is known as AURC.")


def growth(run: Run) -> list[Figure]:
    """The doubt of every client by round, as in the paper's Figure 3, and of it the part that comes from the model."""
    shown = tables.models(run)
    figures = []
    for name in DOUBTS[run.info["task"]][: 1 + _draws(run)] if shown else ():
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
        y_label = f"{metric.label}, {metric.unit}" if metric.unit else metric.label
        description = f"{metric.label} of single clients and on average, over the rounds."
        svg = charts.line_chart(title, series, x_label="round", y_label=y_label, description=description)
        figures.append(Figure(title, svg, f"Thin: single clients, {shown[0]}. {metric.label}: {metric.meaning}."))
    return figures


def _draws(run: Run) -> bool:
    """Whether the headlines come from several draws, which alone can disagree."""
    return tables.estimators(run, tables.models(run)[0])[0].startswith("mc")


def _client_lines(run: Run, model: str, name: str) -> list[Series]:
    return [
        Series(
            label=str(run.info["clients"][client]),
            x=[number for number, _ in points],
            y=[value for _, value in points],
            spread=[0.0] * len(points),
            style=tables.STYLE[model],
            thin=True,
            in_legend=False,
        )
        for client, points in enumerate(tables.client_curves(run, model, name)[:_MOST_LINES])
    ]


def who_and_why(run: Run) -> list[str]:
    """The clients that are clearly less sure than the others, with what may be the reasons."""
    shown = tables.models(run)
    if not shown:
        return []
    total_name, part_name = DOUBTS[run.info["task"]]
    total = _last(tables.client_curves(run, shown[0], total_name))
    if not np.isfinite(total).any():
        return []
    part = _last(tables.client_curves(run, shown[0], part_name))
    median = float(np.nanmedian(total))
    unit = tables.metric(total_name).unit
    unsure = [i for i in np.argsort(-np.nan_to_num(total)).tolist() if total[i] > _UNSURE * median]
    label = tables.metric(total_name).label.lower()
    if not unsure:
        return [f"All clients are about equally sure: the median {label} is {median:.2f} {unit}".strip() + "."]
    sentences = []
    for i in unsure[:_MOST_SENTENCES]:
        amount = f"{label} {total[i]:.2f} {unit}".strip()
        share = part[i] / total[i] if total_name == "entropy" else (part[i] / total[i]) ** 2  # variances add up
        reasons = [*_reasons(run, i), *_kind(share if _draws(run) else math.nan)]
        why = "; ".join(reasons) or "nothing that the run records explains it"
        sentences.append(f"{run.info['clients'][i]} is unsure ({amount}, the median is {median:.2f}): {why}.")
    if len(unsure) > _MOST_SENTENCES:
        sentences.append(f"{len(unsure) - _MOST_SENTENCES} more are less sure than {_UNSURE:g} times the median.")
    return sentences


def _last(curves: Sequence[Sequence[tuple[int, float]]]) -> tables.Floats:
    return np.array([points[-1][1] for points in curves] or [math.nan])


def _reasons(run: Run, client: int) -> list[str]:
    """What sets a client apart from the others."""
    info, known = run.info, (run.summary or {}).get("clients") or {}
    reasons = []
    size, usual = info["train_sizes"][client], float(np.median(info["train_sizes"]))
    if size < 0.7 * usual:
        reasons.append(f"it has few training examples ({size:,}, the median is {usual:,.0f})")
    rarest = known.get("rarest_label")
    if rarest and info["labels"] and rarest[client] < 0.2 * size / len(info["labels"][client]):
        reasons.append(f"one of its labels is rare (its training data have {rarest[client]} of it)")
    if info["labels"]:
        sharers = sum(bool(set(labels) & set(info["labels"][client])) for labels in info["labels"]) - 1
        if not sharers and len(info["labels"]) > 1:
            reasons.append("no other client has any of its labels")
    distance = known.get("distance")
    if distance and distance[client] is not None:
        median = float(np.nanmedian(tables.numbers(distance)))
        if distance[client] > 1.5 * median:
            far = f"KL {distance[client]:,.0f} nats, the median is {median:,.0f}"
            reasons.append(f"its model lies far from the shared one ({far}), so its data are unlike the others’")
    return reasons


def _kind(share: float) -> list[str]:
    """What the doubt is about, by the share of it that comes from not knowing the model."""
    if not math.isfinite(share):
        return []
    if share >= 0.3:
        return [f"{share:.0%} of the doubt is about the model, which more data would lessen"]
    return [f"only {share:.0%} of the doubt is about the model: its examples are hard to tell apart, as far as it sees"]
