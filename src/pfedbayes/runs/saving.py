"""Save a federation in a folder, and load the trained federation of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pfedbayes import runs
from pfedbayes.data import DataConfig, Preprocessing, Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posthoc import PostHoc
from pfedbayes.files.reading import read_bytes, reading
from pfedbayes.nets import Model
from pfedbayes.nets.import_path import refuse_untrusted
from pfedbayes.runs.calibration import calibration_bytes
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.description import describe_federation, scored_clients, scores_of
from pfedbayes.runs.experiment import Experiment, build_federation
from pfedbayes.runs.final_analysis import analyse_final_models
from pfedbayes.runs.kept_model import KeptModel
from pfedbayes.runs.naming import method_name
from pfedbayes.runs.resume import recorded_plan, refuse_other_data
from pfedbayes.runs.sections import Evaluation, Execution, NetConfig


def save(federation: Federation, folder: str | Path, samples: int = 10) -> Path:
    """Save a federation of your own data and module in a folder, without the data and the module.

    `load` needs them again. If the federation has test data, the folder can be reported; if its network consists of
    torch's own layers, its clients can be opened, predict, and be exported, calibrated by its validation data.

    samples: weight draws of a prediction when models are scored.
    """
    evaluation = Evaluation(samples)
    experiment = Experiment(DataConfig(), NetConfig(), federation.method, federation.training, evaluation, Execution())
    writer = runs.Writer(Path(folder))
    try:
        if (writer.folder / runs.INFO).exists() and runs.read_info(writer.folder).digest is not None:
            raise UserError(f"{folder} holds a run: give another folder")
        if isinstance(federation.method, PostHoc):
            raise UserError("a federation with evaluation.posterior is kept by its run: use pfedbayes run")
        method = {"name": method_name(federation.method), **dataclasses.asdict(federation.method)}
        training = dataclasses.asdict(federation.training)
        del training["patience"]  # early stopping needs the validation data of a run
        writer.write(runs.CONFIG, to_toml({"method": method, "training": training}))
        writer.write_info(describe_federation(federation, evaluation, None))
        writer.truncate_log(0)
        if federation.round and any(map(len, federation.shards.test)):
            scores = scores_of(federation.evaluate(samples), scored_clients(federation, evaluation))
            writer.append(runs.RoundRecord(federation.round, 0.0, **scores))
        writer.checkpoint(federation.checkpoint(writer.folder / runs.CLIENTS), federation.round, seconds=0.0)
        if (kept := KeptModel.of(federation.model)) is not None:
            writer.write(runs.CALIBRATION, calibration_bytes(federation, experiment, federation.round, kept))
        analysis = analyse_final_models(federation, evaluation)
        writer.write_summary(
            runs.Summary(rounds=federation.round, seconds=0.0, estimator=federation.headline(samples), **vars(analysis))
        )
    finally:
        writer.close()
    return writer.folder


def load(
    folder: str | Path,
    shards: Shards | None = None,
    model: Model | None = None,
    device: str = "auto",
    trust_module: bool = False,
) -> Federation:
    """Load the trained federation of a run folder; with early stopping, as it was after its best round.

    A run's data and network are built again from its config. A folder that `save` wrote has no config for them: give
    the shards and the model that the federation was trained with.

    trust_module: whether to import the code that the folder names for its network or its method; else such a folder
    is refused.
    """
    run = runs.read_run(Path(folder))
    plan = recorded_plan(run).on(choose_device(device))
    checkpoint = runs.read_checkpoint(run.folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet: let the run train for longer")
    if run.info.digest is None and (shards is None or model is None):
        raise UserError(f"{folder} holds a federation of your own data and module: give load() its shards and model")
    experiment = run.with_method(trust_module)
    if model is None:
        refuse_untrusted(experiment.net.name, run.folder, trust_module)
    if shards is None:
        shards = load_shards(experiment.data)
        refuse_other_data(run, shards)
    federation = build_federation(experiment, shards, run.info.seeds, plan, model=model)
    state = checkpoint.best or checkpoint
    federation.restore(state.tensors, state.round, run.folder / runs.CLIENTS)
    return federation


def read_preprocessing(folder: str | Path) -> Preprocessing:
    """Read how a run made inputs and targets from your own data; `data.read_inputs` applies it to new rows."""
    path = Path(folder) / runs.PREPROCESSING
    with reading(path, "give the folder of a run of your own data"):
        text = read_bytes(path, follow=False).decode()
    return Preprocessing.from_json(text, str(path))
