"""Records of finished jobs, one file each, so that a stopped benchmark continues; and their collection for the page."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedbayes.runs import write_file

DIGITS = 5


@dataclass(frozen=True)
class Record:
    """The result of one method on one split."""

    protocol: str
    """"tables", "newcomers", "heart", "survival" or "activity"."""
    table: str
    split: int
    method: str
    task: str
    digest: str
    """Hash of the rows and of their parts."""
    rows: tuple[int, int, int]
    """Training, validation and test rows."""
    clients: int
    scores: dict[str, float] | None
    """Over all test rows; None if the method failed."""
    by_client: dict[str, float] | None
    """Means over clients."""
    seconds: float
    failed: str | None
    """The reason in one line."""
    settings: str | None
    """Hash of the settings of a method of this package."""
    resolved: str | None
    """The name in configs of a method of this package."""
    version: str
    """Version of pfedbayes."""
    commit: str | None
    machine: str
    workers: int
    """Jobs that ran at the same time."""
    date: str
    per_client: dict[str, dict[str, float]] | None = None
    """Scores of single clients by name, where the page needs them."""


def record_file(folder: Path, protocol: str, table: str, split: int, method: str) -> Path:
    """Return the file of a record."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", method)
    return folder / protocol / re.sub(r"[^\w.-]+", "-", table) / f"{split}-{plain}.json"


def write_record(folder: Path, record: Record) -> None:
    """Write the file of a record."""
    path = record_file(folder, record.protocol, record.table, record.split, record.method)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def read_record(path: Path) -> Record:
    """Read a record."""
    content = json.loads(path.read_text())
    return Record(**{**content, "rows": tuple(content["rows"])})


def read_records(folder: Path) -> list[Record]:
    """Read all records under a folder."""
    return [read_record(path) for path in sorted(folder.glob("*/*/*.json"))]


def collect(records: Iterable[Record]) -> dict[str, Any]:
    """Return the results of all protocols as plain values, with one list entry per split.

    {protocol: {table: {"task", "clients", "rows", "splits", "digests", "methods": {method: {"nll": [...], ...}}}}}
    """
    results: dict[str, Any] = {}
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record.protocol, record.table), []).append(record)
    for (protocol, table), group in sorted(grouped.items()):
        results.setdefault(protocol, {})[table] = _table(group)
    return results


def _table(group: Sequence[Record]) -> dict[str, Any]:
    splits = sorted({record.split for record in group})
    methods: dict[str, dict[int, Record]] = {}
    for record in group:
        methods.setdefault(record.method, {})[record.split] = record
    newest = {split: max((r for r in group if r.split == split), key=lambda r: r.date) for split in splits}
    first = newest[splits[0]]
    return {
        "task": first.task,
        "clients": first.clients,
        "rows": list(first.rows),
        "splits": splits,
        "digests": [newest[split].digest for split in splits],
        "code": sorted({f"{record.version} ({record.commit or 'commit not recorded'})" for record in group}),
        "machines": sorted({record.machine for record in group}),
        "workers": sorted({record.workers for record in group}),
        "dates": [min(record.date for record in group), max(record.date for record in group)],
        "methods": {name: _method(own, newest) for name, own in sorted(methods.items())},
    }


def _method(own: dict[int, Record], newest: dict[int, Record]) -> dict[str, Any]:
    """Return the scores of a method by split; those on other rows than the newest record of a split are left out."""
    kept = [own.get(split) for split in newest]
    valid = [
        record if record and record.digest == latest.digest else None
        for record, latest in zip(kept, newest.values(), strict=True)
    ]
    names = sorted({name for record in valid if record and record.scores for name in record.scores})
    failures = sorted({record.failed for record in valid if record and record.failed})
    resolved = sorted({record.resolved for record in valid if record and record.resolved})
    return {
        **{name: [_rounded(record.scores, name) if record else None for record in valid] for name in names},
        "by_client": {
            name: [_rounded(record.by_client, name) if record else None for record in valid] for name in names
        },
        "seconds": [None if record is None or record.failed else round(record.seconds, 2) for record in valid],
        **({"per_client": per_client} if any(per_client := [_clients(record) for record in valid]) else {}),
        **({"failed": failures} if failures else {}),
        **({"resolved": resolved} if resolved else {}),
    }


def _clients(record: Record | None) -> dict[str, dict[str, float]] | None:
    if record is None or record.per_client is None:
        return None
    return {
        client: {name: round(value, DIGITS) for name, value in scores.items()}
        for client, scores in record.per_client.items()
    }


def _rounded(scores: dict[str, float] | None, name: str) -> float | None:
    return round(scores[name], DIGITS) if scores and name in scores else None
