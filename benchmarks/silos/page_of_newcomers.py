"""The sections of the page on clients that join later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.silos.activity import LEFT_OUT, OWN_WINDOWS, PUBLISHED, RANDOM
from benchmarks.silos.cells import difference_cells, mean_and_deviation, number, row
from benchmarks.silos.newcomers import MODELS, RIVAL, SIZES
from benchmarks.silos.ours import DEFAULT
from benchmarks.silos.statistics import Difference, corrected_interval

Results = Mapping[str, Any]
Clients = dict[str, dict[str, float]]
OTHERS = ("shared", "alone", "rival")
NAMES = {"shared": "the shared model", "alone": "the same method alone", "rival": "logistic regression or ridge alone"}
SCORES = {"accuracy": ("Accuracy, %", ".1f"), "auroc": ("AUROC", ".3f"), "rmse": ("RMSE", ".3f")}


def clients_of(table: Results, method: str = DEFAULT) -> Clients:
    """Return the scores of each client, as means over the splits in which it is scored."""
    found: dict[str, list[dict[str, float]]] = {}
    parts = [table["methods"].get(name, {}).get("per_client") for name in (method, RIVAL)]
    for both in zip(*(part for part in parts if part is not None), strict=True):
        for client in sorted({name for split in both for name in split or {}}):
            known = [split[client] for split in both if split and client in split]
            found.setdefault(client, []).append({name: value for one in known for name, value in one.items()})
    return {
        client: {
            name: float(np.mean([one[name] for one in scores if name in one]))
            for name in {name for one in scores for name in one}
        }
        for client, scores in sorted(found.items())
    }


def by_size(clients: Clients, size: int, score: str) -> dict[str, list[float]]:
    """Return the scores of each model of `MODELS` for the clients that bring so many rows."""
    names = {model: f"{model} {0 if model == 'shared' else size} {score}" for model in MODELS}
    kept = [scores for scores in clients.values() if all(name in scores for name in names.values())]
    return {model: [scores[name] for scores in kept] for model, name in names.items()}


def over_clients(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of ours - theirs with its t interval over clients."""
    return corrected_interval([a - b for a, b in zip(ours, theirs, strict=True)], test_share=0.0)


def newcomers_section(tables: Results) -> list[str]:
    """Return the section on newcomers with few rows."""
    clients = {name: clients_of(table) for name, table in tables.items()}
    losses = {(name, size): by_size(own, size, "nll") for name, own in clients.items() for size in SIZES}
    losses = {place: scores for place, scores in losses.items() if scores["joined"]}
    if not losses:
        return []
    lines = [
        "## New clients\n",
        *(_count(size, [scores for (_, n), scores in losses.items() if n == size]) for size in SIZES),
        "",
        "| table | rows brought | newcomers | 0 rows: shared | joined | alone | rival alone | joined − shared | "
        "| joined − alone | | joined − rival | |",
        "|---" * 13 + "|",
    ]
    for (name, size), scores in losses.items():
        means = [number(float(np.mean(scores[model]))) for model in MODELS]
        found = [over_clients(scores["joined"], scores[other]) for other in OTHERS]
        cells = [cell for one in found for cell in difference_cells(one)]
        lines.append(row([name, str(size), str(len(scores["joined"])), *means, *cells]))
    seeds = max(len(table["splits"]) for table in tables.values())
    lines += [
        "",
        f"Mean NLL in nats over newcomers, {seeds} random draw{'s' * (seeds > 1)}. Ten clients of a table, or all if "
        "there are fewer, are left out in turn, at most a tenth of the clients at a time. The default method trains on "
        "all rows of the others. A newcomer can bring 70 % of its rows, but at most 100, and is scored on the rest, "
        "whatever it brings. Clients with too few rows drop out of larger sizes, so compare within a row. “Alone” is "
        "the same method on the newcomer's rows only, with the encoding of the federation; the rival is logistic "
        "regression or ridge on these rows. Intervals are t intervals over newcomers, 95 %, after averaging the draws "
        "of a client.\n",
    ]
    for score, (heading, digits) in SCORES.items():
        lines += _table(clients, score, heading, digits)
    return lines


def _count(size: int, tables: Sequence[dict[str, list[float]]]) -> str:
    """Count the tables on which the joined model has the lower mean NLL."""
    parts = []
    for other in OTHERS:
        found = [over_clients(scores["joined"], scores[other]) for scores in tables]
        lower = sum(one.mean < 0 for one in found)
        shown = [sum(one.word == word for one in found) for word in ("better", "worse")]
        parts.append(f"{NAMES[other]} on {lower} (interval below 0 on {shown[0]}, above 0 on {shown[1]})")
    return f"- With **{size} rows**, of {len(tables)} tables, the joined model has a lower NLL than {'; '.join(parts)}."


def _table(clients: Mapping[str, Clients], score: str, heading: str, digits: str) -> list[str]:
    """Return the means of another score; nothing if no table has it."""
    rows = []
    for name, own in clients.items():
        for size in SIZES:
            found = by_size(own, size, score)
            if found["joined"]:
                means = [format(float(np.mean(found[model])), digits) for model in MODELS]
                rows.append(row([name, str(size), str(len(found["joined"])), *means]))
    head = f"| {heading} | rows brought | newcomers | 0 rows: shared | joined | alone | rival alone |"
    return [head, "|---" * 7 + "|", *rows, ""] if rows else []


def activity_section(tables: Results) -> list[str]:
    """Return the section on activity recognition."""
    lines = [
        "## Activities of 30 people (UCI HAR)\n",
        "| protocol | splits | people | personal models, accuracy, % | shared model | gain, points, with 95 % interval "
        "| alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for protocol in (LEFT_OUT, RANDOM):
        table = tables.get(protocol, {"methods": {}})
        for method, scores in table["methods"].items():
            people = list(clients_of(table, method).values())
            own, shared, alone = ([one[name] for one in people if name in one] for name in _ACCURACIES)
            if not own:
                continue
            gain = over_clients(own, shared)
            interval = f"{gain.mean:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})".replace("-", "−")
            done = sum(value is not None for value in scores["accuracy"])
            cells = [str(done), str(len(people)), *map(mean_and_deviation, (own, shared)), interval]
            lines.append(row([protocol, *cells, mean_and_deviation(alone)]))
    published = ", ".join(f"{name} {value:.1f}" for name, value in PUBLISHED.items())
    return [
        *lines,
        "",
        "pFedBayes with a one-dimensional CNN and the defaults for own data; means over people ± standard deviation "
        "over people. Left-out people: each of five folds trains on 24 people, gives each of the other six a model "
        f"from {OWN_WINDOWS} random windows, and scores it on that person's other windows. Alone: the same network and "
        "method on these windows only. Neighbouring windows overlap by half and their order is lost, so random windows "
        "flatter every method, and so do the windows that a left-out person brings.\n",
        f"Published, with another version of the features and random windows: {published} %.\n",
    ]


_ACCURACIES = ("accuracy", "shared_accuracy", "alone_accuracy")
