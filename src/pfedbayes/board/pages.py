"""The pages of the board as HTML. Every text is escaped by the templates."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from pfedbayes import report
from pfedbayes.board.finding import Shown
from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.report import federation, figures, tables
from pfedbayes.report.charts import Figure
from pfedbayes.report.describe import compare as compare_runs
from pfedbayes.report.page import Table, environment
from pfedbayes.report.render import run_labels
from pfedbayes.runs.folder import REPORT, Run

MOST_CLIENTS = 100  # rows of a table
MOST_LINES = 30  # of the journal


def overview(found: Sequence[Shown], now: float) -> str:
    """Return the list of all runs."""
    rows = [(each, _cells(each, now)) for each in found]
    return _page("Runs", rows=rows)


def one_run(shown: Shown, now: float) -> str:
    """Return the page of one run: its curves, its clients and, on Flower, its nodes."""
    run = shown.run
    if run is None:
        return _page(shown.name, notice=shown.problem)
    drawn: list[Figure] = []
    lists: list[Table] = []
    names = tables.metric_names(run)
    if names:
        drawn = [figures.curves(run, name) for name in figures.curve_metrics(names)]
        if (clients := figures.clients_figure(run, names[0])) is not None:
            drawn.append(clients)
        lists.append(_clients(run, names[0]))
    journal: list[str] = []
    if run.info.federation is not None:
        if rows := federation.refused(run):
            lists.append(Table("Refused uploads", ["client", "why"], [("", rows)]))
        journal = federation.journal_lines(run)[-MOST_LINES:][::-1]
    about = [*zip(HEADS, _cells(shown, now), strict=True), ("data", run.info.data or tables.data_title(run))]
    has_report = (run.folder / REPORT).is_file()
    return _page(
        shown.name, about=about, figures=drawn, tables=lists, journal=journal, report=shown.key if has_report else None
    )


def comparison(chosen: Sequence[Shown]) -> str:
    """Return a page that lays the curves of several runs over one another."""
    readable = [(each, each.run) for each in chosen if each.run is not None and tables.metric_names(each.run)]
    own = [run for _, run in readable]
    if len(own) < 2:
        return _page("Comparison", notice="Choose at least two runs that have scores.")
    labels = run_labels(own)
    names = figures.curve_metrics(tables.metric_names(own[0]))
    pairs = ((model, name) for model in MODELS for name in names)
    drawn = [figures.overlaid_curves(own, labels, model, name) for model, name in pairs]
    return _page("Comparison", sentences=compare_runs(labels, own), figures=list(filter(None, drawn)))


HEADS = ("method", "state", "round", "scores", "time left", "nodes")


def _cells(shown: Shown, now: float) -> list[str]:
    run = shown.run
    if run is None:
        return ["–", shown.state(now), "–", shown.problem, "", ""]
    scores = []
    for row in tables.headline(run):
        name, estimate = next(iter(row.mean.items()))
        scores.append(f"{row.model} {tables.metric(name).label} {tables.format_estimate(name, estimate)}")
    left, nodes = shown.seconds_left(now), shown.nodes
    return [
        run.info.method.title, shown.state(now), f"{shown.round}/{shown.rounds}", "; ".join(scores),
        "" if left is None else _duration(left), "" if nodes is None else f"{nodes[0]} of {nodes[1]}",
    ]  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


def _clients(run: Run, name: str) -> Table:
    """Return the last score of each client."""
    absent = set(tables.final(run).absent or ())
    curves = {model: tables.client_curves(run, model, name) for model in tables.models(run)}
    rows = []
    for k, client in enumerate(run.info.clients[:MOST_CLIENTS]):
        last = [own[k][-1][1] if own and own[k] else float("nan") for own in curves.values()]
        cells = [tables.format_estimate(name, tables.Estimate(value)) for value in last]
        rows.append((client, [f"{run.info.train_sizes[k]:,}", *cells, "sent no scores" if k in absent else ""]))
    more = len(run.info.clients) - len(rows)
    notes = [f"… and {more:,} more clients"] if more > 0 else []
    heads = ["training rows", *(f"{model} {tables.metric(name).label}" for model in curves), ""]
    return Table("Clients", heads, [("", rows)], notes=notes)


def _page(title: str, **content: object) -> str:
    style = resources.files(report.__package__).joinpath("style.css").read_text("utf-8")
    empty: dict[str, object] = dict.fromkeys(("rows", "about", "figures", "tables", "journal", "sentences"), ())
    parts = empty | {"report": None, "notice": "", "heads": HEADS} | content
    return environment().get_template("board.html").render(title=title, style=style, **parts)
