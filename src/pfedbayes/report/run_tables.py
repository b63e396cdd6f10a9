"""The tables of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pfedbayes.evaluation.estimators import ENSEMBLE, MODELS
from pfedbayes.report import federation, tables
from pfedbayes.report.describe import axis_label, client_labels
from pfedbayes.report.page import Table
from pfedbayes.report.plain import format_interval
from pfedbayes.report.tables import Estimate
from pfedbayes.runs.folder import Run

TITLE = {"personal": "Personal models", "shared": "Shared model", "gated": "Personal models, gated by the shared model"}
_NO_BREAK = "\N{NO-BREAK SPACE}"
_SORT_ABOVE = 20  # a table of more clients is sorted, the worst first
_MOST_ROWS = 200  # clients that a table lists


def all_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the scores of several runs."""
    return list(dict.fromkeys(name for run in runs for name in tables.metric_names(run)))


def headline_table(run: Run, names: Sequence[str]) -> Table:
    """Return the mean over clients and the worst client of each model."""
    estimators = dict.fromkeys(tables.estimator_title(row.estimator) for row in tables.headline(run))
    one = not run.info.method.stochastic and ENSEMBLE not in {row.estimator for row in tables.headline(run)}
    by = "one network, without sampling" if one else " and ".join(estimators)
    blocks = [
        (
            TITLE[row.model],
            [
                ("mean over clients", _cells(row.mean, names)),
                ("worst client", _cells(row.worst, names)),
                *([("all rows together", _cells(pooled, names))] if (pooled := tables.pooled(run, row.model)) else []),
            ],
        )
        for row in (*tables.headline(run), *filter(None, [tables.gated(run)]))
    ]
    return Table(f"Prediction: {by}", [_head(name) for name in names], blocks)


def estimator_table(run: Run, names: Sequence[str]) -> Table | None:
    """Return the means of all estimators; None if there is only one."""
    rows, shown = tables.every_estimator(run), tables.models(run)
    if len(rows) == len(shown):
        return None
    blocks = [
        (
            TITLE[model],
            [(tables.estimator_title(row.estimator), _cells(row.mean, names)) for row in rows if row.model == model],
        )
        for model in shown
    ]
    return Table("All estimators, mean over clients", [_head(name) for name in names], blocks)


def window_table(run: Run, names: Sequence[str]) -> Table | None:
    """Return best, mean and last over the rounds of the window, as papers report them."""
    rows, window = tables.window(run), run.experiment.training.evaluate_window
    if not rows or window is None:
        return None
    blocks = [
        (
            TITLE[model],
            [
                (
                    tables.estimator_title(row.estimator),
                    [tables.format_estimate(names[0], estimate) for estimate in (row.best, row.mean, row.last)],
                )
                for row in rows
                if row.model == model
            ],
        )
        for model in tables.models(run)
    ]
    rounds = f"rounds {window[0]} to {window[1]}"
    caption = f"{axis_label(names[0])} over {rounds}; the best round is picked on the data it is scored on"
    return Table(caption, ["best", "mean", "last"], blocks)


def comparison_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a block per model with a row per run; a star marks the best mean of a block."""
    names = all_metrics(runs)
    blocks = []
    for model in MODELS:
        leaders = tables.leaders(runs, model)
        lines = []
        for i, run in enumerate(runs):
            for row in tables.headline(run):
                if row.model == model:
                    means = [
                        f"{cell} ★" if leaders.get(name) == i else cell
                        for name, cell in zip(names, _cells(row.mean, names), strict=True)
                    ]
                    rounds = str(tables.final(run).round)
                    seconds = f"{run.summary.seconds:.1f}" if run.summary else "unfinished"
                    lines.append((labels[i], [*means, *_cells(row.worst, names[:1]), rounds, seconds]))
        if lines:
            blocks.append((TITLE[model], lines))
    worst = [f"worst client’s {_head(name)}" for name in names[:1]]
    heads = [*(_head(name) for name in names), *worst, "rounds", "seconds"]
    return Table("Mean over clients, and the worst client", heads, blocks)


def differing_settings(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the settings in which the runs differ."""
    flat = [
        {f"{section}.{key}": str(value) for section, values in run.sections.items() for key, value in values.items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [(key, [settings.get(key, "") for settings in flat]) for key in keys]
    return Table("", list(labels), [("", [(key, cells) for key, cells in rows if len(set(cells)) > 1])])


def client_table(run: Run, name: str) -> Table:
    """Return a metric of each client, with its labels and the sizes of its data sets."""
    shown, info = tables.models(run), run.info
    by_model = [tables.per_client(run, model, name) for model in shown]
    order = list(range(len(info.clients)))
    caption = _head(name)
    if len(order) > _SORT_ABOVE:
        sign = 1 if tables.metric(name).larger_is_better else -1
        order.sort(key=lambda i: (not math.isnan(by_model[0][i].value), sign * by_model[0][i].value))
        caption += f", worst {shown[0]} model first"
    if len(order) > _MOST_ROWS:
        caption += f", {_MOST_ROWS} of {len(order):,} clients"
    # Over several seeds the deviation is shown instead.
    with_intervals = name == "accuracy" and len(info.seeds) == 1
    rows = []
    for i in order[:_MOST_ROWS]:
        labels = [client_labels(run, i)] if info.labels else []
        sizes = [f"{info.train_sizes[i]:,}", f"{info.test_sizes[i]:,}"]
        cells = []
        for estimates in by_model:
            cells.append(tables.format_estimate(name, estimates[i]))
            cells += [format_interval(estimates[i].value, info.test_sizes[i])] if with_intervals else []
        rows.append((info.clients[i], [*labels, *sizes, *cells]))
    heads = [*(["labels"] if info.labels else []), "train", run.experiment.evaluation.split]
    for model in shown:
        heads += [model, "95 % interval"] if with_intervals else [model]
    return Table(caption, heads, [("", rows)])


def refused_table(run: Run) -> Table | None:
    """Return what the server refused; None if it refused nothing."""
    rows = federation.refused(run)
    return Table("Refused uploads and replies, by round", ["client", "reason"], [("", rows)]) if rows else None


def _head(name: str) -> str:
    """Return the head of a metric's column, with an arrow towards better values."""
    metric = tables.metric(name)
    if metric.nominal is not None:
        return f"{axis_label(name)}{_NO_BREAK}→{_NO_BREAK}{metric.nominal:g}"
    return f"{axis_label(name)}{_NO_BREAK}{'↑' if metric.larger_is_better else '↓'}"


def _cells(estimates: dict[str, Estimate], names: Sequence[str]) -> list[str]:
    return [tables.format_estimate(name, estimates[name]) if name in estimates else "" for name in names]
