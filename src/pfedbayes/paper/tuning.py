"""The settings that the preset "tuned" was chosen from, and the studies behind the explanations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pfedbayes.engine.training import Training
from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.paper.extensions import EXTENDED, title
from pfedbayes.paper.source import (
    BEST,
    DATASETS,
    MEAN,
    NOTHING,
    SIZES,
    STUDIES,
    TUNED,
    Source,
    by_size,
    over_seeds,
    score_text,
    seeds_text,
    setting_text,
)
from pfedbayes.report.page import Table
from pfedbayes.sweep import scores
from pfedbayes.sweep.scores import DEFAULT, Record

Rows = list[tuple[str, list[str]]]


def tuning_table(source: Source) -> Table:
    """Every setting that was tried, with its accuracy on validation data."""
    blocks = []
    for dataset, name in DATASETS.items():
        rows = [row for method in TUNED for row in _tuning_rows(source, dataset, method)]
        if rows:
            blocks.append((name, rows))
    heads = [f"{size}: {model}" for size in SIZES for model in MODELS]
    caption = "All settings: accuracy on validation data, mean of the last eighth of the rounds"
    return Table(caption, [*heads, "overall", "rounds", "seeds"], blocks)


def chosen_table(source: Source) -> Table:
    """The best setting of every method and data set; where extended pFedBayes is chosen, also that of pFedBayes."""
    blocks = []
    for dataset, name in DATASETS.items():
        rows = []
        for method in TUNED:
            found = _by_setting(source, dataset, method)
            by_name: dict[str, dict[str, float]] = {}
            for setting, value in _overall(found).items():
                by_name.setdefault(title(method, found[setting]), {})[setting] = value
            for variant, score in by_name.items():
                best = _chosen(score)
                rows.append((variant, [best, f"{score[best]:.2f}", str(len(score))]))
        if rows:
            blocks.append((name, rows))
    caption = "Best settings: accuracy on validation data, mean over models, sizes and seeds"
    return Table(caption, ["setting", "overall", "settings compared"], blocks)


def untuned_statement(source: Source) -> Iterator[str]:
    """Name the data sets on which no setting of Algorithm 1 has an overall score."""
    without = []
    for dataset, name in DATASETS.items():
        found = _by_setting(source, dataset, "pfedbayes")
        names = {title("pfedbayes", found[setting]) for setting in _overall(found)}
        if names == {EXTENDED}:
            without.append(name)
    if without:
        yield (
            f"All settings of pFedBayes that ran on all sizes of {' and '.join(without)} extend Algorithm 1: pFedBayes "
            "itself has no tuned setting there."
        )


def _tuning_rows(source: Source, dataset: str, method: str) -> Rows:
    found = _by_setting(source, dataset, method)
    score = _overall(found)
    best = _chosen(score) if score else None
    rows = []
    for setting, records in found.items():
        groups = by_size(records)
        cells = [score_text(each, over_seeds(each, model, None, MEAN)) for each in groups for model in MODELS]
        overall = f"{score[setting]:.2f}" if setting in score else NOTHING
        mark = " (chosen)" if setting == best else ""
        rounds = records[0]["settings"].get("training.rounds", Training().rounds)
        head = f"{title(method, records)}: {setting}"
        rows.append((head, [*cells, overall + mark, str(rounds), seeds_text([each for each in groups if each])]))
    return rows


def _by_setting(source: Source, dataset: str, method: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in source.find("tuning", dataset=dataset, method=method, variant=DEFAULT):
        found.setdefault(setting_text(record["varied"]), []).append(record)
    return found


def _overall(found: dict[str, list[Record]]) -> dict[str, float]:
    """Return the score of every setting that ran on all sizes and did not diverge."""
    sizes = {record["size"] for records in found.values() for record in records}
    complete = {key: each for key, each in found.items() if {record["size"] for record in each} == sizes}
    return {key: value for key, each in complete.items() if math.isfinite(value := scores.overall(each))}


def _chosen(score: dict[str, float]) -> str:
    return max(score, key=score.__getitem__)


def study_tables(source: Source) -> list[Table]:
    """Return a table for every study that has been run."""
    return [_study_table(source, name) for name in STUDIES if source.records[name]]


def _study_table(source: Source, name: str) -> Table:
    """Every setting of a study in a row: mean and best of the scored rounds by size and model."""
    shown = {MEAN: "mean", BEST: "best"}
    sizes = [size for size in SIZES if source.find(name, size=size)]
    models = [model for model in MODELS if any(record[model] for record in source.records[name])]
    blocks = []
    for dataset, block in DATASETS.items():
        found: dict[str, list[Record]] = {}
        for record in source.find(name, dataset=dataset, variant=DEFAULT):
            parts = filter(None, [title(record["method"], [record]), setting_text(record["varied"])])
            found.setdefault(": ".join(parts), []).append(record)
        rows = []
        for head, records in found.items():
            groups = by_size(records, sizes)
            cells = [
                score_text(each, over_seeds(each, model, None, score))
                for each in groups
                for model in models
                for score in shown
            ]
            rows.append((head, [*cells, seeds_text(groups)]))
        if rows:
            blocks.append((block, rows))
    heads = [f"{size}: {model}, {what}" for size in sizes for model in models for what in shown.values()]
    return Table(STUDIES[name], [*heads, "seeds"], blocks)
