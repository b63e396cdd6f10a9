"""Assess the uncertainty of the models of a federation: calibration and out-of-distribution detection.

On its own test data a client's model should be as confident as it is accurate. On inputs unlike its training data it
should be less confident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards, available, load_published
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
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
from pfedbayes.trust import abstention, conformal

OTHER_SET = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
MAX_STRANGE = 1000  # out-of-distribution examples per kind and client: enough for an AUROC to a percent
NOISE = 0.5  # standard deviation of the noise, as a share of the range of a pixel or of a feature's own deviation
ALPHA, TARGET = 0.1, 0.01  # miscoverage of the conformal sets, and error rate of abstention
NAMES = {
    "unseen": "test examples of other clients whose labels the client has never trained on",
    "other": "test images of Fashion-MNIST for MNIST, and of MNIST for Fashion-MNIST",
    "rotated": "the client's own test images, turned by 90 degrees",
    "noisy": f"the client's own test data with Gaussian noise, {NOISE:g} of a pixel's range or a feature's deviation",
}

# Heading of each metric in tables, with an arrow towards better values, and its decimals.
FIGURES = {
    "accuracy": ("accuracy %\u00a0↑", 2),
    "nll": ("NLL\u00a0↓", 3),
    "brier": ("Brier\u00a0↓", 3),
    "ece": ("ECE\u00a0↓", 3),
    "adaptive_ece": ("adaptive ECE\u00a0↓", 3),
    "aurc": ("AURC\u00a0↓", 4),
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

Row = dict[str, float]


class Answers(NamedTuple):
    """Predictions of a model for n examples."""

    log_probs: Tensor
    """Log-probabilities (n, C)."""
    epistemic: Tensor
    """Epistemic uncertainty (n,) in nats."""


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
    inputs = {client: dict(strange_inputs(shards, client, strange or {})) for client in tested(shards)}
    for which in federation.models():
        ways: dict[str, list[list[Row]]] = {}
        for s in range(len(federation.seeds)):
            for way, rows in _ways(federation, which, s, samples, inputs).items():
                ways.setdefault(way, []).append(rows)
        result[which] = ways
    return result


def tested(shards: Shards) -> list[int]:
    """Return the clients that have test data."""
    return [i for i, rows in enumerate(shards.test) if len(rows)]


def _ways(
    federation: Federation, which: Which, s: int, samples: int, inputs: dict[int, dict[str, Tensor]]
) -> dict[str, list[Row]]:
    """Return the metrics of each client, raw and, if all clients have validation data, with temperature scaling.

    The shared model has one temperature for all clients, a personal model its own.
    """
    shards = federation.shards
    ways: dict[str, list[Row]] = {}
    known = {i: _answers(federation, which, i, shards.x[shards.test[i]], s, samples) for i in inputs}
    strange = {
        i: {name: _answers(federation, which, i, x, s, samples) for name, x in own.items()} for i, own in inputs.items()
    }
    held_out = {
        i: (_answers(federation, which, i, shards.x[shards.validation[i]], s, samples), shards.y[shards.validation[i]])
        for i in inputs
        if len(shards.validation[i])
    }
    heats = _temperatures(which, held_out)
    for way, heat in {"as it is": {}, "scaled": heats}.items():
        if way == "scaled" and len(heats) < len(inputs):
            continue
        # The temperature is fitted to the calibration data, which would void the guarantees.
        sets = {} if heat else _sets(held_out)
        ways[way] = []
        for i in inputs:
            y = shards.y[shards.test[i]]
            answers = _warmed(known[i], heat.get(i))
            row = _calibration(answers.log_probs, y)
            for name, others in strange[i].items():
                row |= _detection(name, answers, _warmed(others, heat.get(i)), federation.method.about.stochastic)
            if i in sets:
                row |= _guarantees(answers.log_probs, y, *sets[i])
            if heat:
                row["temperature"] = float(heat[i])
            ways[way].append(row)
    return ways


def _answers(federation: Federation, which: Which, client: int, x: Tensor, s: int, samples: int) -> Answers:
    outputs = federation.predict(which, client, x, samples if federation.method.about.stochastic else None, s).cpu()
    return Answers(log_average(outputs), decompose_uncertainty(outputs).epistemic)


def _warmed(answers: Answers, heat: Tensor | None) -> Answers:
    return answers if heat is None else answers._replace(log_probs=tempered(answers.log_probs, heat))


def _temperatures(which: Which, held_out: dict[int, tuple[Answers, Tensor]]) -> dict[int, Tensor]:
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


def _detection(name: str, own: Answers, others: Answers, draws: bool) -> Row:
    """Return the AUROC of out-of-distribution detection against the client's own test data.

    The score is the lack of confidence and, if the model draws weights, also the disagreement of the draws.
    """
    row = {f"auroc_{name}": float(auroc(-confidence(own.log_probs), -confidence(others.log_probs)))}
    if draws:
        row[f"auroc_{name}_mi"] = float(auroc(own.epistemic, others.epistemic))
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


def strange_inputs(shards: Shards, client: int, others: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs that a client's model should be uncertain about, by their names in NAMES; the same on every call."""
    generator = torch.Generator().manual_seed(client)
    own = _some(shards.test[client], generator)
    rows = torch.cat(shards.test)
    unseen = rows[~torch.isin(shards.y[rows], shards.y[shards.train[client]])]
    if len(unseen):
        yield "unseen", shards.x[_some(unseen, generator)]
    for name, x in others.items():
        yield name, x[_some(torch.arange(len(x)), generator)]
    x = shards.x[own]
    if x.dim() == 4 and x.shape[-1] == x.shape[-2]:
        yield "rotated", x.rot90(dims=(-2, -1))
    noise = torch.randn(x.shape, generator=generator)
    if x.dtype == torch.uint8:
        yield "noisy", (x + 255 * NOISE * noise).clamp(0, 255).to(torch.uint8)
    else:
        yield "noisy", x + NOISE * shards.x.std(0, correction=0) * noise.to(x.dtype)


def _some(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return at most MAX_STRANGE of the rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=generator)[:MAX_STRANGE]]


def other_set(name: str, data_dir: str | Path | None = None) -> dict[str, Tensor]:
    """Return the test images of the data set that is compared with a published one, if it is on this machine."""
    here = {source.name for source in available(data_dir) if source.found}
    if OTHER_SET.get(name) not in here:
        return {}
    pool = load_published(OTHER_SET[name], data_dir)
    return {"other": pool.x[pool.official_train_count :]}


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
                drawn = {name.removesuffix("_mi"): value for name, value in mean.items() if name.endswith("_mi")}
                titled[f"{which}, by MI"] = drawn
            yield from ((title, row) for title, row in titled.items() if any(name in row for name in columns))


def headings(columns: Sequence[str]) -> list[str]:
    """Return the headings of these columns."""
    return [FIGURES[name][0] for name in columns]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the formatted values of a row."""
    return [f"{row[name]:.{FIGURES[name][1]}f}" if name in row else "" for name in columns]
