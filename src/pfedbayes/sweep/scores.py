"""The scores of a finished run as records: one for each seed and each way of looking at the models.

    method, preset, dataset, size, split, variant, seed
    personal, shared   null, or for each estimator (one, mc10, mean) accuracies in percent: best_700_800, the best of
                       the last eighth of the rounds (picked on the data it is scored on), mean_700_800, their mean,
                       and last; nll and ece at the last round; evaluations, the rounds scored in the last eighth
    device, seconds    where it ran, and this seed's share of the time of the run
    precision          of matrix products: "full", "tf32" or "bf16"; older records do not have it
    commit, source     of the code, and a digest of its files; older records have no source
    cell, varied       the name of the run in its sweep, and the settings by which it differs from others of its row
    settings, curve    its settings as far as they are not the defaults, and the accuracy of each model over the rounds:
                       in one record for each seed
    diverged           why there are no scores, if there are none

Variants: "default" is the method as it is; "label-prior" with the client's label frequencies added; "cloud", "local"
are further models of a method; "leaky" is adapted on test data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pfedbayes.methods import METHODS
from pfedbayes.report import tables
from pfedbayes.report.tables import Floats
from pfedbayes.runs.folder import Run
from pfedbayes.runs.reading import NUMBER, Kinds, read_json, require_keys

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
    **dict.fromkeys(("best_700_800", "mean_700_800", "last", "nll", "ece"), NUMBER | None),
    "evaluations": int,
}


def read(path: Path) -> list[Record]:
    """The records of a file."""
    remedy = "give a file that pfedbayes sweep has written, or none"
    found: list[Record] = read_json(path, "the results of a sweep", _check, remedy)
    return found


def _check(content: Any) -> None:
    if not isinstance(content, list):
        raise ValueError("it is no list")
    for number, record in enumerate(content, 1):
        called = f"record {number}"
        require_row(record, KEYS, called)
        if record["variant"] == DEFAULT:
            require_keys(record, {"settings": dict}, called)
        for model in tables.MODELS:
            for estimator, scored in (record[model] or {}).items():
                require_keys(scored, SCORES, f"{model} {estimator} of {called}")


def require_row(row: Any, kinds: Kinds, called: str) -> None:
    """Refuse what is no object with these keys, or is of a method that we do not have."""
    require_keys(row, kinds, called)
    if row["method"] not in METHODS:
        raise ValueError(f"{called} is of an unknown method {row['method']!r}")


def records(names: dict[str, Any], settings: dict[str, Any], run: Run) -> list[Record]:
    """The records of a finished run, which is called by these names: preset, ..., variant, cell, varied."""
    own = names["variant"]
    by_variant: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for model in tables.models(run):
        estimators = tables.estimators(run, model)
        for name in estimators:
            variant, way = _variant(name, model, own, estimators)
            scored = _scores(run, model, name)
            by_variant.setdefault(variant, {}).setdefault(model, {})[way] = scored
    common = names | _origin(run)
    found = []
    for s, seed in enumerate(run.info["seeds"]):
        for variant, of_models in by_variant.items():
            models = {
                model: {way: each[s] for way, each in sorted(of_models[model].items())} if model in of_models else None
                for model in tables.MODELS
            }
            record = common | {"variant": variant, "seed": seed, **models}
            if variant == own:
                record |= {"settings": settings, "curve": _curve(run, s, own)}
            found.append(record)
    return found


def diverged(names: dict[str, Any], settings: dict[str, Any], run: Run, reason: str) -> list[Record]:
    """The records of a run that has ended in numbers that are not finite."""
    common = names | _origin(run) | {"personal": None, "shared": None, "diverged": reason}
    return [common | {"seed": seed, "settings": settings} for seed in run.info["seeds"]]


def headline(scored: dict[str, Any]) -> dict[str, Any]:
    """Of the scores of a model by estimator those that are the method's result: averaged samples, if it samples."""
    average = next((name for name in scored if name.startswith("mc")), "mean")
    found: dict[str, Any] = scored[average]
    return found


def overall(found: Sequence[Record]) -> float:
    """One number for records of one setting: the accuracy over the last eighth of the rounds, the mean of models, seeds
    and sizes. Not a number if one of them has diverged."""
    if not found or not all(each["personal"] or each["shared"] for each in found):
        return math.nan
    accuracies = [headline(each[model])["mean_700_800"] for each in found for model in tables.MODELS if each[model]]
    return math.nan if None in accuracies else fmean(accuracies)


def seconds(found: Sequence[Record]) -> float:
    """The time that the runs behind these records took; records of one seed are of one run."""
    by_run: dict[tuple[str, int], float] = {(each["cell"], each["seed"]): each["seconds"] for each in found}
    return sum(by_run.values())


def _origin(run: Run) -> dict[str, Any]:
    """Where a seed was run, how long, and by which code."""
    hardware, seeds = run.info["hardware"], run.info["seeds"]
    took = run.summary["seconds"] if run.summary else (run.rounds[-1]["seconds"] if run.rounds else 0.0)
    return {
        "device": hardware["gpu"] if hardware["device"] == "cuda" else hardware["cpu"],
        "precision": run.info["plan"]["precision"],
        "seconds": round(took / len(seeds), 2),
        "commit": run.info["commit"],
        "source": run.info.get("source"),
    }


def _variant(name: str, model: str, own: str, names: Sequence[str]) -> tuple[str, str]:
    """The variant and the estimator that a column of the log stands for."""
    base = name.removesuffix(PRIOR)
    is_way = base in ("one", "mean") or base.startswith("mc")
    way, view = (base, "") if is_way else ("mean", base)
    if model == "personal" and "honest" in names:
        # The method's own figures are those of a model that has seen the test data.
        view = "" if view == "honest" else "leaky"
    words = [own if own != DEFAULT else "", view, "label-prior" if name.endswith(PRIOR) else ""]
    return "+".join(filter(None, words)) or DEFAULT, way


def _scores(run: Run, model: str, estimator: str) -> list[dict[str, Any]]:
    """The figures of every seed."""
    first, last = run.config["training"]["evaluate_window"]
    every = tables.evaluated(run)
    window = [record for record in every if first <= record["round"] <= last]
    accuracy = tables.by_seed(run, window or every[-1:], model, estimator, "accuracy")
    final = {name: tables.by_seed(run, every[-1:], model, estimator, name)[0] for name in ("accuracy", "nll", "ece")}
    reduced = {
        "best_700_800": accuracy.max(axis=0),
        "last": final.pop("accuracy"),
        "mean_700_800": accuracy.mean(axis=0),
        **final,
    }
    return [
        {name: _number(values[s]) for name, values in reduced.items()} | {"evaluations": len(accuracy)}
        for s in range(accuracy.shape[1])
    ]


def _curve(run: Run, s: int, own: str) -> dict[str, Any]:
    """Accuracy by round for each model, by the headline estimator, without the many rounds of the window."""
    every = run.config["training"]["evaluate_every"]
    kept = [r for r in tables.evaluated(run) if r["round"] % every == 0 or r["round"] == run.rounds[-1]["round"]]
    curves = {}
    for model in tables.models(run):
        names = tables.estimators(run, model)  # the headline first
        name = next(name for name in names if _variant(name, model, own, names)[0] == own)
        accuracies: Floats = tables.by_seed(run, kept, model, name, "accuracy")[:, s]
        numbers = [r["round"] for r in kept if name in r[model]]
        curves[model] = [[number, _number(value, 2)] for number, value in zip(numbers, accuracies, strict=True)]
    return curves


def _number(value: np.float64, digits: int = DIGITS) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
