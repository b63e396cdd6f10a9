"""Copy the scores of a run to TensorBoard, MLflow or Weights & Biases while it trains. rounds.jsonl stays the truth."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pfedbayes.errors import UserError, nearest, one_line
from pfedbayes.runs.schema import RoundRecord

MODELS = ("personal", "shared")
FOLDER = "tensorboard"  # in the run folder


class Tracker(NamedTuple):
    """Where scores go."""

    log: Callable[[int, Mapping[str, float]], None]
    """Takes a round and its scores by name."""
    close: Callable[[], None]


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, settings: Mapping[str, Mapping[str, Any]], warn: Callable[[str], None]
) -> Iterator[Callable[[RoundRecord], None]]:
    """Return a function that sends a record to the trackers of these names.

    settings: of the run, by section. warn: gets a line if a tracker fails. The run goes on without that tracker.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name!r} is unknown: {nearest(name, TRACKERS)}")
        _import(name, name)
    plain = {f"{section}.{key}": value for section, values in settings.items() for key, value in values.items()}
    active: dict[str, Tracker | None] = dict.fromkeys(names)  # each is opened with the first record

    def attempt(name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            del active[name]
            warn(f"tracking by {name} has stopped ({type(error).__name__}: {one_line(error)}); the run goes on")

    def send(record: RoundRecord) -> None:
        values = mean_scores(record)
        for name in list(active):
            attempt(name, partial(log, name, record.round, values))

    def log(name: str, round: int, values: Mapping[str, float]) -> None:
        tracker = active[name] = active[name] or TRACKERS[name](folder, plain)
        tracker.log(round, values)

    try:
        yield send
    finally:
        for name, tracker in list(active.items()):
            if tracker is not None:
                attempt(name, tracker.close)


def mean_scores(record: RoundRecord) -> dict[str, float]:
    """Return each score of a record as its mean over clients and seeds, by MODEL/ESTIMATOR/METRIC."""
    values = {"seconds": record.seconds}
    if record.validation_nll is not None:
        values["validation_nll"] = record.validation_nll
    for model in MODELS:
        for estimator, metrics in record.scores(model).items():
            for metric, by_seed in metrics.items():
                known = [x for own in by_seed for x in own if x is not None and math.isfinite(x)]
                if known:
                    values[f"{model}/{estimator}/{metric}"] = math.fsum(known) / len(known)
    return values


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"--track {name} needs {name}: pip install 'pfedbayes[{name}]'") from None


def _tensorboard(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / FOLDER))
    writer.add_text("settings", "\n".join(f"    {key} = {value!r}" for key, value in settings.items()))

    def log(round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return Tracker(log, writer.close)


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    mlflow = _import("mlflow", "mlflow")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})
    return Tracker(lambda round, values: mlflow.log_metrics(dict(values), step=round), mlflow.end_run)


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    wandb = _import("wandb", "wandb")
    run = wandb.init(project="pfedbayes", name=folder.name, config=dict(settings))
    return Tracker(lambda round, values: run.log(dict(values), step=round), run.finish)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
