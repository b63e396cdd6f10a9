"""What Table 1 shows: how close our results are to the paper's, and which method is first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pfedbayes.paper import ranks
from pfedbayes.paper.extensions import EXTENDED
from pfedbayes.paper.source import (
    BEST,
    DATASETS,
    METHODS_OF_THE_PAPER,
    NOTHING,
    PUBLIC,
    SIZES,
    Source,
    over_seeds,
)
from pfedbayes.paper.table1 import Line, column_title, lines_of, name_of, paper_score, records_of
from pfedbayes.report.page import Table
from pfedbayes.report.tables import Estimate, format_estimate
from pfedbayes.sweep.scores import Record

WITHIN = 1.5  # points from the paper; larger differences need a reason
SETTINGS = {"paper": "the paper's settings", "tuned": "tuned settings"}


class Cell(NamedTuple):
    """A cell of Table 1 that the paper has too: one model of one method on one data set."""

    line: Line
    dataset: str
    size: str
    name: str  # of the method, by the settings of its runs
    paper: Estimate
    ours: Estimate
    records: Sequence[Record]

    @property
    def column(self) -> str:
        return column_title(self.dataset, self.size, self.line.model)

    @property
    def gap(self) -> float:
        """Our accuracy minus the paper's, in points."""
        return self.ours.value - self.paper.value


def cells_of(source: Source, preset: str) -> list[Cell]:
    """Return the cells that the paper has too, scored as in the paper, by ten samples where weights are drawn."""
    found = []
    for line in lines_of(METHODS_OF_THE_PAPER, preset):
        if line.estimator in (None, "mc10"):
            for dataset, size in ((dataset, size) for dataset in DATASETS for size in SIZES):
                paper = paper_score(source, line, dataset, size)
                records = records_of(source, line, dataset, size)
                ours = over_seeds(records, line.model, line.estimator, BEST)
                if paper and ours:
                    name = name_of(source, line, dataset)
                    found.append(Cell(line, dataset, size, name, Estimate(*paper), ours, records))
    return found


def lead(source: Source) -> list[str]:
    """Return the main findings, at most three sentences."""
    paper, tuned = (cells_of(source, preset) for preset in ("paper", "tuned"))
    firsts = ranks.count_firsts(source)
    return [*_against_paper(paper, "paper"), *_against_paper(tuned, "tuned", firsts), *_near_paper(paper)]


def details(source: Source) -> list[str]:
    """Return further findings that name single cells."""
    paper, tuned = (cells_of(source, preset) for preset in ("paper", "tuned"))
    return [*_below_paper(paper, "paper"), *_below_paper(tuned, "tuned"), *_tuning_hurts(tuned, paper)]


def _of_pfedbayes(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return the cells of pFedBayes and of its extension, by name."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.line.method == "pfedbayes":
            found.setdefault(cell.name, []).append(cell)
    return found


def _against_paper(cells: Sequence[Cell], preset: str, firsts: Mapping[str, str] | None = None) -> Iterator[str]:
    """Say in how many cells pFedBayes reaches the paper's mean, and how often it is first.

    firsts: by method, in how many columns it is among the first of the tuned methods.
    """
    firsts = firsts or {}
    for name, own in _of_pfedbayes(cells).items():
        reached = f"reaches the paper's mean in {sum(cell.gap >= 0 for cell in own)} of {len(own)} cells"
        if preset == "paper":
            of_columns = _ranks(cells).values()
            ours, of_paper = (sum(rank[k] == 1 for rank in of_columns) for k in (0, 1))
            also = f" and is first in {ours} of {len(of_columns)} columns (in the paper: {of_paper})"
        else:
            also = f" and is among the first of the tuned methods in {firsts[name]} columns" if name in firsts else ""
            if ranks.PROPER_UNTUNED in firsts:
                also += f"; {ranks.PROPER_UNTUNED} is in {firsts[ranks.PROPER_UNTUNED]}"
        what = f"{name} (ours, not Algorithm 1)" if name == EXTENDED else name
        yield f"With {SETTINGS[preset]}, {what} {reached}{also}."


def _below_paper(cells: Sequence[Cell], preset: str) -> Iterator[str]:
    for name, own in _of_pfedbayes(cells).items():
        below = [f"{cell.column} ({cell.gap:+.2f}{_peak(cell)})" for cell in own if not cell.gap >= 0]
        if below:
            yield f"Below the paper's mean, {name} with {SETTINGS[preset]}: {', '.join(below)}."


def _peak(cell: Cell) -> str:
    """Return the best round of the mean curve over seeds, if the model loses a point or more after it."""
    curves = [dict(map(tuple, record["curve"][cell.line.model])) for record in cell.records if "curve" in record]
    if not curves:
        return ""
    mean = {round: sum(curve[round] for curve in curves) / len(curves) for round in curves[0]}
    best, last = max(mean, key=lambda round: mean[round]), max(mean)
    if mean[best] < mean[last] + 1:
        return ""
    return f": {mean[best]:.2f} at round {best}, {mean[last]:.2f} at round {last}"


def _tuning_hurts(tuned: Sequence[Cell], paper: Sequence[Cell]) -> Iterator[str]:
    """Name the cells in which the tuned settings are worse than the paper's."""
    own = {cell.column: cell.ours.value for cell in paper if cell.line.method == "pfedbayes"}
    for name, cells in _of_pfedbayes(tuned).items():
        gaps = {cell.column: cell.ours.value - own[cell.column] for cell in cells if cell.column in own}
        behind = [f"{column} ({gap:+.2f})" for column, gap in gaps.items() if gap < 0]
        if behind:
            yield f"{_capital(name)} with tuned settings is behind pFedBayes with the paper's: {', '.join(behind)}."


def _ranks(cells: Sequence[Cell]) -> dict[str, tuple[int, int, int]]:
    """Return by column the rank of pFedBayes here and in the paper, and the number of methods."""
    found = {}
    for own in cells:
        if own.line.method == "pfedbayes":
            others = [cell for cell in cells if cell.column == own.column and cell is not own]
            ours = 1 + sum(other.ours.value > own.ours.value for other in others)
            of_paper = 1 + sum(other.paper.value > own.paper.value for other in others)
            found[own.column] = (ours, of_paper, 1 + len(others))
    return found


def differing_ranks(source: Source) -> Table | None:
    """The columns in which the rank of pFedBayes, at the paper's settings, is not the paper's."""
    found = _ranks(cells_of(source, "paper"))
    rows = [
        (column, [str(ours), str(of_paper), str(count)])
        for column, (ours, of_paper, count) in found.items()
        if ours != of_paper
    ]
    caption = "Rank of pFedBayes with the paper's settings, where it differs from the paper"
    return Table(caption, ["ours", "paper", "methods"], [("", rows)]) if rows else None


def _near_paper(cells: Sequence[Cell]) -> Iterator[str]:
    """Say how many cells of the other methods are near the paper's."""
    others = [cell for cell in cells if cell.line.method != "pfedbayes"]
    below, above = (sum(1 for cell in others if not side * cell.gap <= WITHIN) for side in (-1, 1))
    if others:
        yield (
            f"Of {len(others)} cells of the other methods, {len(others) - below} are within {WITHIN} points of the "
            f"paper or above it ({above} are above by more) and {below} are below."
        )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:] if text == EXTENDED else text


def far_from_paper(source: Source) -> Table:
    """The cells that differ from the paper by more than 1.5 points, or of pFedBayes below it, with the reason."""
    blocks: dict[str, list[tuple[str, list[str]]]] = {title: [] for title in DATASETS.values()}
    for cell in cells_of(source, "paper"):
        below = cell.line.method == "pfedbayes" and not cell.gap >= 0
        if below or not abs(cell.gap) <= WITHIN:
            accuracies = (format_estimate("accuracy", each) for each in (cell.paper, cell.ours))
            cells = [*accuracies, f"{cell.gap:+.2f}", _gap_as_public_code(source, cell), _reason(source, cell)]
            blocks[DATASETS[cell.dataset]].append((f"{cell.line.title(cell.name)}, {cell.size}", cells))
    heads = ["paper", "ours", "difference", "difference, scored as the public code", "reason"]
    caption = f"Preset paper: cells more than {WITHIN} points from the paper, or of pFedBayes below it"
    return Table(caption, heads, [(title, rows) for title, rows in blocks.items() if rows])


def _gap_as_public_code(source: Source, cell: Cell) -> str:
    """Return the difference to the paper by what the public code scores: another model, or one sample."""
    line = cell.line
    if line.estimator:
        line = replace(line, estimator="one")
    elif line.model == "personal" and line.method in PUBLIC:
        line = replace(line, variant=PUBLIC[line.method])
    else:
        return NOTHING
    ours = over_seeds(records_of(source, line, cell.dataset, cell.size), line.model, line.estimator, BEST)
    return f"{ours.value - cell.paper.value:+.2f}" if ours else NOTHING


def _reason(source: Source, cell: Cell) -> str:
    """Return the first reason that fits."""
    facts = {"method": cell.line.method, "model": cell.line.model, "dataset": cell.dataset, "size": cell.size}
    for reason in source.reasons:
        if all(reason.get(key, value) == value for key, value in facts.items()):
            return reason["why"]
    return NOTHING
