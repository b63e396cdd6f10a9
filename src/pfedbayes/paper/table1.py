"""Table 1: the rows of the paper with our results beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.methods import METHODS
from pfedbayes.paper.extensions import EXTENSIONS, extensions, title
from pfedbayes.paper.source import (
    BEST,
    DATASETS,
    LAST,
    MEAN,
    METHODS_OF_THE_PAPER,
    NOTHING,
    OUTER_RATE,
    PUBLIC,
    PUBLIC_NOISE,
    SIZES,
    TUNED,
    Source,
    difference_text,
    over_seeds,
    score_text,
    seeds_text,
    setting_text,
)
from pfedbayes.report.page import Table
from pfedbayes.report.tables import Estimate, format_estimate
from pfedbayes.sweep.scores import DEFAULT, Record

ESTIMATORS = {"one": "one sample", "mc10": "ten samples", "mean": "mean network"}
VARIANTS = {
    OUTER_RATE: "outer rate 0.05",
    PUBLIC_NOISE: "weight noise 0.001 as in the public code",
    "leaky": "adapted on test data as in the public code",
    "local": "w of the last local step as in the public code",
    "cloud": "cloud model",
    "label-prior": "with the client's label prior",
}


@dataclass(frozen=True)
class Line:
    """A row of Table 1."""

    method: str
    model: str
    """personal or shared."""
    estimator: str | None = None
    """one, mc10 or mean; None: the only one of the method."""
    variant: str = DEFAULT
    preset: str = "paper"

    def title(self, name: str) -> str:
        """Return the head of the row for a method of this name."""
        notes = [
            self.model,
            ESTIMATORS[self.estimator] if self.estimator else "",
            *(VARIANTS.get(word, word) for word in self.variant.split("+") if word != DEFAULT),
        ]
        return f"{name} ({', '.join(filter(None, notes))})"


def lines_of(
    methods: Sequence[str], preset: str = "paper", variants: Collection[str] = (), label_prior: bool = False
) -> Iterator[Line]:
    """Return the rows of a table: every model by every estimator, then the variants that are asked for."""
    for name in methods:
        about = METHODS[name].about
        line = Line(name, "personal", preset=preset)
        for model in MODELS:
            if getattr(about, model):
                estimators = tuple(ESTIMATORS) if about.stochastic else (None,)
                yield from (replace(line, model=model, estimator=estimator) for estimator in estimators)
                if label_prior:
                    by = "mc10" if about.stochastic else None
                    yield replace(line, model=model, estimator=by, variant="label-prior")
        if PUBLIC.get(name) in variants:
            yield replace(line, variant=PUBLIC[name])
        if OUTER_RATE in variants and name == "perfedavg":
            yield from (replace(line, variant=each) for each in (OUTER_RATE, f"{OUTER_RATE}+{PUBLIC[name]}"))
        if PUBLIC_NOISE in variants and name == "pfedbayes":
            yield from (replace(line, model=model, estimator="one", variant=PUBLIC_NOISE) for model in MODELS)


def shown_variants(preset: str, split: str = "two-block") -> tuple[str, ...]:
    """Return the variants that the tables of a preset show."""
    further = (OUTER_RATE, PUBLIC_NOISE) if preset == "paper" else ()
    return (*PUBLIC.values(), *further) if split == "two-block" else ()


def shown_lines(preset: str, split: str = "two-block", label_prior: bool = False) -> list[Line]:
    """Return the rows of a table of a preset."""
    methods = METHODS_OF_THE_PAPER if preset == "paper" and split == "two-block" else TUNED
    return list(lines_of(methods, preset, shown_variants(preset, split), label_prior))


def column_title(dataset: str, size: str, model: str) -> str:
    """Return the name of a column of Table 1."""
    return f"{DATASETS[dataset]} {size} {model}"


def paper_score(source: Source, line: Line, dataset: str, size: str) -> tuple[float, float] | None:
    """Return the paper's mean and standard deviation."""
    for row in source.paper["table1"]:
        if (row["method"], row["dataset"], row["size"]) == (line.method, dataset, size):
            mean_and_std: tuple[float, float] | None = row[line.model]
            return mean_and_std
    return None


def records_of(source: Source, line: Line, dataset: str, size: str, split: str = "two-block") -> list[Record]:
    """Return the records of a row in one column."""
    found = source.find("table1", preset=line.preset, split=split, dataset=dataset, size=size, method=line.method)
    return [record for record in found if is_of_variant(record, line.variant)]


def name_of(source: Source, line: Line, dataset: str, split: str = "two-block") -> str:
    """Return the name of the method of a row, as the settings of its runs on this data set say."""
    cell = {"preset": line.preset, "split": split, "dataset": dataset, "method": line.method}
    return title(line.method, source.find("table1", variant=DEFAULT, **cell))


def is_of_variant(record: Record, variant: str) -> bool:
    """Return whether a record belongs to a variant; a diverged run stands for all variants that are scored from it."""
    own = record["variant"]
    of_default = own == DEFAULT and not variant.startswith((PUBLIC_NOISE, OUTER_RATE))
    scored_from_it = of_default or variant.startswith(f"{own}+")
    return own == variant or ("diverged" in record and scored_from_it)


def summary(source: Source) -> Table:
    """pFedBayes in the paper, pFedBayes here, and the extended method, each by ten samples in its best round."""
    columns = [(dataset, size) for dataset in DATASETS for size in SIZES]
    blocks: list[tuple[str, list[tuple[str, list[str]]]]] = []
    for model in MODELS:
        rows: dict[str, dict[tuple[str, str], str]] = {}
        for dataset, size in columns:
            if paper := paper_score(source, Line("pfedbayes", model), dataset, size):
                of_paper = rows.setdefault("pFedBayes, in the paper", {})
                of_paper[dataset, size] = format_estimate("accuracy", Estimate(*paper))
        for preset, settings in (("paper", "the paper's settings"), ("tuned", "tuned settings")):
            line = Line("pfedbayes", model, "mc10", preset=preset)
            for dataset, size in columns:
                if records := records_of(source, line, dataset, size):
                    ours = over_seeds(records, model, line.estimator, BEST)
                    head = f"{name_of(source, line, dataset)}, {settings}"
                    rows.setdefault(head, {})[dataset, size] = score_text(records, ours)
        blocks.append((model, [(head, [cells.get(at, NOTHING) for at in columns]) for head, cells in rows.items()]))
    heads = [f"{DATASETS[dataset]} {size}" for dataset, size in columns]
    return Table("pFedBayes: accuracy in percent by ten samples, best of rounds 700 to 800", heads, blocks)


def departures(source: Source) -> Table | None:
    """What extended pFedBayes changes in Algorithm 1 and in the paper's settings, by data set."""
    rows = []
    for dataset, name in DATASETS.items():
        paper, tuned = (
            next((record["settings"] for record in source.find(
                "table1", preset=preset, dataset=dataset, method="pfedbayes", split="two-block", variant=DEFAULT
            )), None)
            for preset in ("paper", "tuned")
        )  # fmt: skip
        if paper is not None and tuned is not None:
            changed = {key: tuned[key] for key in tuned if tuned[key] != paper.get(key)}
            departing = {key: changed[key] for key in extensions(tuned) if key in changed}
            words = "; ".join(f"{EXTENSIONS[key]} ({setting_text({key: value})})" for key, value in departing.items())
            others = setting_text({key: value for key, value in changed.items() if key not in departing})
            rows.append((name, [words or "nothing: this is pFedBayes", others or NOTHING]))
    heads = ["departs from Algorithm 1", "other settings that differ from the paper's"]
    return Table("The settings of the preset tuned for pFedBayes", heads, [("", rows)]) if rows else None


def beside_paper(source: Source, preset: str) -> Table:
    """Table 1 as the paper scores it, by the best of rounds 700 to 800: paper, ours, difference."""
    blocks = []
    for dataset, name in DATASETS.items():
        rows = []
        for line in _with_algorithm1(source, shown_lines(preset), dataset):
            cells, groups = [], []
            for size in SIZES:
                records = records_of(source, line, dataset, size)
                paper = paper_score(source, line, dataset, size)
                ours = over_seeds(records, line.model, line.estimator, BEST)
                groups.append(records)
                cells += [
                    format_estimate("accuracy", Estimate(*paper)) if paper else NOTHING,
                    score_text(records, ours),
                    difference_text(ours, paper and paper[0]),
                ]
            rows.append((_head(source, line, dataset, preset), [*cells, seeds_text(groups)]))
        blocks.append((name, rows))
    heads = [f"{size}: {what}" for size in SIZES for what in ("paper", "ours", "difference")]
    return Table(f"Preset {preset}: best of rounds 700 to 800, as the paper scores", [*heads, "seeds"], blocks)


def unpicked(source: Source, preset: str, split: str) -> Table:
    """Table 1 without picking a round on test data: mean of rounds 700 to 800, round 800, NLL and ECE."""
    shown = {MEAN: "accuracy", LAST: "accuracy", "nll": "nll", "ece": "ece"}
    blocks = []
    for dataset, name in DATASETS.items():
        rows = []
        for line in _with_algorithm1(source, shown_lines(preset, split, label_prior=True), dataset, split):
            groups = [records_of(source, line, dataset, size, split) for size in SIZES]
            cells = [
                score_text(records, over_seeds(records, line.model, line.estimator, score), metric)
                for records in groups
                for score, metric in shown.items()
            ]
            rows.append((_head(source, line, dataset, preset, split), [*cells, seeds_text(groups)]))
        blocks.append((name, rows))
    heads = [f"{size}: {what}" for size in SIZES for what in ("mean of 700–800", "round 800", "NLL", "ECE")]
    return Table(f"Preset {preset}, {split} labels: no round picked", [*heads, "seeds"], blocks)


def _with_algorithm1(source: Source, lines: Sequence[Line], dataset: str, split: str = "two-block") -> Iterator[Line]:
    """Put pFedBayes at the paper's settings, by ten samples, before the rows of an extended pFedBayes."""
    for line in lines:
        proper = METHODS[line.method].about.title
        if (line.estimator, line.variant) == ("one", DEFAULT) and name_of(source, line, dataset, split) != proper:
            yield replace(line, estimator="mc10", preset="paper")
        yield line


def _head(source: Source, line: Line, dataset: str, preset: str, split: str = "two-block") -> str:
    head = line.title(name_of(source, line, dataset, split))
    return head if line.preset == preset else f"{head[:-1]}, the paper's settings)"
