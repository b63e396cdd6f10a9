"""A personal prediction that is not blind to the labels of other clients.

A personal model never trained on labels that its client has no rows of, so it names one of its own instead. The shared
model did. The gated prediction asks the shared model whether the label is one of the client's own, and both models
which of them:

p(y|x) = p_shared(own|x) [w p_personal(y|x, own) + (1 - w) p_shared(y|x, own)] for own labels, p_shared(y|x) for others.

Three numbers per client and one per label are fitted to held-out rows, see `fit`; without any they are neutral. How
many of the new rows have other labels is estimated from these rows themselves, see `share_of_others`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.evaluation.models import FederatedModels, available_models

STEPS = 50  # of Newton's method, of bisection, and of the iteration for the share
LARGEST = 100.0  # evidence of a single row
LENT = 20  # rows of all clients that count beside a client's own when its weight is fitted


class Gate(NamedTuple):
    """How the shared model gates the predictions of one client."""

    own: Tensor
    """Which labels (C,) the client has training rows of."""
    usual: float
    """Share of the training rows of all clients whose labels the client lacks."""
    bias: Tensor
    """Correction (C,) that is added to the log-probabilities of the shared model."""
    weight: float = 1.0
    """Weight w of the personal model among the own labels."""


class Parts(NamedTuple):
    """A gated prediction of n examples before the share of other labels is known."""

    evidence: Tensor
    """Log-likelihood ratio (n,) of the own labels and the others, by the shared model."""
    within: Tensor
    """Log-probabilities (n, C) among the own labels, and among the others."""


def parts(personal: Tensor, shared: Tensor, gate: Gate) -> Parts:
    """Return the parts (..., n), (..., n, C) of a prediction from the log-probabilities (..., n, C) of both models."""
    own = gate.own
    shared = (shared + gate.bias.to(shared)).log_softmax(-1)
    mass, rest = (shared.masked_fill(~each, -torch.inf).logsumexp(-1, keepdim=True) for each in (own, ~own))
    own_mass = personal.masked_fill(~own, -torch.inf).logsumexp(-1, keepdim=True)
    of_shared = shared - torch.where(own, mass, rest)
    of_personal = torch.where(own & own_mass.isfinite(), personal - own_mass, of_shared)
    mixed = torch.logaddexp(of_personal + _log(gate.weight), of_shared + _log(1 - gate.weight))
    evidence = ((mass - rest).squeeze(-1) + _logit(gate.usual)).clamp(-LARGEST, LARGEST)
    return Parts(evidence, torch.where(own, mixed, of_shared))


def joined(found: Parts, gate: Gate, share: float | None = None) -> Tensor:
    """Return the log-probabilities (..., n, C) at a share of other labels; None for the usual share."""
    odds = (found.evidence + _logit(1 - (gate.usual if share is None else share)))[..., None]
    return found.within + torch.where(gate.own, logsigmoid(odds), logsigmoid(-odds))


def gated(personal: Tensor, shared: Tensor, gate: Gate, share: float | None = None) -> Tensor:
    """Return the gated log-probabilities (..., n, C) from those of the two models.

    If the client has all labels, the personal prediction is returned. share: see `joined`.
    """
    return personal if is_open(gate) else joined(parts(personal, shared, gate), gate, share)


def is_open(gate: Gate) -> bool:
    """Return whether there is nothing to gate: the client has all labels."""
    return bool(gate.own.all())


def share_of_others(evidence: Tensor, usual: float, weights: Tensor | None = None) -> float:
    """Estimate which share of n rows has other labels, from the evidence (n,) for own labels.

    Expectation maximisation for a shift of the label frequencies (Saerens et al. 2002), with two rows at the usual
    share in addition (Laplace), so that few rows move it little. No labels are needed.

    weights: how often each row counts (n,), with sum n.
    """
    counted = torch.ones_like(evidence) if weights is None else weights
    share = usual
    for _ in range(STEPS):
        others = torch.sigmoid(-(evidence.double() + _logit(1 - share)))
        share = (float((counted * others).sum()) + 2 * usual) / (len(evidence) + 2)
    return share


def _logit(p: float) -> float:
    """Return log(p / (1 - p)); for 0 and 1 a number that no evidence outweighs and whose exponential is 0."""
    return math.log(p) - math.log1p(-p) if 0 < p < 1 else math.copysign(1000, p - 0.5)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


class Summaries(NamedTuple):
    """What calibration needs to know of n held-out rows at any share of other labels, each (n,)."""

    evidence: Tensor
    """See `Parts`."""
    true: Tensor
    """Probability of the true label among the own labels, or among the others."""
    top: Tensor
    """Largest probability among the own labels."""
    other: Tensor
    """Largest probability among the others."""
    lacking: Tensor
    """Whether the true label is not an own one."""


def summaries(found: Parts, y: Tensor, gate: Gate) -> Summaries:
    """Return the summaries of predictions for labels y (n,)."""
    within = found.within.exp()
    top, other = (within.masked_fill(~each, 0.0).amax(-1) for each in (gate.own, ~gate.own))
    true = within.gather(-1, y[:, None]).squeeze(-1)
    return Summaries(found.evidence.float(), true.float(), top.float(), other.float(), ~gate.own[y])


_NOTHING = torch.empty(0)
NO_SUMMARIES = Summaries(_NOTHING, _NOTHING, _NOTHING, _NOTHING, torch.empty(0, dtype=torch.bool))


class Judged(NamedTuple):
    """Predictions of n rows at a share of other labels, each (n,)."""

    true: Tensor
    """Probability of the true label."""
    sure: Tensor
    """Confidence in the predicted label, see `metrics.confidence`."""
    wrong: Tensor
    """Whether the predicted label is wrong."""


def judged(rows: Summaries, share: float) -> Judged:
    """Return what summaries say at a share of other labels."""
    odds = rows.evidence.double() + _logit(1 - share)
    mass, rest = odds.sigmoid(), (-odds).sigmoid()
    own, other = mass * rows.top, rest * rows.other
    true = torch.where(rows.lacking, rest, mass) * rows.true
    # The rest of the probability, without the cancellation of 1 - p.
    left = torch.where(own >= other, rest + mass * (1 - rows.top), mass + rest * (1 - rows.other))
    return Judged(true, -left.clamp_min(torch.finfo(torch.float64).tiny).log(), true < torch.maximum(own, other))


class HeldOut(NamedTuple):
    """What the two models of a client predict for n rows that they were not trained on, on the CPU."""

    personal: Tensor
    """Log-probabilities (n, C) of the personal model."""
    shared: Tensor
    """Log-probabilities (n, C) of the shared model."""
    y: Tensor
    """Labels (n,)."""


def applies(federation: FederatedModels) -> bool:
    """Return whether there is something to gate: classes, both models, and a client that lacks a label."""
    if federation.model.likelihood.task != "classification" or len(available_models(federation.method)) < 2:
        return False
    return not all(map(is_open, gates(federation.data)))


def gates(data: ClientData, index: int = 0) -> list[Gate]:
    """Return a gate per client of a federation, before anything is fitted: bias 0 and weight 1."""
    sets = data.train_sets[index * data.num_clients : (index + 1) * data.num_clients]
    counts = torch.stack([data.count_labels(rows.cpu()) for rows in sets])
    of_all, bias = counts.sum(0), torch.zeros(counts.shape[1])
    return [Gate(own > 0, float(of_all[own == 0].sum() / of_all.sum()), bias) for own in counts]


def fit(plain: Sequence[Gate], held_out: Mapping[int, Sequence[tuple[Gate, HeldOut]]]) -> list[Gate]:
    """Return the gates of all clients with a bias and weights from held-out rows.

    The bias (C,) maximises the likelihood of the shared model for the rows of all clients, with a standard normal
    prior. A client's weight maximises the likelihood of its own rows among its own labels; the rows of all clients
    count as much as `LENT` of its own. Both need only sums over each client's rows.

    held_out: by client, rows with the gate of the federation that has left them out.
    """
    if not any(held_out.values()):
        return list(plain)
    every = [rows for of_client in held_out.values() for _, rows in of_client]
    bias = fit_bias(torch.cat([rows.shared for rows in every]), torch.cat([rows.y for rows in every]))
    likelihoods = {i: _within(of_client, bias) for i, of_client in held_out.items() if of_client}
    of_all = torch.cat(list(likelihoods.values()), dim=1)
    weights = [fit_weight(likelihoods.get(i, of_all[:, :0]), of_all) for i in range(len(plain))]
    return [
        each._replace(bias=bias, weight=1.0 if is_open(each) else weight)
        for each, weight in zip(plain, weights, strict=True)
    ]


def of_newcomer(own: Tensor, known: Sequence[Gate], rows: HeldOut) -> Gate:
    """Return the gate of a client that was not in the run, with the bias of the run's gates if it has some.

    own: which labels (C,) it has. rows: held out from its training. All labels count as equally frequent.
    """
    plain = Gate(own, float((~own).double().mean()), known[0].bias if known else torch.zeros(len(own)))
    probabilities = _within([(plain, rows)], plain.bias)
    return plain._replace(weight=fit_weight(probabilities, probabilities))


def _within(of_client: Sequence[tuple[Gate, HeldOut]], bias: Tensor) -> Tensor:
    """Return the probabilities (2, n) of the true labels among the own ones, by the personal and the shared model."""
    both = []
    for gate, rows in of_client:
        known = gate.own[rows.y]
        of_weights = (
            parts(rows.personal, rows.shared, gate._replace(bias=bias, weight=weight)).within for weight in (1.0, 0.0)
        )
        both.append(torch.stack([each.gather(-1, rows.y[:, None])[known, 0].double().exp() for each in of_weights]))
    return torch.cat(both, dim=1)


def fit_bias(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the bias (C,) that minimises the NLL of softmax(log_probs + bias) + |bias|^2 / 2 (Newton's method)."""
    log_probs, classes = log_probs.double(), log_probs.shape[-1]
    counts = torch.bincount(y, minlength=classes).double()

    def loss(bias: Tensor) -> Tensor:
        return (log_probs + bias).logsumexp(-1).sum() - counts @ bias + bias.square().sum() / 2

    bias = log_probs.new_zeros(classes)
    for _ in range(STEPS):
        probs = (log_probs + bias).softmax(-1)
        curvature = torch.diag(probs.sum(0) + 1) - probs.T @ probs
        step = torch.linalg.solve(curvature, probs.sum(0) - counts + bias)
        while loss(bias - step) > loss(bias) and bool(step.abs().max() > 1e-9):
            step = step / 2
        bias = bias - step
    return bias.float()


def fit_weight(own: Tensor, of_all: Tensor) -> float:
    """Return the weight w in [0, 1] that maximises the sum of log(w p + (1 - w) s) for probabilities (2, n) of p, s."""

    def slope(rows: Tensor, weight: float) -> float:
        p, s = rows
        return float(((p - s) / (weight * p + (1 - weight) * s).clamp_min(1e-300)).sum())

    low, high = 0.0, 1.0
    for _ in range(STEPS):  # the likelihood is concave, so bisection of its slope finds the maximum
        middle = (low + high) / 2
        total = slope(own, middle) + LENT / max(1, of_all.shape[1]) * slope(of_all, middle)
        low, high = (middle, high) if total > 0 else (low, middle)
    return low if of_all.shape[1] else 1.0
