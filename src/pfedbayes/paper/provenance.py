"""Where the results come from: devices and time, rounds scored, precision, commits."""

from __future__ import annotations

from collections.abc import Iterator

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.paper.source import DATASETS, Source
from pfedbayes.paper.table1 import ESTIMATORS, Line, name_of
from pfedbayes.report.page import Table
from pfedbayes.sweep import scores
from pfedbayes.sweep.scores import Record

ROUNDS_SCORED = 101  # rounds 700 to 800


def device_time(source: Source, names: dict[str, list[str]]) -> Table:
    """How long the runs of some tables took, by device; names: the tables that a row counts."""
    rows = []
    for label, tables in names.items():
        by_device: dict[str, list[Record]] = {}
        for record in (record for table in tables for record in source.records[table]):
            by_device.setdefault(record["device"], []).append(record)
        for device, records in sorted(by_device.items()):
            count = len({(record["cell"], record["seed"]) for record in records})
            rows.append((label, [device, f"{scores.seconds(records) / 60:.1f}", str(count)]))
    notes = ["Cells that ran at the same time are counted one by one."]
    return Table("Device time", ["device", "minutes", "runs"], [("", rows)], notes)


def statements(source: Source) -> list[str]:
    """Return the limits of Table 1 that come from how its runs were made."""
    return [*_rarely_scored(source), *_in_bfloat16(source), *_commits(source)]


def _rarely_scored(source: Source) -> Iterator[str]:
    """Name the cells whose best round is the best of fewer than all rounds from 700 to 800."""
    fewer: dict[str, None] = {}
    for record in source.records["table1"]:
        for model in MODELS:
            for estimator, scored in (record[model] or {}).items():
                if scored["evaluations"] < ROUNDS_SCORED:
                    where = f"{_dataset(record)} {record['size']}"
                    by = f"{_method(source, record)}, {ESTIMATORS.get(estimator, estimator)}"
                    fewer[f"{where}, {by}: {scored['evaluations']}"] = None
    if fewer:
        yield f"Cells with fewer than {ROUNDS_SCORED} scored rounds from 700 to 800: {'; '.join(sorted(fewer))}."


def _dataset(record: Record) -> str:
    name: str = record["dataset"]
    return DATASETS.get(name, name)


def _method(source: Source, record: Record) -> str:
    line = Line(record["method"], MODELS[0], preset=record["preset"])
    return name_of(source, line, record["dataset"], record["split"])


def _in_bfloat16(source: Source) -> Iterator[str]:
    half = {
        f"{_dataset(record)} {_method(source, record)}": None
        for record in source.records["table1"]
        if record.get("precision") == "bf16"
    }
    if half:
        in_full = any(record.get("precision") == "full" for record in source.records.get("fedavg", []))
        yield (
            f"Networks that ran in bfloat16: {', '.join(sorted(half))}. The effect was measured on MNIST "
            f"(precision.md){' and, for FedAvg, on large CIFAR-10 (studies.md)' if in_full else ' only'}."
        )


def _commits(source: Source) -> Iterator[str]:
    """Say how many runs can be traced to a commit."""
    commits = {(record["cell"], record["seed"]): record["commit"] for record in source.records["table1"]}
    unknown = sum(1 for commit in commits.values() if commit is None)
    changed = sum(1 for commit in commits.values() if commit and commit.endswith("-dirty"))
    if unknown or changed:
        yield (
            f"Of {len(commits)} runs, {len(commits) - unknown - changed} used the code of a commit, {changed} used a "
            f"commit with uncommitted changes, and {unknown} did not record the commit (table1.json)."
        )
