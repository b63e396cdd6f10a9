"""Which of the tuned methods is first in a column of Table 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.methods import METHODS
from pfedbayes.paper.extensions import EXTENDED
from pfedbayes.paper.source import BEST, DATASETS, LAST, MEAN, NOTHING, SIZES, TUNED, Source, over_seeds
from pfedbayes.paper.table1 import VARIANTS, Line, column_title, lines_of, name_of, records_of, shown_variants
from pfedbayes.report.page import Table
from pfedbayes.report.tables import Estimate
from pfedbayes.sweep.scores import DEFAULT

SCORES = {BEST: "best of rounds 700 to 800", MEAN: "mean of rounds 700 to 800", LAST: "round 800"}
PROPER_UNTUNED = f"{METHODS['pfedbayes'].about.title} with the paper's settings"


def among_tuned(source: Source) -> Table | None:
    """How often each method is among the first of the tuned methods."""
    by_score = {score: count_firsts(source, score) for score in SCORES}
    names = dict.fromkeys(name for counts in by_score.values() for name in counts)
    rows = [(name, [counts.get(name, NOTHING) for counts in by_score.values()]) for name in names]
    notes = [
        "A method is among the first if it is behind the best by at most the larger of their two standard deviations. "
        "Where the public code scores another model, the better one counts."
    ]
    if EXTENDED in names:
        notes.append(f"{PROPER_UNTUNED} is compared with the other tuned methods, without {EXTENDED}.")
    caption = "Columns in which a method is among the first of the tuned methods"
    return Table(caption, list(SCORES.values()), [("", rows)], notes) if rows else None


def count_firsts(source: Source, score: str = BEST) -> dict[str, str]:
    """Return by method in how many columns it is among the first of the tuned methods, e.g. "15 of 18"."""
    found: dict[str, list[bool]] = {}
    for column in _columns():
        for name, is_first in _among_first(source, column, score).items():
            found.setdefault(name, []).append(is_first)
    return {name: f"{sum(each)} of {len(each)}" for name, each in found.items()}


def behind_tuned(source: Source) -> Table | None:
    """The columns in which the tuned pFedBayes is not among the first."""
    blocks = []
    for score, title in SCORES.items():
        rows = []
        for dataset, size, model in _columns():
            found = _tuned_column(source, dataset, size, model, score)
            own = Line("pfedbayes", model, preset="tuned")
            if own not in found or len(found) == 1:
                continue
            first = max(found, key=lambda line: found[line].value)
            if not _is_close(found[own], found[first]):
                scored_as = f", {VARIANTS[first.variant]}" if first.variant != DEFAULT else ""
                gap = f"{found[own].value - found[first].value:+.2f}"
                rows.append(
                    (
                        column_title(dataset, size, model),
                        [name_of(source, own, dataset), gap, f"{METHODS[first.method].about.title}{scored_as}"],
                    )
                )
        if rows:
            blocks.append((title[0].upper() + title[1:], rows))
    heads = ["method", "difference to the first", "first"]
    return Table("Columns in which the tuned pFedBayes is not among the first", heads, blocks) if blocks else None


def _columns() -> Iterator[tuple[str, str, str]]:
    return ((dataset, size, model) for dataset in DATASETS for size in SIZES for model in MODELS)


def _among_first(source: Source, column: tuple[str, str, str], score: str) -> dict[str, bool]:
    """Return by method whether it is among the first in a column that has a tuned pFedBayes and another method."""
    found = _tuned_column(source, *column, score)
    own = Line("pfedbayes", column[2], preset="tuned")
    if own not in found or len(found) == 1:
        return {}
    name = name_of(source, own, column[0])
    close = _close_methods(found)
    titles = {line.method: METHODS[line.method].about.title for line in found} | {"pfedbayes": name}
    result = {titles["pfedbayes"]: "pfedbayes" in close}
    if name == EXTENDED:
        proper = replace(own, preset="paper")
        records = records_of(source, proper, *column[:2])
        if estimate := over_seeds(records, column[2], None, score):
            field = {line: value for line, value in found.items() if line != own} | {proper: estimate}
            result[PROPER_UNTUNED] = "pfedbayes" in _close_methods(field)
    return result | {titles[method]: method in close for method in titles if method != "pfedbayes"}


def _close_methods(found: dict[Line, Estimate]) -> set[str]:
    first = max(found.values(), key=lambda estimate: estimate.value)
    return {line.method for line in found if _is_close(found[line], first)}


def _tuned_column(source: Source, dataset: str, size: str, model: str, score: str) -> dict[Line, Estimate]:
    """Return the scores of the tuned methods in a column, also those of the models that public code scores."""
    found = {}
    own = Line("pfedbayes", model, preset="tuned")
    for line in (own, *lines_of(TUNED[1:], "tuned", shown_variants("tuned"))):
        records = records_of(source, line, dataset, size) if line.model == model else []
        estimate = over_seeds(records, model, None, score)
        if estimate and math.isfinite(estimate.value):
            found[line] = estimate
    return found


def _is_close(one: Estimate, first: Estimate) -> bool:
    return one.value - first.value >= -max(one.std or 0, first.std or 0)
