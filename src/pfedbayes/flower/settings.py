"""The run config of a Flower app: the sections [method], [training], [evaluation] and [federation]."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pfedbayes.constraints import AtLeastOne, Interval, NonNegative, Positive, check
from pfedbayes.engine.plan import Dtype
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError, nearest
from pfedbayes.methods import Method
from pfedbayes.nets import Init
from pfedbayes.runs.config import build, parse_override
from pfedbayes.runs.experiment import default_of, from_sections
from pfedbayes.runs.naming import make_imported, method_name
from pfedbayes.runs.sections import Evaluation

Wire = Literal["float32", "float16", "bfloat16", "float64"]
Rule = Literal["none", "median-norm", "trimmed-mean"]
Robust = Literal["auto", "none", "median-norm", "trimmed-mean"]
MIN_SECURE_CLIENTS = 3  # from the mean of two, each learns the other's update
MAX_SECURE_CLIENTS = 1000  # Flower adds numbers below 2^22 modulo 2^32


@dataclass(frozen=True)
class FederationConfig:
    """The section [federation] of a run config."""

    clients: AtLeastOne[int]
    """The number of clients, numbered from 0."""
    out: str = "runs/federation"
    """The run folder, on the server's machine."""
    init: Init | None = None
    """How weights are initialised, see `Net.init`; None for the method's default."""
    dtype: Dtype = "float32"
    """The type in which nodes and server compute."""
    wire: Wire = "float32"
    """The type in which arrays are sent."""
    timeout: Positive[float] = 600.0
    """Seconds that a round waits for replies."""
    wait: NonNegative[float] = 60.0
    """Seconds that the server waits for nodes to connect."""
    min_replies: int | None = None
    """Repeat a round with fewer usable uploads; None for more than half of the clients that were asked."""
    attempts: AtLeastOne[int] = 3
    """How often a round is tried."""
    largest: Positive[float] = 1e4
    """Refuse an upload with an entry of larger magnitude."""
    largest_rho: Positive[float] = 30.0
    """Refuse a Gaussian with an entry of rho of larger magnitude: sigma is about exp(rho) for negative rho."""
    largest_step: Positive[float] = 100.0
    """Refuse an upload with an entry that is farther than this from the server's model, where there is one model."""
    largest_size: AtLeastOne[float] = 10.0
    """Count the examples of a client as at most this many times the median, in averages that are weighted by them."""
    roster: str | None = None
    """The file on the server's machine that names the key of each client, see `pfedbayes federation keys`."""
    enrol: Literal["roster", "first-come"] = "roster"
    """Without a roster: "first-come" binds each client to the key of the first node that claims its number."""
    keep: AtLeastOne[int] = 5
    """The number of states that the server and each node keep, to go back to with `pfedbayes federation rollback`."""
    robust: Robust = "auto"
    """Robust averaging: "median-norm" scales down long updates, "trimmed-mean" drops extreme values.

    "auto" is "median-norm" for methods that average and Hierarchical, and "none" for others and with secure or
    privacy_noise.
    """
    trim: Annotated[float, Interval(at_least=0, less_than=0.5)] = 0.2
    """The share of the largest and of the smallest values that "trimmed-mean" drops from every entry."""
    privacy_noise: NonNegative[float] = 0.0
    """The noise multiplier z of client-level differential privacy; 0 for none."""
    privacy_clip: Positive[float] = 1.0
    """The clipping norm of updates of theta, or of the means of Gaussians."""
    privacy_clip_rho: Positive[float] = 1.0
    """The clipping norm of updates of the rho of Gaussians."""
    privacy_delta: Annotated[float, Interval(more_than=0, less_than=1)] = 1e-5
    """The delta of (epsilon, delta)-privacy."""
    secure: bool = False
    """Secure aggregation: the server learns the mean of the updates and no single update."""
    secure_reach: Positive[float] = 1.0
    """Clip entries of updates to [-secure_reach, secure_reach]; the mean is precise to a two-millionth of it."""
    states: str | None = None
    """The folder for the states of nodes without a state-dir, for simulations on one machine."""

    def __post_init__(self) -> None:
        check(self)
        if self.min_replies is not None and not 1 <= self.min_replies <= self.clients:
            raise ValueError(f"min_replies must be between 1 and clients = {self.clients}, got {self.min_replies}")
        if self.privacy_noise and self.robust not in ("none", "auto"):
            raise ValueError("privacy_noise clips updates itself and needs a plain mean: leave robust out")
        if self.secure and not MIN_SECURE_CLIENTS <= self.clients <= MAX_SECURE_CLIENTS:
            raise ValueError(
                f"secure needs {MIN_SECURE_CLIENTS} to {MAX_SECURE_CLIENTS} clients, got {self.clients}: the mean of "
                "two reveals each one's update to the other, and Flower's sums overflow with more"
            )
        if self.secure and (self.privacy_noise or self.robust not in ("none", "auto")):
            raise ValueError("secure shows the server no single update: leave robust and privacy_noise out")

    def rule(self, method: Method) -> Rule:
        """Return how uploads of this method are made robust."""
        if self.robust != "auto":
            return self.robust
        means = method.about.averages or method.about.mean_only
        return "median-norm" if means and not (self.secure or self.privacy_noise) else "none"


# Settings that may change between two starts of one federation, because its results do not depend on them.
OPERATION = {
    "training": {"rounds"},
    "federation": {
        "out",
        "states",
        "timeout",
        "wait",
        "min_replies",
        "attempts",
        "largest",
        "largest_rho",
        "largest_step",
        "roster",
        "enrol",
        "keep",
    },
}
SECTIONS = ("method", "training", "evaluation", "federation")


@dataclass(frozen=True)
class Settings:
    """The sections of a run config, parsed."""

    method: Method
    training: Training
    evaluation: Evaluation
    federation: FederationConfig

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return plain values by section."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        sections["method"] = {"name": method_name(self.method), **sections["method"]}
        return sections

    def identity(self) -> dict[str, Any]:
        """Return every setting that the results depend on: it identifies a federation."""
        return _identity(self.sections())

    def completed(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return an earlier identity, with the default values of settings that were added since."""
        defaults = {
            section: {
                each.name: value
                for each in dataclasses.fields(getattr(self, section))
                if (value := default_of(each)) is not dataclasses.MISSING
            }
            for section in SECTIONS
        }
        return _identity(defaults) | dict(before)

    def digest(self) -> str:
        """Return a hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def needed(self, asked: int) -> int:
        """Return how many uploads a round needs if it asks this many clients."""
        if self.method.needs.all_clients:
            return self.federation.clients
        least = MIN_SECURE_CLIENTS if self.federation.secure else 0
        return max(least, self.federation.min_replies or asked // 2 + 1)


def _identity(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": json.loads(json.dumps(value))  # lists instead of tuples, as in the file
        for section, values in sections.items()
        for name, value in values.items()
        if name not in OPERATION.get(section, ())
    }


def refuse_difference(before: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse to continue with other settings than before, and name the first one that differs."""
    for name in (*now, *before):
        old, new = before.get(name), now.get(name)
        if old != new:
            raise UserError(f"{what} was made with {name} = {json.dumps(old)} and is now {json.dumps(new)}: {remedy}")


def from_run_config(run_config: Mapping[str, Any]) -> Settings:
    """Parse a flat run config such as {"method.name": "pfedbayes", "training.rounds": 20}.

    Flower does not support lists, so a list is written as a text: "[0, 10]".
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in run_config.items():
        section, dot, key = name.partition(".")
        if section not in SECTIONS or not dot:
            raise UserError(f"unknown key {name} in the run config: {nearest(section, SECTIONS)}")
        sections.setdefault(section, {})[key] = (
            parse_override(f"{name}={value}")[2] if isinstance(value, str) and value.startswith("[") else value
        )
    own = sections.pop("federation", {})
    if "clients" not in own:
        raise UserError("federation.clients is missing: write the number of clients in pyproject.toml")
    federation = build(FederationConfig, own, "federation")
    if sections.get("training", {}).get("patience") is not None:
        raise UserError("there is no early stopping on Flower: leave training.patience out")
    # Only the nodes' own loaders know whether there are validation data.
    experiment = from_sections(sections | {"data": {"validation": 0.1}}, make=make_imported)
    method = experiment.method
    if method.needs.pooled_data:
        raise UserError(f"{method.about.title} needs the data of all clients in one place: choose another method")
    if experiment.evaluation.clients is not None:
        raise UserError("every node evaluates itself on Flower: leave evaluation.clients out")
    if experiment.evaluation.posterior is not None:
        raise UserError(
            "on Flower every node scores the method's own predictions: leave evaluation.posterior out, or train with "
            "pfedbayes run"
        )
    changes = federation.robust not in ("none", "auto") or federation.privacy_noise or federation.secure
    if method.about.mean_only and (federation.privacy_noise or federation.secure):
        raise UserError(
            f"{method.about.title} sends models and gradients, which differ in size by orders of magnitude: leave "
            "federation.privacy_noise and .secure out, or set method.name=pfedbayes"
        )
    if not (method.about.averages or method.about.mean_only) and changes:
        raise UserError(
            f"{method.about.title} does not average uploads: leave federation.robust, .privacy_noise and .secure out"
        )
    participants = experiment.training.participants
    if federation.secure and participants is not None and participants < MIN_SECURE_CLIENTS:
        raise UserError(
            f"training.participants is {participants}, but federation.secure needs {MIN_SECURE_CLIENTS}: raise it"
        )
    return Settings(method, experiment.training, experiment.evaluation, federation)
