"""Run an experiment into a folder, with checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pfedbayes import runs
from pfedbayes.data import Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, choose_device
from pfedbayes.errors import Diverged, UserError
from pfedbayes.evaluation.cross_site import cross_site
from pfedbayes.runs.calibration import calibration_bytes
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.description import describe_federation, scored_clients, scores_of
from pfedbayes.runs.early_stopping import EarlyStopping
from pfedbayes.runs.experiment import Experiment, build_federation
from pfedbayes.runs.final_analysis import analyse_final_models
from pfedbayes.runs.joining import judge_joining
from pfedbayes.runs.resume import keep_schedule, note_resumption, note_schedule, previous_run, refuse_other_data

CHECKPOINT_SHARE = 0.1  # at most this share of the time goes into checkpoints


@dataclass(frozen=True)
class Progress:
    """The state of a run after a round."""

    round: int
    rounds: int
    """Rounds planned."""
    seconds: float
    """Seconds of work since the start of the run."""
    record: runs.RoundRecord | None
    """The scores, if the models were evaluated after this round."""


def execute(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    device: str = "auto",
    resume: bool = False,
    data_dir: Path | None = None,
    on_download: Callable[[str, int, int], None] | None = None,
    on_federation: Callable[[Federation], None] | None = None,
    shards: Shards | None = None,
) -> Generator[Progress]:
    """Run an experiment into the folder `out` and yield after every round.

    Closing the iterator between two rounds saves a checkpoint.

    resume: continue from the last checkpoint in `out`.
    on_download: called with the name of a file, the bytes received and the bytes expected.
    on_federation: called with the federation before it is trained.
    shards: the data, if they are in memory; default: load those of the experiment.
    """
    choose_device(device)
    writer = runs.Writer(out)
    try:
        yield from _execute(writer, experiment, seeds, device, resume, data_dir, on_download, on_federation, shards)
    finally:
        writer.close()


def _execute(
    writer: runs.Writer,
    experiment: Experiment,
    seeds: Sequence[int],
    device: str,
    resume: bool,
    data_dir: Path | None,
    on_download: Callable[[str, int, int], None] | None,
    on_federation: Callable[[Federation], None] | None,
    shards: Shards | None,
) -> Generator[Progress]:
    experiment = keep_schedule(experiment, writer.folder)
    plan, checkpoint = previous_run(writer.folder, experiment, seeds, resume)
    shards = shards or load_shards(experiment.data, data_dir, on_download)
    if plan is not None:
        refuse_other_data(runs.read_run(writer.folder, log_bytes=0), shards)
    clients_file = writer.folder / runs.CLIENTS
    federation = build_federation(experiment, shards, seeds, plan, device, clients_file=clients_file)
    try:
        if checkpoint:
            if checkpoint.round > experiment.training.rounds:
                raise UserError(
                    f"{writer.folder} is already at round {checkpoint.round}: raise training.rounds to continue"
                )
            note_schedule(experiment, checkpoint.round)
            federation.restore(checkpoint.tensors, checkpoint.round, clients_file)
            if (writer.folder / runs.SUMMARY).exists() and checkpoint.round < experiment.training.rounds:
                _keep_result(writer, federation)
            checkpoint = checkpoint.release_file()
        if on_federation:
            on_federation(federation)
        writer.write(runs.CONFIG, to_toml(experiment.sections()))
        if plan is None:
            info = describe_federation(federation, experiment.evaluation, experiment.digest(seeds))
        else:
            info = dataclasses.replace(runs.read_info(writer.folder), plan=plan)
            info = note_resumption(info, plan.device, federation.round)
        writer.write_info(info)
        if shards.preprocessing:
            writer.write(runs.PREPROCESSING, shards.preprocessing.to_json())
        writer.truncate_log(checkpoint.log_bytes if checkpoint else 0)
        clock = runs.Clock(checkpoint.seconds if checkpoint else 0.0)
        stopping = None
        if experiment.training.patience is not None:
            best = checkpoint.best if checkpoint else None
            stopping = EarlyStopping(experiment.training.patience, experiment.evaluation, best)
        checkpoint = best = None  # so that the tensors of a best round are freed when a better one comes
        yield from _train(writer, experiment, federation, plan or federation.plan, clock, stopping)
    finally:
        federation.population.close()


def _keep_result(writer: runs.Writer, federation: Federation) -> None:
    """Keep the result of a finished run until the extended run has one: its state, and its clients in a file."""
    if not (writer.folder / runs.FINISHED).exists():
        writer.keep_finished_state()
    finished = runs.read_checkpoint(writer.folder, runs.FINISHED)
    if finished is not None and "rows" in finished.tensors:
        federation.population.pin(finished.tensors["rows"].tolist())


def _train(
    writer: runs.Writer,
    experiment: Experiment,
    federation: Federation,
    plan: Plan,
    clock: runs.Clock,
    stopping: EarlyStopping | None,
) -> Generator[Progress]:
    """Train up to the last round, then write the summary. `plan` is the recorded one."""
    scored = scored_clients(federation, experiment.evaluation)
    due = clock.seconds() + experiment.execution.checkpoint_seconds
    try:
        over = stopping is not None and stopping.is_over(federation.round)
        for trained in () if over else federation.rounds():
            round = trained.round
            record = None
            if experiment.training.evaluates(round):
                scores = federation.evaluate(**experiment.evaluation.after(round, experiment.training.rounds))
                seconds = clock.seconds()
                loss = stopping.consider(federation) if stopping else None
                over = stopping is not None and stopping.is_over(round)
                record = runs.RoundRecord(round, seconds, **scores_of(scores, scored), validation_nll=loss)
                writer.append(record)
            if federation.plan != plan:  # the engine has fallen back: a resumed run starts with the new plan
                plan = federation.plan
                writer.write_info(dataclasses.replace(runs.read_info(writer.folder), plan=plan))
            if clock.seconds() > due or round == experiment.training.rounds or over:
                took = _save(writer, federation, clock, stopping)
                due = clock.seconds() + max(experiment.execution.checkpoint_seconds, took / CHECKPOINT_SHARE)
            yield Progress(round, experiment.training.rounds, clock.seconds(), record)
            if over:
                break
    except (GeneratorExit, Diverged):
        # Both leave the federation as it was after its last complete round.
        _save(writer, federation, clock, stopping)
        raise
    kept = _best_of(federation, experiment, stopping.best if stopping else None)
    summary = runs.Summary(
        rounds=federation.round,
        kept_round=kept.round,
        seconds=clock.seconds(),
        estimator=kept.headline(experiment.evaluation.samples),
        joining=judge_joining(kept, experiment),
        cross_site=cross_site(kept, experiment.evaluation.samples) if experiment.evaluation.alone else None,
        **vars(analyse_final_models(kept, experiment.evaluation)),
    )
    writer.write(runs.CALIBRATION, calibration_bytes(kept, experiment, federation.round))
    kept.population.close()
    writer.write_summary(summary)


def _best_of(federation: Federation, experiment: Experiment, best: runs.Best | None) -> Federation:
    """Return the federation after its best round, or the federation itself if there is no better round."""
    if best is None or best.round == federation.round:
        return federation
    kept = build_federation(experiment, federation.shards, federation.seeds, federation.plan)
    kept.restore(best.tensors, best.round)
    return kept


def _save(writer: runs.Writer, federation: Federation, clock: runs.Clock, stopping: EarlyStopping | None) -> float:
    """Write a checkpoint and return the seconds that it took."""
    start = clock.seconds()
    tensors = federation.checkpoint(writer.folder / runs.CLIENTS)
    writer.checkpoint(tensors, federation.round, start, stopping.best if stopping else None)
    federation.population.saved()
    return clock.seconds() - start
