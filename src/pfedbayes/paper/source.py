"""A folder of results: the paper's numbers, the records of our sweeps, and the reasons for differences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pfedbayes.errors import UserError
from pfedbayes.files.reading import NUMBER, Kinds, read_json, require_keys
from pfedbayes.report.tables import Estimate, format_estimate
from pfedbayes.report.tables import over_seeds as estimate_over_seeds
from pfedbayes.sweep import scores
from pfedbayes.sweep.scores import DEFAULT, Record

DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
SIZES = ("small", "medium", "large")
METHODS_OF_THE_PAPER = ("fedavg", "fedprox", "bnfed", "perfedavg", "pfedme", "heurfedamp", "pfedgp", "pfedbayes")
TUNED = ("pfedbayes", "fedavg", "pfedme", "fedrep")
# The model that the public code of a method scores instead of its personal model. The paper probably used that code.
PUBLIC = {"perfedavg": "leaky", "pfedme": "local", "heurfedamp": "cloud"}
PUBLIC_NOISE = "public-noise"  # pFedBayes with the weight noise of its public code
OUTER_RATE = "outer-rate"  # Per-FedAvg with another outer learning rate: the paper states none
# Sweeps that answer one question each, with the captions of their tables.
STUDIES = {
    "views": "Shifted training images: accuracy on validation data, rounds 700 to 800",
    "swings": "The shared model on CIFAR-10: accuracy on validation data, mean network, rounds 101 to 200 of 200",
    "samples": "pFedBayes with several weight draws per step, otherwise at the paper's settings: accuracy on test "
    "data, rounds 700 to 800",
    "fedprox": "FedProx anchored at the first model received: accuracy on test data, rounds 700 to 800",
    "bnfed": "BNFed with learning rates below the paper's 0.5: accuracy on test data, rounds 700 to 800",
    "fedavg": "FedAvg on large CIFAR-10 with one setting changed, and one model trained on the pooled data (Pooled): "
    "accuracy on test data, rounds 700 to 800",
    "overlap": "Clients that share images, so that test images of one are training images of others: accuracy on test "
    "data, rounds 700 to 800",
}
# Scores of a record over rounds 700 to 800.
BEST, MEAN, LAST = "window_best", "window_mean", "last"
NOTHING = "–"
# The rows of paper.json by table.
SETTINGS_ROW: Kinds = {"method": str, "varied": dict, "personal": NUMBER | None, "shared": NUMBER | None}
PAPER: dict[str, Kinds] = {
    "table1": {"method": str, "dataset": str, "size": str, "personal": list | None, "shared": list | None},
    "table2": SETTINGS_ROW,
    "table3": SETTINGS_ROW,
}
SYMBOLS = {
    "method.rho0": "ρ", "method.zeta": "ζ", "method.eta_personal": "η₁", "method.eta_global": "η₂",
    "method.eta": "η", "method.alpha": "η", "method.prox": "λ", "method.self_weight": "α",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """The content of a folder of results."""

    paper: dict[str, list[dict[str, Any]]]
    """The paper's rows by table."""
    records: dict[str, list[Record]]
    """Our records by table or study."""
    reasons: list[dict[str, str]]
    """Why cells of Table 1 differ from the paper, by method, model, dataset and size."""

    def find(self, table: str, **wanted: Any) -> list[Record]:
        """Return the records of a table that have these values."""
        return [record for record in self.records[table] if all(record[key] == wanted[key] for key in wanted)]


def read_source(folder: Path) -> Source:
    """Read and check the JSON files of a folder of results."""
    remedy = "give a folder of results such as docs/results"
    paper = read_json(folder / "paper.json", "the paper's tables", _check_paper, remedy)
    names = (*PAPER, "tuning", *STUDIES)
    records = {name: scores.read_records(path) if (path := folder / f"{name}.json").exists() else [] for name in names}
    _refuse_tuning_on_test_data(folder / "tuning.json", records["tuning"])
    path = folder / "reasons.json"
    reasons = read_json(path, "reasons", _check_reasons, remedy) if path.exists() else []
    return Source(paper, records, reasons)


def _refuse_tuning_on_test_data(path: Path, records: Sequence[Record]) -> None:
    """Refuse cells of another sweep: imported by mistake, they could be chosen by their test accuracy."""
    for record in records:
        if record["variant"] == DEFAULT and record["settings"].get("evaluation.split") != "validation":
            raise UserError(
                f"{path} has {record['cell']}, which is scored on test data: keep only cells with "
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
    """Return a score of one cell and variant over its seeds; None without records.

    estimator: None takes the headline estimator of the method.
    """
    found = [record[model] for record in records if record[model]]
    scored = [scores.headline(each) if estimator is None else each.get(estimator) for each in found]
    values = [math.nan if each[name] is None else each[name] for each in scored if each]
    return estimate_over_seeds(np.array(values)) if values else None


def score_text(records: Sequence[Record], estimate: Estimate | None, name: str = "accuracy") -> str:
    """Return the text of a table cell: the estimate, "diverged", or a dash."""
    if estimate is not None:
        return format_estimate(name, estimate)
    return "diverged" if any("diverged" in record for record in records) else NOTHING


def difference_text(ours: Estimate | None, paper: float | None) -> str:
    """Return our score minus the paper's, with its sign, or a dash."""
    return NOTHING if ours is None or paper is None or not math.isfinite(ours.value) else f"{ours.value - paper:+.2f}"


def seeds_text(groups: Sequence[Sequence[Record]]) -> str:
    """Return the number of seeds: one number if all groups of records have the same, else one per group."""
    counts = [len({record["seed"] for record in records}) for records in groups]
    return ", ".join(str(count or NOTHING) for count in (counts[:1] if len(set(counts)) == 1 else counts))


def setting_text(varied: dict[str, Any]) -> str:
    """Return settings with the paper's letters, e.g. "ζ = 10, η₁ = 0.001"."""
    symbols = SYMBOLS | ({"method.eta": "η₂"} if "method.eta_personal" in varied else {})
    return ", ".join(f"{symbols.get(key, key.partition('.')[2])} = {_value(value)}" for key, value in varied.items())


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return format(value, "g") if type(value) in (int, float) else json.dumps(value)


def by_size(records: Sequence[Record], sizes: Sequence[str] = SIZES) -> list[list[Record]]:
    """Return the records in one group per size."""
    return [[record for record in records if record["size"] == size] for size in sizes]
