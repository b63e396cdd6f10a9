"""Survival curves: what was observed beside the mean prediction of each model."""

from __future__ import annotations

from pfedbayes.report import charts, tables
from pfedbayes.report.charts import Figure, Series
from pfedbayes.runs.folder import Run


def figure(run: Run) -> Figure | None:
    """Draw the Kaplan-Meier curve of the scored rows and the mean curve of each model; None for other tasks."""
    curves = run.summary.survival if run.summary else None
    if curves is None:
        return None
    flat = [0.0] * len(curves.times)
    observed = Series("observed (Kaplan-Meier)", curves.times, _percent(curves.observed), flat, style=2, thin=True)
    predicted = [
        Series(f"{model}, mean prediction", curves.times, _percent(values), flat, tables.STYLE[model], thin=True)
        for model, values in curves.predicted.items()
    ]
    title = "Survival of the scored rows"
    ends = {line.label: line.y[-1] for line in (observed, *predicted)}
    description = "; ".join(f"{label}: {end:.1f} % at the end" for label, end in ends.items())
    svg = charts.line_chart(
        title, [observed, *predicted], x_label="time", y_label="without an event, %", description=description
    )
    return Figure(
        title,
        svg,
        "The mean curve of a calibrated model is near the observed one. The curves end where few rows are left.",
    )


def _percent(shares: list[float]) -> list[float]:
    return [100 * share for share in shares]
