"""Compare the estimators of `pfedbayes.sklearn` with models of scikit-learn and statsmodels on grouped tables.

    python -m benchmarks.grouped examples/heart.csv:disease:hospital DIR/school.csv:score:school

prints the tables of docs/grouped.md. Splits and rivals are those of `benchmarks.silos`: a fifth of the rows of each
group are test rows, and all models are fitted to the other rows. `--out` keeps the scores of each split, so that an
interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silos import rivals
from benchmarks.silos.encoding import encode
from benchmarks.silos.scores import Labels, NotFitted, Numbers, Predictions, score
from benchmarks.silos.tables import Split, Task, parse_table, split_table
from pfedbayes.files.writing import write_file
from pfedbayes.sklearn import PersonalizedClassifier, PersonalizedRegressor

OURS = {"classification": PersonalizedClassifier.__name__, "regression": PersonalizedRegressor.__name__}
LINEAR = {"classification": "logistic regression", "regression": "ridge"}
SHOWN = {"classification": ("nll", "accuracy"), "regression": ("nll", "rmse")}
TITLES = {"nll": "NLL", "accuracy": "accuracy in %", "rmse": "RMSE"}
Records = dict[str, dict[str, Any]]  # by table: its task, and by model the scores of each split


def names_of(task: Task) -> dict[str, str]:
    """Return what each model is called on the page."""
    linear = LINEAR[task]
    return {
        OURS[task]: f"`{OURS[task]}`",
        f"local {linear}": f"{linear}, one per group",
        f"pooled {linear}": f"{linear}, with the group as a column",
        rivals.BOOSTING: "gradient boosting, with the group as a column",
        "mixed intercepts": "mixed-effects model (statsmodels), random intercepts",
    }


def ours(split: Split) -> Predictions:
    """Fit the estimator with its defaults and predict the test rows."""
    frame, test = split.frame, split.test
    x, y, groups = frame.drop(columns=[split.target, split.client]), frame[split.target], frame[split.client]
    client = encode(split).client[test]
    if split.task == "regression":
        model = PersonalizedRegressor(device="cpu").fit(x[~test], y[~test], groups[~test])
        found = model.predict_details(x[test], groups[test])
        mean, deviation, targets = (each.to_numpy(float) for each in (found["mean"], found["deviation"], y[test]))
        return Numbers(mean, deviation, targets, client)
    model = PersonalizedClassifier(device="cpu").fit(x[~test], y[~test], groups[~test])
    places = np.searchsorted(model.classes_, y[test])
    return Labels(model.predict_proba(x[test], groups[test]), places, client)


def rival(name: str, split: Split) -> Predictions:
    """Fit a rival and predict the test rows."""
    found = rivals.find(name, split.task)
    assert found is not None
    return rivals.predict(found, encode(split))


def compare(tables: list[str], splits: int, keep: Callable[[Records], None], records: Records) -> None:
    """Fit every model to every split that has no record yet; call `keep` after each."""
    for text in tables:
        table = parse_table(text)
        for seed in range(splits):
            split = split_table(table, seed)
            own = records.setdefault(table.name, {"task": split.task, "rows": len(split.parts), "models": {}})
            own["groups"] = len(split.clients)
            for name in names_of(split.task):
                done = own["models"].setdefault(name, [])
                if len(done) > seed:
                    continue
                start = time.monotonic()
                try:
                    predictions = ours(split) if name == OURS[split.task] else rival(name, split)
                    scores: dict[str, Any] = {
                        key: value for key, value in score(predictions)[0].items() if key in SHOWN[split.task]
                    }
                except NotFitted as error:
                    scores = {"failed": str(error)}
                done.append({"seconds": time.monotonic() - start} | scores)
                keep(records)


def tables_of(records: Records) -> str:
    """Return the records as tables in Markdown."""
    parts = []
    for name, own in records.items():
        shown = SHOWN[own["task"]]
        parts.append(
            f"| {name}: {own['groups']} groups, {own['rows']:,} rows | {' | '.join(TITLES[key] for key in shown)} |"
        )
        parts.append("|---" * (1 + len(shown)) + "|")
        for model, title in names_of(own["task"]).items():
            runs = [one for one in own["models"][model] if "failed" not in one]
            cells = [_cell([one[key] for one in runs], key) for key in shown]
            parts.append(f"| {title} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(values: list[float], metric: str) -> str:
    """Return mean ± standard deviation over the splits."""
    if not values:
        return "–"
    places = {"nll": 3, "accuracy": 1, "rmse": 3}[metric]
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{spread}"


def main() -> None:
    """Compare, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tables", nargs="*", help="FILE:TARGET:GROUP")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file that keeps the scores")
    options = parser.parse_args()
    records: Records = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}

    def keep(found: Records) -> None:
        if options.out:
            write_file(options.out, json.dumps(found, indent=1) + "\n")

    compare(options.tables, options.splits, keep, records)
    print(tables_of(records))


if __name__ == "__main__":
    main()
