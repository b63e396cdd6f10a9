"""The figures of the report: scores by round, by client, and reliability diagrams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pfedbayes.report import charts, cross_site, joining, survival, tables, uncertainty
from pfedbayes.report.charts import Figure
from pfedbayes.report.describe import amount, axis_label, client_labels
from pfedbayes.report.run_tables import TITLE
from pfedbayes.report.tables import Estimate
from pfedbayes.runs.folder import Run

_DASHES = ("", "2 3", "8 4", "10 3 2 3")
_MOST_BARS = 20  # clients that a bar chart still labels legibly
_MOST_DOTS = 500  # clients that a dot chart still separates


def all_figures(run: Run) -> dict[str, Figure]:
    """Return the figures of a run's page, by names that are valid for files."""
    names = tables.metric_names(run)
    drawn: dict[str, Figure | None] = {f"{name}_by_round": curves(run, name) for name in curve_metrics(names)}
    drawn["validation"] = validation(run)
    drawn["clients"] = clients_figure(run, names[0]) if names else None
    drawn |= {f"reliability_{model}": figure for model, figure in reliability(run)}
    drawn |= {"risk_coverage": uncertainty.risk_coverage(run), "survival": survival.figure(run)}
    drawn |= {f"doubt_{k}": figure for k, figure in enumerate(uncertainty.by_round(run), start=1)}
    drawn |= {"joining": joining.figure(run), "cross_site": cross_site.figure(run)}
    return {name: figure for name, figure in drawn.items() if figure}


def curve_metrics(names: Sequence[str]) -> list[str]:
    """Return the metrics to draw by round: the error, or the order of times, and the likelihood."""
    return [name for name in names if name in ("accuracy", "rmse", "c_index", "nll")] or list(names[:1])


def curves(run: Run, name: str) -> Figure:
    """Draw both models by round, with thin lines for the estimators that are not in the headline."""
    series = []
    for model in tables.models(run):
        estimators = tables.estimators(run, model)
        for i, estimator in enumerate(estimators):
            label = f"{model}, {tables.estimator_title(estimator)}" if len(estimators) > 1 else model
            dash = _DASHES[i % len(_DASHES)]
            series.append(_series(run, model, estimator, name, label, tables.STYLE[model], dash, thin=i > 0))
    title = f"{tables.metric(name).label} by round"
    return Figure(title, _line_chart(title, name, series), _best_rounds(run, name))


def validation(run: Run) -> Figure | None:
    """Draw the validation loss by round, and the round that early stopping keeps; None without it."""
    points = [(record.round, record.validation_nll) for record in run.rounds if record.validation_nll is not None]
    if not points:
        return None
    x, y = [float(number) for number, _ in points], [loss for _, loss in points]
    series = [charts.Series("validation NLL", x, y, [0.0] * len(x), style=2)]
    kept = run.summary.kept_round if run.summary else None
    caption = ""
    if kept in x:
        loss = y[x.index(kept)]
        series.append(charts.Series(f"kept: round {kept}", [float(kept)], [loss], [0.0], style=1))
        caption = f"The models of the report are those with {loss:.3g} in round {kept}: see training.patience."
    return Figure("Validation NLL by round", _line_chart("Validation NLL by round", "nll", series), caption)


def overlaid_curves(runs: Sequence[Run], labels: Sequence[str], model: str, name: str) -> Figure | None:
    """Draw the headline curves of all runs that have the model and the metric."""
    series = [
        _series(run, model, row.estimator, name, label, i % charts.COLOURS, _DASHES[i // charts.COLOURS % len(_DASHES)])
        for i, (label, run) in enumerate(zip(labels, runs, strict=True))
        for row in tables.headline(run)
        if row.model == model and name in row.mean
    ]
    title = f"{TITLE[model]}: {tables.metric(name).label} by round"
    return Figure(title, _line_chart(title, name, series)) if series else None


def _series(
    run: Run, model: str, estimator: str, name: str, label: str, style: int, dash: str, thin: bool = False
) -> charts.Series:
    points = tables.curve(run, model, estimator, name)
    return charts.Series(
        label=label,
        x=[number for number, _ in points],
        y=[estimate.value for _, estimate in points],
        spread=[estimate.std or 0.0 for _, estimate in points],
        style=style,
        dash=dash,
        thin=thin,
    )


def _line_chart(title: str, name: str, series: Sequence[charts.Series]) -> str:
    ends = [
        f"{line.label}: {line.y[0]:.4g} at round {line.x[0]:g}, {line.y[-1]:.4g} at round {line.x[-1]:g}"
        for line in series
    ]
    return charts.line_chart(title, series, x_label="round", y_label=axis_label(name), description="; ".join(ends))


def _best_rounds(run: Run, name: str) -> str:
    """Return the best round of each model, with the warning that it was picked in hindsight."""
    best = max if tables.metric(name).larger_is_better else min
    found = []
    for row in tables.headline(run):
        points = tables.curve(run, row.model, row.estimator, name)
        finite = [(number, estimate) for number, estimate in points if math.isfinite(estimate.value)]
        if finite:
            number, estimate = best(finite, key=lambda point: point[1].value)
            found.append(f"{row.model} {amount(name, estimate)} (round {number})")
    if not found:
        return ""
    split = run.experiment.evaluation.split
    return f"Best round: {', '.join(found)}. It was picked on the {split} data, so it is optimistic."


def clients_figure(run: Run, name: str) -> Figure:
    """Draw a metric of each client: bars for a few clients, dots for many."""
    metric, shown, info = tables.metric(name), tables.models(run), run.info
    by_model = [tables.per_client(run, model, name) for model in shown]
    groups = []
    with_labels = info.labels and not info.class_names  # class names are too long
    for i in _evenly_spaced(by_model[0], _MOST_DOTS):
        sizes = f"{info.train_sizes[i]:,} / {info.test_sizes[i]:,}"
        group = charts.Group(
            label=info.clients[i],
            values=[estimates[i].value for estimates in by_model],
            spreads=[estimates[i].std or 0.0 for estimates in by_model],
            note=" · ".join([client_labels(run, i), sizes] if with_labels else [sizes]),
        )
        groups.append(group)
    title, series = f"{metric.label} by client", {TITLE[model].lower(): tables.STYLE[model] for model in shown}
    description = f"{metric.label} of {len(groups)} clients in the last evaluated round; the table has the numbers."
    if len(groups) > _MOST_BARS:
        svg = charts.dot_chart(title, series, groups, value_label=axis_label(name), description=description)
        caption = "Hover over a dot to see its client and value."
        if len(groups) < len(info.clients):
            caption += f" Shown: {len(groups)} of {len(info.clients):,} clients, evenly spaced in this order."
        return Figure(title, svg, caption)
    end = 100 if metric.unit == "%" else None
    svg = charts.bar_chart(title, series, groups, value_label=axis_label(name), description=description, end=end)
    labels = "its labels, then " if with_labels else ""
    whiskers = " Whiskers: ± one standard deviation over seeds." if len(info.seeds) > 1 else ""
    split = run.experiment.evaluation.split
    return Figure(title, svg, f"Under each name: {labels}its training / {split} examples.{whiskers}")


def _evenly_spaced(estimates: Sequence[Estimate], most: int) -> list[int]:
    """Return all clients, or `most` of them, evenly spaced in the order of their estimates."""
    count = len(estimates)
    if count <= most:
        return list(range(count))
    ranked = sorted(range(count), key=lambda i: (math.isnan(estimates[i].value), estimates[i].value))
    return [ranked[k * (count - 1) // (most - 1)] for k in range(most)]


def reliability(run: Run) -> Iterator[tuple[str, Figure]]:
    """Yield each model with its reliability diagram."""
    for model, bins in (run.summary.reliability if run.summary else {}).items():
        if bins and sum(bins.count):
            ece = tables.pooled_ece(bins)
            svg = charts.reliability_chart(
                f"Reliability of the {TITLE[model].lower()}",
                tables.numbers(bins.confidence).tolist(),
                tables.numbers(bins.accuracy).tolist(),
                bins.count,
                style=tables.STYLE[model],
                description=f"Expected calibration error {ece:.3f} over {sum(bins.count):,.0f} predictions.",
            )
            yield model, Figure(f"{TITLE[model]}: ECE {ece:.3f} over all predictions", svg)
