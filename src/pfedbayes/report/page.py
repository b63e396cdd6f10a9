"""One self-contained HTML page about one run, or about several side by side."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from pfedbayes import runs as run_folders
from pfedbayes.errors import UserError
from pfedbayes.report import charts, doubts, examples, federation, tables, words
from pfedbayes.report.charts import Figure
from pfedbayes.report.tables import Estimate
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.folder import Run

_TITLE = {"personal": "Personal models", "shared": "Shared model"}
_DASHES = ("", "2 3", "8 4", "10 3 2 3")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_MOST_BARS = 20  # clients that a bar chart still labels legibly
_MOST_DOTS = 500  # clients that a chart of dots still keeps apart
_MOST_NAMES = 6  # of classes that a cell lists
_MOST_ROWS = 200  # clients that a table lists


@dataclass(frozen=True)
class Table:
    """A caption, the heads of the columns, and rows (head, cells) in titled blocks.

    notes, and after them figures by the names of their files, stand between the caption and the rows.
    """

    caption: str
    heads: list[str]
    blocks: list[tuple[str, list[tuple[str, list[str]]]]]
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the page about the runs in `folders` to the file `out`."""
    page = render([run_folders.read(folder) for folder in folders])
    with run_folders.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    return out


def render(runs: Sequence[Run]) -> str:
    """The page as a string."""
    if not runs:
        raise UserError("a report needs a run: give the folder of at least one")
    template = environment().get_template("page.html")
    labels = _labels(runs)
    return template.render(
        runs=[_run_context(run, label) for run, label in zip(runs, labels, strict=True)],
        comparison=_comparison_context(runs, labels) if len(runs) > 1 else None,
        glossary=[
            (tables.metric(name).label, tables.metric(name).meaning)
            for name in _metric_names(runs)
            if tables.metric(name).meaning
        ],
    )


def environment() -> Environment:
    """The templates of this folder."""

    def load(name: str) -> str:
        return resources.files(__package__).joinpath(name).read_text("utf-8")

    return Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def figures(run: Run) -> dict[str, Figure]:
    """The drawings of a run's page, by names that can be those of files."""
    names = tables.metric_names(run)
    drawn: dict[str, Figure | None] = {f"{name}_by_round": _curves(run, name) for name in _curve_metrics(names)}
    drawn["clients"] = _clients_figure(run, names[0]) if names else None
    drawn |= {f"reliability_{model}": figure for model, figure in _reliability(run)}
    drawn["risk_coverage"] = doubts.risk_coverage(run)
    drawn |= {f"doubt_{k}": figure for k, figure in enumerate(doubts.growth(run), start=1)}
    return {name: figure for name, figure in drawn.items() if figure}


def _labels(runs: Sequence[Run]) -> list[str]:
    """Method and folder name, or the whole path where names repeat."""
    names = [run.folder.resolve().name for run in runs]
    return [
        f"{run.info['method']['title']} ({name if names.count(name) == 1 else run.folder})"
        for run, name in zip(runs, names, strict=True)
    ]


def _run_context(run: Run, label: str) -> dict[str, Any]:
    """All that the template shows of one run."""
    names = tables.metric_names(run)
    return {
        "label": label,
        "origin": f"Run {run.folder.resolve().name}, started {run.info['created'].replace('T', ' ')}",
        "title": f"{run.info['method']['title']} on {_data_title(run)}",
        "status": _status(run),
        "resume": _resume(run) if run.summary is None else None,
        "lead": words.lead(run),
        "headline": _headline_table(run, names),
        "estimators": _estimator_table(run, names),
        "window": _window_table(run, names),
        "several_seeds": len(run.info["seeds"]) > 1,
        "split": tables.split(run),
        "curves": [_curves(run, name) for name in _curve_metrics(names)],
        "clients_figure": _clients_figure(run, names[0]) if names else None,
        "clients": _client_table(run, names[0]) if names else None,
        "reliability": [figure for _, figure in _reliability(run)],
        "risk_coverage": doubts.risk_coverage(run),
        "doubts": doubts.growth(run),
        "unsure": doubts.who_and_why(run),
        "example_groups": examples.groups(run),
        "nodes": federation.lead(run) if run.journal else None,
        "refused": _refused_table(run),
        "settings": to_toml(run.config),
        "facts": _facts(run),
        "reproduce": _reproduce(run),
    }


def _refused_table(run: Run) -> Table | None:
    rows = federation.refused(run)
    return Table("Refused, by round", ["client", "reason"], [("", rows)]) if rows else None


def _resume(run: Run) -> str:
    on_flower = "federation" in run.info
    return federation.START if on_flower else f"pfedbayes run --resume --out {shlex.quote(str(run.folder))}"


def _reproduce(run: Run) -> str:
    if "federation" in run.info:
        return f"{federation.START} -c 'federation.out=\"again\"'"
    seeds = len(run.info["seeds"])
    config = shlex.quote(str(run.folder / run_folders.CONFIG))
    return f"pfedbayes run {config}{f' --seeds {seeds}' if seeds > 1 else ''} --out again"


def _comparison_context(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any]:
    """All that the template shows of several runs together."""
    return {
        "lead": words.compare(labels, runs),
        "notes": [f"{label}: {status}" for label, run in zip(labels, runs, strict=True) if (status := _status(run))],
        "table": _comparison_table(runs, labels),
        "curves": [
            figure
            for model in tables.MODELS
            for name in _curve_metrics(_metric_names(runs))
            if (figure := _overlaid_curves(runs, labels, model, name))
        ],
        "differing": _differing_settings(runs, labels),
        "several_seeds": any(len(run.info["seeds"]) > 1 for run in runs),
    }


def _metric_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in tables.metric_names(run)))


def _curve_metrics(names: Sequence[str]) -> list[str]:
    """The metrics worth a curve: the errors people count, and the likelihood that training works on."""
    return [name for name in names if name in ("accuracy", "rmse", "nll")] or list(names[:1])


def _data_title(run: Run) -> str:
    data = run.config["data"]
    if "path" in data:
        return Path(data["path"]).stem
    return " ".join(filter(None, [data["name"], data.get("size")]))


def _status(run: Run) -> str | None:
    """What is missing from the run, or None."""
    records = tables.evaluated(run)
    if not any(run.info["test_sizes"]):
        return f"No client of this run has {tables.split(run)} data, so there are no numbers to show."
    if not records:
        return "No round of this run has been evaluated yet, so there are no numbers to show."
    if run.summary is not None:
        return None
    last, planned = records[-1]["round"], run.config["training"]["rounds"]
    return f"This run is unfinished: these are the numbers of round {last} of {planned}."


def _axis(name: str) -> str:
    metric = tables.metric(name)
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label


def _head(name: str) -> str:
    """The head of a metric's column, with an arrow towards the better."""
    metric = tables.metric(name)
    if metric.nominal is not None:
        return f"{_axis(name)}{_NO_BREAK}→{_NO_BREAK}{metric.nominal:g}"
    return f"{_axis(name)}{_NO_BREAK}{'↑' if metric.larger_is_better else '↓'}"


def _cells(estimates: dict[str, Estimate], names: Sequence[str]) -> list[str]:
    return [tables.text(name, estimates[name]) if name in estimates else "" for name in names]


def _headline_table(run: Run, names: Sequence[str]) -> Table:
    estimators = dict.fromkeys(tables.estimator_title(row.estimator) for row in tables.headline(run))
    by = " and ".join(estimators) if run.info["method"]["stochastic"] else "one network, nothing to sample"
    blocks = [
        (
            _TITLE[row.model],
            [("mean over clients", _cells(row.mean, names)), ("worst client", _cells(row.worst, names))],
        )
        for row in tables.headline(run)
    ]
    return Table(f"Predicting by: {by}", [_head(name) for name in names], blocks)


def _estimator_table(run: Run, names: Sequence[str]) -> Table | None:
    """The means of all estimators, where there is more than one."""
    rows, shown = tables.every_estimator(run), tables.models(run)
    if len(rows) == len(shown):
        return None
    blocks = [
        (
            _TITLE[model],
            [(tables.estimator_title(row.estimator), _cells(row.mean, names)) for row in rows if row.model == model],
        )
        for model in shown
    ]
    return Table("All ways to predict, mean over clients", [_head(name) for name in names], blocks)


def _window_table(run: Run, names: Sequence[str]) -> Table | None:
    """Best, mean and last over the rounds of the window, as papers report them."""
    rows = tables.window(run)
    if not rows:
        return None
    first, last = run.config["training"]["evaluate_window"]
    blocks = [
        (
            _TITLE[model],
            [
                (
                    tables.estimator_title(row.estimator),
                    [tables.text(names[0], estimate) for estimate in (row.best, row.mean, row.last)],
                )
                for row in rows
                if row.model == model
            ],
        )
        for model in tables.models(run)
    ]
    caption = f"{_axis(names[0])} over rounds {first} to {last}; the best round is picked on the data it is scored on"
    return Table(caption, ["best", "mean", "last"], blocks)


def _comparison_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """A block per model, since only rows of the same model are worth comparing; a star marks the best mean."""
    names = _metric_names(runs)
    blocks = []
    for model in tables.MODELS:
        leaders = tables.leaders(runs, model)
        lines = []
        for i, run in enumerate(runs):
            for row in tables.headline(run):
                if row.model == model:
                    means = [
                        f"{cell} ★" if leaders.get(name) == i else cell
                        for name, cell in zip(names, _cells(row.mean, names), strict=True)
                    ]
                    rounds = str(tables.final(run)["round"])
                    seconds = f"{run.summary['seconds']:.1f}" if run.summary else "unfinished"
                    lines.append((labels[i], [*means, *_cells(row.worst, names[:1]), rounds, seconds]))
        if lines:
            blocks.append((_TITLE[model], lines))
    worst = [f"worst client’s {_head(name)}" for name in names[:1]]
    heads = [*(_head(name) for name in names), *worst, "rounds", "seconds"]
    return Table("Mean over clients, and the worst client", heads, blocks)


def _differing_settings(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    flat = [
        {f"{section}.{key}": str(value) for section, values in run.config.items() for key, value in values.items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [(key, [settings.get(key, "") for settings in flat]) for key in keys]
    return Table("", list(labels), [("", [(key, cells) for key, cells in rows if len(set(cells)) > 1])])


def _curves(run: Run, name: str) -> Figure:
    """Both models over the rounds, with thin lines for the estimators that are not in the headline."""
    series = []
    for model in tables.models(run):
        estimators = tables.estimators(run, model)
        for i, estimator in enumerate(estimators):
            label = f"{model}, {tables.estimator_title(estimator)}" if len(estimators) > 1 else model
            dash = _DASHES[i % len(_DASHES)]
            series.append(_series(run, model, estimator, name, label, tables.STYLE[model], dash, thin=i > 0))
    title = f"{tables.metric(name).label} by round"
    return Figure(title, _line_chart(title, name, series), _best_rounds(run, name))


def _overlaid_curves(runs: Sequence[Run], labels: Sequence[str], model: str, name: str) -> Figure | None:
    """The headline curves of all runs that have the model and the metric."""
    series = [
        _series(run, model, row.estimator, name, label, i % charts.COLOURS, _DASHES[i // charts.COLOURS % len(_DASHES)])
        for i, (label, run) in enumerate(zip(labels, runs, strict=True))
        for row in tables.headline(run)
        if row.model == model and name in row.mean
    ]
    title = f"{_TITLE[model]}: {tables.metric(name).label} by round"
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
    return charts.line_chart(title, series, x_label="round", y_label=_axis(name), description="; ".join(ends))


def _best_rounds(run: Run, name: str) -> str:
    """The best round beside the last one, with the warning that it was picked with hindsight."""
    best = max if tables.metric(name).larger_is_better else min
    found = []
    for row in tables.headline(run):
        points = tables.curve(run, row.model, row.estimator, name)
        finite = [(number, estimate) for number, estimate in points if math.isfinite(estimate.value)]
        if finite:
            number, estimate = best(finite, key=lambda point: point[1].value)
            found.append(f"{row.model} {words.amount(name, estimate)} (round {number})")
    if not found:
        return ""
    return f"Best round: {', '.join(found)}; picked on the {tables.split(run)} data, so optimistic."


def _client_labels(run: Run, client: int) -> str:
    labels, names = run.info["labels"], run.info.get("class_names")
    if not labels:
        return ""
    own = labels[client]
    if not names:
        return " ".join(str(label) for label in own)
    more = [f"… ({len(own)} of {len(names)})"] if len(own) > _MOST_NAMES else []
    return ", ".join([*(names[label] for label in own[:_MOST_NAMES]), *more])


def _spread(estimates: Sequence[Estimate], most: int) -> list[int]:
    """All clients or, if there are more than `most`, so many of them evenly spaced in the order of their numbers."""
    count = len(estimates)
    if count <= most:
        return list(range(count))
    ranked = sorted(range(count), key=lambda i: (math.isnan(estimates[i].value), estimates[i].value))
    return [ranked[k * (count - 1) // (most - 1)] for k in range(most)]


def _clients_figure(run: Run, name: str) -> Figure:
    """Bars for a handful of clients, dots for many."""
    metric, shown, info = tables.metric(name), tables.models(run), run.info
    by_model = [tables.per_client(run, model, name) for model in shown]
    groups = []
    with_labels = info["labels"] and not info.get("class_names")  # names are too long for it
    for i in _spread(by_model[0], _MOST_DOTS):
        sizes = f"{info['train_sizes'][i]:,} / {info['test_sizes'][i]:,}"
        group = charts.Group(
            label=str(info["clients"][i]),
            values=[estimates[i].value for estimates in by_model],
            spreads=[estimates[i].std or 0.0 for estimates in by_model],
            note=" · ".join([_client_labels(run, i), sizes] if with_labels else [sizes]),
        )
        groups.append(group)
    title, series = f"{metric.label} of each client", {_TITLE[model].lower(): tables.STYLE[model] for model in shown}
    description = f"{metric.label} of {len(groups)} clients at the last evaluated round; the table has the numbers."
    if len(groups) > _MOST_BARS:
        svg = charts.dot_chart(title, series, groups, value_label=_axis(name), description=description)
        caption = "Point at a dot for its client and value."
        if len(groups) < len(info["clients"]):
            caption += f" Shown: {len(groups)} of {len(info['clients']):,} clients, evenly spaced in that order."
        return Figure(title, svg, caption)
    end = 100 if metric.unit == "%" else None
    svg = charts.bar_chart(title, series, groups, value_label=_axis(name), description=description, end=end)
    labels = "its labels, then " if with_labels else ""
    whiskers = " Whiskers: ± one standard deviation over seeds." if len(info["seeds"]) > 1 else ""
    return Figure(title, svg, f"Under each name: {labels}its training / {tables.split(run)} examples.{whiskers}")


def _client_table(run: Run, name: str) -> Table:
    shown, info = tables.models(run), run.info
    by_model = [tables.per_client(run, model, name) for model in shown]
    order = list(range(len(info["clients"])))
    caption = _head(name)
    if len(order) > _MOST_BARS:
        sign = 1 if tables.metric(name).larger_is_better else -1
        order.sort(key=lambda i: (not math.isnan(by_model[0][i].value), sign * by_model[0][i].value))
        caption += f", worst {shown[0]} first"
    if len(order) > _MOST_ROWS:
        caption += f", {_MOST_ROWS} of {len(order):,} clients"
    rows = []
    for i in order[:_MOST_ROWS]:
        labels = [_client_labels(run, i)] if info["labels"] else []
        sizes = [f"{info['train_sizes'][i]:,}", f"{info['test_sizes'][i]:,}"]
        cells = [tables.text(name, estimates[i]) for estimates in by_model]
        rows.append((str(info["clients"][i]), [*labels, *sizes, *cells]))
    heads = [*(["labels"] if info["labels"] else []), "train", tables.split(run), *shown]
    return Table(caption, heads, [("", rows)])


def _reliability(run: Run) -> Iterator[tuple[str, Figure]]:
    """The diagrams of both models, by their names."""
    for model, bins in ((run.summary or {}).get("reliability") or {}).items():
        if bins and sum(bins["count"]):
            ece = tables.pooled_ece(bins)
            svg = charts.reliability_chart(
                f"Reliability of the {_TITLE[model].lower()}",
                *(tables.numbers(bins[key]).tolist() for key in ("confidence", "accuracy", "count")),
                style=tables.STYLE[model],
                description=f"Expected calibration error {ece:.3f} over {sum(bins['count']):,.0f} predictions.",
            )
            yield model, Figure(f"{_TITLE[model]}: ECE {ece:.3f} over all predictions", svg)


def _facts(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to judge and repeat the run, besides its settings."""
    info = run.info
    sizes = f"{sum(info['train_sizes']):,} training and {sum(info['test_sizes']):,} {tables.split(run)} examples"
    facts = {
        "pfedbayes": info["version"],
        "commit": info["commit"],
        "data": info.get("data"),
        "seeds": ", ".join(str(seed) for seed in info["seeds"]),
        "clients": f"{info.get('num_clients', len(info['clients'])):,}",
        "clients scored": f"{len(info['clients']):,}, with {sizes}",
        "parameters": f"{info['num_params']:,}",
        "rounds": run.summary and run.summary["rounds"],
        "round kept": run.summary and run.summary.get("kept_round"),
        "seconds": run.summary and f"{run.summary['seconds']:.1f}",
        **info["hardware"],
        **{f"plan: {key}": value for key, value in info["plan"].items()},
    }
    return [(key.replace("_gb", ", GB"), str(value)) for key, value in facts.items() if value is not None]
