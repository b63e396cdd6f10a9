"""The section of the page that compares the methods of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.silos import rates
from benchmarks.silos.cells import row, signed
from benchmarks.silos.ours import DEFAULT, METHODS
from benchmarks.silos.statistics import Difference, mean_of, paired, ranks
from pfedbayes.methods import METHODS as OURS

Results = Mapping[str, Any]
WORDS = ("better", "indistinguishable", "worse")
LEGEND = """All methods have the same network, the same splits and the same budget: 50 rounds of 8 steps on all rows of
a client. The default method also trains on the validation rows. The others keep the round with the lowest validation
loss, and their learning rates are chosen: on the first split, without its test rows, we try {grid}. A method has one
rate for all classification tables and one for all regression tables: the one with the lowest mean rank of the
validation loss. A rate with which it diverges on some table is out. Other settings are the defaults of the package.
The rates are in `benchmarks/silos/rates.json`, the rest in `benchmarks/silos/ours.py`.
"""


def methods_section(tables: Results) -> list[str]:
    """Return the section; nothing if no other method is measured."""
    names = [name for name in METHODS[1:] if any("nll" in table["methods"].get(name, {}) for table in tables.values())]
    if not names:
        return []
    found = {name: differences(tables, name) for name in names}
    lines = [
        "## The package's methods\n",
        f"| default against | {' | '.join(WORDS)} | mean rank | rate, classification | rate, regression |",
        "|---" * (len(WORDS) + 4) + "|",
    ]
    ranked = mean_ranks(tables, [DEFAULT, *names])
    for name in names:
        words = [one.word for one in found[name].values()]
        chosen = [rates.chosen().get(task, {}).get(name) for task in ("classification", "regression")]
        shown = ["–" if rate is None else f"{rate:g}" for rate in chosen]
        lines.append(row([_title(name), *(str(words.count(word)) for word in WORDS), f"{ranked[name]:.1f}", *shown]))
    lines += [
        "",
        "Tables on which the NLL of the default method is better or worse than that of the other, by the 95 % interval "
        f"of the difference. The mean rank is among these methods; that of the default one is {ranked[DEFAULT]:.1f}.\n",
        LEGEND.format(grid=", ".join(f"{rate:g}" for rate in rates.GRID)),
        f"| NLL, default minus | {' | '.join(map(_title, names))} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for table in tables:
        lines.append(row([table, *(_cell(found[name].get(table)) for name in names)]))
    return [*lines, "", "Bold: the 95 % interval does not hold 0.\n"]


def differences(tables: Results, name: str) -> dict[str, Difference]:
    """Return the difference default - other of the NLL for each table that has both."""
    found = {}
    for table, results in tables.items():
        ours, theirs = (results["methods"].get(method, {}).get("nll", ()) for method in (DEFAULT, name))
        train, validation, test = results["rows"]
        if ours and theirs and (one := paired(ours, theirs, test / (train + validation))) is not None:
            found[table] = one
    return found


def mean_ranks(tables: Results, names: list[str]) -> dict[str, float]:
    """Return the mean rank of each method by mean NLL, over the tables that have all of them."""
    ranked = []
    for results in tables.values():
        means = {name: mean_of(results["methods"].get(name, {}).get("nll", ())) for name in names}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if len(known) == len(names):
            ranked.append(ranks(known))
    return {name: float(np.mean([one[name] for one in ranked])) if ranked else float("nan") for name in names}


def _title(name: str) -> str:
    return OURS[name].about.title


def _cell(one: Difference | None) -> str:
    if one is None:
        return ""
    text = f"{signed(one.mean)} [{signed(one.low)}, {signed(one.high)}]" if one.splits > 1 else signed(one.mean)
    return f"**{text}**" if one.word in ("better", "worse") else text
