"""Results of several machines or days as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Results = Mapping[str, Any]
TEXTS = ("failed", "resolved")  # entries of a method that are not by split


def merged(old: Results, new: Results) -> dict[str, Any]:
    """Return collected results with newer ones added. The newer ones win, and older ones on other rows are left out."""
    results: dict[str, Any] = {}
    for protocol in sorted({*old, *new}):
        before, after = old.get(protocol, {}), new.get(protocol, {})
        results[protocol] = {
            name: _merged_table(before[name], after[name])
            if name in before and name in after
            else (before | after)[name]
            for name in sorted({*before, *after})
        }
    return results


def _merged_table(old: Results, new: Results) -> dict[str, Any]:
    digests = _digests(old) | _digests(new)
    splits = sorted(digests)
    return {
        **new,
        "splits": splits,
        "digests": [digests[split] for split in splits],
        **{key: sorted({*old[key], *new[key]}) for key in ("code", "machines", "workers")},
        "dates": [min(old["dates"][0], new["dates"][0]), max(old["dates"][1], new["dates"][1])],
        "methods": {
            name: _merged_method(name, old, new, digests) for name in sorted({**old["methods"], **new["methods"]})
        },
    }


def _digests(table: Results) -> dict[int, str]:
    return dict(zip(table["splits"], table["digests"], strict=True))


def _merged_method(name: str, old: Results, new: Results, digests: Mapping[int, str]) -> dict[str, Any]:
    """Return the scores of a method by split, each from the newest table that has it."""
    chosen: dict[int, tuple[Results, int]] = {}  # for each split, a result and the place in its lists
    used: list[Results] = []
    for table in (old, new):
        result = table["methods"].get(name)
        if result is None:
            continue
        used.append(result)
        for place, (split, digest) in enumerate(_digests(table).items()):
            if digest == digests[split] and result["seconds"][place] is not None:
                chosen[split] = result, place

    def values(key: str, by_client: bool = False) -> list[Any]:
        """Return an entry by split."""
        found = []
        for split in sorted(digests):
            result, place = chosen.get(split, ({}, 0))
            entry = (result.get("by_client", {}) if by_client else result).get(key)
            found.append(None if entry is None else entry[place])
        return found

    keys = sorted({key for result in used for key in result if key not in (*TEXTS, "by_client")})
    of_clients = sorted({key for result in used for key in result["by_client"]})
    texts = {key: sorted({text for result in used for text in result.get(key, ())}) for key in TEXTS}
    if len(chosen) == len(digests):
        del texts["failed"]
    return {
        **{key: values(key) for key in keys},
        "by_client": {key: values(key, by_client=True) for key in of_clients},
        **{key: known for key, known in texts.items() if known},
    }
