"""The log of a run reduced to the numbers that tables show.

The report and the command line print the same rows, so both take them from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.runs.folder import Run

MODELS = ("personal", "shared")
STYLE = {"personal": 0, "shared": 1}  # the same colour and shape in every chart
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """How a logged number is called, judged and printed; `nominal` is a level to meet rather than to exceed.

    What is not a `score` is neither good nor bad: it has no column in tables of results."""

    label: str
    meaning: str = ""
    larger_is_better: bool = False
    decimals: int = 3
    unit: str = ""
    nominal: float | None = None
    score: bool = True


METRICS = {
    "accuracy": Metric("Accuracy", "share of right answers", larger_is_better=True, decimals=2, unit="%"),
    "nll": Metric("NLL", "mean negative log-likelihood of the truth"),
    "brier": Metric("Brier score", "squared distance between probabilities and truth, 0 to 2"),
    "ece": Metric("ECE", "mean gap between confidence and accuracy, in 15 bins"),
    "rmse": Metric("RMSE", "root of the mean squared error, in the units of the target"),
    "coverage": Metric(
        "Coverage",
        "share of targets inside the predicted central 90 % interval",
        larger_is_better=True,
        decimals=2,
        unit="%",
        nominal=90,
    ),
    "entropy": Metric("Entropy", "all the uncertainty of a prediction", unit="nats", score=False),
    "mutual_information": Metric("Mutual information", "its part from not knowing the model", unit="nats", score=False),
    "deviation": Metric("Predicted deviation", "standard deviation of a predicted target", score=False),
    "model_deviation": Metric("Model’s deviation", "its part from not knowing the model", score=False),
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the sample standard deviation beside it, None with one seed."""

    value: float
    std: float | None = None


@dataclass(frozen=True)
class Row:
    """One model as one estimator sees it: per metric the mean over clients and the worst client."""

    model: str
    estimator: str
    mean: dict[str, Estimate]
    worst: dict[str, Estimate]


def metric(name: str) -> Metric:
    """A metric this module has never heard of still gets a column under its own name."""
    return METRICS.get(name, Metric(name))


def text(name: str, estimate: Estimate) -> str:
    """An estimate of the metric `name` as printed: "97.12 ± 0.08", or "n/a" where there is no number."""
    decimals = metric(name).decimals
    if not math.isfinite(estimate.value):
        return "n/a"
    if estimate.std is None or not math.isfinite(estimate.std):
        return f"{estimate.value:.{decimals}f}"
    return f"{estimate.value:.{decimals}f} ± {estimate.std:.{decimals}f}"


def estimator_title(name: str) -> str:
    """How a prediction was made from a distribution over models, in words."""
    if name.endswith("+prior"):
        return f"{estimator_title(name.removesuffix('+prior'))}, with the client's label prior"
    if name.startswith("mc"):
        return f"{name.removeprefix('mc')} samples averaged"
    titles = {
        "one": "one sample",
        "mean": "mean network",
        "local": "as local training left it",
        "cloud": "cloud model",
        "honest": "adapted on training data only",
    }
    return titles.get(name, name)


def split(run: Run) -> str:
    """The part of the data on which the models were scored: "test" or "validation"."""
    return str(run.config.get("evaluation", {}).get("split", "test"))


def evaluated(run: Run) -> list[dict[str, Any]]:
    """The logged rounds in which a model was scored; none if no client has anything to be scored on."""
    if not any(run.info["test_sizes"]):
        return []
    return [record for record in run.rounds if any(record.get(model) for model in MODELS)]


def final(run: Run) -> dict[str, Any]:
    """The evaluated round whose models are kept: the last one or, with early stopping, the best on validation data."""
    records = evaluated(run)
    kept = (run.summary or {}).get("kept_round")
    return next((record for record in records if record["round"] == kept), records[-1])


def models(run: Run) -> list[str]:
    """The models that the final round has numbers for."""
    return [model for model in MODELS if evaluated(run) and final(run).get(model)]


def estimators(run: Run, model: str) -> list[str]:
    """The estimators of a model, the one that headlines use first."""
    names = list(final(run)[model])
    wanted = run.summary["estimator"] if run.summary else None
    # While there is no summary: averaged samples, if the method samples at all.
    return sorted(names, key=lambda name: (name != wanted, not name.startswith("mc")))


def metric_names(run: Run) -> list[str]:
    """The scores of a run in the order of its log."""
    names: dict[str, None] = {}
    for model in models(run):
        names |= dict.fromkeys(final(run)[model][estimators(run, model)[0]])
    return [name for name in names if metric(name).score]


def headline(run: Run) -> list[Row]:
    """One row per model, at the final round, with the estimator that the run recommends."""
    return [_row(run, model, estimators(run, model)[0]) for model in models(run)]


def every_estimator(run: Run) -> list[Row]:
    """One row per model and estimator, at the final round."""
    return [_row(run, model, estimator) for model in models(run) for estimator in estimators(run, model)]


def comparable(runs: Sequence[Run]) -> bool:
    """Whether all runs were scored on the same data."""
    return all((run.config["data"], split(run)) == (runs[0].config["data"], split(runs[0])) for run in runs)


def leaders(runs: Sequence[Run], model: str) -> dict[str, int]:
    """Per metric, the index of the run with the best mean: among finished ones, and only where they compare."""
    if not comparable(runs):
        return {}
    rows = {
        i: row for i, run in enumerate(runs) if run.summary is not None for row in headline(run) if row.model == model
    }
    best = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row.mean):
        means = {i: row.mean[name].value for i, row in rows.items() if name in row.mean}
        finite = [i for i, mean in means.items() if math.isfinite(mean)]
        if len(finite) > 1 and metric(name).nominal is None:
            choose = max if metric(name).larger_is_better else min
            best[name] = choose(finite, key=means.__getitem__)
    return best


def curve(run: Run, model: str, estimator: str, name: str) -> list[tuple[int, Estimate]]:
    """The mean over clients, round by round."""
    return [
        (record["round"], over_seeds(mean_over_clients(numbers(record[model][estimator][name]), sizes(run, record))))
        for record in evaluated(run)
        if name in (record.get(model) or {}).get(estimator, {})
    ]


def client_curves(run: Run, model: str, name: str) -> list[list[tuple[int, float]]]:
    """A metric of every client, round by round, by the headline estimator and as the mean over seeds; none if it was
    not logged."""
    estimator = estimators(run, model)[0]
    logged = [
        (record["round"], numbers(record[model][estimator][name]).mean(axis=0))
        for record in evaluated(run)
        if name in (record.get(model) or {}).get(estimator, {})
    ]
    clients = range(len(run.info["clients"]) if logged else 0)
    return [[(number, float(values[client])) for number, values in logged] for client in clients]


@dataclass(frozen=True)
class WindowRow:
    """A model's first metric over the rounds of training.evaluate_window.

    The best round is picked on the very data it is scored on: it is what papers print, not an unbiased estimate.
    """

    model: str
    estimator: str
    best: Estimate
    mean: Estimate
    last: Estimate


def window(run: Run) -> list[WindowRow]:
    """One row per model and estimator; none if the run has no window or has not come to it."""
    first, last = run.config["training"].get("evaluate_window") or (1, 0)
    records = [record for record in evaluated(run) if first <= record["round"] <= last]
    rows = []
    for model in models(run) if records else []:
        name = metric_names(run)[0]
        best = np.max if metric(name).larger_is_better else np.min
        for estimator in estimators(run, model):
            by_round = by_seed(run, records, model, estimator, name)
            reduced = (best(by_round, axis=0), by_round.mean(axis=0), by_round[-1])
            rows.append(WindowRow(model, estimator, *(over_seeds(figures) for figures in reduced)))
    return rows


def by_seed(run: Run, records: Sequence[dict[str, Any]], model: str, estimator: str, name: str) -> Floats:
    """The mean over clients in every round that the estimator was scored in: (rounds, seeds)."""
    scored = [(record[model][estimator][name], sizes(run, record)) for record in records if estimator in record[model]]
    return np.stack([mean_over_clients(numbers(logged), weights) for logged, weights in scored])


def per_client(run: Run, model: str, name: str) -> list[Estimate]:
    """A metric of every client at the final round, by the headline estimator."""
    values = numbers(final(run)[model][estimators(run, model)[0]][name])
    return [over_seeds(values[:, client]) for client in range(values.shape[1])]


def mean_over_clients(values: Floats, sizes: Floats) -> Floats:
    """Mean of values (seeds, clients) weighted by test size: every test example counts the same.

    A client without test examples has no number and no weight. Any other missing number is a failure that the
    mean has to show, so it becomes NaN rather than being left out.
    """
    tested = sizes > 0
    with np.errstate(invalid="ignore", over="ignore"):
        return np.average(values[:, tested], axis=1, weights=sizes[tested])


def worst_client(name: str, values: Floats, sizes: Floats) -> Floats:
    """The least good number among the tested clients of every seed, from values (seeds, clients)."""
    worst = np.min if metric(name).larger_is_better else np.max
    return np.asarray(worst(values[:, sizes > 0], axis=1))


def over_seeds(values: Floats) -> Estimate:
    """Mean and sample standard deviation of one number per seed."""
    with np.errstate(invalid="ignore", over="ignore"):
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Estimate(float(np.mean(values)), std)


def pooled_ece(bins: dict[str, Any]) -> float:
    """Expected calibration error of one reliability diagram: the mean gap between confidence and accuracy."""
    return float(np.abs(_gaps(bins)).sum())


def overconfidence(bins: dict[str, Any]) -> float:
    """Mean confidence minus accuracy over one reliability diagram: positive if the model is too sure."""
    return float(_gaps(bins).sum())


def _gaps(bins: dict[str, Any]) -> Floats:
    """Confidence minus accuracy per bin, weighted by the share of the bin; empty bins are left out."""
    confidence, accuracy, count = (numbers(bins[key]) for key in ("confidence", "accuracy", "count"))
    filled = count > 0
    share = count[filled] / count[filled].sum() if filled.any() else count[filled]
    return share * (confidence[filled] - accuracy[filled])


def _row(run: Run, model: str, estimator: str) -> Row:
    record = final(run)
    log, weights = record[model][estimator], sizes(run, record)
    values = {name: numbers(logged) for name, logged in log.items() if metric(name).score}
    return Row(
        model=model,
        estimator=estimator,
        mean={name: over_seeds(mean_over_clients(array, weights)) for name, array in values.items()},
        worst={name: over_seeds(worst_client(name, array, weights)) for name, array in values.items()},
    )


def sizes(run: Run, record: dict[str, Any]) -> Floats:
    """Test examples of the clients; none of those whose node was away when the record was made: they have no weight."""
    counts = numbers(run.info["test_sizes"])
    counts[record.get("absent", [])] = 0
    return counts


def numbers(logged: Any) -> Floats:
    """Logged numbers as an array; a null of the log becomes NaN."""
    return np.array(logged, dtype=np.float64)
