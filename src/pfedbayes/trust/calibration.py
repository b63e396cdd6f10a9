"""Calibration scores of models on validation data, and the guarantees for new data that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.likelihoods import Likelihood, is_of_labels, is_of_numbers
from pfedbayes.maths.metrics import confidence, log_average, moments
from pfedbayes.trust import abstention, conformal
from pfedbayes.trust.menu import LEVELS, Menu, menu

DRAWS = 100  # weight draws averaged in the predictions that are calibrated
DELTA = 0.05  # probability with which the guarantee of an abstention rule may fail
OWN_MENU = 100  # a client's own examples calibrate the default rule for abstaining if there are this many
ROOM = 3  # a client's own examples calibrate its abstention if there are this many times the necessary number


class Scores(NamedTuple):
    """Calibration scores of n examples."""

    odd: Tensor
    """Nonconformity scores (n,) of the true targets, see `conformal`."""
    sure: Tensor
    """Confidence (n,) in the predicted label; empty for a regression."""
    wrong: Tensor
    """Whether the predicted label is wrong, (n,); empty for a regression."""


Fold = tuple[int, Sequence[Tensor]]
"""The index of the federation that was trained without some rows, and these rows of the pool for each client."""
NO_SCORES = Scores(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool))


def score(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Scores:
    """Return the scores of outputs (K, n, ...) for targets y (n, ...)."""
    if is_of_numbers(likelihood):
        return NO_SCORES._replace(odd=conformal.residuals(moments(likelihood, outputs), y).cpu())
    assert is_of_labels(likelihood)  # noqa: S101, there is no other kind
    log_probs = log_average(likelihood.logits(outputs))
    odd = conformal.true_scores(conformal.label_scores(log_probs), y)
    return Scores(odd.cpu(), confidence(log_probs).cpu(), (log_probs.argmax(-1) != y).cpu())


def score_clients(federation: Federation, which: Which, folds: Sequence[Fold]) -> Iterator[Scores]:
    """Yield the scores of each client, fold by fold; clients without rows are skipped."""
    for i in range(len(folds[0][1])):
        for index, sets in folds:
            if len(sets[i]):
                batch = federation.batch_of(sets[i])
                outputs = trained_model(federation, which, i, index).outputs(DRAWS)
                yield score(federation.model.likelihood, outputs(batch.x), batch.y)


def concatenate(scores: Sequence[Scores]) -> Scores:
    """Return the scores of all examples as one record."""
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True))) if scores else NO_SCORES


class Guarantees(NamedTuple):
    """What is guaranteed for the predictions of new examples."""

    sets: conformal.Calibration
    """Conformal sets, or intervals for a regression."""
    rule: abstention.Abstention | None
    """When to answer and when to abstain; None for a regression."""


def menus(own: Scores, of_all: Scores) -> tuple[Menu, ...]:
    """Return the menu of a client's own examples, and that of all clients' if there are more of them."""
    found = [menu(own.sure, own.wrong, DELTA)] if len(own.sure) else []
    if len(of_all.sure) > len(own.sure):
        found.append(menu(of_all.sure, of_all.wrong, DELTA, "federation"))
    return tuple(found)


def default_rule(found: Sequence[Menu]) -> abstention.Abstention:
    """Return the rule for abstaining if no error rate is asked for.

    It comes from a client's own menu if it rests on enough examples, else from that of all clients. The number of
    examples alone decides between the two.
    """
    if not found:
        return abstention.Abstention(math.inf, LEVELS[-1], DELTA, 0, 0, 0)
    return (found[0] if found[0].size >= OWN_MENU else found[-1]).default()


def guarantee(own: Scores, of_all: Scores, coverage: float, error: float | None) -> Guarantees:
    """Return the guarantees for a client: from its own examples if there are enough, else from those of all clients.

    The number of examples alone decides between the two: a choice that depends on the scores would void the guarantee.
    """
    for name, value in (("coverage", coverage), ("error", error)):
        if value is not None and not 0 < value < 1:
            raise UserError(f"{name} is {value}: give a share between 0 and 1, e.g. 0.9 for coverage, 0.05 for error")
    sets = conformal.calibrate(_never_empty(own), 1 - coverage)
    if sets.is_trivial and len(of_all.odd) > len(own.odd):
        sets = conformal.calibrate(_never_empty(of_all), 1 - coverage, "federation")
    if error is None:
        return Guarantees(sets, None)
    if len(own.sure) >= ROOM * abstention.smallest_sample(error, DELTA) or len(of_all.sure) <= len(own.sure):
        return Guarantees(sets, abstention.calibrate(own.sure, own.wrong, error, DELTA))
    return Guarantees(sets, abstention.calibrate(of_all.sure, of_all.wrong, error, DELTA, "federation"))


def _never_empty(scores: Scores) -> Tensor:
    """Return the scores of the true targets. In files of early versions that of the most probable label is not 0."""
    return torch.where(scores.wrong, scores.odd, 0.0) if len(scores.wrong) else scores.odd
