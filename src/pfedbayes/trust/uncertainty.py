"""Assess the uncertainty of the models of a federation: calibration and out-of-distribution detection.

On its own test data a client's model should be as confident as it is accurate. On inputs unlike its training data it
should be less confident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Served
from pfedbayes.maths.likelihoods import is_of_labels, is_of_numbers, is_of_times
from pfedbayes.maths.metrics import (
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    confidence,
    ece,
    nll,
    reliability,
    temperature,
    tempered,
)
from pfedbayes.maths.ranking import auroc
from pfedbayes.trust import abstention, conformal, gate
from pfedbayes.trust.answers import ALPHA, Answers, Inputs, Models, add_gated, answer_labels
from pfedbayes.trust.calibration import NO_ROWS, Held, fit_maps
from pfedbayes.trust.gate import Parts
from pfedbayes.trust.numbers import answer_numbers
from pfedbayes.trust.recalibration import FOLDS, RAW
from pfedbayes.trust.strangeness import strangeness

TARGET = 0.01  # error rate of abstention
ALARM = 0.05  # share of own inputs that a threshold on the strangeness may flag
HURTS = 0.005  # by which a scaling may raise the NLL before it is warned of
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of inputs of unseen labels in a mixture
# Heading of each metric in tables, with an arrow towards better values, and its decimals.
FIGURES = {
    "rmse": ("RMSE\u00a0↓", 4),
    "coverage": ("90 % intervals cover, %", 1),
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
    "On the clients' own test data": ("rmse", "coverage", "accuracy", "nll", "brier", "ece", "adaptive_ece", "aurc"),
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
for _name, _decimals, _better in (("accuracy", 2, "↑"), ("nll", 3, "↓")):
    FIGURES |= {f"{_name}_at_{share:g}": (f"{share:.0%}\u00a0{_better}", _decimals) for share in SHARES}
    FIGURES |= {f"{_name}_all": (f"all\u00a0{_better}", _decimals)}

Row = dict[str, float]


def assess(
    federation: Federation, samples: int = 10, strange: dict[str, Tensor] | None = None
) -> dict[str, dict[str, list[list[Row]]]]:
    """Return metrics of every model by how its predictions are scaled: {model: {way: [seed][client]}}.

    The ways: "as it is"; "scaled" by a temperature; and "calibrated", as runs calibrate predictions by default.

    strange: further out-of-distribution inputs by name, besides those of `strange_inputs`.
    """
    return assess_models(Models.of(federation, samples), strange)


Observe = Callable[[Served, int, dict[str, Answers], Inputs], None]
"""Is told what a model answers to the inputs of a client, by kind."""


def assess_models(
    models: Models, strange: dict[str, Tensor] | None = None, observe: Observe | None = None
) -> dict[str, dict[str, list[list[Row]]]]:
    """Return the metrics of models, see `assess`. observe: is told the answers of the first seed."""
    likelihood, shards = models.likelihood, models.shards
    if is_of_times(likelihood):
        raise UserError(
            "these targets are times to an event, and this comparison is of labels or numbers: see report.html instead"
        )
    if not any(len(rows) for rows in shards.test):
        raise UserError("no client of this run has test data: run again with data.test_fraction above 0")
    result: dict[str, dict[str, list[list[Row]]]] = {}
    clients = {client: Inputs.of(shards, client, strange or {}) for client in tested(shards)}
    for s in range(models.num_seeds):
        for which, by_client, ways in _of_seed(models, clients, s):
            for way, rows in ways.items():
                sized = [row | {"size": float(len(shards.test[i]))} for i, row in zip(clients, rows, strict=True)]
                result.setdefault(which, {}).setdefault(way, []).append(sized)
            for i in clients if observe is not None and s == 0 else ():
                assert observe is not None  # noqa: S101, for mypy
                observe(which, i, by_client[i], clients[i])
    return result


def _of_seed(
    models: Models, clients: dict[int, Inputs], s: int
) -> Iterator[tuple[Served, dict[int, dict[str, Answers]], dict[str, list[Row]]]]:
    """Yield for each model of a seed its answers by client and kind, and the metrics by way of scaling."""
    likelihood = models.likelihood
    if is_of_labels(likelihood):
        answers = {i: answer_labels(models, likelihood, i, inputs, s) for i, inputs in clients.items()}
        for which in add_gated(models, answers):
            by_client = {i: {kind: found[which] for kind, found in every.items()} for i, every in answers.items()}
            yield which, by_client, _ways(models, which, by_client, clients)
        return
    assert is_of_numbers(likelihood)  # noqa: S101, checked by `assess_models`
    for name in models.names:
        of_numbers, found = answer_numbers(models, likelihood, name, clients, s)
        rows = [found[i] | _detection(of_numbers[i], clients[i]) for i in clients]
        yield name, of_numbers, {"as it is": rows}


def tested(shards: Shards) -> list[int]:
    """Return the clients that have test data."""
    return [i for i, rows in enumerate(shards.test) if len(rows)]


def _ways(
    models: Models,
    which: Served,
    answers: dict[int, dict[str, Answers]],
    inputs: dict[int, Inputs],
) -> dict[str, list[Row]]:
    """Return the metrics of each client: raw, and if all clients have validation data, scaled and calibrated.

    The shared model has one temperature for all clients, a personal model its own. Gated predictions have their own
    fit.
    """
    held_out = {
        i: (answers[i]["validation"], inputs[i].known["validation"][1]) for i in answers if "validation" in answers[i]
    }
    ways = {"as it is": [_raw_row(models, every, inputs[i]) for i, every in answers.items()]}
    sets = _sets(held_out)
    for place, (i, every) in enumerate(answers.items()):
        if i in sets:
            ways["as it is"][place] |= _guarantees(every["own"].log_probs, inputs[i].known["own"][1], *sets[i])
    if which == "gated" or len(held_out) < len(inputs):
        return ways
    heats = _temperatures(which, held_out)
    ways["scaled"] = [
        _warmed_row(every, inputs[i], partial(tempered, temperature=heats[i])) | {"temperature": float(heats[i])}
        for i, every in answers.items()
    ]
    held = [_held(*held_out[i]) if i in held_out else NO_ROWS for i in range(len(models.shards.names))]
    fitted = fit_maps(models.likelihood, held)
    maps = {i: fitted.maps.of(i) if fitted else RAW for i in answers}
    ways["calibrated"] = [_warmed_row(every, inputs[i], maps[i].of_labels) for i, every in answers.items()]
    return ways


def _held(answers: Answers, y: Tensor) -> Held:
    """Return validation rows, divided into folds, to fit maps to."""
    return Held(answers.log_probs, y, torch.arange(len(y)) % FOLDS, torch.empty(0))


def _raw_row(models: Models, every: dict[str, Answers], inputs: Inputs) -> Row:
    """Return the metrics of raw predictions that need no held-out data of other clients."""
    row = _warmed_row(every, inputs, lambda log_probs: log_probs) | _mixtures(every, inputs.known)
    if models.averages:
        own = every["own"].epistemic
        for name in inputs.strange:
            row[f"auroc_{name}_mi"] = float(auroc(own, every[f"strange {name}"].epistemic))
    return row | _detection(every, inputs)


def _detection(every: dict[str, Answers], inputs: Inputs) -> Row:
    """Return how well strangeness detects strange inputs; nothing without validation data."""
    found = strangeness_of(every)
    if not found:
        return {}
    row = {"false_alarms": float((found["own"] >= 1 - ALARM).double().mean())}
    return row | {f"auroc_{k}_strangeness": float(auroc(found["own"], found[f"strange {k}"])) for k in inputs.strange}


def strangeness_of(every: dict[str, Answers]) -> dict[str, Tensor]:
    """Return the strangeness (n,) of own test data and of strange inputs, by kind; empty without validation data."""
    if "validation" not in every:
        return {}

    def scores(answers: Answers) -> Tensor:
        return torch.stack([answers.by_model, answers.distance], dim=-1)

    known, gated = scores(every["validation"]), every["own"].gated is not None
    kinds = [kind for kind in every if kind == "own" or kind.startswith("strange ")]
    return {kind: strangeness(known, scores(every[kind]), gated) for kind in kinds}


def _warmed_row(every: dict[str, Answers], inputs: Inputs, warm: Callable[[Tensor], Tensor]) -> Row:
    """Return the metrics of scaled predictions: on own test data, and how well confidence detects strange inputs."""
    own = warm(every["own"].log_probs)
    row = _calibration(own, inputs.known["own"][1])
    for name in inputs.strange:
        strange = warm(every[f"strange {name}"].log_probs)
        row[f"auroc_{name}"] = float(auroc(-confidence(own), -confidence(strange)))
    return row


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
    """Return the mean of each metric over clients and seeds; the error among answers is that of all answers pooled.

    Clients weigh by their number of test examples, as in the scores of a run.
    """
    flat = [row for of_seed in rows for row in of_seed]
    names = dict.fromkeys(name for row in flat for name in row if name != "size")
    mean = {}
    for name in names:
        known = [(row.get("size", 1.0), row[name]) for row in flat if name in row]
        mean[name] = sum(size * value for size, value in known) / sum(size for size, _ in known)
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
            yield from ((title, row) for title, row in titled.items() if any(name in row for name in columns))


def warnings(assessed: dict[str, dict[str, list[list[Row]]]]) -> list[str]:
    """Return sentences on scalings that make predictions worse."""
    sentences = []
    for which, ways in assessed.items():
        raw = mean_rows(ways["as it is"])
        for way in ("scaled", "calibrated"):
            after = mean_rows(ways[way])["nll"] if way in ways else raw["nll"]
            if after > raw["nll"] + HURTS:
                what = "a plain temperature" if way == "scaled" else "the map that calibrates predictions by default"
                remedy = "hold out more validation data" + (", or predict with --raw" if way == "calibrated" else "")
                sentences.append(
                    f"{what} raises the NLL of the {which} model on test data from {raw['nll']:.3f} to {after:.3f}: "
                    f"{remedy}"
                )
    return sentences


def filled(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the columns in which a row has a value."""
    return [name for name in columns if any(name in row for row in rows)]


def headings(columns: Sequence[str]) -> list[str]:
    """Return the headings of these columns."""
    return [FIGURES[name][0] for name in columns]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the formatted values of a row."""
    return [f"{row[name]:.{FIGURES[name][1]}f}" if name in row else "" for name in columns]
