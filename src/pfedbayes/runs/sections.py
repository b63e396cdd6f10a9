"""The sections [net], [evaluation] and [execution] of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pfedbayes.constraints import AtLeastOne, Count, CountOrZero, Interval, NonNegative, Positive, check
from pfedbayes.engine.plan import Dtype, Noise, Over, Plan, Precision, Threads
from pfedbayes.engine.population import Resting
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import EvaluationSplit, Sampling, estimator_names
from pfedbayes.evaluation.laplace import Choice
from pfedbayes.maths.laplace import Structure
from pfedbayes.nets import Init
from pfedbayes.nets.convolutions import Convolutions
from pfedbayes.nets.import_path import is_import_path
from pfedbayes.runs.config import build, check_plain

NETS = ("mlp", "table", "vgg", "cnn")
MOST_LAYERS = 1000
TABLE_WIDTH = 16  # of the hidden layer of the network for tables
MOST_FOLDS = 100
OF_ALL_NETS = ("name", "init", "sigma_eps")  # settings that the user's own modules have too


@dataclass(frozen=True)
class NetConfig:
    """The network and its noise model."""

    name: str | None = None
    """"mlp", "table", "vgg", "cnn", or the import path of your own module, "my_module:MyNet". Default: what fits."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers of an MLP, or of the one hidden layer of the network for tables (0: no layer)."""
    activation: Literal["relu", "tanh"] = "relu"
    head: Literal["mlp3", "linear"] = "mlp3"
    """Classifier of the VGG."""
    norm: Literal["none", "group"] = "none"
    """Normalisation layers of the VGG."""
    init: Init | None = None
    """See `Net.init`. Default: what the method's paper uses."""
    likelihood: Literal["student-t", "gaussian", "negative-binomial", "poisson"] | None = None
    """Distribution of a target, with the network for tables. Default: the first of its task."""
    sigma_eps: Positive[float] | None = None
    """Noise of a regression, in units of its target. Default: learned."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for your own module; in a config they stand beside its name."""

    def __post_init__(self) -> None:
        check(self)
        if self.name not in (None, *NETS) and not is_import_path(self.name):
            raise ValueError(
                f"name is {self.name!r}: choose one of {', '.join(NETS)}, or a module like my_module:MyNet"
            )
        least = 0 if self.name == "table" else 1
        if any(width < least for width in self.hidden or ()):
            raise ValueError(f"hidden widths must be at least {least}, got {list(self.hidden or ())}")
        if self.name == "table" and self.hidden is not None and len(self.hidden) != 1:
            raise ValueError(
                f"the network for tables has one hidden layer, so hidden is one width, e.g. [{TABLE_WIDTH}]"
            )
        if len(self.hidden or ()) > MOST_LAYERS:
            raise ValueError(f"hidden must have at most {MOST_LAYERS} widths, got {len(self.hidden or ())}")

    def section(self) -> dict[str, Any]:
        """Return plain values, as in a config."""
        values: dict[str, Any] = dataclasses.asdict(self)
        settings: dict[str, Any] = values.pop("settings")
        if is_import_path(self.name):
            return {name: values[name] for name in OF_ALL_NETS} | settings
        return values

    @classmethod
    def from_section(cls, values: Mapping[str, Any]) -> NetConfig:
        """Build from a config. With an import path, unknown keys become arguments of the module."""
        if not is_import_path(str(values.get("name"))):
            if "settings" in values:
                raise UserError("net.settings are arguments of your own module: give net.name, e.g. my_module:MyNet")
            return build(cls, values, "net")
        own = {name: value for name, value in values.items() if name in OF_ALL_NETS}
        settings = {name: value for name, value in values.items() if name not in OF_ALL_NETS}
        check_plain(settings, "net")
        return dataclasses.replace(build(cls, own, "net"), settings=settings)


@dataclass(frozen=True)
class Evaluation:
    """How models are scored."""

    samples: Count = 10
    """Weight draws averaged in a prediction."""
    label_prior: bool = False
    """Also score every model with the client's label frequencies added to its log-probabilities."""
    split: EvaluationSplit = "test"
    """The data set on which models are scored."""
    estimators: tuple[str, ...] | None = None
    """Which of "one", "mc10" and "mean" to score, where weights are drawn. Default: all."""
    sampling: Sampling = "weights"
    """Draw the "weights", in "pairs" with opposite noise (less variance), or the "activations" of dense layers
    (cheaper)."""
    clients: AtLeastOne[int] | None = None
    """Score this many clients, drawn once. Default: all."""
    average_every: AtLeastOne[int] = 1
    """Score the average of the draws, the most expensive estimator, only in rounds divisible by this number and in the
    last round."""
    folds: Annotated[int, Interval(at_least=0, at_most=MOST_FOLDS)] = 0
    """Train this many more federations, each without one fold of the training rows, and calibrate predictions by what
    they say of the rows left out; 0 for none. A run with validation rows of its own uses those instead."""
    alone: bool = False
    """Also train each client alone, to show what joining bought."""
    posterior: Literal["laplace", "swag", "ensemble"] | None = None
    """What a method without weight draws predicts with: a Gaussian over the last layer ("laplace"), a Gaussian over all
    weights from the models of the last rounds ("swag"), or all seeds together ("ensemble"). Default: one network."""
    covariance: Structure = "kronecker"
    """Structure of Laplace's covariance."""
    precision: Choice = "evidence"
    """Laplace's prior precision has the highest marginal likelihood, or the least NLL of validation rows."""
    swag_start: CountOrZero | None = None
    """Rounds before SWAG collects its first model. Default: three quarters of training.rounds."""
    swag_rank: CountOrZero = 10
    """Rank of SWAG's covariance beside its diagonal; a client keeps this many models."""

    def __post_init__(self) -> None:
        check(self)
        known = estimator_names(self.samples)
        if self.estimators is not None and (not self.estimators or not set(self.estimators) <= set(known)):
            raise ValueError(f"estimators must be some of {', '.join(known)}, got {list(self.estimators)}")
        if self.folds == 1:
            raise ValueError("folds is 1, which leaves no rows to train on: give 0, or at least 2")
        if self.average_every > 1 and not self._without_average:
            raise ValueError("average_every leaves nothing to score in most rounds: give another estimator too")

    @property
    def _without_average(self) -> tuple[str, ...]:
        known = estimator_names(self.samples)
        return tuple(name for name in self.estimators or known if name != known[1])

    def after(self, round: int, rounds: int) -> dict[str, Any]:
        """Return the arguments of `Prediction.evaluate` after round `round` of `rounds`."""
        options = dataclasses.asdict(self)
        for name in ("folds", "alone", "posterior", "covariance", "precision", "swag_start", "swag_rank"):
            del options[name]
        if round % options.pop("average_every") and round != rounds:
            options["estimators"] = self._without_average
        return options


@dataclass(frozen=True)
class Execution:
    """How a run is executed: see `Plan` for the fields without a description.

    A field that is None is chosen to fit. The choice is recorded in the run folder; results depend on it only up to
    rounding.
    """

    over: Over | None = None
    chunk: AtLeastOne[int] | None = None
    threads: Threads | None = None
    dtype: Dtype = "float32"
    compile: bool | None = None
    graph: bool | None = None
    noise: Noise | None = None
    precision: Precision | None = None
    convolutions: Convolutions | None = None
    resting: Resting | None = None
    checkpoint_seconds: NonNegative[float] = 20.0
    """Seconds between checkpoints; longer where saving is slow."""

    def __post_init__(self) -> None:
        check(self)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan with every setting that is given here."""
        wanted = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        del wanted["checkpoint_seconds"]
        if self.over == "loop":
            wanted = {"compile": False, "graph": False} | wanted
        elif self.noise == "torch":
            wanted = {"graph": False} | wanted
        return dataclasses.replace(plan, **wanted)
