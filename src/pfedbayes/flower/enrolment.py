"""Who may be which client: the roster of key fingerprints, which only the operator of the server writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedbayes.errors import one_line
from pfedbayes.files.reading import parse_toml, read_bytes, reading
from pfedbayes.files.typed import from_json

LONGEST_NAME = 80  # characters
REMEDY = "correct it, or write one with pfedbayes federation keys"


@dataclass(frozen=True)
class Entry:
    """A client in the roster."""

    number: int
    key: str
    """Fingerprint of the key of its node, as ssh-keygen -lf prints it."""
    name: str | None = None
    """Its name in the report; None for the one that its node claims."""
    train_size: int | None = None
    """The most training examples that it may claim; None for any number."""
    left: bool = False
    """Whether the operator has removed it for good."""


def read_roster(path: Path, num_clients: int) -> dict[int, Entry]:
    """Read a roster: `[[client]]` tables with `number` and `key`, and optionally `name`, `train_size` and `left`."""
    with reading(path, REMEDY, "is no roster"):
        content = parse_toml(read_bytes(path).decode())
        tables = content.get("client")
        if not isinstance(tables, list) or set(content) != {"client"}:
            raise ValueError("it must hold [[client]] tables and nothing else")
        entries = [_entry(table, k) for k, table in enumerate(tables)]
        for what, values in (("number", [entry.number for entry in entries]), ("key", [each.key for each in entries])):
            if len(set(values)) < len(values):
                raise ValueError(f"two clients have the same {what}")
        if outside := [entry.number for entry in entries if not 0 <= entry.number < num_clients]:
            raise ValueError(f"client {outside[0]} is not between 0 and federation.clients - 1 = {num_clients - 1}")
        return {entry.number: entry for entry in entries}


def _entry(table: Any, place: int) -> Entry:
    if isinstance(table, dict) and (unknown := sorted(set(table) - set(Entry.__dataclass_fields__))):
        raise ValueError(f"client[{place}] has an unknown key {one_line(unknown[0], 40)}")
    try:
        entry = from_json(Entry, table)
    except ValueError as error:
        raise ValueError(f"client[{place}]: {error}") from None
    if not entry.key.startswith("SHA256:"):
        raise ValueError(f"client[{place}]: its key is no fingerprint like SHA256:…")
    return entry


def clean_name(name: object) -> str:
    """Return a name that a node claims as one short line of printable characters."""
    return one_line(name, LONGEST_NAME).strip() or "nameless"
