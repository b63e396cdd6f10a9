"""One self-contained HTML page about one run, or about several side by side."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfedbayes import runs as run_folders
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.report import (
    cross_site,
    describe,
    examples,
    federation,
    figures,
    joining,
    plain,
    run_tables,
    survival,
    tables,
    uncertainty,
)
from pfedbayes.report.page import environment
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import Resumption


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the page about the runs in `folders` to the file `out`."""
    runs = [run_folders.read_run(folder) for folder in folders]
    for run in runs:
        if run.info.digest is None and run.info.federation is None and not run.rounds:
            raise UserError(
                f"{run.folder} comes from pfedbayes.save, without scores: give the federation test data, and save it "
                "again"
            )
    page = render(runs)
    with run_folders.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    run_folders.write_file(out, page.encode(errors="backslashreplace"))  # a path may have bytes that are not UTF-8
    return out


def render(runs: Sequence[Run]) -> str:
    """Return the page as a string."""
    if not runs:
        raise UserError("a report needs a run: give the folder of at least one")
    template = environment().get_template("page.html")
    labels = run_labels(runs)
    return template.render(
        runs=[_run_context(run, label) for run, label in zip(runs, labels, strict=True)],
        comparison=_comparison_context(runs, labels) if len(runs) > 1 else None,
        glossary=[
            (tables.metric(name).label, tables.metric(name).meaning)
            for name in run_tables.all_metrics(runs)
            if tables.metric(name).meaning
        ],
    )


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return method and folder name of each run, or the whole path where folder names repeat."""
    names = [run.folder.resolve().name for run in runs]
    return [
        f"{run.info.method.title} ({name if names.count(name) == 1 else run.folder})"
        for run, name in zip(runs, names, strict=True)
    ]


def _run_context(run: Run, label: str) -> dict[str, Any]:
    """Return what the template shows of one run."""
    names = tables.metric_names(run)
    return {
        "label": label,
        "origin": f"Run {run.folder.resolve().name}, started {run.info.created.replace('T', ' ')}",
        "title": f"{run.info.method.title} on {tables.data_title(run)}",
        "status": _status(run),
        "resume": _resume(run) if run.summary is None else None,
        "lead": describe.lead(run),
        "plain": plain.summary(run),
        "headline": run_tables.headline_table(run, names),
        "estimators": run_tables.estimator_table(run, names),
        "window": run_tables.window_table(run, names),
        "several_seeds": len(run.info.seeds) > 1,
        "split": run.experiment.evaluation.split,
        "curves": [
            *(figures.curves(run, name) for name in figures.curve_metrics(names)),
            *filter(None, [figures.validation(run)]),
        ],
        "clients_figure": figures.clients_figure(run, names[0]) if names else None,
        "clients": run_tables.client_table(run, names[0]) if names else None,
        "reliability": [figure for _, figure in figures.reliability(run)],
        "risk_coverage": uncertainty.risk_coverage(run),
        "survival": survival.figure(run),
        "uncertainty": uncertainty.by_round(run),
        "uncertain_clients": uncertainty.uncertain_clients(run),
        "example_groups": examples.groups(run),
        "joining": joining.lead(run),
        "joining_table": joining.table(run),
        "joining_figure": joining.figure(run),
        "cross_site": cross_site.lead(run),
        "cross_site_figure": cross_site.figure(run),
        "nodes": federation.lead(run) if run.journal else None,
        "refused": run_tables.refused_table(run),
        "settings": to_toml(run.sections),
        "facts": _facts(run),
        "reproduce": _reproduce(run),
    }


def _comparison_context(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any]:
    """Return what the template shows of several runs together."""
    return {
        "lead": describe.compare(labels, runs),
        "notes": [f"{label}: {status}" for label, run in zip(labels, runs, strict=True) if (status := _status(run))],
        "table": run_tables.comparison_table(runs, labels),
        "curves": [
            figure
            for model in MODELS
            for name in figures.curve_metrics(run_tables.all_metrics(runs))
            if (figure := figures.overlaid_curves(runs, labels, model, name))
        ],
        "differing": run_tables.differing_settings(runs, labels),
        "several_seeds": any(len(run.info.seeds) > 1 for run in runs),
    }


def _status(run: Run) -> str | None:
    """Return what is missing from the run, or None."""
    records = tables.evaluated(run)
    if not any(run.info.test_sizes):
        return f"No client of this run has {run.experiment.evaluation.split} data, so there are no scores to show."
    if not records:
        return "No round of this run has been evaluated yet, so there are no scores to show."
    if run.summary is not None:
        return None
    return f"This run is unfinished: the report shows round {records[-1].round} of {run.experiment.training.rounds}."


def _resume(run: Run) -> str:
    if run.info.federation is not None:
        return federation.START
    return f"pfedbayes run --resume --out {shlex.quote(str(run.folder))}"


def _reproduce(run: Run) -> str:
    if run.info.federation is not None:
        return f"{federation.START} -c 'federation.out=\"again\"'"
    seeds = len(run.info.seeds)
    config = shlex.quote(str(run.folder / run_folders.CONFIG))
    return f"pfedbayes run {config}{f' --seeds {seeds}' if seeds > 1 else ''} --out again"


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return what a reader needs to judge and to reproduce the run, besides its settings."""
    info, summary = run.info, run.summary
    split = run.experiment.evaluation.split
    sizes = f"{sum(info.train_sizes):,} training and {sum(info.test_sizes):,} {split} examples"
    facts = {
        "pfedbayes": info.version,
        "commit": info.commit,
        **{f"after round {each.after_round}": _resumed(each) for each in info.resumed},
        "data": info.data,
        "seeds": ", ".join(str(seed) for seed in info.seeds),
        "clients": f"{info.num_clients or len(info.clients):,}",
        "clients scored": f"{len(info.clients):,}, with {sizes}",
        "parameters": f"{info.num_params:,}",
        "rounds": summary and summary.rounds,
        "round kept": summary and summary.kept_round,
        "seconds": summary and f"{summary.seconds:.1f}",
        **dataclasses.asdict(info.hardware),
        **{f"plan: {key}": value for key, value in dataclasses.asdict(info.plan).items()},
    }
    return [(key.replace("_gb", ", GB"), str(value)) for key, value in facts.items() if value is not None]


def _resumed(change: Resumption) -> str:
    """Describe the code and the machine that continued a run."""
    versions = f"pfedbayes {change.version}, torch {change.hardware.torch}, Python {change.hardware.python}"
    return f"resumed with {versions} on {change.hardware.processor}"
