"""Tuning: settings of one method are drawn from a space, trained at once, and dropped if others predict better.

Rows that no model was trained on decide: validation rows, or else the rows that each fold leaves out. Test rows play
no part. After a quarter and after a half of the rounds, the better half of the settings goes on (successive halving).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import largest_batch, plan_for
from pfedbayes.engine.settings import diverged, federation_of_settings, keep_settings
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.files.reading import read_object, reading
from pfedbayes.files.typed import from_json, to_json
from pfedbayes.files.writing import write_file
from pfedbayes.methods.base import Method
from pfedbayes.nets import Init, Model
from pfedbayes.runs import TUNING
from pfedbayes.runs.copies import left_out
from pfedbayes.runs.experiment import Experiment, build_model, fit_net
from pfedbayes.runs.joining import row_losses
from pfedbayes.runs.naming import method_name
from pfedbayes.sweep.space import Space, draw
from pfedbayes.trust.calibration import Fold

FORMAT = 1
SHARES = (0.25, 0.5, 1.0)  # of the rounds, after which settings are compared
Rows = tuple[Tensor, ...]  # of the pool, by client
ANOTHER = "tune into another folder, or remove the file to begin anew"


@dataclass(frozen=True)
class Trial:
    """A setting."""

    values: dict[str, float]
    """The tuned hyper-parameters."""
    scores: list[float | None]
    """Mean negative log-likelihood of the rows after each stage that it took part in; None if it diverged."""


@dataclass(frozen=True)
class Tuning:
    """tuning.json: what was tried, and what was chosen."""

    format: int
    digest: str
    """Hash of all other settings."""
    method: str
    space: dict[str, list[float]]
    """Lowest and highest value by hyper-parameter."""
    rows: int
    """The number of rows that decide."""
    folds: int
    """The number of folds whose left-out rows they are; 0 for validation rows."""
    stages: list[int]
    """Rounds after which settings are compared."""
    trials: list[Trial]
    """The first one is the experiment as it was."""
    chosen: int | None = None
    """The index of the chosen trial; None before the last stage is over."""
    gain: float | None = None
    """By how much its score is lower than that of the first trial."""
    error: float | None = None
    """Standard error of the gain."""

    @property
    def done(self) -> int:
        """The number of stages that are over."""
        return len(self.trials[0].scores)

    @property
    def alive(self) -> list[int]:
        """The trials that go on, see `taking_part`."""
        return self.taking_part(min(self.done, len(self.stages) - 1))

    def taking_part(self, stage: int) -> list[int]:
        """Return the trials of a stage: the first one, and the better half of the others of the stage before."""
        every = list(range(len(self.trials)))
        for before in range(stage):
            ranked = sorted(every[1:], key=lambda k: _order(self.trials[k].scores[before]))
            good = [k for k in ranked if self.trials[k].scores[before] is not None]
            every = [0, *sorted(good[: max(1, len(ranked) // 2)])]
        return every


@dataclass(frozen=True)
class TuningProgress:
    """The state of a search after a round."""

    round: int
    rounds: int
    settings: int
    """How many settings still train."""
    tuning: Tuning


def _order(score: float | None) -> float:
    return math.inf if score is None else score


def tune(
    experiment: Experiment,
    out: Path,
    space: Space,
    count: int,
    device: str = "auto",
    data_dir: Path | None = None,
    on_download: Callable[[str, int, int], None] | None = None,
) -> Generator[TuningProgress]:
    """Tune the method of an experiment with `count` settings, and write tuning.json into the folder `out`.

    A search that was stopped goes on from the last finished stage, whose settings it trains again.
    """
    _refuse_unsuitable(experiment, count)
    out.mkdir(parents=True, exist_ok=True)
    shards = load_shards(experiment.data, data_dir, on_download)
    net = fit_net(experiment.net, shards, experiment.method)
    model, training = build_model(net, shards.task_shape, experiment.method), experiment.training
    folds = [] if any(map(len, shards.validation)) else left_out(shards, _folds(experiment), experiment.data.seed)
    judged: Sequence[Rows] = folds or [shards.validation]
    methods = draw(experiment.method, space, count, training.seed)
    tuning = _begin(experiment, out, space, methods, sum(len(rows) for sets in judged for rows in sets), len(folds))
    federation: Federation | None = None
    while tuning.done < len(tuning.stages):
        alive, until = tuning.alive, tuning.stages[tuning.done]
        if federation is None:
            federation = _start(experiment, shards, model, [methods[k] for k in alive], folds, net.init, device)
        for trained in federation.rounds(until):
            round = trained.round
            yield TuningProgress(round, training.rounds, len(alive), tuning)
        losses = [_losses(federation, k, judged) for k in range(len(alive))]
        tuning = _after_stage(tuning, alive, losses)
        write_file(out / TUNING, dump_json(to_json(tuning), indent=1))
        yield TuningProgress(federation.round, training.rounds, len(tuning.alive), tuning)
        if tuning.chosen is None:
            federation = keep_settings(federation, [alive.index(k) for k in tuning.alive], model, folds)
    if federation is not None:
        federation.population.close()


def tuned(experiment: Experiment, tuning: Tuning) -> Experiment:
    """Return the experiment with the chosen setting."""
    if tuning.chosen is None:
        raise ValueError("the search is not over")
    values = tuning.trials[tuning.chosen].values
    return dataclasses.replace(experiment, method=dataclasses.replace(experiment.method, **values))


def read_tuning(path: Path) -> Tuning:
    """Read tuning.json."""
    with reading(path, ANOTHER):
        value, checked = read_object(path, follow=False)
        if not checked:
            raise ValueError("its checksum is missing")
        found = from_json(Tuning, value)
        _require_whole(found)
        return found


def _require_whole(found: Tuning) -> None:
    """Raise ValueError if the parts of a file do not fit each other."""
    last = len(found.stages)
    if found.format != FORMAT or not found.trials or not last or not 0 <= found.done <= last:
        raise ValueError("it is no search of this version")
    if any(set(trial.values) != set(found.space) for trial in found.trials):
        raise ValueError("its trials do not fit its space")
    if any(len(ends) != 2 for ends in found.space.values()):
        raise ValueError("a range has no two ends")
    if None in found.trials[0].scores:
        raise ValueError("its first trial has no score")
    if not all(math.isfinite(score) for trial in found.trials for score in trial.scores if score is not None):
        raise ValueError("a score is not finite")
    for stage in range(max(len(trial.scores) for trial in found.trials)):
        scored = [k for k, trial in enumerate(found.trials) if len(trial.scores) > stage]
        if scored != (found.taking_part(stage) if stage < found.done else []):
            raise ValueError("its scores do not fit its stages")
    if found.done < last:
        fits = {found.chosen, found.gain, found.error} == {None}
    elif found.gain is None or found.error is None:
        fits = False
    else:
        best = _best(found.trials, found.alive)
        fits = math.isfinite(found.gain + found.error) and found.chosen in (0, best)
    if not fits:
        raise ValueError("its choice does not follow from its scores")


def _best(trials: Sequence[Trial], alive: Sequence[int]) -> int:
    """Return the trial with the lowest last score."""
    return min(alive, key=lambda k: _order(trials[k].scores[-1]))


def _refuse_unsuitable(experiment: Experiment, count: int) -> None:
    if count < 2:
        raise UserError(f"a search over {count} setting chooses nothing: give at least 2")
    if experiment.training.server_optimizer != "none":
        raise UserError("settings cannot train at once with a server optimizer: leave training.server_optimizer out")
    has_validation = experiment.data.validation > 0 or experiment.data.split_column is not None
    if not has_validation and not experiment.evaluation.folds:
        raise UserError(
            "a search needs rows that no model was trained on: set data.validation=0.2, or evaluation.folds=5"
        )


def _folds(experiment: Experiment) -> int:
    return experiment.evaluation.folds or 5


def _begin(experiment: Experiment, out: Path, space: Space, methods: Sequence[Method], rows: int, folds: int) -> Tuning:
    """Return the search that the folder holds, or a new one."""
    rounds = experiment.training.rounds
    new = Tuning(
        format=FORMAT,
        digest=experiment.digest([experiment.training.seed, rounds]),
        method=method_name(experiment.method),
        space={name: [values.low, values.high] for name, values in space.items()},
        rows=rows,
        folds=folds,
        stages=sorted({max(1, round(share * rounds)) for share in SHARES}),
        trials=[Trial({name: getattr(method, name) for name in space}, []) for method in methods],
    )
    if not os.path.lexists(out / TUNING):
        return new
    found = read_tuning(out / TUNING)
    begun = dataclasses.replace(
        found, trials=[Trial(trial.values, []) for trial in found.trials], chosen=None, gain=None, error=None
    )
    if begun != new:
        raise UserError(f"{out / TUNING} is another search: {ANOTHER}")
    return found


def _start(
    experiment: Experiment,
    shards: Shards,
    model: Model,
    methods: Sequence[Method],
    folds: Sequence[Rows],
    init: Init | None,
    device: str,
) -> Federation:
    """Return the federation of all settings, at round 0."""
    training = dataclasses.replace(experiment.training, patience=None)
    count, width = len(methods) * max(1, len(folds)), largest_batch(shards, methods[0], training)
    plan = plan_for(model, methods[0], training, len(shards.train), count, device, largest=width)
    plan = experiment.execution.adapt(plan)
    return federation_of_settings(shards, model, methods, training, init, plan, folds)


def _losses(federation: Federation, setting: int, judged: Sequence[Rows]) -> NDArray[np.float64] | None:
    """Return the losses of all rows that decide; None if the setting has diverged."""
    each = len(judged)
    places: list[Fold] = [(setting * each + f, sets) for f, sets in enumerate(judged)]
    if any(diverged(federation, index) for index, _ in places):
        return None
    losses = np.concatenate(
        [row_losses(federation, i, index, rows) for index, sets in places for i, rows in enumerate(sets)]
    )
    return losses if np.isfinite(losses).all() else None


def _after_stage(tuning: Tuning, alive: Sequence[int], losses: Sequence[NDArray[np.float64] | None]) -> Tuning:
    """Add the scores of a stage; after the last one, choose."""
    if losses[0] is None:
        raise UserError("the experiment itself diverges, before anything is tuned: lower its learning rates")
    trials = list(tuning.trials)
    for k, each in zip(alive, losses, strict=True):
        score = None if each is None else float(each.mean())
        trials[k] = dataclasses.replace(trials[k], scores=[*trials[k].scores, score])
    tuning = dataclasses.replace(tuning, trials=trials)
    if tuning.done < len(tuning.stages):
        return tuning
    best = _best(trials, alive)
    difference = losses[0] - losses[alive.index(best)]  # type: ignore[operator]
    gain, error = float(difference.mean()), float(difference.std() / math.sqrt(max(1, len(difference) - 1)))
    return dataclasses.replace(tuning, chosen=best if gain > error else 0, gain=gain, error=error)
