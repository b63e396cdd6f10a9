"""The log of a run reduced to the numbers that the report and the command line show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.evaluation.estimators import ENSEMBLE, MODELS
from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import Reliability, RoundRecord

STYLE = {"personal": 0, "shared": 1}  # the same colour and shape in every chart
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """How a logged number is named, judged and printed."""

    label: str
    meaning: str = ""
    larger_is_better: bool = False
    decimals: int = 3
    unit: str = ""
    nominal: float | None = None
    """The level to meet, for a metric that is neither to be maximised nor minimised."""
    undefined: bool = False
    """Whether some clients may have none: means leave these out, and tables show a dash."""
    score: bool = True
    """False for a number that is neither good nor bad: tables of results leave it out."""


METRICS = {
    "accuracy": Metric("Accuracy", "share of correct predictions", larger_is_better=True, decimals=2, unit="%"),
    "nll": Metric("NLL", "mean negative log-likelihood"),
    "brier": Metric("Brier score", "squared distance between probabilities and true label, from 0 to 2"),
    "ece": Metric("ECE", "expected calibration error: mean gap between confidence and accuracy, in 15 bins"),
    "balanced_accuracy": Metric(
        "Balanced accuracy",
        "mean over the classes of the share of correct predictions",
        larger_is_better=True,
        decimals=2,
        unit="%",
    ),
    "mae": Metric("MAE", "mean distance between the predicted and the true class, in steps of their order"),
    "auroc": Metric(
        "AUROC",
        "probability that a row of a class gets a higher probability of it than another row; of more than two "
        "classes, the mean over classes. A client whose rows have one class only has none",
        larger_is_better=True,
        undefined=True,
    ),
    "auprc": Metric(
        "AUPRC",
        "area under the precision-recall curve of the second class; of more than two classes, the mean over classes",
        larger_is_better=True,
        undefined=True,
    ),
    "rmse": Metric("RMSE", "root mean squared error, in units of the target"),
    "crps": Metric(
        "CRPS",
        "continuous ranked probability score: mean distance of predictions from the target, minus half of "
        "their mean distance from each other, in units of the target",
    ),
    "coverage": Metric(
        "Coverage",
        "share of targets inside the central 90 % prediction interval",
        larger_is_better=True,
        decimals=2,
        unit="%",
        nominal=90,
    ),
    "c_index": Metric(
        "C-index",
        "probability that of two rows whose order is known, the one with the higher risk has the event first. A client "
        "whose rows have no event has none",
        larger_is_better=True,
        undefined=True,
    ),
    "ibs": Metric(
        "Integrated Brier score",
        "squared distance between the probability to survive and what happened, averaged over the time in which the "
        "training data have events; censoring is weighted out",
        undefined=True,
    ),
    "entropy": Metric("Entropy", "total uncertainty of a prediction", unit="nats", score=False),
    "mutual_information": Metric(
        "Mutual information", "model uncertainty, a part of the entropy", unit="nats", score=False
    ),
    "deviation": Metric("Predicted deviation", "standard deviation of a prediction", score=False),
    "model_deviation": Metric(
        "Model deviation", "the part of it that is due to uncertainty about the model", score=False
    ),
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    value: float
    std: float | None = None
    """Sample standard deviation over seeds; None with one seed."""


@dataclass(frozen=True)
class Row:
    """The scores of one model by one estimator, by metric."""

    model: str
    estimator: str
    mean: dict[str, Estimate]
    """Mean over clients."""
    worst: dict[str, Estimate]
    """The worst client."""


def metric(name: str) -> Metric:
    """Return how to show a metric; an unknown one is shown under its own name."""
    return METRICS.get(name, Metric(name))


def format_estimate(name: str, estimate: Estimate) -> str:
    """Format a mean and its standard deviation with the decimals of the metric, "n/a" or a dash if it is not finite."""
    decimals = metric(name).decimals
    if not math.isfinite(estimate.value):
        return "–" if metric(name).undefined else "n/a"
    if estimate.std is None or not math.isfinite(estimate.std):
        return f"{estimate.value:.{decimals}f}"
    return f"{estimate.value:.{decimals}f} ± {estimate.std:.{decimals}f}"


def estimator_title(name: str) -> str:
    """Describe an estimator: how a distribution over models becomes a prediction."""
    if name.endswith("+prior"):
        return f"{estimator_title(name.removesuffix('+prior'))}, with the client's label prior"
    if name.startswith("mc"):
        return f"average of {name.removeprefix('mc')} samples"
    titles = {
        "one": "one sample",
        "mean": "mean network",
        ENSEMBLE: "average of all seeds",
        "local": "as local training left it",
        "cloud": "cloud model",
        "honest": "adapted on training data only",
    }
    return titles.get(name, name)


def evaluated(run: Run) -> list[RoundRecord]:
    """Return the logged rounds in which a model was scored; none if no client has data to be scored on."""
    if not any(run.info.test_sizes):
        return []
    return [record for record in run.rounds if record.personal or record.shared]


def final(run: Run) -> RoundRecord:
    """Return the evaluated round whose models are kept: the last one or, with early stopping, the best one."""
    records = evaluated(run)
    kept = run.summary.kept_round if run.summary else None
    return next((record for record in records if record.round == kept), records[-1])


def models(run: Run) -> list[str]:
    """Return the models that are scored in the final round."""
    return [model for model in MODELS if evaluated(run) and final(run).scores(model)]


def estimators(run: Run, model: str) -> list[str]:
    """Return the estimators of a model, the headline estimator first."""
    wanted = run.summary.estimator if run.summary else None
    # Without a summary, the average of samples comes first, if the method draws samples.
    return sorted(final(run).scores(model), key=lambda name: (name != wanted, not name.startswith(("mc", ENSEMBLE))))


def metric_names(run: Run) -> list[str]:
    """Return the scores of a run in the order of its log."""
    names: dict[str, None] = {}
    for model in models(run):
        names |= dict.fromkeys(final(run).scores(model)[estimators(run, model)[0]])
    return [name for name in names if metric(name).score]


def headline(run: Run) -> list[Row]:
    """Return one row per model: the final round, by the headline estimator."""
    return [_row(run, model, estimators(run, model)[0]) for model in models(run)]


def pooled(run: Run, model: str) -> dict[str, Estimate]:
    """Return the scores of all clients' rows together by metric; empty for metrics that mean the same per client."""
    scores = run.summary.pooled.get(model, {}) if run.summary else {}
    return {name: Estimate(math.nan if value is None else value) for name, value in scores.items()}


def every_estimator(run: Run) -> list[Row]:
    """Return one row per model and estimator: the final round."""
    return [_row(run, model, estimator) for model in models(run) for estimator in estimators(run, model)]


def data_title(run: Run) -> str:
    """Return a name for the data of a run."""
    if run.info.federation is not None:
        return f"the data of {len(run.info.clients)} nodes"
    return "your own data" if run.info.digest is None else run.experiment.data.title


def comparable(runs: Sequence[Run]) -> bool:
    """Return whether all runs were scored on the same data."""
    scored_on = [(data_title(run), run.experiment.data, run.experiment.evaluation.split) for run in runs]
    return all(each == scored_on[0] for each in scored_on)


def leaders(runs: Sequence[Run], model: str) -> dict[str, int]:
    """Return by metric the index of the finished run with the best mean; empty if the runs are not comparable."""
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
    """Return the mean over clients by round."""
    return [
        (record.round, over_seeds(mean_over_clients(numbers(logged), sizes(run, record), metric(name).undefined)))
        for record in evaluated(run)
        if (logged := record.scores(model).get(estimator, {}).get(name)) is not None
    ]


def client_curves(run: Run, model: str, name: str) -> list[list[tuple[int, float]]]:
    """Return a metric of every client by round: headline estimator, mean over seeds; empty if it was not logged."""
    estimator = estimators(run, model)[0]
    by_round = [
        (record.round, numbers(logged).mean(axis=0))
        for record in evaluated(run)
        if (logged := record.scores(model).get(estimator, {}).get(name)) is not None
    ]
    clients = range(len(run.info.clients) if by_round else 0)
    return [[(number, float(values[client])) for number, values in by_round] for client in clients]


@dataclass(frozen=True)
class WindowRow:
    """A model's first metric over the rounds of training.evaluate_window."""

    model: str
    estimator: str
    best: Estimate
    """The best round, picked on the data it is scored on: what papers print, not an unbiased estimate."""
    mean: Estimate
    last: Estimate


def window(run: Run) -> list[WindowRow]:
    """Return one row per model and estimator; none if the run has no window or has not reached it."""
    first, last = run.experiment.training.evaluate_window or (1, 0)
    records = [record for record in evaluated(run) if first <= record.round <= last]
    rows = []
    for model in models(run) if records else []:
        name = metric_names(run)[0]
        best = np.max if metric(name).larger_is_better else np.min
        for estimator in estimators(run, model):
            by_round = by_seed(run, records, model, estimator, name)
            reduced = (best(by_round, axis=0), by_round.mean(axis=0), by_round[-1])
            rows.append(WindowRow(model, estimator, *(over_seeds(figures) for figures in reduced)))
    return rows


def by_seed(run: Run, records: Sequence[RoundRecord], model: str, estimator: str, name: str) -> Floats:
    """Return the mean over clients in every round in which the estimator was scored: (rounds, seeds)."""
    scored = [(record.scores(model), sizes(run, record)) for record in records]
    return np.stack(
        [
            mean_over_clients(numbers(scores[estimator][name]), weights, metric(name).undefined)
            for scores, weights in scored
            if estimator in scores
        ]
    )


def per_client(run: Run, model: str, name: str) -> list[Estimate]:
    """Return a metric of every client in the final round, by the headline estimator."""
    values = numbers(final(run).scores(model)[estimators(run, model)[0]][name])
    return [over_seeds(values[:, client]) for client in range(values.shape[1])]


def mean_over_clients(values: Floats, sizes: Floats, undefined: bool = False) -> Floats:
    """Average values (seeds, clients) with weights `sizes`, so that every example counts the same.

    A client without examples has no weight. Any other missing number makes the mean NaN, so that the failure shows.
    undefined: leave missing numbers out instead, since the metric is not defined for some clients.
    """
    tested = sizes > 0
    if undefined:
        known = np.isfinite(values) & tested
        with np.errstate(invalid="ignore"):
            return np.asarray((np.where(known, values, 0.0) * sizes).sum(1) / (known * sizes).sum(1))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.average(values[:, tested], axis=1, weights=sizes[tested])


def worst_client(name: str, values: Floats, sizes: Floats) -> Floats:
    """Return the worst value of each seed among the clients with examples, from values (seeds, clients)."""
    values = values[:, sizes > 0]
    if metric(name).undefined:  # clients without the metric are not the worst
        known = np.isfinite(values)
        values = np.where(known, values, np.inf if metric(name).larger_is_better else -np.inf)
        values[~known.any(axis=1)] = np.nan
    worst = np.min if metric(name).larger_is_better else np.max
    return np.asarray(worst(values, axis=1))


def over_seeds(values: Floats) -> Estimate:
    """Return the mean and the sample standard deviation of one number per seed."""
    with np.errstate(invalid="ignore", over="ignore"):
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Estimate(float(np.mean(values)), std)


def pooled_ece(bins: Reliability) -> float:
    """Return the expected calibration error of a reliability diagram."""
    return float(np.abs(_gaps(bins)).sum())


def ece_by_chance(bins: Reliability) -> float:
    """Return the 95 % quantile of the error that a calibrated model shows by chance (normal approximation)."""
    confidence, count = (numbers(each)[numbers(bins.count) > 0] for each in (bins.confidence, bins.count))
    variance = count * confidence * (1 - confidence)
    # The gap of a bin is half-normal: its mean is sqrt(2 / pi) and its variance 1 - 2 / pi, in standard deviations.
    mean = math.sqrt(2 / math.pi) * np.sqrt(variance).sum()
    deviation = math.sqrt((1 - 2 / math.pi) * variance.sum())
    return float((mean + 1.645 * deviation) / count.sum()) if len(count) else 0.0


def overconfidence(bins: Reliability) -> float:
    """Return mean confidence minus accuracy of a reliability diagram: positive for an overconfident model."""
    return float(_gaps(bins).sum())


def _gaps(bins: Reliability) -> Floats:
    """Return confidence minus accuracy of each filled bin, times the share of the bin."""
    confidence, accuracy, count = numbers(bins.confidence), numbers(bins.accuracy), numbers(bins.count)
    filled = count > 0
    share = count[filled] / count[filled].sum() if filled.any() else count[filled]
    return share * (confidence[filled] - accuracy[filled])


def gated(run: Run) -> Row | None:
    """Return the scores of the gated predictions; None if the run has none."""
    log = run.summary.gated if run.summary and evaluated(run) else {}
    return _row_of("gated", str(run.summary and run.summary.estimator), log, sizes(run, final(run))) if log else None


def _row(run: Run, model: str, estimator: str) -> Row:
    record = final(run)
    return _row_of(model, estimator, record.scores(model)[estimator], sizes(run, record))


def _row_of(model: str, estimator: str, log: dict[str, list[list[float | None]]], weights: Floats) -> Row:
    values = {name: numbers(logged) for name, logged in log.items() if metric(name).score}
    return Row(
        model=model,
        estimator=estimator,
        mean={
            name: over_seeds(mean_over_clients(array, weights, metric(name).undefined))
            for name, array in values.items()
        },
        worst={name: over_seeds(worst_client(name, array, weights)) for name, array in values.items()},
    )


def sizes(run: Run, record: RoundRecord) -> Floats:
    """Return the scored examples of each client; 0 for a client that sent no scores for this record."""
    counts = numbers(run.info.test_sizes)
    counts[record.absent or []] = 0
    return counts


def numbers(logged: Any) -> Floats:
    """Return logged numbers as an array, with NaN for null."""
    return np.array(logged, dtype=np.float64)
