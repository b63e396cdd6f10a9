"""The cells of a sweep, read from its file."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedbayes.errors import UserError, nearest, one_line, printable
from pfedbayes.runs.config import read_toml
from pfedbayes.runs.experiment import SECTIONS, Change, Experiment, resolve, seed_numbers
from pfedbayes.runs.naming import method_name

# What a row may list, from the outermost loop to the innermost, and the setting that it sets.
AXES = {
    "dataset": ("data", "name"),
    "size": ("data", "size"),
    "split": ("data", "labels"),
    "method": ("method", "name"),
}
FILE_KEYS = ("base", "preset", "preset_file", "seeds", "set", "rows")
ROW_KEYS = (*AXES, "variant", "seeds", "set", "vary")
WINDOW_SHARE = 8  # the paper scores the last eighth of its rounds


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    facts: dict[str, str]
    """What tables call it: preset, dataset, size, split, method, variant."""
    experiment: Experiment
    seeds: tuple[int, ...]
    changes: tuple[Change, ...]
    """Settings that the sweep file gives to this cell."""
    varied: dict[str, Any]
    """Settings that vary inside its row."""
    lacks: str | None = None
    """Why the cell cannot run yet; None if it can."""

    @property
    def settings(self) -> dict[str, Any]:
        """The identity of the results: the seeds, and every setting of the computation that is not the default."""
        found: dict[str, Any] = {"seeds": list(self.seeds)}
        for section in SECTIONS:
            if section != "execution":
                found |= _not_default(section, getattr(self.experiment, section))
        found.pop("data.dir", None)
        return found

    @property
    def kind(self) -> tuple[str, str]:
        """Cells of one kind take about the same time: method and data set."""
        return self.facts["method"], self.facts["dataset"]


def _not_default(section: str, values: Any) -> dict[str, Any]:
    """Return the settings of a section that are not the default, as JSON reads them back."""
    named: dict[str, Any] = {"method.name": method_name(values)} if section == "method" else {}
    for item in dataclasses.fields(values):
        value = getattr(values, item.name)
        if value != item.default:
            named[f"{section}.{item.name}"] = list(value) if isinstance(value, tuple) else value
    return named


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a sweep file, in the order in which they are run."""
    file = read_toml(path)
    _refuse_unknown(file, FILE_KEYS, str(path))
    rows = file.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{path} describes no cells: give it at least one [[rows]]")
    for key in ("base", "preset", "preset_file"):
        _require_text(file.get(key, ""), key, str(path))
    presets = _read_presets(path.parent / file["preset_file"]) if "preset_file" in file else None
    cells: dict[str, Cell] = {}
    for row in rows:
        _refuse_unknown(row, ROW_KEYS, f"[[rows]] of {path}")
        for cell in _cells(path, file, row, presets):
            if cell.name in cells:
                raise UserError(f"{path} describes {cell.name} twice: remove one, or give it another variant")
            cells[cell.name] = cell
    if not cells:
        raise UserError(f"{path} describes no cells: a list in its [[rows]] is empty")
    return list(cells.values())


def _read_presets(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{path} does not exist: write it with pfedbayes sweep tuning.toml --choose {path}")
    return read_toml(path)


def _refuse_unknown(table: Mapping[str, Any], valid: Sequence[str], where: str) -> None:
    for name in table:
        if name not in valid:
            raise UserError(f"unknown key {name!r} in {where}: {nearest(name, valid)}")


def _require_text(value: Any, key: str, where: str) -> None:
    if not isinstance(value, str) or not value.isprintable():
        raise UserError(f"{key} is {one_line(repr(value))} in {where}: give a text")


def _cells(path: Path, file: dict[str, Any], row: dict[str, Any], presets: dict[str, Any] | None) -> Iterator[Cell]:
    common = [*_changes(file.get("set", {}), path), *_changes(row.get("set", {}), path)]
    axes = [row[axis] if isinstance(row[axis], list) else [row[axis]] for axis in AXES if axis in row]
    settings = [AXES[axis] for axis in AXES if axis in row]
    for axis in AXES.keys() & row.keys():
        for value in row[axis] if isinstance(row[axis], list) else [row[axis]]:
            _require_text(value, axis, f"[[rows]] of {path}")
    _require_text(row.get("variant", ""), "variant", f"[[rows]] of {path}")
    points = row.get("vary", [{}])
    if not isinstance(points, list):
        raise UserError(f"vary is {one_line(repr(points))} in {path}: give a list such as [{{ method.eta = 0.1 }}]")
    for values in itertools.product(*axes):
        named = dict(zip([axis for axis in AXES if axis in row], values, strict=True))
        base = _base(path, file, named)
        chosen = [(*setting, value) for setting, value in zip(settings, values, strict=True)]
        lacks = None
        if presets is not None:
            dataset, method = named.get("dataset", ""), named.get("method", "")
            of_dataset = presets.get(dataset, {})
            if isinstance(of_dataset, Mapping) and method in of_dataset:
                chosen += _changes(of_dataset[method], path)
            else:
                lacks = f"{file['preset_file']} has no settings for {method} on {dataset}: write them with --choose"
        for point in points:
            varied = _changes(point, path)
            cell = _cell(path, file, row, base, [*chosen, *common, *varied], varied)
            yield dataclasses.replace(cell, lacks=lacks)


def _base(path: Path, file: dict[str, Any], named: dict[str, str]) -> dict[str, Any]:
    """Return the sections of the experiment file on which a cell is based."""
    if "base" not in file:
        return {}
    name = file["base"]
    for axis, value in named.items():
        name = name.replace(f"{{{axis}}}", value)
    if "{" in name or "}" in name:
        raise UserError(f"base of {path} cannot be filled in ({name!r}): a row gives {', '.join(named) or 'nothing'}")
    return read_toml(path.parent / name)


def _changes(sections: Any, path: Path) -> list[Change]:
    if not isinstance(sections, Mapping) or not all(isinstance(values, Mapping) for values in sections.values()):
        raise UserError(
            f"{one_line(repr(sections))} in {path} is not understood: write settings as section.key = value"
        )
    return [(section, key, value) for section, values in sections.items() for key, value in values.items()]


def _cell(
    path: Path,
    file: dict[str, Any],
    row: dict[str, Any],
    base: dict[str, Any],
    changes: list[Change],
    varied: list[Change],
) -> Cell:
    experiment = resolve(base, changes)
    if not any(change[:2] == ("training", "evaluate_window") for change in changes):
        rounds = experiment.training.rounds
        window = (max(1, rounds - rounds // WINDOW_SHARE), rounds)
        experiment = dataclasses.replace(
            experiment, training=dataclasses.replace(experiment.training, evaluate_window=window)
        )
    if experiment.data.name == "regression":
        raise UserError(f"{path} has a regression, but a sweep compares accuracies: use data with labels")
    count = row.get("seeds", file.get("seeds", 1))
    if type(count) is not int or count < 1:
        raise UserError(f"seeds is {one_line(repr(count))} in {path}: give a whole number, at least 1")
    facts = {
        "preset": str(file.get("preset", "paper")),
        "dataset": experiment.data.name,
        "size": str(experiment.data.size),
        "split": experiment.data.labels,
        "method": method_name(experiment.method),
        "variant": str(row.get("variant", "default")),
    }
    by = {f"{section}.{key}": value for section, key, value in varied}
    parts = [value for value in facts.values() if value != "default"] + [f"{key}={value}" for key, value in by.items()]
    name = printable("_".join(parts).replace("/", "-"))
    seeds = tuple(seed_numbers(experiment.training.seed, count))
    return Cell(name, facts, experiment, seeds, tuple(changes), by)


def select(cells: Sequence[Cell], only: Sequence[str] = (), part: tuple[int, int] = (1, 1)) -> list[Cell]:
    """Return the cells whose names have all the words of a text in `only`; of these, every n-th for part (i, n).

    A word matches a whole part of a name, such as mnist or fedavg; a word that is no such part matches any piece.
    """
    if not all(text.split() for text in only):
        raise UserError(
            "--only is empty: give words of the names that --dry-run lists, or leave it out to run all cells"
        )
    whole = {word for cell in cells for word in cell.name.split("_")}

    def has(cell: Cell, word: str) -> bool:
        return word in (cell.name.split("_") if word in whole else cell.name)

    chosen = [cell for cell in cells if not only or any(all(has(cell, w) for w in text.split()) for text in only)]
    if not chosen:
        raise UserError(f"no cell matches {' or '.join(only)}: --dry-run lists the cells")
    number, of = part
    return chosen[number - 1 :: of]


def parse_part(text: str) -> tuple[int, int]:
    """Parse "2/3" as (2, 3)."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise UserError(f"--part {text!r} is not understood: write 1/3, 2/3 or 3/3 for a third of the cells")
    return number, of
