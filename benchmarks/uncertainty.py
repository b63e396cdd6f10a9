"""Calibration and out-of-distribution detection of pFedBayes, FedAvg, Local, pFedMe and deep ensembles.

    python -m benchmarks.uncertainty [--device cuda] [--data-dir DIR] [--minutes 30] [--part 1/3]

Settings of experiments/*.toml, a fifth of the training data held out, five seeds. Every finished cell is one JSON file
in the folder --records; cells that are there are not measured again, so run the command again to continue after a stop.
--part 1/3 takes the first of every three cells, for three processes that share a machine. Without --part, collect the
records beside the page and write it. Data sets whose files are missing are skipped and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import available, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.estimators import Which
from pfedbayes.runs.experiment import Experiment, build_federation, read_experiment
from pfedbayes.runs.provenance import describe_code, describe_machine
from pfedbayes.trust import uncertainty as honesty
from pfedbayes.trust.answers import Models
from pfedbayes.trust.shifts import NAMES, other_set

SETS, SIZES = ("mnist", "fashion-mnist", "cifar10"), ("small", "medium", "large")
ROOT = Path(__file__).parents[1]
EXPERIMENTS, PAGE = ROOT / "experiments", ROOT / "docs" / "results" / "uncertainty"
TUNED = tomllib.loads((EXPERIMENTS / "tuned.toml").read_text())
METHODS = {
    "pfedbayes": "pFedBayes",
    "local": "Local",
    "fedavg": "FedAvg",
    "pfedme": "pFedMe",
    "ensembles": "Deep ensembles",
}
# What is trained together: an ensemble takes its networks from Local and FedAvg.
GROUPS = {"pfedbayes": ("pfedbayes",), "networks": ("local", "fedavg"), "pfedme": ("pfedme",)}
NETWORKS = 5  # in an ensemble
SAMPLES = 10  # weight draws in a prediction
VALIDATION = 0.2
DECIMALS = 6  # of a figure in a record

Figures = dict[str, dict[str, dict[str, list[float | None]]]]
"""Means over clients: {model: {way: {metric: [seed]}}}."""


@dataclass(frozen=True)
class Cell:
    """What is measured in one piece."""

    name: str
    """The data set."""
    size: str
    group: str
    rounds: int
    seeds: int
    data_dir: Path | None = None

    @property
    def title(self) -> str:
        """The name of the record."""
        return f"{self.name}-{self.size}-{self.group}"

    def settings(self, method: str) -> list[str]:
        """Return what differs from the experiment's file."""
        found = [f"data.validation={VALIDATION}", f"training.rounds={self.rounds}", "training.evaluate_window=[1,1]"]
        if method == "pfedbayes":
            return [*found, "method.zeta=1.0"]
        # Local has FedAvg's learning rate; its clients upload nothing.
        tuned = TUNED[self.name]["fedavg" if method == "local" else method]
        keep = ("method",) if method == "local" else ("method", "training", "net")
        changes = {f"{section}.{key}": value for section in keep for key, value in tuned.get(section, {}).items()}
        return [*found, f"method.name={method}", *(f"{key}={json.dumps(value)}" for key, value in changes.items())]

    def experiment(self, method: str) -> Experiment:
        """Return the experiment of a method."""
        where = [f"data.dir={json.dumps(str(self.data_dir))}"] if self.data_dir else []
        return read_experiment(EXPERIMENTS / f"{self.name}_{self.size}.toml", [*self.settings(method), *where])

    def asked(self) -> dict[str, Any]:
        """Return what a record must have been measured with."""
        return {"seeds": self.seeds, "settings": {method: self.settings(method) for method in GROUPS[self.group]}}


class OutOfTime(Exception):
    """The time that was given is over."""


def order(rounds: int, seeds: int, data_dir: Path | None = None) -> Iterator[Cell]:
    """Yield all cells, the most telling ones first."""
    small = [(name, size) for name in SETS[:2] for size in SIZES[:2]]
    large = [(name, SIZES[2]) for name in SETS[:2]]
    images = [(SETS[2], size) for size in SIZES]
    for part in (small, large, images):
        for group in GROUPS:
            for name, size in part:
                yield Cell(name, size, group, rounds, seeds, data_dir)


def train(cell: Cell, method: str, seeds: int, device: str, deadline: float) -> Federation:
    """Return the trained federations of seeds 1, 2, …"""
    experiment = cell.experiment(method)
    federation = build_federation(experiment, load_shards(experiment.data), range(1, seeds + 1), device=device)
    for _ in federation.rounds():
        if time.monotonic() > deadline:
            raise OutOfTime
    return federation


def ensembles(federations: dict[Which, Federation], count: int) -> Models:
    """Return ensembles of NETWORKS networks: the k-th has every `count`-th of the federations' seeds, from the k-th."""

    def predict(which: Which, client: int, x: Tensor, s: int) -> Tensor:
        own = federations[which]
        return torch.cat([own.predict(which, client, x, None, k) for k in range(s, count * NETWORKS, count)])

    first = federations["personal"]
    return Models(first.data, first.model.likelihood, tuple(federations), count, True, predict)


def measure(cell: Cell, device: str = "auto", deadline: float = math.inf) -> dict[str, Any]:
    """Train and assess the models of a cell."""
    begun, methods = time.monotonic(), GROUPS[cell.group]
    several = len(methods) > 1
    trained = {
        method: train(cell, method, cell.seeds * NETWORKS if several else cell.seeds, device, deadline)
        for method in methods
    }
    trained_after = time.monotonic() - begun
    strange = other_set(cell.name, cell.data_dir)
    models = {
        method: dataclasses.replace(Models.of(federation, SAMPLES), num_seeds=cell.seeds)
        for method, federation in trained.items()
    }
    if several:
        models["ensembles"] = ensembles({"personal": trained["local"], "shared": trained["fedavg"]}, cell.seeds)
    found = {method: figures(each, strange) for method, each in models.items()}
    seconds = {"training": trained_after, "all": time.monotonic() - begun}
    machine = describe_machine()
    return cell.asked() | {
        "device": machine["gpu"] or machine["cpu"],
        "commit": describe_code()["commit"],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "figures": found,
    }


def figures(models: Models, strange: dict[str, Tensor]) -> Figures:
    """Return the mean over clients of every metric, by seed."""
    found: Figures = {}
    for which, ways in honesty.assess_models(models, strange).items():
        for way, seeds in ways.items():
            rows = [honesty.mean_rows([clients]) for clients in seeds]
            names = dict.fromkeys(name for row in rows for name in row)
            of_way = found.setdefault(which, {}).setdefault(way, {})
            for name in names:
                of_way[name] = [round(row[name], DECIMALS) if name in row else None for row in rows]
    return found


HEAD = """# Uncertainty

{verdict}

The tables compare pFedBayes with FedAvg, Local, pFedMe and deep ensembles: their calibration, how well they detect
out-of-distribution inputs, their conformal sets and their abstention. Each client has five of ten labels (two-block
split), and a fifth of its training data is held out. [Reading the uncertainty](../uncertainty.md) explains what is
guaranteed.

"""
NOTES = """## How to read the tables

Each entry is a mean over clients, and of it the mean and standard deviation over {seeds} seeds. Bold: the best row of a
column, and rows that differ from it by at most its standard deviation.

{settings}

- Deep ensembles: the average of {networks} networks with different seeds, of Local for personal models and of FedAvg
  for the shared one. There are as many ensembles as seeds, and no network is in two of them.
- Local and FedAvg: the first {seeds} of the {all} seeds from which the ensembles take their networks.
- scaled: with a temperature fitted on validation data, per client for personal models, one for all for shared models.
- calibrated: with the map that runs choose by default (`trust/recalibration.py`).
- gated: the personal model gated by the shared one (`trust/gate.py`), the default of `predict`.
- by MI: the score is the mutual information between prediction and weights, or networks, instead of the confidence.
- by strangeness: the score is the strangeness that `predict` shows (`trust/strangeness.py`).
- false alarms: share of the client's own test data with a strangeness of 0.95 or more.
- unseen labels: {unseen}.
  The shared model was trained on these labels by other clients, so 0.5 is expected for it.
- other set: {other}.
- rotated: {rotated}.
- noisy: {noisy}.
- sets: 90 % conformal sets (LAC), calibrated per client.
- answered: share of examples answered at a guaranteed error of at most 1 %, calibrated on the validation data of all
  clients; 0 where these data cannot support the guarantee.
- sets and answered exist only for raw predictions: temperatures and maps have already used the calibration data.

Written by `python -m benchmarks.uncertainty` from the JSON file beside it; do not edit.
"""
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
DETECTED = ("auroc_unseen", "auroc_other", "auroc_rotated")

Line = dict[str, list[float]]
"""The figures of one row of a table: by metric, one per seed."""


def lines(figures: dict[str, Figures], columns: tuple[str, ...]) -> dict[str, Line]:
    """Return the rows of a table by title."""
    found: dict[str, Line] = {}
    for method, models in figures.items():
        seeds = len(next(iter(next(iter(next(iter(models.values())).values())).values())))
        for s in range(seeds):
            of_seed: dict[str, dict[str, list[list[honesty.Row]]]] = {
                which: {
                    way: [[{name: value for name, values in row.items() if (value := values[s]) is not None}]]
                    for way, row in ways.items()
                }
                for which, ways in models.items()
            }
            for title, row in honesty.table_rows(of_seed, columns):
                line = found.setdefault(f"{METHODS[method]} {title}", {})
                for name in columns:
                    if name in row:
                        line.setdefault(name, []).append(row[name])
    return found


def spread(values: list[float]) -> float:
    """Return the standard deviation over seeds; 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def is_close(line: Line, others: list[Line], name: str) -> bool | None:
    """Return whether a row is the best of a column, or within a standard deviation of it; None if none is better."""
    sign = {"\u2191": 1, "\u2193": -1}.get(honesty.FIGURES[name][0][-1])
    if sign is None:
        return None
    best = max((each[name] for each in [line, *others] if name in each), key=lambda each: sign * statistics.fmean(each))
    return sign * (statistics.fmean(best) - statistics.fmean(line[name])) <= spread(best)


def entry(line: Line, others: list[Line], name: str) -> str:
    """Return an entry of a table."""
    if name not in line:
        return ""
    decimals = honesty.FIGURES[name][1]
    text = f"{statistics.fmean(line[name]):.{decimals}f} \u00b1 {spread(line[name]):.{decimals}f}"
    return f"**{text}**" if is_close(line, others, name) else text


def table(figures: dict[str, Figures], columns: tuple[str, ...]) -> list[str]:
    """Return a table in Markdown; nothing if no method has these figures."""
    rows = lines(figures, columns)
    if not rows:
        return []
    every = list(rows.values())
    columns = tuple(honesty.filled(every, columns))
    head = [f"| | {' | '.join(honesty.headings(columns))} |", "|---" * (len(columns) + 1) + "|"]
    return head + [
        f"| {title} | {' | '.join(entry(line, every, name) for name in columns)} |" for title, line in rows.items()
    ]


def by_data(measured: dict[str, Any]) -> dict[tuple[str, str], dict[str, Figures]]:
    """Return the figures of all methods by data set and size."""
    found: dict[tuple[str, str], dict[str, Figures]] = {}
    for name in SETS:
        for size in SIZES:
            records = [measured[title] for group in GROUPS if (title := f"{name}-{size}-{group}") in measured]
            if records:
                every = {method: models for record in records for method, models in record["figures"].items()}
                found[name, size] = {method: every[method] for method in METHODS if method in every}
    return found


def summary(measured: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a sentence on all data sets, and a table of what users see by default beside the best rival."""
    ours, best, rows = "pFedBayes gated, by strangeness", 0, []
    columns = [honesty.FIGURES[name][0] for name in DETECTED]
    for (name, size), figures in by_data(measured).items():
        every = lines(figures, DETECTED)
        if ours not in every:
            continue
        line, entries = every[ours], []
        rivals = [each for title, each in every.items() if not title.startswith(METHODS["pfedbayes"])]
        for column in DETECTED:
            rival = max((statistics.fmean(each[column]) for each in rivals if column in each), default=math.nan)
            entries += [entry(line, rivals, column) if column in line else "", f"{rival:.3f}"]
        best += bool(is_close(line, rivals, DETECTED[0]))
        rows.append(f"| {TITLES[name]}, {size} | {' | '.join(entries)} |")
    if not rows:
        return "The strangeness that pFedBayes shows by default has not been measured.", []
    sentence = (
        "The strangeness that pFedBayes shows by default detects unseen labels best, or within a standard deviation of "
        f"the best rival, on {best} of {len(rows)} data sets."
    )
    head = ["| | " + " | ".join(f"{column} | best rival" for column in columns) + " |", "|---" * 7 + "|"]
    return sentence, [*head, *rows]


def render(measured: dict[str, Any]) -> str:
    """Return the page, from the measurements only."""
    sentence, overview = summary(measured)
    parts = [HEAD.format(verdict=sentence), *overview, ""]
    for (name, size), figures in by_data(measured).items():
        parts.append(f"## {TITLES[name]}, {size}\n")
        for title, columns in (honesty.TABLES | honesty.FURTHER).items():
            if rows := table(figures, columns):
                parts += [f"{title}:\n", *rows, ""]
    cells = measured.values()
    seeds = max(cell["seeds"] for cell in cells)
    settings = sorted(
        {_circumstances(method, each, cell["device"]) for cell in cells for method, each in cell["settings"].items()}
    )
    listed = "\n".join(f"- {each}" for each in settings)
    notes = NOTES.format(settings=listed, seeds=seeds, networks=NETWORKS, all=seeds * NETWORKS, **NAMES)
    return "\n".join([*parts, notes])


def _circumstances(method: str, settings: list[str], device: str) -> str:
    shown = [setting for setting in settings if not setting.startswith(("data.", "method.name", "training.evaluate"))]
    return f"{METHODS[method]}: {', '.join(shown)}, on {device}"


def main() -> None:
    """Measure the missing cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only these, such as mnist-small-pfedbayes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing, and train nothing, after these")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of every N cells, without a page")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--records", type=Path, default=ROOT / "runs" / "uncertainty")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    missing = [source.name for source in available(args.data_dir) if not source.found]
    for name in (name for name in SETS if name in missing):
        print(f"{name} is missing and skipped: `pfedbayes data` says how to get it", flush=True)
    cells = [cell for cell in order(args.rounds, args.seeds, args.data_dir) if cell.name not in missing]
    if args.cells:
        cells = [cell for cell in cells if cell.title in args.cells]
    part, parts = map(int, args.part.split("/"))
    for cell in cells[part - 1 :: parts]:
        path = args.records / f"{cell.title}.json"
        if path.exists() and cell.asked().items() <= json.loads(path.read_text()).items():
            continue
        try:
            if time.monotonic() > deadline:
                raise OutOfTime
            record = measure(cell, args.device, deadline)
        except OutOfTime:
            print(f"{cell.title}: no time is left; run the command again to continue", flush=True)
            break
        write(path, json.dumps(record) + "\n")
        print(f"{cell.title}: {record['seconds']}", flush=True)
    if parts == 1:
        collect(args.records, args.out)


def collect(records: Path, out: Path) -> None:
    """Write OUT.json with its own measurements and those of the records, and the page OUT.md."""
    data = out.with_suffix(".json")
    measured: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {}
    measured |= {path.stem: json.loads(path.read_text()) for path in sorted(records.glob("*.json"))}
    if measured:
        write(data, json.dumps(measured) + "\n")
        write(out.with_suffix(".md"), render(measured))


def write(path: Path, text: str) -> None:
    """Write a file atomically: a stop leaves either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text)
    aside.replace(path)


if __name__ == "__main__":
    main()
