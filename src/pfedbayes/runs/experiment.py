"""An experiment: a config resolved into data, net, method and schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pfedbayes.data import DataConfig, Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Dtype, Noise, Over, Plan, Precision, plan_for
from pfedbayes.engine.population import Resting
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError, nearest
from pfedbayes.evaluation.estimators import EvaluationSplit, Sampling, estimator_names
from pfedbayes.maths.likelihoods import Classification, Likelihood, Regression
from pfedbayes.methods import METHODS, Method
from pfedbayes.nets import Init, Model, Net, WithNoise, cnn, mlp, vgg
from pfedbayes.nets.convolutions import Convolutions
from pfedbayes.nets.import_path import build_module, is_import_path
from pfedbayes.runs.config import build, parse_override, read_toml

NETS = ("mlp", "vgg", "cnn")
OF_ALL_NETS = ("name", "init", "sigma_eps")  # settings that also make sense for a module of one's own


@dataclass(frozen=True)
class NetConfig:
    """name: "mlp", "vgg" or "cnn" (what suits the data, see `fit_net`, if not given), or a module of one's own by its
    import path, "my_module:MyNet", see `modules.build_module`; settings: what such a module is called with, in a config
    beside the name; hidden: widths of an MLP's hidden layers; head, norm: options of the VGG; init: see `Net.init` (the
    method's habit if not given); sigma_eps: the noise of a regression in units of its target (learned if not given).
    """

    name: str | None = None
    hidden: tuple[int, ...] | None = None
    activation: Literal["relu", "tanh"] = "relu"
    head: Literal["mlp3", "linear"] = "mlp3"
    norm: Literal["none", "group"] = "none"
    init: Init | None = None
    sigma_eps: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in (None, *NETS) and not is_import_path(self.name):
            raise ValueError(
                f"name is {self.name!r}: choose one of {', '.join(NETS)}, or a module like my_module:MyNet"
            )
        if self.sigma_eps is not None and self.sigma_eps <= 0:
            raise ValueError(f"sigma_eps must be positive, got {self.sigma_eps}")
        if any(width < 1 for width in self.hidden or ()):
            raise ValueError(f"hidden widths must be at least 1, got {list(self.hidden or ())}")

    def section(self) -> dict[str, Any]:
        """Plain values, as in a config."""
        values: dict[str, Any] = dataclasses.asdict(self)
        settings: dict[str, Any] = values.pop("settings")
        if is_import_path(self.name):
            return {name: values[name] for name in OF_ALL_NETS} | settings
        return values

    @classmethod
    def from_section(cls, values: Mapping[str, Any]) -> NetConfig:
        """From a config; what it says beside the import path of a module goes to the module."""
        if not is_import_path(str(values.get("name"))):
            return build(cls, values, "net")
        own = {name: value for name, value in values.items() if name in OF_ALL_NETS}
        settings = {name: value for name, value in values.items() if name not in OF_ALL_NETS}
        return dataclasses.replace(build(cls, own, "net"), settings=settings)


@dataclass(frozen=True)
class Evaluation:
    """samples: weight draws averaged in a prediction; split: the data on which models are scored; label_prior: score
    every model also with the client's own label frequencies added to what it says, as a column of its own; estimators:
    which of "one", "mc10" and "mean" to score where weights are drawn (all if not given); sampling: draw the "weights",
    in "pairs" with opposite noise, which steadies their average, or the "activations" of dense layers, which is
    cheaper; clients: score only so many of them, drawn once (all if not given); average_every: score the average of the
    draws, the dearest, only in rounds divisible by it and in the last.
    """

    samples: int = 10
    label_prior: bool = False
    split: EvaluationSplit = "test"
    estimators: tuple[str, ...] | None = None
    sampling: Sampling = "weights"
    clients: int | None = None
    average_every: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        known = estimator_names(self.samples)
        if self.estimators is not None and (not self.estimators or not set(self.estimators) <= set(known)):
            raise ValueError(f"estimators must be some of {', '.join(known)}, got {list(self.estimators)}")
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if self.average_every < 1:
            raise ValueError(f"average_every must be at least 1, got {self.average_every}")
        if self.average_every > 1 and not self._without_average:
            raise ValueError("average_every leaves nothing to score in most rounds: give another estimator too")

    @property
    def _without_average(self) -> tuple[str, ...]:
        known = estimator_names(self.samples)
        return tuple(name for name in self.estimators or known if name != known[1])

    def after(self, round: int, rounds: int) -> dict[str, Any]:
        """What `Prediction.evaluate` is asked after this round of so many."""
        options = dataclasses.asdict(self)
        if round % options.pop("average_every") and round != rounds:
            options["estimators"] = self._without_average
        return options


@dataclass(frozen=True)
class Execution:
    """How to run it; chosen to fit where not given, recorded in the run folder, without effect on the results beyond
    rounding: see `Plan`. checkpoint_seconds: the state is saved about so often, less often where saving takes long.
    """

    over: Over | None = None
    chunk: int | None = None
    threads: int | None = None
    dtype: Dtype = "float32"
    compile: bool | None = None
    graph: bool | None = None
    noise: Noise | None = None
    precision: Precision | None = None
    convolutions: Convolutions | None = None
    resting: Resting | None = None
    checkpoint_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in ("chunk", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def adapt(self, plan: Plan) -> Plan:
        """The plan with everything that is set here."""
        wanted = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        del wanted["checkpoint_seconds"]
        if self.over == "loop":
            wanted = {"compile": False, "graph": False} | wanted
        elif self.noise == "torch":
            wanted = {"graph": False} | wanted
        return dataclasses.replace(plan, **wanted)


@dataclass(frozen=True)
class Experiment:
    """The sections of a config."""

    data: DataConfig
    net: NetConfig
    method: Method
    training: Training
    evaluation: Evaluation
    execution: Execution

    def sections(self) -> dict[str, dict[str, Any]]:
        """Plain values by section, as in the file."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        sections["data"] = self.data.section()
        sections["net"] = self.net.section()
        sections["method"] = {"name": method_name(self.method), **sections["method"]}
        return sections

    def digest(self, seeds: Sequence[int]) -> str:
        """Identity of what is computed."""
        return hashlib.sha256(
            json.dumps([_computed(self.sections()), list(seeds)], sort_keys=True).encode()
        ).hexdigest()

    def difference(self, config: Mapping[str, Mapping[str, Any]]) -> str | None:
        """The first setting by which the config of an earlier run computes something else, and how; None if there is
        none. What that config does not have is younger than the run, and counts as having its default value."""
        before, now = _computed(config), _computed(self.sections())
        for section, values in now.items():
            fields = dataclasses.fields(getattr(self, section))
            was = {each.name: default_of(each) for each in fields if each.name in values}
            was |= before.get(section, {})
            for name in was | values:
                old, new = (
                    json.loads(json.dumps(settings.get(name))) for settings in (was, values)
                )  # lists, not tuples
                if old != new:
                    return f"{section}.{name} was {json.dumps(old)} and is {json.dumps(new)}"
        return None


def default_of(setting: dataclasses.Field[Any]) -> Any:
    """The value of a setting that nobody has set; dataclasses.MISSING if it has to be."""
    return setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()


def _computed(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings that say what is computed: all but where the files lie, how it is run and for how long."""
    others = {"data": ("dir", "path"), "training": ("rounds",)}
    return {
        section: {name: value for name, value in values.items() if name not in others.get(section, ())}
        for section, values in sections.items()
        if section != "execution"
    }


Change = tuple[str, str, Any]  # section, key and value of a setting
SECTIONS = [section.name for section in dataclasses.fields(Experiment)]


def method_name(method: Method) -> str:
    """The name by which configs call a method."""
    return next(name for name, cls in METHODS.items() if type(method) is cls)


MAIN_JOB: dict[str, dict[str, Any]] = {"method": {"name": "pfedbayes", "zeta": 1.0}}
# What one's own data are trained with if nothing is said.
OWN_DATA: dict[str, dict[str, Any]] = {
    "data": {"test_fraction": 0.2, "validation": 0.2},
    "method": {"name": "pfedbayes", "zeta": 1.0},
    "training": {"rounds": 300, "local_steps": 20, "batch_size": 32, "evaluate_every": 5, "patience": 50},
}


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of a TOML file with overrides. Without a file: one's own data by the preset `OWN_DATA` if an
    override gives data.path, else the main job, pFedBayes on small MNIST.

    Settings of [method] belong to the method they were written for: when an override names another method, they go.
    """
    if path:
        return from_sections(read_toml(path), overrides)
    own_data = any(parse_override(text)[:2] == ("data", "path") for text in overrides)
    return from_sections(OWN_DATA if own_data else MAIN_JOB, overrides)


def from_sections(sections: Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of config sections."""
    return resolve(sections, [parse_override(text) for text in overrides])


def resolve(sections: Mapping[str, Any], changes: Sequence[Change] = ()) -> Experiment:
    """The experiment of config sections with changed settings (section, key, value)."""
    for section, values in sections.items():
        if section not in SECTIONS:
            raise UserError(f"unknown section [{section}]: {nearest(section, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise UserError(f"{section} is {values!r}: write it as a section [{section}]")
    merged = {section: dict(sections.get(section, {})) for section in SECTIONS}
    for section, name, value in changes:
        if section not in SECTIONS:
            raise UserError(f"unknown section {section!r} in {section}.{name}: {nearest(section, SECTIONS)}")
        if (section, name) == ("method", "name") and value != merged["method"].get("name"):
            merged["method"] = {"name": value}
    for section, name, value in changes:
        merged[section][name] = value

    chosen = merged["method"].pop("name", "pfedbayes")
    if chosen not in METHODS:
        raise UserError(f"unknown method {chosen!r}: {nearest(str(chosen), METHODS)}")
    if "path" in merged["data"]:
        where = Path(str(merged["data"]["path"])).expanduser().absolute()
        merged["data"] = {"name": "files"} | merged["data"] | {"path": str(where)}
    data = build(DataConfig, merged["data"], "data")
    if data.name == "files":
        data = dataclasses.replace(data, size=None)
    net = NetConfig.from_section(merged["net"])
    method = build(METHODS[chosen], merged["method"], "method")
    training = build(Training, merged["training"], "training")
    evaluation = build(Evaluation, merged["evaluation"], "evaluation")
    has_validation = data.validation > 0 or data.split_column is not None
    if evaluation.split == "validation" and not has_validation:
        raise UserError(
            "evaluation.split is 'validation' but data.validation is 0: hold out a fraction of the training data"
        )
    if training.patience is not None and not has_validation:
        raise UserError(
            "training.patience stops on validation data, and data.validation is 0: hold out a fraction of the training "
            "data, or leave patience out"
        )
    if training.patience is not None and evaluation.average_every > 1:
        raise UserError(
            "training.patience may keep a round that evaluation.average_every has left without its score: set one"
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


def _settle(net: NetConfig, method: Method, name: str, hidden: tuple[int, ...]) -> NetConfig:
    """The config with this name and these widths where nothing else is wanted, and with an initialisation."""
    name = method.needs.net or net.name or name
    inits: dict[str, Init] = {"mlp": method.habits.init, "vgg": "kaiming", "cnn": "kaiming"}
    return dataclasses.replace(
        net, name=name, hidden=hidden if net.hidden is None else net.hidden, init=net.init or inits.get(name, "torch")
    )


def fit_net(net: NetConfig, shards: Shards, method: Method) -> NetConfig:
    """The config with all that it leaves to the data: for images the paper's networks where they fit, else a CNN; for
    tables an MLP whose width grows with the square root of the number of rows, from 16 to 100."""
    shape = tuple(shards.x.shape[1:])
    if len(shape) == 3:
        paper = {(3, 32, 32): "vgg", (1, 28, 28): "mlp"}
        return _settle(net, method, paper.get(shape, "cnn"), (100,))
    rows = sum(len(train) for train in shards.train)
    return _settle(net, method, "mlp", (min(max(round(math.sqrt(rows)), 16), 100),))


def build_model(net: NetConfig, shards: Shards, method: Method) -> Model:
    """The network that fits the data and the method, and its likelihood."""
    net = fit_net(net, shards, method)
    shape = tuple(shards.x.shape[1:])
    targets = shards.num_classes if shards.num_classes is not None else shards.y.shape[1]
    outputs = method.needs.outputs or targets
    if net.name is not None and is_import_path(net.name):
        module = build_module(net.name, shape, outputs, net.settings)
    elif net.name == "cnn":
        if len(shape) != 3:
            raise UserError(f"the CNN takes images, the data have shape {shape}: use net.name=mlp")
        module = cnn(shape, outputs)
    elif net.name == "vgg":
        if shards.x.dim() != 4 or shards.x.shape[2:] != (32, 32):
            raise UserError(
                f"the VGG takes 32 x 32 images, the data have shape {tuple(shards.x.shape[1:])}: use net.name=mlp"
            )
        module = vgg(
            outputs, in_channels=shards.x.shape[1], head="linear" if method.needs.outputs else net.head, norm=net.norm
        )
    else:
        module = mlp([math.prod(shape), *(net.hidden or ()), outputs], net.activation)
    likelihood: Likelihood = Classification()
    if shards.num_classes is None:
        unit = shards.preprocessing.target.deviation if shards.preprocessing else 1.0
        likelihood = Regression(net.sigma_eps and net.sigma_eps / unit, unit)
        module = module if net.sigma_eps is not None else WithNoise(module)
    return Model(Net(module), likelihood, method.habits.pixels)


def build_federation(
    experiment: Experiment,
    shards: Shards,
    seeds: Sequence[int],
    plan: Plan | None = None,
    device: str = "auto",
    model: Model | None = None,
    clients_file: Path | None = None,
) -> Federation:
    """A federation at round 0; the model is the experiment's unless another is given."""
    model = model or build_model(experiment.net, shards, experiment.method)
    init = fit_net(experiment.net, shards, experiment.method).init
    make = partial(Federation, shards, model, experiment.method, experiment.training, seeds, init)
    if plan is not None:
        return make(plan, clients_file)
    choose = partial(plan_for, model, experiment.method, experiment.training, len(shards.train), len(seeds), device)
    federation = make(experiment.execution.adapt(choose()), clients_file)
    faster = None if experiment.execution.over else federation.faster_over()
    if faster in (None, federation.plan.over):
        return federation
    return make(experiment.execution.adapt(choose(over=faster)), clients_file)
