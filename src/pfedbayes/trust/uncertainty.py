"""Assess the uncertainty of the models of a federation: calibration and out-of-distribution detection.

On its own test data a client's model should be as confident as it is accurate. On inputs unlike its training data it
should be less confident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import MODELS, Served
from pfedbayes.maths.metrics import (
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    confidence,
    decompose_uncertainty,
    ece,
    log_average,
    nll,
    reliability,
    temperature,
    tempered,
)
from pfedbayes.maths.ranking import auroc
from pfedbayes.trust import abstention, conformal, gate
from pfedbayes.trust.gate import Gate, HeldOut, Parts
from pfedbayes.trust.shifts import some_rows, strange_inputs, strange_rows
from pfedbayes.trust.strangeness import distances, fit_inputs, model_scores, strangeness

ALPHA, TARGET = 0.1, 0.01  # miscoverage of the conformal sets, and error rate of abstention
ALARM = 0.05  # share of own inputs that a threshold on the strangeness may flag
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of inputs of unseen labels in a mixture
# Heading of each metric in tables, with an arrow towards better values, and its decimals.
FIGURES = {
    "accuracy": ("accuracy %\u00a0↑", 2),
    "nll": ("NLL\u00a0↓", 3),
    "brier": ("Brier\u00a0↓", 3),
    "ece": ("ECE\u00a0↓", 3),
    "adaptive_ece": ("adaptive ECE\u00a0↓", 3),
    "aurc": ("AURC\u00a0↓", 4),
    "false_alarms": (f"false alarms\u00a0≤\u00a0{ALARM:g}", 3),
    "auroc_unseen": ("unseen labels\u00a0↑", 3),
    "auroc_other": ("other set\u00a0↑", 3),
    "auroc_rotated": ("rotated\u00a0↑", 3),
    "auroc_noisy": ("noisy\u00a0↑", 3),
    "set_coverage": (f"sets cover\u00a0→\u00a0{1 - ALPHA:g}", 3),
    "set_size": ("labels in a set\u00a0↓", 2),
    "answered": ("answered\u00a0↑", 3),
    "answered_wrong": (f"wrong among them\u00a0≤\u00a0{TARGET:g}", 4),
}
TABLES = {
    "On the clients' own test data": ("accuracy", "nll", "brier", "ece", "adaptive_ece", "aurc"),
    "Detection of out-of-distribution inputs (AUROC)": ("auroc_unseen", "auroc_other", "auroc_rotated", "auroc_noisy"),
    "Guarantees: conformal sets and abstention": ("set_coverage", "set_size", "answered", "answered_wrong"),
}

# Further tables, which earlier measurements do not have.
FURTHER = {
    f"Own test data with a strangeness of {1 - ALARM:g} or more": ("false_alarms",),
} | {
    f"{title} by the share of inputs of unseen labels, and on the test data of all clients": (
        *(f"{name}_at_{share:g}" for share in SHARES),
        f"{name}_all",
    )
    for name, title in (("accuracy", "Accuracy in %"), ("nll", "NLL"))
}
for _name, _decimals in (("accuracy", 2), ("nll", 3)):
    FIGURES |= {f"{_name}_at_{share:g}": (f"{share:.0%}", _decimals) for share in SHARES}
    FIGURES |= {f"{_name}_all": ("all", _decimals)}

Row = dict[str, float]


class Answers(NamedTuple):
    """Predictions of a model for n examples."""

    log_probs: Tensor
    """Log-probabilities (n, C)."""
    epistemic: Tensor
    """Epistemic uncertainty (n,) in nats."""
    gated: tuple[Parts, Gate] | None = None
    """What a gated prediction consists of."""
    by_model: Tensor = torch.empty(0)
    """Score (n,) of the strangeness by the model."""
    distance: Tensor = torch.empty(0)
    """Distance (n,) from the client's training inputs."""


def assess(
    federation: Federation, samples: int = 10, strange: dict[str, Tensor] | None = None
) -> dict[str, dict[str, list[list[Row]]]]:
    """Return metrics of every model, raw and with temperature scaling: {model: {way: [seed][client]}}.

    strange: further out-of-distribution inputs by name, besides those of `strange_inputs`.
    """
    if federation.model.likelihood.task != "classification":
        raise UserError("this comparison needs class probabilities: give a run whose targets are labels")
    shards = federation.shards
    if not any(len(rows) for rows in shards.test):
        raise UserError("no client of this run has test data: run again with data.test_fraction above 0")
    result: dict[str, dict[str, list[list[Row]]]] = {}
    clients = {client: _Inputs.of(shards, client, strange or {}) for client in tested(shards)}
    for s in range(len(federation.seeds)):
        answers = {i: _answers(federation, i, inputs, s, samples) for i, inputs in clients.items()}
        for which in _models(federation, answers):
            by_client = {i: {kind: found[which] for kind, found in every.items()} for i, every in answers.items()}
            for way, rows in _ways(federation, which, by_client, clients).items():
                result.setdefault(which, {}).setdefault(way, []).append(rows)
    return result


def tested(shards: Shards) -> list[int]:
    """Return the clients that have test data."""
    return [i for i, rows in enumerate(shards.test) if len(rows)]


class _Inputs(NamedTuple):
    """What the models of a client are asked."""

    known: dict[str, tuple[Tensor, Tensor]]
    """Inputs and labels: "own" and, if there are any, "validation" and "unseen"; "all": test data of all clients."""
    strange: dict[str, Tensor]
    """Out-of-distribution inputs by name."""

    @classmethod
    def of(cls, shards: Shards, client: int, others: dict[str, Tensor]) -> _Inputs:
        rows = {"own": shards.test[client], "validation": shards.validation[client]}
        _, rows["unseen"], generator = strange_rows(shards, client)
        rows["all"] = some_rows(torch.cat(shards.test), generator)
        known = {name: (shards.x[each], shards.y[each]) for name, each in rows.items() if len(each)}
        return cls(known, dict(strange_inputs(shards, client, others)))

    def every(self) -> dict[str, Tensor]:
        """Return all inputs by kind."""
        return {name: x for name, (x, _) in self.known.items()} | {f"strange {k}": x for k, x in self.strange.items()}


def _models(federation: Federation, answers: dict[int, dict[str, dict[Served, Answers]]]) -> list[Served]:
    """Return the models that are assessed. The first seed's gates are fitted with its first answers."""
    models: list[Served] = [*federation.models()]
    if gate.applies(federation):
        _add_gated(federation, answers)
        models.append("gated")
    return models


def _answers(
    federation: Federation, client: int, inputs: _Inputs, s: int, samples: int
) -> dict[str, dict[Served, Answers]]:
    """Return what the personal and the shared model say to all inputs of a client, by kind."""
    draws = samples if federation.method.about.stochastic else None
    own = fit_inputs(federation.shards.x[federation.shards.train[client]])
    found: dict[str, dict[Served, Answers]] = {}
    for kind, x in inputs.every().items():
        found[kind] = {}
        for which in federation.models():
            outputs = federation.predict(which, client, x, draws, s).cpu()
            by_model = model_scores(federation.model.likelihood, outputs)
            uncertainty = decompose_uncertainty(outputs).epistemic
            found[kind][which] = Answers(log_average(outputs), uncertainty, None, by_model, distances(x, own))
    return found


def _add_gated(federation: Federation, answers: dict[int, dict[str, dict[Served, Answers]]]) -> None:
    """Add the gated predictions, with gates that are fitted to validation data if there are any."""
    shards, plain = federation.shards, gate.gates(federation.data)
    held_out: dict[int, list[tuple[Gate, HeldOut]]] = {}
    for i, every in answers.items():
        if "validation" in every:
            personal, shared = (every["validation"][which].log_probs for which in MODELS)
            held_out[i] = [(plain[i], HeldOut(personal, shared, shards.y[shards.validation[i]]))]
    gates = gate.fit(plain, held_out)
    for i, every in answers.items():
        for found in every.values():
            ours, theirs = (found[which] for which in MODELS)
            parts = gate.parts(ours.log_probs, theirs.log_probs, gates[i])
            share = gate.share_of_others(parts.evidence, gates[i].usual)
            log_probs = gate.gated(ours.log_probs, theirs.log_probs, gates[i], share)
            disagreement = ours.epistemic + theirs.epistemic
            found["gated"] = Answers(log_probs, disagreement, (parts, gates[i]), -parts.evidence, ours.distance)


def _ways(
    federation: Federation,
    which: Served,
    answers: dict[int, dict[str, Answers]],
    inputs: dict[int, _Inputs],
) -> dict[str, list[Row]]:
    """Return the metrics of each client, raw and, if all clients have validation data, with temperature scaling.

    The shared model has one temperature for all clients, a personal model its own.
    """
    ways: dict[str, list[Row]] = {}
    held_out = {
        i: (answers[i]["validation"], inputs[i].known["validation"][1]) for i in answers if "validation" in answers[i]
    }
    heats = _temperatures(which, held_out) if which != "gated" else {}
    for way, heat in {"as it is": {}, "scaled": heats}.items():
        if way == "scaled" and len(heats) < len(inputs):
            continue
        # The temperature is fitted to the calibration data, which would void the guarantees.
        sets = {} if heat else _sets(held_out)
        ways[way] = []
        for i, every in answers.items():
            warmed = {kind: _warmed(each, heat.get(i)) for kind, each in every.items()}
            own, y = warmed["own"], inputs[i].known["own"][1]
            row = _calibration(own.log_probs, y)
            for name in inputs[i].strange:
                others = warmed[f"strange {name}"]
                row |= _detection(name, own, others, federation.method.about.stochastic, every.get("validation"))
            row |= _mixtures(warmed, inputs[i].known)
            if i in sets:
                row |= _guarantees(own.log_probs, y, *sets[i])
            if heat:
                row["temperature"] = float(heat[i])
            ways[way].append(row)
    return ways


def _mixtures(answers: dict[str, Answers], known: dict[str, tuple[Tensor, Tensor]]) -> Row:
    """Return accuracy and NLL on test data with growing shares of unseen labels, and on those of all clients."""
    row = {
        f"{name}_all": float(score(answers["all"].log_probs, known["all"][1]))
        for name, score in (("accuracy", accuracy), ("nll", nll))
    }
    if "unseen" not in known:
        return row
    own, unseen = (answers[kind] for kind in ("own", "unseen"))
    log_probs, sizes = torch.cat([own.log_probs, unseen.log_probs]), (len(own.log_probs), len(unseen.log_probs))
    y = torch.cat([known[kind][1] for kind in ("own", "unseen")])
    for share in SHARES:
        weights = torch.cat([torch.full((n,), part / n) for n, part in zip(sizes, (1 - share, share), strict=True)])
        mixed = log_probs
        if own.gated is not None and unseen.gated is not None:  # the share is estimated for each mixture
            parts, fitted = (
                Parts(*(torch.cat(each) for each in zip(own.gated[0], unseen.gated[0], strict=True))),
                own.gated[1],
            )
            estimate = gate.share_of_others(parts.evidence, fitted.usual, weights * sum(sizes))
            mixed = gate.joined(parts, fitted, estimate)
        row[f"accuracy_at_{share:g}"] = float(100 * (weights * (mixed.argmax(-1) == y)).sum())
        row[f"nll_at_{share:g}"] = float(-(weights * mixed.gather(-1, y[:, None]).squeeze(-1)).sum())
    return row


def _warmed(answers: Answers, heat: Tensor | None) -> Answers:
    return answers if heat is None else answers._replace(log_probs=tempered(answers.log_probs, heat))


def _temperatures(which: Served, held_out: dict[int, tuple[Answers, Tensor]]) -> dict[int, Tensor]:
    if which == "personal" or not held_out:
        return {i: temperature(answers.log_probs, y) for i, (answers, y) in held_out.items()}
    log_probs = torch.cat([answers.log_probs for answers, _ in held_out.values()])
    of_all = temperature(log_probs, torch.cat([y for _, y in held_out.values()]))
    return dict.fromkeys(held_out, of_all)


def _calibration(log_probs: Tensor, y: Tensor) -> Row:
    """Return metrics on the client's own test data."""
    wrong = log_probs.argmax(-1) != y
    figures = {
        "accuracy": accuracy(log_probs, y),
        "nll": nll(log_probs, y),
        "brier": brier(log_probs, y),
        "ece": ece(reliability(log_probs, y)),
        "adaptive_ece": adaptive_ece(log_probs, y),
        "aurc": aurc(confidence(log_probs), wrong),
    }
    return {name: float(figure) for name, figure in figures.items()}


def _detection(name: str, own: Answers, others: Answers, draws: bool, held_out: Answers | None) -> Row:
    """Return the AUROC of out-of-distribution detection against the client's own test data.

    The score is the lack of confidence; with held-out data also the strangeness that users see; and if the model draws
    weights, also the disagreement of the draws.
    """
    row = {f"auroc_{name}": float(auroc(-confidence(own.log_probs), -confidence(others.log_probs)))}
    if draws:
        row[f"auroc_{name}_mi"] = float(auroc(own.epistemic, others.epistemic))
    if held_out is not None:
        known = torch.stack([held_out.by_model, held_out.distance], dim=-1)
        strange = [strangeness(known, torch.stack([each.by_model, each.distance], dim=-1)) for each in (own, others)]
        row[f"auroc_{name}_strangeness"] = float(auroc(*strange))
        row["false_alarms"] = float((strange[0] >= 1 - ALARM).double().mean())
    return row


def _sets(
    held_out: dict[int, tuple[Answers, Tensor]],
) -> dict[int, tuple[conformal.Calibration, abstention.Abstention]]:
    """Return each client's conformal sets, from its own data if it has enough, and abstention from the data of all."""
    if not held_out:
        return {}
    scores = [conformal.true_scores(conformal.label_scores(a.log_probs), y) for a, y in held_out.values()]
    log_probs = torch.cat([a.log_probs for a, _ in held_out.values()])
    wrong = log_probs.argmax(-1) != torch.cat([y for _, y in held_out.values()])
    rule = abstention.calibrate(confidence(log_probs), wrong, TARGET)
    return {i: (sets, rule) for i, sets in zip(held_out, conformal.calibrate_clients(scores, ALPHA), strict=True)}


def _guarantees(log_probs: Tensor, y: Tensor, sets: conformal.Calibration, rule: abstention.Abstention) -> Row:
    """Return coverage and size of the conformal sets on the client's test data, the share of examples that are
    answered, and the share that are answered wrongly."""
    within = conformal.label_sets(conformal.label_scores(log_probs), sets)
    answered = rule.answers(confidence(log_probs))
    return {
        "set_coverage": float(within.gather(-1, y[:, None]).double().mean()),
        "set_size": float(within.sum(-1).double().mean()),
        "answered": float(answered.double().mean()),
        "wrong": float((answered & (log_probs.argmax(-1) != y)).double().mean()),
    }


def mean_rows(rows: list[list[Row]]) -> Row:
    """Return the mean of each metric over clients and seeds; the error among answers is that of all answers pooled."""
    flat = [row for of_seed in rows for row in of_seed]
    names = dict.fromkeys(name for row in flat for name in row)
    known = {name: [row[name] for row in flat if name in row] for name in names}
    mean = {name: sum(values) / len(values) for name, values in known.items()}
    if mean.get("answered"):
        mean["answered_wrong"] = mean["wrong"] / mean["answered"]
    return mean


def table_rows(assessed: dict[str, dict[str, list[list[Row]]]], columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a table that have values in these columns, with their titles.

    Each model has a raw row, one with temperature scaling and, if it draws weights, one by MI, the disagreement of the
    draws.
    """
    for which, ways in assessed.items():
        for way, rows in ways.items():
            mean = mean_rows(rows)
            titled = {which if way == "as it is" else f"{which}, {way}": mean}
            if way == "as it is":
                for ending, title in (("_mi", "MI"), ("_strangeness", "strangeness")):
                    of_score = {k.removesuffix(ending): value for k, value in mean.items() if k.endswith(ending)}
                    titled[f"{which}, by {title}"] = of_score
                if "false_alarms" in mean:
                    titled[f"{which}, by strangeness"]["false_alarms"] = mean.pop("false_alarms")
            else:
                mean.pop("false_alarms", None)
            yield from ((title, row) for title, row in titled.items() if any(name in row for name in columns))


def headings(columns: Sequence[str]) -> list[str]:
    """Return the headings of these columns."""
    return [FIGURES[name][0] for name in columns]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the formatted values of a row."""
    return [f"{row[name]:.{FIGURES[name][1]}f}" if name in row else "" for name in columns]
