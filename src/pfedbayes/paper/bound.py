"""The terms of Theorem 1 for an experiment or a run, and a plain reading of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pfedbayes import runs
from pfedbayes.data import Shards, load_shards
from pfedbayes.errors import UserError
from pfedbayes.methods import PFedBayes
from pfedbayes.paper import theory
from pfedbayes.paper.theory import LARGEST_DISTANCE, Constants, Setting
from pfedbayes.runs.config import build, parse_override, read_toml
from pfedbayes.runs.experiment import fit_net, from_sections
from pfedbayes.runs.naming import make_without_code, method_name


class Case(NamedTuple):
    """The setting of the theory that stands for an experiment.

    notes: assumptions of the theorem that the experiment breaks, and what was taken instead.
    """

    setting: Setting
    notes: tuple[str, ...] = ()


class Term(NamedTuple):
    """A row of the table that `pfedbayes paper bound` prints."""

    name: str  # the key in the JSON output
    letter: str  # of the paper
    equation: str
    value: float
    meaning: str


def parse_constants(texts: Sequence[str]) -> Constants:
    """Read the constants of the paper from texts such as "C_prime=2"."""
    values = {}
    for text in texts:
        if "=" not in text:
            raise UserError(f"--constant {text!r} has no '=': write NAME=VALUE, e.g. --constant C_prime=2")
        _, name, value = parse_override(f"constants.{text}")
        values[name] = value
    return build(Constants, values, "constants")


def read_case(source: Path | None, data_dir: Path | None = None) -> Case:
    """Return the setting of an experiment file or a run folder; None: the paper's medium MNIST."""
    if source is None:
        return Case(Setting())
    experiment = from_sections(_sections(source), make=make_without_code)
    name = method_name(experiment.method)
    if not isinstance(experiment.method, PFedBayes):
        raise UserError(
            f"{source} trains {name}, but the theorem is about pfedbayes: give an experiment with that method"
        )
    net, shards = experiment.net, None
    if net.name in (None, "mlp"):
        shards = load_shards(experiment.data, data_dir)
        net = fit_net(net, shards, experiment.method)
    if shards is None or net.name != "mlp" or not net.hidden:
        raise UserError(
            f"{source} has the net {net.name!r}, but the theorem is about fully connected nets with hidden layers: "
            "give --n, --layers, --width and --inputs instead of the file"
        )
    return _case(shards, net.hidden, experiment.method)


def _sections(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        return read_toml(source)
    run = runs.read_run(source)
    if run.info.digest is None:
        raise UserError(f"{source} holds no data and no net: give --n, --layers, --width and --inputs instead of it")
    return run.sections


def _case(shards: Shards, hidden: tuple[int, ...], method: PFedBayes) -> Case:
    """Return the nearest setting that the theorem covers, with a note for every assumption that does not hold."""
    sizes = [len(indices) for indices in shards.train]
    notes = []
    if len(set(sizes)) > 1:
        notes.append(f"clients have {min(sizes)} to {max(sizes)} examples; n is the smallest of these numbers")
    if len(set(hidden)) > 1:
        notes.append(f"the hidden layers have widths {list(hidden)}; M is the largest of them")
    if shards.num_classes is not None:
        notes.append(
            "the theorem is about regression; for classification the values show an order of magnitude at best"
        )
    if method.zeta < 1:
        notes.append(f"the theorem needs zeta of at least 1: 1 is used instead of {method.zeta:g}")
    setting = Setting(
        size=min(sizes),
        layers=len(hidden),
        width=max(hidden),
        inputs=math.prod(shards.x.shape[1:]),
        outputs=shards.num_classes or shards.y.shape[1],
        zeta=max(1.0, method.zeta),
    )
    return Case(setting, tuple(notes))


def with_changes(setting: Setting, **given: Any) -> Setting:
    """Return the setting with the given values; None keeps the value of the setting."""
    return dataclasses.replace(setting, **{name: value for name, value in given.items() if value is not None})


def terms(s: Setting) -> list[Term]:
    """Return the quantities of Section 3, in the paper's order."""
    exponent = theory.rate_exponent(s.smoothness, s.d)
    return [
        Term("num_params", "T", "", s.num_params, "parameters of the network"),
        Term("scale_a", "A", "(10)", theory.scale_a(s), "scale of σ_n²"),
        Term(
            "sigma_n", "σ_n", "(9)", math.sqrt(theory.sigma_n_squared(s)), "standard deviation of a weight in the proof"
        ),
        Term("r_n", "r_n", "(11)", theory.r_n(s), "estimation error"),
        Term("xi_n", "ξ_n", "(21)", theory.xi_n(s), f"approximation error, β = {s.smoothness:g}, d = {s.d:g}"),
        Term("epsilon_n_squared", "ε_n²", "(13)", theory.epsilon_n(s) ** 2, "r_n log^2δ(n)"),
        Term("lemma1", "Lemma 1", "(18)", theory.lemma1(s, 0.0), "C ε_n², added to the objective over n"),
        Term("lemma2", "Lemma 2", "(19)", theory.lemma2(s), "bound on the objective l_n + ζ KL"),
        Term("theorem1", "Theorem 1", "(20)", theory.theorem1(s), "bound on the squared Hellinger distance"),
        Term(
            "chosen_num_params",
            "T",
            "Sec. 3",
            theory.chosen_num_params(s),
            "the number of parameters that the corollary chooses",
        ),
        Term("minimax_rate", "", "(25)", theory.minimax_rate(s), f"minimax rate n^{exponent:.3g}"),
        Term("convergence_rate", "", "(22)", theory.convergence_rate(s), "minimax rate times log^2δ(n)"),
    ]


def explain(s: Setting) -> list[str]:
    """Return sentences that say what the terms mean."""
    bound, useful = theory.theorem1(s), theory.useful_size(s)
    statement = f"the averaged squared Hellinger distance is at most {bound:.3g}"
    if bound < LARGEST_DISTANCE:
        sentences = [f"The bound is not vacuous: {statement}, and the largest possible distance is 1."]
    elif useful is not None:
        sentences = [
            f"The bound is vacuous: {statement}, but no such distance exceeds 1.",
            f"It falls below 1 from n = {useful:.3g} examples per client.",
        ]
    else:
        share = s.constants.C_second * theory.xi_n(s) / s.zeta
        sentences = [
            f"The bound is vacuous: {statement}, but no such distance exceeds 1.",
            f"It stays vacuous for every n: the approximation error alone contributes {share:.3g}.",
        ]
    variance = theory.sigma_n_squared(s)
    if variance > s.weight_bound**2:
        sentences.append(f"Assumption 3 does not hold: σ_n² = {variance:.3g} exceeds B² = {s.weight_bound**2:.3g}.")
    unknown = dataclasses.asdict(s.constants)
    delta = unknown.pop("delta")
    sentences.append(
        "The paper gives no values for the constants C. This table uses "
        + ("1 for all" if set(unknown.values()) == {1.0} else ", ".join(f"{k} = {v:g}" for k, v in unknown.items()))
        + f", and δ = {delta:g}: the values show how the bound grows, not how large it is."
    )
    return sentences


def as_json(case: Case) -> dict[str, Any]:
    """Return the setting, the terms and the notes for the option --json."""
    s = case.setting
    return {
        "setting": dataclasses.asdict(s) | {"dimension": s.d},
        "terms": {term.name: term.value for term in terms(s)},
        "vacuous": theory.theorem1(s) >= LARGEST_DISTANCE,
        "useful_size": theory.useful_size(s),
        "notes": list(case.notes),
    }
