"""An experiment: the config of a run, and the model and the federation that it describes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pfedbayes.constraints import LARGEST_SEED
from pfedbayes.data import DataConfig, Preprocessing, Shards, TaskShape, holds_tables
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, largest_batch, plan_for, run_size
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError, nearest, one_line
from pfedbayes.maths.likelihoods import Classification, Likelihood, Regression
from pfedbayes.memory import device_memory, host_memory, refuse_too_large
from pfedbayes.methods import Method
from pfedbayes.methods.hierarchical import with_schedule
from pfedbayes.nets import Init, Model, Net, TableNet, WithNoise, cnn, mlp, vgg
from pfedbayes.nets.import_path import build_module, is_import_path
from pfedbayes.runs.config import build, parse_override, read_toml
from pfedbayes.runs.copies import Copies, copies_of
from pfedbayes.runs.naming import MakeMethod, make_method, method_name
from pfedbayes.runs.outcomes import outcome_of
from pfedbayes.runs.posteriors import check_likelihood, check_posterior, with_posterior
from pfedbayes.runs.sections import TABLE_WIDTH, Evaluation, Execution, NetConfig

MOST_SEEDS = 1000  # federations that are trained at once
MAIN_JOB: dict[str, dict[str, Any]] = {"method": {"name": "pfedbayes", "zeta": 1.0}}
# Defaults for the user's own tables.
OWN_TABLES: dict[str, dict[str, Any]] = {
    "data": {"test_fraction": 0.2},
    "method": {"name": "hierarchical"},
    "training": {"rounds": 50, "local_steps": 8, "evaluate_every": 10},
    "evaluation": {"samples": 100, "folds": 5, "alone": True},
}
# Defaults for the user's own images and arrays, and for other methods.
OWN_DATA: dict[str, dict[str, Any]] = {
    "data": {"test_fraction": 0.2, "validation": 0.2},
    "method": {"name": "pfedbayes", "zeta": 1.0},
    "training": {"rounds": 300, "local_steps": 20, "batch_size": 32, "evaluate_every": 5, "patience": 50},
}


@dataclass(frozen=True)
class Experiment:
    """The sections of a config."""

    data: DataConfig
    net: NetConfig
    method: Method
    training: Training
    evaluation: Evaluation
    execution: Execution

    @property
    def federated(self) -> Method:
        """The method as a run trains it and predicts with it, see `with_posterior`."""
        return with_posterior(self.method, self.evaluation)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return plain values by section, as in a config file."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        sections["data"] = self.data.section()
        sections["net"] = self.net.section()
        sections["method"] = {"name": method_name(self.method), **sections["method"]}
        return sections

    def digest(self, seeds: Sequence[int]) -> str:
        """Return a hash of the seeds and of every setting on which the results depend."""
        return hashlib.sha256(
            json.dumps([_computed(self.sections()), list(seeds)], sort_keys=True).encode()
        ).hexdigest()

    def difference(self, config: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return the first setting by which an earlier config gives other results, as "NAME was X and is Y"; else None.

        A setting that the earlier config lacks is newer than the run, and counts as its default.
        """
        before, now = _computed(config), _computed(self.sections())
        for section, values in now.items():
            fields = dataclasses.fields(getattr(self, section))
            was = {each.name: default_of(each) for each in fields if each.name in values}
            was |= before.get(section, {})
            for name in was | values:
                # Through JSON, which turns tuples into lists.
                old, new = (json.loads(json.dumps(settings.get(name))) for settings in (was, values))
                if old != new:
                    return f"{section}.{name} was {json.dumps(old)} and is {json.dumps(new)}"
        return None


def default_of(setting: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; dataclasses.MISSING if it has none."""
    return setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()


def _computed(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings on which results depend: all but paths, the number of rounds and [execution]."""
    others = {"data": ("dir", "path"), "training": ("rounds",)}
    return {
        section: {name: value for name, value in values.items() if name not in others.get(section, ())}
        for section, values in sections.items()
        if section != "execution"
    }


Change = tuple[str, str, Any]  # section, key, value
SECTIONS = [section.name for section in dataclasses.fields(Experiment)]


def seed_numbers(first: int, count: int) -> list[int]:
    """Return the seeds first, first + 1, … of federations that are trained at once; refuse absurdly many."""
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(f"{count} seeds at once are not possible: give 1 to {MOST_SEEDS} seeds")
    if first + count - 1 > LARGEST_SEED:
        raise UserError(f"training.seed is {first}, so a later seed would exceed {LARGEST_SEED}: give a smaller one")
    return [first + k for k in range(count)]


def read_experiment(path: Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file and apply overrides such as "training.rounds=100".

    Without a file the experiment is `MAIN_JOB`: pFedBayes on small MNIST. If an override gives data.path, it is
    `OWN_TABLES`; for images, for arrays and if an override names another method, it is `OWN_DATA`. An override that
    names another method drops the file's other settings of [method].
    """
    if path:
        return from_sections(read_toml(path), overrides)
    given = {(section, name): value for section, name, value in map(parse_override, overrides)}
    if ("data", "path") not in given:
        return from_sections(MAIN_JOB, overrides)
    chosen = given.get(("method", "name"), "hierarchical")
    tables = holds_tables(str(given["data", "path"]))
    if tables and chosen == "hierarchical":
        return from_sections(OWN_TABLES, overrides)
    return from_sections(OWN_DATA | {"evaluation": {"alone": tables}}, overrides)


def from_sections(
    sections: Mapping[str, Any], overrides: Sequence[str] = (), make: MakeMethod = make_method
) -> Experiment:
    """Build an experiment from config sections and overrides; make: see `resolve`."""
    return resolve(sections, [parse_override(text) for text in overrides], make)


def resolve(sections: Mapping[str, Any], changes: Sequence[Change] = (), make: MakeMethod = make_method) -> Experiment:
    """Build an experiment from config sections with changes (section, key, value).

    make: builds the method. The default imports code that the config names: sections of a file that was not written by
    the user need another one of `naming`.
    """
    for section, values in sections.items():
        if section not in SECTIONS:
            raise UserError(f"unknown section [{section}]: {nearest(section, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise UserError(f"{section} is {one_line(repr(values))}: write it as a section [{section}]")
    merged = {section: dict(sections.get(section, {})) for section in SECTIONS}
    for section, name, value in changes:
        if section not in SECTIONS:
            raise UserError(f"unknown section {section!r} in {section}.{name}: {nearest(section, SECTIONS)}")
        if (section, name) == ("method", "name") and value != merged["method"].get("name"):
            merged["method"] = {"name": value}
    for section, name, value in changes:
        merged[section][name] = value

    chosen = merged["method"].pop("name", "pfedbayes")
    if not isinstance(chosen, str):
        raise UserError(f"unknown method {one_line(repr(chosen))}: give the name of a method")
    if "path" in merged["data"]:
        merged["data"] = {"name": "files"} | merged["data"]
    data = build(DataConfig, merged["data"], "data")
    if data.path is not None:
        data = dataclasses.replace(data, size=None, path=_absolute(data.path))
    net = NetConfig.from_section(merged["net"])
    method = make(chosen, merged["method"])
    training = build(Training, merged["training"], "training")
    method = with_schedule(method, training.rounds * training.local_steps)
    evaluation = build(Evaluation, merged["evaluation"], "evaluation")
    has_validation = data.validation > 0 or data.split_column is not None
    check_posterior(method, evaluation, data)
    if evaluation.posterior == "swag" and evaluation.swag_start is None:
        evaluation = dataclasses.replace(evaluation, swag_start=training.rounds * 3 // 4)
    if evaluation.split == "validation" and not has_validation:
        raise UserError(
            "evaluation.split is 'validation' but data.validation is 0: hold out a fraction of the training data"
        )
    if training.patience is not None and not has_validation:
        raise UserError(
            "training.patience needs validation data, but data.validation is 0: hold out a fraction of the training "
            "data, or leave patience out"
        )
    if training.patience is not None and evaluation.average_every > 1:
        raise UserError(
            "training.patience and evaluation.average_every exclude each other (the best round may have no score): "
            "set one"
        )
    if data.name != "files":
        image_net = "vgg" if data.name == "cifar10" else "mlp"
        net = _settle(net, method, image_net, (100,))
    training = dataclasses.replace(
        training,
        train=training.train or method.habits.trains,
        participants=None if method.needs.all_clients else training.participants,
    )
    return Experiment(data, net, method, training, evaluation, build(Execution, merged["execution"], "execution"))


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # an unknown user in ~name
        raise UserError(f"data.path is {path!r} ({error}): give the path of your data") from None


def _settle(net: NetConfig, method: Method, name: str, hidden: tuple[int, ...]) -> NetConfig:
    """Fill in the name, the hidden widths and the initialisation where the config leaves them open."""
    name = method.needs.net or net.name or name
    inits: dict[str, Init] = {"mlp": method.habits.init, "vgg": "kaiming", "cnn": "kaiming"}
    return dataclasses.replace(
        net, name=name, hidden=hidden if net.hidden is None else net.hidden, init=net.init or inits.get(name, "torch")
    )


def fit_net(net: NetConfig, shards: Shards, method: Method) -> NetConfig:
    """Fill in what the config leaves to the data.

    Images get the paper's networks where they fit, else a CNN. Tables with one target get the network for tables, and
    arrays an MLP whose width is the square root of the number of rows, between 16 and 100.
    """
    shape = tuple(shards.x.shape[1:])
    if len(shape) == 3:
        paper = {(3, 32, 32): "vgg", (1, 28, 28): "mlp"}
        return _settle(net, method, paper.get(shape, "cnn"), (100,))
    table = shards.preprocessing is not None and shards.preprocessing.inputs and shards.task_shape.num_targets == 1
    if net.name == "table" or (table and not net.hidden and net.name is None and method.needs.net is None):
        return _settle(net, method, "table", (TABLE_WIDTH,))
    rows = sum(len(train) for train in shards.train)
    return _settle(net, method, "mlp", (min(max(round(math.sqrt(rows)), 16), 100),))


def build_model(net: NetConfig, task: TaskShape, method: Method) -> Model:
    """Build the network and its likelihood for the data and the method; net: complete, as from `fit_net`."""
    if net.name is None or (net.name == "mlp" and net.hidden is None):
        raise ValueError("the config of the network is incomplete: call fit_net first")
    shape = task.inputs
    outputs = method.needs.outputs or task.num_classes or task.num_targets
    if is_import_path(net.name):
        module = build_module(net.name, shape, outputs, net.settings)
    elif net.name == "table":
        return Model(*_table_model(net, task, method), method.habits.pixels)
    elif net.name == "cnn":
        if len(shape) != 3:
            raise UserError(f"the CNN takes images, the data have shape {shape}: use net.name=mlp")
        module = cnn(shape, outputs)
    elif net.name == "vgg":
        if len(shape) != 3 or shape[1:] != (32, 32):
            raise UserError(f"the VGG takes 32 x 32 images, the data have shape {shape}: use net.name=mlp")
        module = vgg(outputs, in_channels=shape[0], head="linear" if method.needs.outputs else net.head, norm=net.norm)
    else:
        sizes = [math.prod(shape), *(net.hidden or ()), outputs]
        refuse_too_large(sum((a + 1) * b for a, b in pairwise(sizes)) * 4, host_memory(), "the network", "net.hidden")
        module = mlp(sizes, net.activation)
    kinds = {"count": "counts", "ordinal": "ordered classes", "survival": "times to an event"}
    if task.target is not None and (kind := kinds.get(task.target.task)):
        raise UserError(f"{kind} need the network for tables: leave net.name = {net.name!r} and net.hidden out")
    likelihood: Likelihood = Classification(ranking=task.target is not None)
    if task.num_classes is None:
        likelihood = Regression(net.sigma_eps and net.sigma_eps / task.unit, task.unit)
        module = module if net.sigma_eps is not None else WithNoise(module)
    return Model(Net(module), likelihood, method.habits.pixels)


def table_model(fitted: Preprocessing, method: Method) -> Model:
    """Build the model that `pfedbayes run` builds for tables with this preprocessing, where no table is at hand."""
    target = fitted.target
    num_classes = None if target.classes is None else len(target.classes)
    task = TaskShape(fitted.shape, num_classes, 1, target.deviation, fitted.pieces, target)
    return build_model(_settle(NetConfig(), method, "table", (TABLE_WIDTH,)), task, method)


def _table_model(net: NetConfig, task: TaskShape, method: Method) -> tuple[Net, Likelihood]:
    """Return the network for tables and its likelihood."""
    if len(task.inputs) != 1 or task.num_targets != 1:
        raise UserError(
            f"the network for tables takes columns and predicts one target, the data have shape {task.inputs} and "
            f"{task.num_targets} targets: use net.name=mlp"
        )
    (width,) = net.hidden or (TABLE_WIDTH,)
    plain = task.inputs[0] - task.pieces
    refuse_too_large(4 * (task.inputs[0] + 1) * (width + 1), host_memory(), "the network", "net.hidden")

    def make(outputs: int, constants: int = 0, reference: bool = False) -> Net:
        return Net(TableNet(plain, task.pieces, width, outputs, constants, reference))

    outcome = outcome_of(net, task, method.needs.outputs)
    return make(outcome.outputs, outcome.constants, outcome.reference), outcome.likelihood


def _refuse_large_rounds(experiment: Experiment, shards: Shards, model: Model, num_seeds: int, plan: Plan) -> None:
    """Refuse a round whose models, noise or mini-batches cannot fit into memory."""
    method, training = experiment.federated, experiment.training
    steps, at_once = run_size(method, dataclasses.replace(training, rounds=1), len(shards.train), num_seeds)
    memory = device_memory(torch.device(plan.device))
    number = getattr(torch, plan.dtype).itemsize
    together = 1 if plan.over == "loop" else min(at_once, plan.chunk or at_once)
    batch = largest_batch(shards, method, training)
    noise = together * math.prod(method.noise_shape(model, batch) or (0,))
    models = 2 * at_once * model.net.num_params  # before and after the round
    remedy = "--seeds, net.hidden, training.participants or method.samples"
    refuse_too_large((models + noise) * number, memory, "a round", remedy)
    draws = experiment.evaluation.samples * model.net.num_params if method.about.stochastic else 0
    refuse_too_large(draws * number, memory, "an evaluation", "evaluation.samples")
    rows = steps * method.needs.batches_per_step * batch
    refuse_too_large(8 * rows, host_memory(), "a round", "training.local_steps or training.batch_size")


def copies_of_run(experiment: Experiment, shards: Shards, num_seeds: int) -> Copies:
    """Return the federations that an experiment trains besides those of its seeds."""
    return copies_of(experiment.evaluation, experiment.method, shards, num_seeds, experiment.data.seed)


def build_federation(
    experiment: Experiment,
    shards: Shards,
    seeds: Sequence[int],
    plan: Plan | None = None,
    device: str = "auto",
    model: Model | None = None,
    clients_file: Path | None = None,
) -> Federation:
    """Build a federation at round 0, with the experiment's model unless another is given."""
    if experiment.evaluation.posterior == "ensemble" and len(seeds) < 2:
        raise UserError("evaluation.posterior=ensemble needs several seeds: add --seeds 5")
    net = fit_net(experiment.net, shards, experiment.method)
    model = model or build_model(net, shards.task_shape, experiment.method)
    check_likelihood(model.likelihood, experiment.evaluation)
    copies = copies_of_run(experiment, shards, len(seeds)).federations
    method = experiment.federated
    make = partial(Federation, shards, model, method, experiment.training, seeds, net.init, copies=copies)
    if plan is not None:
        return make(plan=plan, clients_file=clients_file)
    every, width = len(seeds) + len(copies), largest_batch(shards, experiment.method, experiment.training)
    choose = partial(plan_for, model, method, experiment.training, len(shards.train), every, device, largest=width)
    plan = experiment.execution.adapt(choose())
    _refuse_large_rounds(experiment, shards, model, every, plan)
    federation = make(plan=plan, clients_file=clients_file)
    faster = None if experiment.execution.over else federation.faster_over()
    if faster in (None, federation.plan.over):
        return federation
    return make(plan=experiment.execution.adapt(choose(over=faster)), clients_file=clients_file)
