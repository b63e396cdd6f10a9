"""Choose the best settings by the results of a sweep, and write them as the preset "tuned"."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pfedbayes import runs
from pfedbayes.errors import UserError, printable
from pfedbayes.runs.config import to_toml
from pfedbayes.sweep.cells import Cell
from pfedbayes.sweep.results import Results, seeds_to_do
from pfedbayes.sweep.scores import DEFAULT, overall

# Settings of the schedule of a tuning run, which the preset leaves out.
SCHEDULE = {"rounds", "seed", "evaluate_every", "evaluate_window"}
# Settings of [evaluation] that the preset takes over.
SCORING = {"sampling"}


def choose(cells: Sequence[Cell], results: Results, path: Path) -> list[str]:
    """Write the settings of the best row for every data set and method; return a line about each.

    Rows are compared by validation accuracy, averaged over the last eighth of the rounds, seeds, sizes and models. Rows
    that are incomplete, lack a size that others have, or have diverged are left out.
    """
    for cell in cells:
        if cell.experiment.evaluation.split != "validation":
            raise UserError(f"{cell.name} is scored on test data: set evaluation.split=validation to choose settings")
    lines: list[str] = []
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for dataset, method in dict.fromkeys((cell.facts["dataset"], cell.facts["method"]) for cell in cells):
        rows = _rows(cell for cell in cells if (cell.facts["dataset"], cell.facts["method"]) == (dataset, method))
        sizes = {cell.facts["size"] for row in rows.values() for cell in row}
        whole = {key: row for key, row in rows.items() if {cell.facts["size"] for cell in row} == sizes}
        scored = {key: _score(row, results) for key, row in whole.items()}
        complete = {key: score for key, score in scored.items() if score is not None}
        if not complete:
            lines.append(f"{method} on {dataset}: no row is complete, so no settings were chosen")
            continue
        best = max(complete, key=lambda key: complete[key])
        chosen = rows[best]
        on = ", ".join(cell.facts["size"] for cell in chosen)
        lines.append(
            f"{method} on {dataset}: {_text(chosen[0].varied)}, {complete[best]:.2f} % on validation data, the best of "
            f"{len(complete)} settings ({on}; {chosen[0].experiment.training.rounds} rounds)"
        )
        for section, values in _settings(chosen[0]).items():
            sections.setdefault(dataset, {}).setdefault(method, {})[section] = values
    if not sections:
        raise UserError("no row of the sweep is complete: run it first")
    head = "".join(
        f"# {printable(line)}\n" for line in ["Chosen by pfedbayes sweep --choose, by validation accuracy.", *lines]
    )
    with runs.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_file(path, f"{head}\n{to_toml(sections)}")
    return lines


def _rows(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Group cells into rows: the cells of a row differ in size only."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(json.dumps(cell.varied, sort_keys=True), []).append(cell)
    return rows


def _score(row: Sequence[Cell], results: Results) -> float | None:
    """Return the accuracy of a row; None if one of its cells is incomplete or has diverged."""
    if any(seeds_to_do(cell, results) for cell in row):
        return None
    score = overall([record for cell in row for record in results[cell.name] if record["variant"] == DEFAULT])
    return score if math.isfinite(score) else None


def _settings(cell: Cell) -> dict[str, dict[str, Any]]:
    """Return the settings of a cell that the preset takes over: net, method, training without schedule, sampling."""
    sections: dict[str, dict[str, Any]] = {}
    for section, key, value in cell.changes:
        training = section in ("net", "method", "training") and key not in SCHEDULE
        scoring = section == "evaluation" and key in SCORING
        if (training or scoring) and (section, key) != ("method", "name"):
            sections.setdefault(section, {})[key] = value
    return sections


def _text(varied: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in varied.items()) or "default settings"
