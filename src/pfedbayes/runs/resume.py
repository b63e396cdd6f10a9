"""Whether a run folder belongs to an experiment, and from where it resumes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from pfedbayes import runs
from pfedbayes.data import Shards
from pfedbayes.engine.plan import Plan
from pfedbayes.errors import UserError
from pfedbayes.methods import Hierarchical
from pfedbayes.runs.experiment import Experiment

log = logging.getLogger("pfedbayes")


def previous_run(
    folder: Path, experiment: Experiment, seeds: Sequence[int], resume: bool
) -> tuple[Plan | None, runs.Checkpoint | None]:
    """Return the recorded plan and the last checkpoint of a folder; refuse a folder that does not fit the experiment.

    Of the plan, only where clients rest may change: that does not change the results.
    """
    if not (folder / runs.INFO).exists():
        refuse_other_files(folder)
        return None, None
    checkpoint = runs.read_checkpoint(folder)
    previous = runs.read_run(folder, checkpoint.log_bytes if checkpoint else 0)
    if how := other_config(previous, experiment, seeds):
        raise UserError(
            f"{folder} was made by another config ({how}): give another --out, or the settings it was made with"
        )
    if not resume:
        raise UserError(f"{folder} already holds this run: add --resume to continue it, or give another --out")
    plan = recorded_plan(previous)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{folder} was run on a GPU and torch sees none: resume it on a machine with one, or give another --out"
        )
    resting = experiment.execution.resting or plan.resting
    return dataclasses.replace(plan, resting=resting), checkpoint


def refuse_other_files(folder: Path) -> None:
    """Refuse a folder without a run that holds something else than a run does before its first round."""
    own = {runs.CONFIG, runs.INFO, runs.TUNING, runs.TUNING_PAGE}
    if others := [path.name for path in folder.iterdir() if path.name not in own and path.name[0] != "."]:
        raise UserError(f"{folder} holds other files ({others[0]}, …): give an empty or a new folder with --out")


def keep_schedule(experiment: Experiment, folder: Path) -> Experiment:
    """Keep the recorded length of the learning rates' schedule if only the number of rounds has changed.

    Only schedules that both times were as long as the run count, since those follow from the number of rounds.
    """
    if not (folder / runs.INFO).exists() or not isinstance(experiment.method, Hierarchical):
        return experiment
    before = runs.read_run(folder, log_bytes=0).experiment
    method = before.method
    whole = [one.training.rounds * one.training.local_steps for one in (before, experiment)]
    if not isinstance(method, Hierarchical) or [method.anneal, experiment.method.anneal] != whole:
        return experiment
    return dataclasses.replace(experiment, method=dataclasses.replace(experiment.method, anneal=method.anneal))


def note_schedule(experiment: Experiment, after_round: int) -> None:
    """Tell the user if rounds remain but the learning rates have fallen to zero."""
    method, training = experiment.method, experiment.training
    if not isinstance(method, Hierarchical) or method.anneal is None or after_round >= training.rounds:
        return
    if after_round * training.local_steps >= method.anneal:
        log.warning(
            "note: the learning rates have already fallen to zero (method.anneal=%d), so further rounds change little: "
            "start a new run for a longer schedule",
            method.anneal,
        )


def note_resumption(info: runs.RunInfo, device: str, after_round: int) -> runs.RunInfo:
    """Record that a run goes on with other code or on another machine than before, and tell the user."""
    here = runs.Resumption(
        after_round, runs.now(), **runs.describe_code(), hardware=runs.Hardware(device, **runs.describe_machine())
    )
    before = info.resumed[-1] if info.resumed else info
    changes = [
        f"{name} {old} instead of {new}"
        for name, new, old in (
            ("pfedbayes", before.version, here.version),
            ("its source", before.source, here.source),
            ("torch", before.hardware.torch, here.hardware.torch),
            ("Python", before.hardware.python, here.hardware.python),
            ("processor", before.hardware.processor, here.hardware.processor),
        )
        if old != new
    ]
    if not changes:
        return info
    log.warning(
        "note: this run goes on with %s: it may differ from a run that was never interrupted; %s records the change",
        ", ".join(changes), runs.INFO,
    )  # fmt: skip
    return dataclasses.replace(info, resumed=[*info.resumed, here])


def recorded_plan(run: runs.Run) -> Plan:
    """Return the plan of a run; refuse a run that was made on Flower."""
    if not isinstance(run.info.plan, Plan):
        raise UserError(
            f"{run.folder} was made on Flower; its personal models are on the nodes: use pfedbayes.flower.load_node "
            "there"
        )
    return run.info.plan


def other_config(run: runs.Run, experiment: Experiment, seeds: Sequence[int]) -> str | None:
    """Return how a run differs from this experiment with these seeds; None if it does not."""
    if run.info.digest is None:
        return "it was not made by a config"
    if run.info.seeds != list(seeds):
        return f"seeds were {run.info.seeds} and are {list(seeds)}"
    return experiment.difference(run.sections)


def refuse_other_data(run: runs.Run, shards: Shards) -> None:
    """Refuse data of the user's own that have changed since the run."""
    if run.info.fingerprint not in (None, shards.fingerprint()):
        raise UserError(
            f"the data at {run.experiment.data.path} are not those that {run.folder} was trained with: restore them, "
            "or start a new run"
        )
