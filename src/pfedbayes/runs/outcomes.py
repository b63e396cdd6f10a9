"""The likelihood of a target of a table, and the outputs that a network needs for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from pfedbayes.data import TaskShape
from pfedbayes.data.own.intervals import require_sound_intervals
from pfedbayes.data.own.summaries import MAX_CLASSES
from pfedbayes.errors import UserError
from pfedbayes.maths.counts import NegativeBinomial, Poisson
from pfedbayes.maths.likelihoods import Classification, Gaussian, Likelihood, Regression, StudentT
from pfedbayes.maths.ordinal import Ordinal
from pfedbayes.maths.survival import Survival
from pfedbayes.nets import Net
from pfedbayes.runs.sections import NetConfig

# By task, the values of net.likelihood; the first is the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "regression": ("student-t", "gaussian"),
    "count": ("negative-binomial", "poisson"),
}

NAMES: dict[str, type[Any]] = {
    "classification": Classification,
    "regression": Regression,
    "gaussian": Gaussian,
    "student-t": StudentT,
    "ordinal": Ordinal,
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "survival": Survival,
}
WIDTHS: dict[type[Any], int] = {
    StudentT: 4,
    Poisson: 1,
    NegativeBinomial: 2,
}  # outputs that a likelihood reads, where their number is fixed


class Outcome(NamedTuple):
    """A likelihood, and the outputs of `nets.TableNet` that it reads."""

    likelihood: Likelihood
    outputs: int
    """Outputs that depend on the input."""
    constants: int = 0
    """Further outputs that do not."""
    reference: bool = False
    """Whether the first of two logits is always 0."""


def outcome_of(net: NetConfig, task: TaskShape, width: int | None) -> Outcome:
    """Return the likelihood of a target. width: the number of outputs, if the method determines it."""
    name = task.target.task if task.target else "regression" if task.num_classes is None else "classification"
    choices = CHOICES.get(name, ())
    if net.likelihood is not None and net.likelihood not in choices:
        remedy = f"choose one of {', '.join(choices)}" if choices else "leave it out"
        raise UserError(f"net.likelihood is {net.likelihood!r}, but the task is {name}: {remedy}")
    chosen = str(net.likelihood or (choices[0] if choices else ""))
    if name == "count" and task.target is not None:
        if chosen == "poisson":
            return Outcome(Poisson(task.target.rate), outputs=1)
        return Outcome(NegativeBinomial(task.target.rate), outputs=1, constants=1)
    if name == "survival" and task.target is not None:
        edges = task.target.edges
        return Outcome(Survival(edges, task.target.rate), outputs=1, constants=len(edges))
    if name == "ordinal":
        classes = task.num_classes or 2
        return Outcome(Ordinal(classes=classes), outputs=1, constants=classes - 1)
    if name == "regression":
        if net.sigma_eps is not None:
            return Outcome(Gaussian(net.sigma_eps / task.unit, task.unit), outputs=1)
        if chosen == "gaussian":
            return Outcome(Gaussian(None, task.unit), outputs=1, constants=1)
        return Outcome(StudentT(None, task.unit), outputs=2, constants=2)
    if task.num_classes == 2 and width is None:
        return Outcome(Classification(ranking=True), outputs=1, reference=True)
    return Outcome(Classification(ranking=True), outputs=width or task.num_classes or 1)


def as_object(likelihood: Likelihood) -> dict[str, Any]:
    """Return the name and the numbers of a likelihood as a JSON object."""
    name = next(name for name, kind in NAMES.items() if type(likelihood) is kind)
    return {"name": name, **dataclasses.asdict(likelihood)}  # type: ignore[call-overload]


def of_object(content: dict[str, Any]) -> Likelihood:
    """Return the likelihood that `as_object` described; raise ValueError if a value is not one that it can have."""
    kind = NAMES.get(str(content.get("name")))
    values = {name: value for name, value in content.items() if name != "name"}
    if kind is None or set(values) != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"its likelihood {str(content)[:80]!r} is not known")
    for name, value in values.items():
        positive = type(value) in (int, float) and 0 < value < math.inf
        known = type(value) is bool if name == "ranking" else positive or (name == "sigma_eps" and value is None)
        if name == "classes":
            known = type(value) is int and 2 <= value <= MAX_CLASSES
        if name == "edges":
            known = isinstance(value, list) and all(type(edge) in (int, float) for edge in value)
        if not known:
            raise ValueError(f"{name} of its likelihood is {str(value)[:40]}")
    if kind is Survival:
        values["edges"] = tuple(values["edges"])
        require_sound_intervals(values["edges"])
    likelihood: Likelihood = kind(**values)
    return likelihood


def require_width(likelihood: Likelihood, net: Net) -> None:
    """Raise ValueError unless a network for tables has the outputs that the likelihood reads."""
    wanted = WIDTHS.get(type(likelihood))
    if isinstance(likelihood, Ordinal):
        wanted = likelihood.classes
    if isinstance(likelihood, Survival):
        wanted = 1 + len(likelihood.edges)
    if type(likelihood) is Gaussian and net.num_outputs:
        wanted = 1 + (likelihood.sigma_eps is None)
    if wanted is not None and net.num_outputs != wanted:
        raise ValueError(f"its network has {net.num_outputs} outputs, and its likelihood reads {wanted}")
