"""What a federation is told by the run config of its Flower app: [method], [training], [evaluation], [federation]."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pfedbayes.engine.federation import Training
from pfedbayes.engine.plan import Dtype
from pfedbayes.errors import UserError, nearest
from pfedbayes.methods import Method
from pfedbayes.nets import Init
from pfedbayes.runs.config import build, parse_override
from pfedbayes.runs.experiment import default_of, from_sections, method_name
from pfedbayes.runs.sections import Evaluation

Wire = Literal["float32", "float16", "bfloat16", "float64"]
Robust = Literal["none", "median-norm", "trimmed-mean"]
SECURE_CLIENTS = 1000  # numbers below 2^22 are added modulo 2^32


@dataclass(frozen=True)
class FederationConfig:
    """clients: how many there are, numbered from 0; out: the run folder, on the server's machine. init: see `Net.init`;
    dtype: in what nodes and server compute; wire: in what arrays travel.

    timeout: seconds that a round waits for replies; wait: seconds that the server waits for nodes to come;
    min_replies: a round with fewer usable uploads is asked for again, `attempts` times (more than half of those asked
    if not given). largest: an upload with an entry of larger magnitude is refused.
    robust: what guards the average. "median-norm" shortens updates that are longer than the median one,
    "trimmed-mean" leaves out the largest and smallest `trim` of the values of every entry.
    privacy_noise: noise multiplier z of client-level differential privacy, 0 for none; privacy_clip: the longest
    update of the means (or of theta), privacy_clip_rho: of the rho of Gaussians; privacy_delta: the delta of
    (epsilon, delta).
    secure: secure aggregation, where the server learns the mean of the updates and no single one; secure_reach: entries
    of updates are clipped to [-secure_reach, secure_reach]; a two-millionth of it is the precision of the mean.
    states: where nodes that have no state-dir of their own keep their states, for simulations on one machine.
    """

    clients: int
    out: str = "runs/federation"
    init: Init | None = None
    dtype: Dtype = "float32"
    wire: Wire = "float32"
    timeout: float = 600.0
    wait: float = 60.0
    min_replies: int | None = None
    attempts: int = 3
    largest: float = 1e4
    robust: Robust = "none"
    trim: float = 0.2
    privacy_noise: float = 0.0
    privacy_clip: float = 1.0
    privacy_clip_rho: float = 1.0
    privacy_delta: float = 1e-5
    secure: bool = False
    secure_reach: float = 1.0
    states: str | None = None

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        for name in ("timeout", "largest", "privacy_clip", "privacy_clip_rho", "secure_reach"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("wait", "privacy_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if self.min_replies is not None and not 1 <= self.min_replies <= self.clients:
            raise ValueError(f"min_replies must be between 1 and clients = {self.clients}, got {self.min_replies}")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim must be at least 0 and less than 0.5, got {self.trim}")
        if not 0 < self.privacy_delta < 1:
            raise ValueError(f"privacy_delta must be between 0 and 1, got {self.privacy_delta}")
        if self.privacy_noise and self.robust != "none":
            raise ValueError("privacy_noise clips updates itself and bounds a plain mean: leave robust out")
        if self.secure and not 3 <= self.clients <= SECURE_CLIENTS:
            raise ValueError(
                f"secure needs 3 to {SECURE_CLIENTS} clients, got {self.clients}: from the mean of two each can tell "
                "the other's update, and Flower's sums of more overflow"
            )
        if self.secure and (self.privacy_noise or self.robust != "none"):
            raise ValueError("with secure the server sees no single update to clip or trim: leave the others out")


# What may change between two starts of one federation: how long, where and how patiently.
OPERATION = {
    "training": {"rounds"},
    "federation": {"out", "states", "timeout", "wait", "min_replies", "attempts", "largest"},
}
SECTIONS = ("method", "training", "evaluation", "federation")


@dataclass(frozen=True)
class Settings:
    """The sections of a run config."""

    method: Method
    training: Training
    evaluation: Evaluation
    federation: FederationConfig

    def sections(self) -> dict[str, dict[str, Any]]:
        """Plain values by section."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        sections["method"] = {"name": method_name(self.method), **sections["method"]}
        return sections

    def identity(self) -> dict[str, Any]:
        """What one federation is told from another by: every setting that its results depend on."""
        return _identity(self.sections())

    def completed(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """An earlier identity, in which settings that are younger than it have their default values."""
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
        """The identity as a short text."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def needed(self, asked: int) -> int:
        """How many uploads a round that asks so many clients cannot do without."""
        if self.method.needs.all_clients:
            return self.federation.clients
        return self.federation.min_replies or asked // 2 + 1


def _identity(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": json.loads(json.dumps(value))  # lists instead of tuples, as they are read back
        for section, values in sections.items()
        for name, value in values.items()
        if name not in OPERATION.get(section, ())
    }


def refuse_difference(before: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse to go on with what was made under other settings, and name the first one that differs."""
    for name in (*now, *before):
        old, new = before.get(name), now.get(name)
        if old != new:
            raise UserError(f"{what} was made with {name} = {json.dumps(old)} and is now {json.dumps(new)}: {remedy}")


def from_run_config(run_config: Mapping[str, Any]) -> Settings:
    """The settings of a flat run config such as {"method.name": "pfedbayes", "training.rounds": 20}.

    Flower knows no lists in it, so a list is written as a text: "[0, 10]".
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
        raise UserError("federation.clients is missing: write in pyproject.toml how many clients there are")
    federation = build(FederationConfig, own, "federation")
    if sections.get("training", {}).get("patience") is not None:
        raise UserError("on Flower there is no early stopping: leave training.patience out")
    # Whether there are validation data is for the nodes' own loaders to say.
    experiment = from_sections(sections | {"data": {"validation": 0.1}})
    method = experiment.method
    if method.needs.pooled_data:
        raise UserError(f"{method.about.title} needs everybody's data in one place: it cannot run on Flower")
    if experiment.evaluation.clients is not None:
        raise UserError("on Flower every node scores itself: leave evaluation.clients out")
    if not method.about.averages and (federation.robust != "none" or federation.privacy_noise or federation.secure):
        raise UserError(
            f"{method.about.title} does not average uploads: leave federation.robust, .privacy_noise and .secure out"
        )
    return Settings(method, experiment.training, experiment.evaluation, federation)
