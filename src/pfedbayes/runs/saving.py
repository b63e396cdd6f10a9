"""Save a federation in a folder, and load the trained federation of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pfedbayes import runs
from pfedbayes.data import Preprocessing, Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posthoc import PostHoc
from pfedbayes.files.reading import read_bytes, reading
from pfedbayes.nets import Model
from pfedbayes.nets.import_path import refuse_untrusted
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.description import describe_federation
from pfedbayes.runs.experiment import build_federation
from pfedbayes.runs.naming import method_name
from pfedbayes.runs.resume import recorded_plan, refuse_other_data
from pfedbayes.runs.sections import Evaluation


def save(federation: Federation, folder: str | Path) -> Path:
    """Save a federation of your own data and module in a folder, without the data and the module.

    `load` needs them again.
    """
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
        writer.write_info(describe_federation(federation, Evaluation(), None))
        writer.checkpoint(federation.checkpoint(writer.folder / runs.CLIENTS), federation.round, seconds=0.0)
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
