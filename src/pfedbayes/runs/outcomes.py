"""The likelihood of a target of a table, and the outputs that a network needs for it."""

from __future__ import annotations

from typing import NamedTuple

from pfedbayes.data import TaskShape
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Gaussian, Likelihood, StudentT
from pfedbayes.runs.sections import NetConfig

# By task, the values of net.likelihood; the first is the default.
CHOICES: dict[str, tuple[str, ...]] = {"regression": ("student-t", "gaussian")}


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
    if name == "regression":
        if net.sigma_eps is not None:
            return Outcome(Gaussian(net.sigma_eps / task.unit, task.unit), outputs=1)
        if chosen == "gaussian":
            return Outcome(Gaussian(None, task.unit), outputs=1, constants=1)
        return Outcome(StudentT(None, task.unit), outputs=2, constants=2)
    if task.num_classes == 2 and width is None:
        return Outcome(Classification(ranking=True), outputs=1, reference=True)
    return Outcome(Classification(ranking=True), outputs=width or task.num_classes or 1)
