"""The paper's tables with our results beside its own, from the records of sweeps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS
from pfedbayes.report import tables as run_tables
from pfedbayes.report.page import Table
from pfedbayes.report.tables import MODELS, Estimate
from pfedbayes.runs.reading import NUMBER, Kinds, read_json, require_keys
from pfedbayes.sweep import scores
from pfedbayes.sweep.scores import DEFAULT, Record

DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
SIZES = ("small", "medium", "large")
METHODS_OF_THE_PAPER = ("fedavg", "fedprox", "bnfed", "perfedavg", "pfedme", "heurfedamp", "pfedgp", "pfedbayes")
TUNED = ("pfedbayes", "fedavg", "pfedme", "fedrep")
# What the public code of a method scores instead of its personal model, and so probably the paper.
PUBLIC = {"perfedavg": "leaky", "pfedme": "local", "heurfedamp": "cloud"}
PUBLIC_NOISE = "public-noise"  # pFedBayes as its public code runs it
OUTER_RATE = "outer-rate"  # Per-FedAvg with another rate where the paper states none
VARIANTS = {
    OUTER_RATE: "outer rate 0.05",
    PUBLIC_NOISE: "weight noise of 0.001, as the public code draws it",
    "leaky": "adapted on test data, as the public code does",
    "local": "w of the last local step, as the public code scores it",
    "cloud": "cloud model",
    "label-prior": "with the client's label prior",
}
ESTIMATORS = {"one": "one sample", "mc10": "ten samples", "mean": "mean network"}
# Sweeps that answer a question.
STUDIES = {
    "views": "Images moved by a pixel or two in training: accuracy on validation data, rounds 700 to 800",
    "swings": "The shared model on CIFAR-10: accuracy on validation data by the mean network, rounds 101 to 200 of 200",
    "samples": "pFedBayes with more than one weight draw per step, otherwise at the paper's settings: accuracy on "
    "test data, rounds 700 to 800",
    "fedprox": "FedProx held near the first model received: accuracy on test data, rounds 700 to 800",
    "bnfed": "BNFed at lower rates than the paper's 0.5: accuracy on test data, rounds 700 to 800",
    "fedavg": "FedAvg on large CIFAR-10 with one setting changed, and one model trained on everybody's data (Pooled): "
    "accuracy on test data, rounds 700 to 800",
    "overlap": "Clients that each draw from all images, so that one is tested on what others train on: accuracy on "
    "test data, rounds 700 to 800",
}
NOTHING = "–"
# The rows of paper.json by table.
SETTINGS_ROW: Kinds = {"method": str, "varied": dict, "personal": NUMBER | None, "shared": NUMBER | None}
PAPER: dict[str, Kinds] = {
    "table1": {"method": str, "dataset": str, "size": str, "personal": list | None, "shared": list | None},
    "table2": SETTINGS_ROW,
    "table3": SETTINGS_ROW,
}


@dataclass(frozen=True)
class Source:
    """What the folder of results holds: the paper's numbers, and ours by table."""

    paper: dict[str, list[dict[str, Any]]]
    records: dict[str, list[Record]]
    reasons: list[dict[str, str]]  # why cells of Table 1 differ from the paper, by method, model, dataset and size

    def find(self, table: str, **wanted: Any) -> list[Record]:
        """The records of a table with these values."""
        return [record for record in self.records[table] if all(record[key] == wanted[key] for key in wanted)]


def read(folder: Path) -> Source:
    """The data files of a folder of results."""
    remedy = "give a folder of results such as docs/results"
    paper = read_json(folder / "paper.json", "the paper's tables", _check_paper, remedy)
    names = (*PAPER, "tuning", *STUDIES)
    records = {name: scores.read_records(path) if (path := folder / f"{name}.json").exists() else [] for name in names}
    _refuse_tuning_on_test_data(folder / "tuning.json", records["tuning"])
    path = folder / "reasons.json"
    reasons = read_json(path, "reasons", _check_reasons, remedy) if path.exists() else []
    return Source(paper, records, reasons)


def _refuse_tuning_on_test_data(path: Path, records: Sequence[Record]) -> None:
    """Cells of another sweep, imported by mistake, would be compared as settings and could be the chosen one."""
    for record in records:
        if record["variant"] == DEFAULT and record["settings"].get("evaluation.split") != "validation":
            raise UserError(
                f"{path} has {record['cell']}, which is scored on test data: leave in it only what was tuned on "
                "evaluation.split=validation"
            )


def _check_paper(content: Any) -> None:
    require_keys(content, dict.fromkeys(PAPER, list), "it")
    for table, kinds in PAPER.items():
        for number, row in enumerate(content[table], 1):
            scores.require_row(row, kinds, f"row {number} of {table}")


def _check_reasons(content: Any) -> None:
    if not isinstance(content, list):
        raise ValueError("it is no list")
    for number, reason in enumerate(content, 1):
        scores.require_row(reason, {"method": str, "why": str}, f"reason {number}")


def over_seeds(records: Sequence[Record], model: str, estimator: str | None, name: str) -> Estimate | None:
    """A score over the seeds of records of one cell and variant; None where there is none. estimator: the headline's if
    not given."""
    found = [record[model] for record in records if record[model]]
    scored = [scores.headline(each) if estimator is None else each.get(estimator) for each in found]
    values = [math.nan if each[name] is None else each[name] for each in scored if each]
    return run_tables.over_seeds(np.array(values)) if values else None


def _text(records: Sequence[Record], estimate: Estimate | None, name: str = "accuracy") -> str:
    if estimate is not None:
        return run_tables.format_estimate(name, estimate)
    return "diverged" if any("diverged" in record for record in records) else NOTHING


def _difference(ours: Estimate | None, paper: float | None) -> str:
    return NOTHING if ours is None or paper is None or not math.isfinite(ours.value) else f"{ours.value - paper:+.2f}"


def _seeds(groups: Sequence[Sequence[Record]]) -> str:
    counts = [len({record["seed"] for record in records}) for records in groups]
    return ", ".join(str(count or NOTHING) for count in (counts[:1] if len(set(counts)) == 1 else counts))


# Table 1


@dataclass(frozen=True)
class Line:
    """A row of Table 1: a model of a method, of which variant and by which estimator (the only one if not given)."""

    method: str
    model: str
    estimator: str | None = None
    variant: str = DEFAULT

    @property
    def title(self) -> str:
        notes = [
            self.model,
            ESTIMATORS[self.estimator] if self.estimator else "",
            *(VARIANTS.get(word, word) for word in self.variant.split("+") if word != DEFAULT),
        ]
        return f"{METHODS[self.method].about.title} ({', '.join(filter(None, notes))})"


def lines_of(methods: Sequence[str], variants: Collection[str] = (), prior: bool = False) -> Iterator[Line]:
    """The rows of a table: models, with estimators where weights are drawn, and those variants of them."""
    for name in methods:
        method = METHODS[name]
        estimators = tuple(ESTIMATORS) if method.about.stochastic else (None,)
        for model in MODELS:
            if getattr(method.about, model):
                yield from (Line(name, model, estimator) for estimator in estimators)
                if prior:
                    yield Line(name, model, "mc10" if method.about.stochastic else None, "label-prior")
        if PUBLIC.get(name) in variants:
            yield Line(name, "personal", None, PUBLIC[name])
        if OUTER_RATE in variants and name == "perfedavg":
            yield from (Line(name, "personal", None, each) for each in (OUTER_RATE, f"{OUTER_RATE}+{PUBLIC[name]}"))
        if PUBLIC_NOISE in variants and name == "pfedbayes":
            yield from (Line(name, model, "one", PUBLIC_NOISE) for model in MODELS)


def shown_variants(preset: str, split: str = "two-block") -> tuple[str, ...]:
    """The variants that the tables of a preset show."""
    further = (OUTER_RATE, PUBLIC_NOISE) if preset == "paper" else ()
    return (*PUBLIC.values(), *further) if split == "two-block" else ()


def of_paper(source: Source, line: Line, dataset: str, size: str) -> tuple[float, float] | None:
    """The paper's mean and standard deviation."""
    for row in source.paper["table1"]:
        if (row["method"], row["dataset"], row["size"]) == (line.method, dataset, size):
            mean_and_std: tuple[float, float] | None = row[line.model]
            return mean_and_std
    return None


def records_of(source: Source, line: Line, preset: str, split: str, dataset: str, size: str) -> list[Record]:
    found = source.find("table1", preset=preset, split=split, dataset=dataset, size=size, method=line.method)
    return [record for record in found if _belongs(record, line.variant)]


def _belongs(record: Record, variant: str) -> bool:
    """Whether a record is of this variant; a run that has diverged stands for all that would have been made of it."""
    own = record["variant"]
    of_default = own == DEFAULT and not variant.startswith((PUBLIC_NOISE, OUTER_RATE))
    made_of_it = of_default or variant.startswith(f"{own}+")
    return own == variant or ("diverged" in record and made_of_it)


def beside_paper(source: Source, preset: str) -> Table:
    """Scored as in the paper, the best of rounds 700 to 800: paper, ours, difference."""
    lines = list(lines_of(METHODS_OF_THE_PAPER if preset == "paper" else TUNED, shown_variants(preset)))
    blocks = []
    for dataset, title in DATASETS.items():
        rows = []
        for line in lines:
            cells, groups = [], []
            for size in SIZES:
                records = records_of(source, line, preset, "two-block", dataset, size)
                paper = of_paper(source, line, dataset, size)
                ours = over_seeds(records, line.model, line.estimator, "window_best")
                groups.append(records)
                cells += [
                    run_tables.format_estimate("accuracy", Estimate(*paper)) if paper else NOTHING,
                    _text(records, ours),
                    _difference(ours, paper and paper[0]),
                ]
            rows.append((line.title, [*cells, _seeds(groups)]))
        blocks.append((title, rows))
    heads = [f"{size}: {what}" for size in SIZES for what in ("paper", "ours", "difference")]
    return Table(f"Preset {preset}: best of rounds 700 to 800, as the paper scores", [*heads, "seeds"], blocks)


def honest(source: Source, preset: str, split: str) -> Table:
    """Without picking a round on test data: the mean of rounds 700 to 800, round 800, and how sure it was."""
    if split == "sliding":
        methods: tuple[str, ...] = TUNED
    else:
        methods = METHODS_OF_THE_PAPER if preset == "paper" else TUNED
    shown = {"window_mean": "accuracy", "last": "accuracy", "nll": "nll", "ece": "ece"}
    blocks = []
    for dataset, title in DATASETS.items():
        rows = []
        for line in lines_of(methods, shown_variants(preset, split), prior=True):
            groups = [records_of(source, line, preset, split, dataset, size) for size in SIZES]
            cells = [
                _text(records, over_seeds(records, line.model, line.estimator, name), metric)
                for records in groups
                for name, metric in shown.items()
            ]
            rows.append((line.title, [*cells, _seeds(groups)]))
        blocks.append((title, rows))
    heads = [f"{size}: {what}" for size in SIZES for what in ("mean of 700–800", "round 800", "NLL", "ECE")]
    return Table(f"Preset {preset}, {split} labels: no round picked", [*heads, "seeds"], blocks)


# Tables 2 and 3

SYMBOLS = {
    "method.rho0": "ρ", "method.zeta": "ζ", "method.eta_personal": "η₁", "method.eta_global": "η₂",
    "method.eta": "η", "method.alpha": "η", "method.prox": "λ", "method.self_weight": "α",
}  # fmt: skip


def setting_text(varied: dict[str, Any]) -> str:
    symbols = SYMBOLS | ({"method.eta": "η₂"} if "method.eta_personal" in varied else {})
    return ", ".join(f"{symbols.get(key, key.partition('.')[2])} = {_value(value)}" for key, value in varied.items())


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return format(value, "g") if type(value) in (int, float) else json.dumps(value)


def settings_table(source: Source, table: str) -> Table:
    """Rows of Table 2 or 3: the paper's values, ours scored likewise, and ours as they should be scored; in Table 2
    also ours scored likewise with the weight noise of the public code."""
    more = ("ours, likewise, noise of 0.001",) if table == "table2" else ()
    rows = []
    for row in source.paper[table]:
        method = METHODS[row["method"]]
        cells = []
        seeds = _seeds([_settings_records(source, table, row, DEFAULT)])
        for model in MODELS:
            variant = PUBLIC.get(row["method"], DEFAULT) if model == "personal" else DEFAULT
            as_paper = _settings_records(source, table, row, variant)
            proper = _settings_records(source, table, row, DEFAULT)
            quiet = _settings_records(source, table, row, PUBLIC_NOISE)
            if row[model] is None:
                cells += [NOTHING] * (4 + len(more))
                continue
            ours = over_seeds(as_paper, model, "one" if method.about.stochastic else "mean", "window_best")
            cells += [
                f"{row[model]:.2f}",
                _text(as_paper, ours),
                _difference(ours, row[model]),
                _text(proper, over_seeds(proper, model, None, "window_mean")),
                *(_text(quiet, over_seeds(quiet, model, "one", "window_best")) for _ in more),
            ]
        rows.append((f"{method.about.title}: {setting_text(row['varied'])}", [*cells, seeds]))
    heads = [
        f"{model}: {what}"
        for model in MODELS
        for what in ("paper", "ours, likewise", "difference", "ours, mean of 700–800", *more)
    ]
    caption = {
        "table2": "pFedBayes on medium MNIST; likewise: best of rounds 700 to 800 by one sample; mean: ten samples",
        "table3": "Other methods on medium MNIST; likewise: best of rounds 700 to 800, personal models as the public "
        "code of a method scores them (Per-FedAvg adapted on test data, pFedMe's w, HeurFedAMP's cloud model)",
    }
    return Table(caption[table], [*heads, "seeds"], [("", rows)])


def _settings_records(source: Source, table: str, row: dict[str, Any], variant: str) -> list[Record]:
    """Our records of a row of the paper."""
    found = source.find(table, method=row["method"], varied=row["varied"])
    return [record for record in found if _belongs(record, variant)]


def noise_of_the_paper(source: Source) -> Iterator[str]:
    """How far from the paper's Table 2 we are with noise of standard deviation 1, as the paper says, and with that of
    the public code, in the rows that were run both ways."""
    gaps: dict[str, list[float]] = {DEFAULT: [], PUBLIC_NOISE: []}
    rows = {setting_text(row["varied"]): row for row in source.paper["table2"]}  # two of them stand there twice
    for row in rows.values():
        records = [_settings_records(source, "table2", row, variant) for variant in gaps]
        for model in MODELS:
            literal, public = (over_seeds(each, model, "one", "window_best") for each in records)
            if literal and public:
                gaps[DEFAULT].append(abs(literal.value - row[model]))
                gaps[PUBLIC_NOISE].append(abs(public.value - row[model]))
    if count := len(gaps[DEFAULT]):
        of_paper, of_code = (sum(each) / count for each in gaps.values())
        yield (
            f"With weight noise of standard deviation 1, which the paper writes, we are {of_paper:.2f} points from its "
            f"figures on average, with 0.001, which the public code draws, {of_code:.2f} ({count} figures that were "
            "measured both ways)."
        )


def tuning_table(source: Source) -> Table:
    """The settings that the preset "tuned" was chosen from."""
    blocks = []
    for dataset, title in DATASETS.items():
        rows = []
        for method in TUNED:
            found: dict[str, list[Record]] = {}
            for record in source.find("tuning", dataset=dataset, method=method, variant=DEFAULT):
                found.setdefault(setting_text(record["varied"]), []).append(record)
            sizes = {record["size"] for records in found.values() for record in records}
            complete = {key: each for key, each in found.items() if {record["size"] for record in each} == sizes}
            score = {key: value for key, each in complete.items() if math.isfinite(value := scores.overall(each))}
            best = max(score, key=score.__getitem__, default=None)
            for setting, records in found.items():
                by_size = [[record for record in records if record["size"] == size] for size in SIZES]
                cells = [
                    _text(each, over_seeds(each, model, None, "window_mean")) for each in by_size for model in MODELS
                ]
                overall = f"{score[setting]:.2f}" if setting in score else NOTHING
                mark = " (chosen)" if setting == best else ""
                rounds = records[0]["settings"].get("training.rounds", Training().rounds)
                head = f"{METHODS[method].about.title}: {setting}"
                rows.append((head, [*cells, overall + mark, str(rounds), _seeds([e for e in by_size if e])]))
        if rows:
            blocks.append((title, rows))
    heads = [f"{size}: {model}" for size in SIZES for model in MODELS]
    caption = "Accuracy on validation data, mean of the last eighth of the rounds"
    return Table(caption, [*heads, "overall", "rounds", "seeds"], blocks)


def study_tables(source: Source) -> list[Table]:
    """The sweeps that answer a question, as far as they have been run."""
    return [_study_table(source, name) for name in STUDIES if source.records[name]]


def _study_table(source: Source, name: str) -> Table:
    """Every setting of a study in a row: by size and model the mean and the best of the rounds scored."""
    shown = {"window_mean": "mean", "window_best": "best"}
    sizes = [size for size in SIZES if source.find(name, size=size)]
    models = [model for model in MODELS if any(record[model] for record in source.records[name])]
    blocks = []
    for dataset, title in DATASETS.items():
        found: dict[str, list[Record]] = {}
        for record in source.find(name, dataset=dataset, variant=DEFAULT):
            name_and_setting = filter(None, [METHODS[record["method"]].about.title, setting_text(record["varied"])])
            found.setdefault(": ".join(name_and_setting), []).append(record)
        rows = []
        for head, records in found.items():
            by_size = [[record for record in records if record["size"] == size] for size in sizes]
            cells = [
                _text(each, over_seeds(each, model, None, score))
                for each in by_size
                for model in models
                for score in shown
            ]
            rows.append((head, [*cells, _seeds(by_size)]))
        if rows:
            blocks.append((title, rows))
    heads = [f"{size}: {model}, {what}" for size in sizes for model in models for what in shown.values()]
    return Table(STUDIES[name], [*heads, "seeds"], blocks)
