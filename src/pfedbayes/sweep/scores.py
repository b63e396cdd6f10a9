"""The scores of a finished run as records: one per seed and variant.

    method, preset, dataset, size, split, variant, seed
    personal, shared   null, or by estimator (one, mc10, mean): accuracies in percent, namely window_best (the best
                       round of the window, picked on the data it is scored on), window_mean and last; nll and ece of
                       the last round; evaluations, the number of rounds scored in the window
    window             [first, last] round of the window; older records lack it
    device, seconds    the processor, and this seed's share of the run time
    precision          of matrix products: "full", "tf32" or "bf16"; older records lack it
    commit, source     of the code, and a digest of its files; older records have no source
    cell, varied       the name of the run in its sweep, and the settings that vary inside its row
    settings, curve    the settings that are not defaults, and the accuracy of each model by round; in one record per
                       seed
    diverged           the reason why there are no scores, if there are none

Variants: "default" is the method as it is; "label-prior" adds the client's label frequencies; "cloud" and "local" are
further models of a method; "leaky" is adapted on test data.

Older records call window_best best_700_800 and window_mean mean_700_800; they are read under the new names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pfedbayes.evaluation.estimators import ENSEMBLE, MODELS
from pfedbayes.files.checksums import check_json
from pfedbayes.files.reading import NUMBER, Kinds, parse_json, read_bytes, reading, require_keys
from pfedbayes.methods import METHODS
from pfedbayes.nets.import_path import is_import_path
from pfedbayes.report import tables
from pfedbayes.report.tables import Floats
from pfedbayes.runs.folder import Run
from pfedbayes.runs.resume import recorded_plan

Record = dict[str, Any]
DEFAULT = "default"
PRIOR = "+prior"
DIGITS = 4
KEYS: Kinds = {
    "method": str, "preset": str, "dataset": str, "size": str, "split": str, "variant": str, "seed": int,
    "personal": dict | None, "shared": dict | None, "device": str, "seconds": NUMBER, "commit": str | None,
    "cell": str, "varied": dict,
}  # fmt: skip
SCORES: Kinds = {
    **dict.fromkeys(("window_best", "window_mean", "last", "nll", "ece"), NUMBER | None),
    "evaluations": int,
}
OLD_NAMES = {"best_700_800": "window_best", "mean_700_800": "window_mean"}


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, older ones under the names of today."""
    with reading(path, "give a file that pfedbayes sweep has written, or none", "does not hold the results of a sweep"):
        text = read_bytes(path)
        content = parse_json(text)
        if isinstance(content, dict) and check_json(text):
            content = content.get("records")  # earlier versions wrote the list alone
        _check(content)
    found: list[Record] = content
    return found


def _check(content: Any) -> None:
    if not isinstance(content, list):
        raise ValueError("it is no list")
    for number, record in enumerate(content, 1):
        called = f"record {number}"
        require_row(record, KEYS, called)
        _rename(record)
        if record["variant"] == DEFAULT:
            require_keys(record, {"settings": dict}, called)
        for model in MODELS:
            for estimator, scored in (record[model] or {}).items():
                require_keys(scored, SCORES, f"{model} {estimator} of {called}")


def _rename(record: Record) -> None:
    for model in MODELS:
        for estimator, scored in (record[model] or {}).items():
            if isinstance(scored, dict):
                record[model][estimator] = {OLD_NAMES.get(name, name): value for name, value in scored.items()}


def require_row(row: Any, kinds: Kinds, called: str) -> None:
    """Raise ValueError unless the row is an object with these keys, of a known method."""
    require_keys(row, kinds, called)
    if row["method"] not in METHODS and not is_import_path(row["method"]):
        raise ValueError(f"{called} is of an unknown method {row['method']!r}")


def records(names: dict[str, Any], settings: dict[str, Any], run: Run) -> list[Record]:
    """Return the records of a finished run. names: preset, …, variant, cell and varied."""
    own = names["variant"]
    by_variant: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for model in tables.models(run):
        estimators = tables.estimators(run, model)
        for name in estimators:
            variant, way = _variant(name, model, own, estimators)
            scored = _scores(run, model, name)
            by_variant.setdefault(variant, {}).setdefault(model, {})[way] = scored
    common = names | _origin(run) | {"window": list(_window(run))}
    found = []
    for s, seed in enumerate(run.info.seeds):
        for variant, of_models in by_variant.items():
            models: dict[str, Any] = {
                model: {way: each[s] for way, each in sorted(of_models[model].items())} if model in of_models else None
                for model in MODELS
            }
            record = common | {"variant": variant, "seed": seed, **models}
            if variant == own:
                record |= {"settings": settings, "curve": _curve(run, s, own)}
            found.append(record)
    return found


def diverged(names: dict[str, Any], settings: dict[str, Any], run: Run, reason: str) -> list[Record]:
    """Return the records of a run that has diverged."""
    common = names | _origin(run) | {"personal": None, "shared": None, "diverged": reason}
    return [common | {"seed": seed, "settings": settings} for seed in run.info.seeds]


def headline(scored: dict[str, Any]) -> dict[str, Any]:
    """Return the scores by the headline estimator: the average of samples if the method draws any, else the mean."""
    average = next((name for name in scored if name.startswith(("mc", ENSEMBLE))), "mean")
    found: dict[str, Any] = scored[average]
    return found


def overall(found: Sequence[Record]) -> float:
    """Return the accuracy over the window, averaged over models, seeds and sizes; NaN if a run has diverged."""
    if not found or not all(each["personal"] or each["shared"] for each in found):
        return math.nan
    accuracies = [headline(each[model])["window_mean"] for each in found for model in MODELS if each[model]]
    return math.nan if None in accuracies else fmean(accuracies)


def seconds(found: Sequence[Record]) -> float:
    """Return the run time behind these records. Records of one seed of a cell are of one run."""
    by_run: dict[tuple[str, int], float] = {(each["cell"], each["seed"]): each["seconds"] for each in found}
    return sum(by_run.values())


def _origin(run: Run) -> dict[str, Any]:
    """Return where a seed was run, for how long, and by which code."""
    info = run.info
    took = run.summary.seconds if run.summary else (run.rounds[-1].seconds if run.rounds else 0.0)
    return {
        "device": info.hardware.processor,
        "precision": recorded_plan(run).precision,
        "seconds": round(took / len(info.seeds), 2),
        "commit": info.commit,
        "source": info.source,
    }


def _window(run: Run) -> tuple[int, int]:
    """Return the first and the last round of the window: the last round alone if the run has no window."""
    last = run.experiment.training.rounds
    return run.experiment.training.evaluate_window or (last, last)


def _variant(name: str, model: str, own: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the variant and the estimator of a column of the log."""
    base = name.removesuffix(PRIOR)
    is_way = base in ("one", "mean") or base.startswith("mc")
    way, view = (base, "") if is_way else ("mean", base)
    if model == "personal" and "honest" in names:
        # The method's own scores are of a model that has seen the test data.
        view = "" if view == "honest" else "leaky"
    words = [own if own != DEFAULT else "", view, "label-prior" if name.endswith(PRIOR) else ""]
    return "+".join(filter(None, words)) or DEFAULT, way


def _scores(run: Run, model: str, estimator: str) -> list[dict[str, Any]]:
    """Return the scores of every seed."""
    first, last = _window(run)
    every = tables.evaluated(run)
    window = [record for record in every if first <= record.round <= last]
    accuracy = tables.by_seed(run, window or every[-1:], model, estimator, "accuracy")
    final = {name: tables.by_seed(run, every[-1:], model, estimator, name)[0] for name in ("accuracy", "nll", "ece")}
    reduced = {
        "window_best": accuracy.max(axis=0),
        "last": final.pop("accuracy"),
        "window_mean": accuracy.mean(axis=0),
        **final,
    }
    return [
        {name: _number(values[s]) for name, values in reduced.items()} | {"evaluations": len(accuracy)}
        for s in range(accuracy.shape[1])
    ]


def _curve(run: Run, s: int, own: str) -> dict[str, Any]:
    """Return the accuracy of each model by round, by the headline estimator, without the many rounds of the window."""
    every = run.experiment.training.evaluate_every
    kept = [record for record in tables.evaluated(run) if record.round % every == 0 or record is run.rounds[-1]]
    curves = {}
    for model in tables.models(run):
        names = tables.estimators(run, model)  # the headline first
        name = next(name for name in names if _variant(name, model, own, names)[0] == own)
        accuracies: Floats = tables.by_seed(run, kept, model, name, "accuracy")[:, s]
        numbers = [record.round for record in kept if name in record.scores(model)]
        curves[model] = [[number, _number(value, 2)] for number, value in zip(numbers, accuracies, strict=True)]
    return curves


def _number(value: np.float64, digits: int = DIGITS) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
