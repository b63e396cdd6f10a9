"""What Table 1 says of its own account: how close to the paper it is and why, who is first, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pfedbayes.methods import METHODS
from pfedbayes.paper.tables import (
    DATASETS,
    ESTIMATORS,
    METHODS_OF_THE_PAPER,
    NOTHING,
    PUBLIC,
    SIZES,
    TUNED,
    VARIANTS,
    Line,
    Source,
    lines_of,
    of_paper,
    over_seeds,
    records_of,
    setting_text,
    shown_variants,
)
from pfedbayes.report import tables as run_tables
from pfedbayes.report.page import Table
from pfedbayes.report.tables import MODELS, Estimate
from pfedbayes.sweep import scores
from pfedbayes.sweep.scores import DEFAULT, Record

ROUNDS_SCORED = 101  # rounds 700 to 800
WITHIN = 1.5  # points from the paper; more need a reason
BEST = "window_best"
SCORES = {
    BEST: "the best of rounds 700 to 800",
    "window_mean": "the mean of rounds 700 to 800",
    "last": "that of round 800",
}


class Cell(NamedTuple):
    """A model of a method on a data set with the paper's settings: the paper's accuracy and ours."""

    line: Line
    dataset: str
    size: str
    paper: Estimate
    ours: Estimate
    records: Sequence[Record]

    @property
    def column(self) -> str:
        return _column(self.dataset, self.size, self.line.model)

    @property
    def gap(self) -> float:
        return self.ours.value - self.paper.value


def remarks(source: Source) -> list[str]:
    """What Table 1 shows, in sentences."""
    paper, tuned = (_cells(source, preset) for preset in ("paper", "tuned"))
    return [
        *_what_is_tuned(source),
        *_at_or_above(tuned, "tuned"),
        *_at_or_above(paper, "paper"),
        *_tuned_behind(tuned, paper),
        *_ranks(paper),
        *_near_paper(paper),
        *_among_tuned(source),
        *_rarely_scored(source),
        *_in_bfloat16(source),
        *_made_by(source),
        *device_time(source, "table1"),
        *(f"With all other sweeps of this folder: {text}" for text in device_time(source, *source.records)),
    ]


def far_from_paper(source: Source) -> Table:
    """The cells that differ from the paper and need a reason, with it."""
    blocks: dict[str, list[tuple[str, list[str]]]] = {title: [] for title in DATASETS.values()}
    for cell in _cells(source, "paper"):
        below = cell.line.method == "pfedbayes" and not cell.gap >= 0
        if below or not abs(cell.gap) <= WITHIN:
            accuracies = (run_tables.format_estimate("accuracy", each) for each in (cell.paper, cell.ours))
            cells = [*accuracies, f"{cell.gap:+.2f}", _as_public_code(source, cell), _why(source, cell)]
            blocks[DATASETS[cell.dataset]].append((f"{cell.line.title}, {cell.size}", cells))
    heads = ["paper", "ours", "difference", "difference, as the public code scores", "why"]
    caption = f"Preset paper: more than {WITHIN} points from the paper, or pFedBayes below it, and why"
    return Table(caption, heads, [(title, rows) for title, rows in blocks.items() if rows])


def device_time(source: Source, *names: str) -> Iterator[str]:
    """How long the runs of these tables took, by device."""
    by_device: dict[str, list[Record]] = {}
    for record in (record for name in names for record in source.records[name]):
        by_device.setdefault(record["device"], []).append(record)
    for device, records in sorted(by_device.items()):
        count = len({(record["cell"], record["seed"]) for record in records})
        yield (
            f"{scores.seconds(records) / 60:.1f} minutes on {device} for {count} runs; cells that ran at the same time "
            "are counted each."
        )


def _column(dataset: str, size: str, model: str) -> str:
    return f"{DATASETS[dataset]} {size} {model}"


def _columns() -> Iterator[tuple[str, str, str]]:
    return ((dataset, size, model) for dataset in DATASETS for size in SIZES for model in MODELS)


def _cells(source: Source, preset: str) -> list[Cell]:
    """The cells that the paper has too, by its score, where weights are drawn by ten samples."""
    found = []
    for line in lines_of(METHODS_OF_THE_PAPER):
        if line.estimator in (None, "mc10"):
            for dataset, size in ((dataset, size) for dataset in DATASETS for size in SIZES):
                paper = of_paper(source, line, dataset, size)
                records = records_of(source, line, preset, "two-block", dataset, size)
                ours = over_seeds(records, line.model, line.estimator, BEST)
                if paper and ours:
                    found.append(Cell(line, dataset, size, Estimate(*paper), ours, records))
    return found


def _what_is_tuned(source: Source) -> Iterator[str]:
    """What the preset "tuned" of pFedBayes changes, by data set."""
    texts = []
    for dataset, title in DATASETS.items():
        paper, tuned = (
            next((r["settings"] for r in source.find("table1", preset=preset, dataset=dataset, method="pfedbayes",
                                                    split="two-block", variant=DEFAULT) if "settings" in r), None)
            for preset in ("paper", "tuned")
        )  # fmt: skip
        if paper is not None and tuned is not None:
            texts.append(
                f"on {title} {setting_text({key: tuned[key] for key in tuned if tuned[key] != paper.get(key)})}"
            )
    if texts:
        yield f"Preset paper: the paper's settings. Preset tuned changes, for pFedBayes, {'; '.join(texts)}."


def _at_or_above(cells: Sequence[Cell], preset: str) -> Iterator[str]:
    """How often pFedBayes has at least the paper's mean."""
    own = [cell for cell in cells if cell.line.method == "pfedbayes"]
    below = [
        f"{cell.column} ({cell.gap:+.2f}{_peak(cell.records, cell.line.model)})" for cell in own if not cell.gap >= 0
    ]
    if own:
        yield (
            f"pFedBayes ({preset}, ten samples, best of rounds 700 to 800) is at or above the paper's mean in "
            f"{len(own) - len(below)} of {len(own)} cells" + (f"; below in {', '.join(below)}." if below else ".")
        )


def _peak(records: Sequence[Record], model: str) -> str:
    """Where a model had been better by a point than it is at the end, by the mean curve over seeds."""
    curves = [dict(map(tuple, record["curve"][model])) for record in records if "curve" in record]
    if not curves:
        return ""
    mean = {round: sum(curve[round] for curve in curves) / len(curves) for round in curves[0]}
    best, last = max(mean, key=lambda round: mean[round]), max(mean)
    if mean[best] < mean[last] + 1:
        return ""
    return f": {mean[best]:.2f} at round {best}, {mean[last]:.2f} at round {last}"


def _tuned_behind(tuned: Sequence[Cell], paper: Sequence[Cell]) -> Iterator[str]:
    """Where pFedBayes does worse with the settings that were chosen than with the paper's."""
    own = {cell.column: cell.ours.value for cell in paper if cell.line.method == "pfedbayes"}
    gaps = {cell.column: cell.ours.value - own[cell.column] for cell in tuned if cell.column in own}
    behind = [f"{column} ({gap:+.2f})" for column, gap in gaps.items() if gap < 0]
    if behind:
        yield f"By the same score pFedBayes is worse tuned than with the paper's settings in {', '.join(behind)}."


def _ranks(cells: Sequence[Cell]) -> Iterator[str]:
    """Which of the methods pFedBayes is with the paper's settings, here and in the paper."""
    ranks = {}
    for own in cells:
        if own.line.method == "pfedbayes":
            others = [cell for cell in cells if cell.column == own.column and cell is not own]
            ours = 1 + sum(other.ours.value > own.ours.value for other in others)
            of_paper = 1 + sum(other.paper.value > own.paper.value for other in others)
            ranks[own.column] = (ours, of_paper, 1 + len(others))
    if ranks:
        firsts = [sum(rank[k] == 1 for rank in ranks.values()) for k in (0, 1)]
        differing = [
            f"{column}: {ours} of {count} here, {of_paper} there"
            for column, (ours, of_paper, count) in ranks.items()
            if ours != of_paper
        ]
        yield (
            f"With the paper's settings pFedBayes is the first of the methods in {firsts[0]} of {len(ranks)} columns, "
            f"in the paper in {firsts[1]}"
            + (f"; its place differs in {'; '.join(differing)}." if differing else ", the same ones.")
        )


def _near_paper(cells: Sequence[Cell]) -> Iterator[str]:
    """How many cells of the other methods are near the paper's."""
    others = [cell for cell in cells if cell.line.method != "pfedbayes"]
    below, above = (sum(1 for cell in others if not side * cell.gap <= WITHIN) for side in (-1, 1))
    if others:
        yield (
            f"Of {len(others)} cells of the other methods {len(others) - below} are within {WITHIN} points of the "
            f"paper or above it, {above} of them above by more than that; {below} are below. A table of their own "
            "has the reasons, as far as they are known."
        )


def _as_public_code(source: Source, cell: Cell) -> str:
    """The difference to the paper by what the public code of a method scores: another model, or one sample."""
    line = cell.line
    if line.estimator:
        line = replace(line, estimator="one")
    elif line.model == "personal" and line.method in PUBLIC:
        line = replace(line, variant=PUBLIC[line.method])
    else:
        return NOTHING
    records = records_of(source, line, "paper", "two-block", cell.dataset, cell.size)
    ours = over_seeds(records, line.model, line.estimator, BEST)
    return f"{ours.value - cell.paper.value:+.2f}" if ours else NOTHING


def _why(source: Source, cell: Cell) -> str:
    """The first reason that fits."""
    facts = {"method": cell.line.method, "model": cell.line.model, "dataset": cell.dataset, "size": cell.size}
    for reason in source.reasons:
        if all(reason.get(key, value) == value for key, value in facts.items()):
            return reason["why"]
    return NOTHING


def _among_tuned(source: Source) -> Iterator[str]:
    """Where the tuned pFedBayes is the best of the tuned methods, and where the others are, each by the better model if
    its public code scores another one."""
    for score, title in SCORES.items():
        gaps: list[str] = []
        ahead: dict[str, list[bool]] = {}  # by method, of the columns that it has
        for column in _columns():
            found = _tuned_column(source, *column, score)
            if "pfedbayes" not in {line.method for line in found} or len(found) == 1:
                continue
            first = max(found, key=lambda line: found[line].value)
            close = {line.method for line in found if _is_close(found[line], found[first])}
            for method in dict.fromkeys(line.method for line in found):
                ahead.setdefault(method, []).append(method in close)
            if "pfedbayes" not in close:
                gap = found[Line("pfedbayes", column[2])].value - found[first].value
                scored_as = f", {VARIANTS[first.variant]}" if first.variant != DEFAULT else ""
                gaps.append(f"{_column(*column)} ({gap:+.2f} to {METHODS[first.method].about.title}{scored_as})")
        if ahead:
            counts = {method: f"{sum(each)} of {len(each)}" for method, each in ahead.items()}
            ours = counts.pop("pfedbayes")
            others = ", ".join(f"{METHODS[method].about.title} in {count}" for method, count in counts.items())
            yield (
                f"Among the tuned methods, by {title}, pFedBayes is the first, or behind it by no more than the larger "
                f"of their standard deviations, in {ours} columns"
                + (f"; not in {', '.join(gaps)}." if gaps else ".")
                + f" Likewise {others}, by the better where the public code scores another model."
            )


def _tuned_column(source: Source, dataset: str, size: str, model: str, score: str) -> dict[Line, Estimate]:
    """What the tuned methods have in a column, also as their public code scores them."""
    found = {}
    for line in (Line("pfedbayes", model), *lines_of(TUNED[1:], shown_variants("tuned"))):
        records = records_of(source, line, "tuned", "two-block", dataset, size) if line.model == model else []
        estimate = over_seeds(records, model, None, score)
        if estimate and math.isfinite(estimate.value):
            found[line] = estimate
    return found


def _is_close(one: Estimate, first: Estimate) -> bool:
    return one.value - first.value >= -max(one.std or 0, first.std or 0)


def _rarely_scored(source: Source) -> Iterator[str]:
    """Where the last hundred rounds were not all scored, so that a best of them is a best of fewer."""
    fewer: dict[str, None] = {}
    for record in source.records["table1"]:
        for model in MODELS:
            for estimator, scored in (record[model] or {}).items():
                if scored["evaluations"] < ROUNDS_SCORED:
                    where = f"{DATASETS.get(record['dataset'], record['dataset'])} {record['size']}"
                    by = f"{METHODS[record['method']].about.title}, {ESTIMATORS.get(estimator, estimator)}"
                    fewer[f"{where}, {by}: {scored['evaluations']}"] = None
    if fewer:
        yield f"Rounds scored from 700 to 800 where not all {ROUNDS_SCORED} were: {'; '.join(sorted(fewer))}."


def _in_bfloat16(source: Source) -> Iterator[str]:
    half = {
        f"{DATASETS.get(record['dataset'], record['dataset'])} {METHODS[record['method']].about.title}": None
        for record in source.records["table1"]
        if record.get("precision") == "bf16"
    }
    if half:
        in_full = any(record.get("precision") == "full" for record in source.records.get("fedavg", []))
        yield (
            f"Networks that ran in bfloat16: {', '.join(sorted(half))}. What that changes was measured on MNIST "
            f"(precision.md){' and, for FedAvg, on large CIFAR-10 (studies.md)' if in_full else ' alone'}."
        )


def _made_by(source: Source) -> Iterator[str]:
    """Of which code the results are."""
    commits = {(record["cell"], record["seed"]): record["commit"] for record in source.records["table1"]}
    unknown = sum(1 for commit in commits.values() if commit is None)
    changed = sum(1 for commit in commits.values() if commit and commit.endswith("-dirty"))
    if unknown or changed:
        yield (
            f"Of {len(commits)} runs {len(commits) - unknown - changed} were made by the code of a commit, {changed} "
            f"by that of a commit with files changed since, and of {unknown} the commit was not recorded (table1.json)."
        )
