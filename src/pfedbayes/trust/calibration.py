"""Calibration scores of models on validation data, and the guarantees for new data that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import MODELS, Which
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.likelihoods import Likelihood, NumberLikelihood, is_of_labels, is_of_numbers, is_of_times
from pfedbayes.maths.metrics import confidence, log_average, moments
from pfedbayes.trust import abstention, conformal, gate
from pfedbayes.trust.gate import Gate, HeldOut, Summaries
from pfedbayes.trust.menu import LEVELS, Menu, menu
from pfedbayes.trust.recalibration import FOLDS, Fitted, Rows, fit, label_rows, number_rows, sharpened

DRAWS = 100  # weight draws averaged in the predictions that are calibrated
DELTA = 0.05  # probability with which the guarantee of an abstention rule may fail
OWN_MENU = 100  # a client's own examples calibrate the default rule for abstaining if there are this many
AT_ONCE = 2**17  # densities that are computed in one pass: more do not stay in a CPU's caches
ROOM = 3  # a client's own examples calibrate its abstention if there are this many times the necessary number


SetKind = Literal["lac", "aps", "raps"]
ScoreKind = Literal["lac", "aps", "raps", "normalised", "quantile"]
SETS: tuple[SetKind, ...] = ("lac", "aps", "raps")
NO_NEW_SCORES = "the scores were written by an early version"


class Scores(NamedTuple):
    """Calibration scores of n examples."""

    odd: Tensor
    """Nonconformity scores (n,) of the true targets, see `conformal`."""
    sure: Tensor
    """Confidence (n,) in the predicted label; empty for a regression."""
    wrong: Tensor
    """Whether the predicted label is wrong, (n,); empty for a regression."""
    label: Tensor = torch.empty(0, dtype=torch.int64)
    """The true label (n,); empty for a regression, and like the following in files of early versions."""
    aps: Tensor = torch.empty(0)
    """APS scores (n,) of the true labels; empty for a regression."""
    raps: Tensor = torch.empty(0)
    """RAPS scores (n,) of the true labels; empty for a regression."""
    quantile: Tensor = torch.empty(0)
    """Quantile scores (n,) of the targets; empty for labels."""


Fold = tuple[int, Sequence[Tensor]]
"""The index of the federation that was trained without some rows, and these rows of the pool for each client."""
NO_SCORES = Scores(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool))


class Held(NamedTuple):
    """Predictions of n rows of a client by models that were not trained on them."""

    said: Tensor
    """Log-probabilities (n, C) of the averaged prediction; for numbers, the outputs (K, n, ...)."""
    y: Tensor
    """Targets (n, ...)."""
    fold: Tensor
    """Folds (n,) for cross-validation."""
    u: Tensor
    """Uniform numbers (n,) of APS and RAPS."""

    def rows(self, likelihood: Likelihood) -> Rows:
        """Return the losses of the rows under any map."""
        if is_of_labels(likelihood):
            return label_rows(self.said, self.y, self.fold)
        assert is_of_numbers(likelihood)  # noqa: S101, there is no other kind
        mean = likelihood.mean_and_noise(self.said)[0].mean(-3)
        draws = len(self.said)

        def log_density(y: Tensor) -> Tensor:
            at_once = max(1, AT_ONCE // max(1, self.said[..., 0].numel()))
            parts = [torch.logsumexp(-likelihood.nll(self.said[:, None], some), 0) for some in torch.split(y, at_once)]
            return torch.cat(parts) - math.log(draws)

        return number_rows(log_density, mean, self.y, self.fold)

    def scores(self, likelihood: Likelihood, fitted: Fitted | None = None, client: int = 0) -> Scores:
        """Return the calibration scores; with maps, those of predictions by maps that have not seen the row."""
        if not len(self.y):
            return NO_SCORES
        factor, bias = fitted.unseen(client, self.fold) if fitted else (torch.zeros(1, 1), None)
        if is_of_labels(likelihood):
            return _label_scores(sharpened(self.said, factor, bias) if fitted else self.said, self.y, self.u)
        if is_of_times(likelihood):
            return NO_SCORES._replace(odd=likelihood.survival(self.said, self.y[..., 0]))
        assert is_of_numbers(likelihood)  # noqa: S101, there is no other kind
        stretch = factor.exp().to(self.y)
        predicted = moments(likelihood, self.said)
        residuals = conformal.residuals(predicted, self.y) / stretch[:, 0]
        band = stretched_band(likelihood, self.said, predicted.mean, stretch)
        return NO_SCORES._replace(odd=residuals, quantile=conformal.band_scores(band, self.y))


_NO_LABELS = torch.empty(0, dtype=torch.int64)
NO_ROWS = Held(torch.empty(0), _NO_LABELS, _NO_LABELS, torch.empty(0))


def score(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Scores:
    """Return the scores of outputs (K, n, ...) for targets y (n, ...)."""
    u = torch.rand(len(y), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _held(likelihood, outputs, y, torch.zeros(len(y), dtype=torch.int64), u).scores(likelihood)


def _held(likelihood: Likelihood, outputs: Tensor, y: Tensor, fold: Tensor, u: Tensor) -> Held:
    said = log_average(likelihood.logits(outputs)) if is_of_labels(likelihood) else outputs
    return Held(said.cpu(), y.cpu(), fold, u)


def label_set_scores(log_probs: Tensor, kind: SetKind, u: Tensor) -> Tensor:
    """Return the scores (n, C) of all labels for sets of a kind; u: uniform numbers (n,)."""
    if kind == "lac":
        return conformal.label_scores(log_probs)
    return conformal.label_scores(log_probs, u.to(log_probs), conformal.PENALTY if kind == "raps" else 0.0)


def stretched_band(
    likelihood: NumberLikelihood, outputs: Tensor, mean: Tensor, stretch: Tensor | float
) -> conformal.Band:
    """Return the quantiles of a prediction (n, d) that is stretched about its mean."""
    ends, (middle, _) = likelihood.interval(outputs, conformal.BAND), likelihood.interval(outputs, 0.0)
    return conformal.Band(*(mean + stretch * (each - mean) for each in (ends[0], middle, ends[1])))


def _label_scores(log_probs: Tensor, y: Tensor, u: Tensor) -> Scores:
    odd, aps, raps = (conformal.true_scores(label_set_scores(log_probs, kind, u), y) for kind in SETS)
    return Scores(odd, confidence(log_probs), log_probs.argmax(-1) != y, y, aps, raps)


def hold_clients(federation: Federation, which: Which, folds: Sequence[Fold]) -> list[Held]:
    """Return the predictions of each client's rows, fold by fold. Rows of a single fold are divided into FOLDS."""
    likelihood, found = federation.model.likelihood, []
    for i in range(len(folds[0][1])):
        parts = []
        for k, (index, sets) in enumerate(folds):
            count = len(sets[i])
            batch = federation.batch_of(sets[i])
            outputs = trained_model(federation, which, i, index).outputs(DRAWS)(batch.x) if count else None
            if outputs is not None:
                fold = torch.full((count,), k) if len(folds) > 1 else torch.arange(count) % FOLDS
                parts.append(_held(likelihood, outputs, batch.y, fold, conformal.uniforms(batch.x)))
        axis = 0 if is_of_labels(likelihood) else 1
        whole = [torch.cat(each, axis if k == 0 else 0) for k, each in enumerate(zip(*parts, strict=True))]
        found.append(Held(*whole) if whole else NO_ROWS)
    return found


def fit_maps(likelihood: Likelihood, held: Sequence[Held], by_folds: bool = False) -> Fitted | None:
    """Return the maps of the clients that make predictions calibrated; None if raw predictions are as good.

    by_folds: whether the rows were predicted by models of folds. Counts and times have no maps: a stretched
    distribution would not be one of whole numbers, and not one of times above 0.
    """
    if likelihood.task in ("count", "survival"):
        return None
    # A client without rows takes no part.
    nothing = label_rows(torch.empty(0, 1), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    fitted = fit([each.rows(likelihood) if len(each.y) else nothing for each in held], 2.0 if by_folds else 1.0)
    return None if fitted.maps.is_raw else fitted


def predict_held_out(
    federation: Federation, folds: Sequence[Fold], samples: int = DRAWS
) -> dict[int, list[tuple[Gate, HeldOut]]]:
    """Return by client what its two models predict for its rows, fold by fold, with the gate of the fold."""
    found: dict[int, list[tuple[Gate, HeldOut]]] = {}
    for index, sets in folds:
        gates = gate.gates(federation.data, index)
        for i, rows in enumerate(sets):
            own = found.setdefault(i, [])
            if len(rows):
                batch = federation.batch_of(rows)
                personal, shared = (
                    log_average(trained_model(federation, which, i, index).outputs(samples)(batch.x)).cpu()
                    for which in MODELS
                )
                own.append((gates[i], HeldOut(personal, shared, batch.y.cpu())))
    return found


def score_gated(fitted: Gate, rows: Sequence[tuple[Gate, HeldOut]]) -> Summaries:
    """Return the summaries of a client's held-out rows. A fold may lack a label of which the client has one row."""
    every = []
    for of_fold, held in rows:
        own = fitted._replace(own=of_fold.own, usual=of_fold.usual)
        every.append(gate.summaries(gate.parts(held.personal, held.shared, own), held.y, own))
    return concatenate_summaries(every)


def concatenate_summaries(rows: Sequence[Summaries]) -> Summaries:
    """Return the summaries of all rows as one record."""
    return Summaries(*(torch.cat(parts) for parts in zip(*rows, strict=True))) if rows else gate.NO_SUMMARIES


def scores_at(rows: Summaries, share: float) -> Scores:
    """Return the scores of gated predictions at a share of other labels."""
    found = gate.judged(rows, share)
    return Scores(torch.where(found.wrong, 1 - found.true, 0.0).float(), found.sure.float(), found.wrong)


def concatenate(scores: Sequence[Scores]) -> Scores:
    """Return the scores of all examples as one record."""
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True))) if scores else NO_SCORES


class Guarantees(NamedTuple):
    """What is guaranteed for the predictions of new examples."""

    sets: conformal.Calibration | conformal.ClassCalibration
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


def guarantee(
    own: Scores,
    of_all: Scores,
    coverage: float,
    error: float | None,
    kind: ScoreKind = "lac",
    by_class: int | None = None,
) -> Guarantees:
    """Return the guarantees for a client: from its own examples if there are enough, else from those of all clients.

    The number of examples alone decides between the two: a choice that depends on the scores would void the guarantee.

    kind: of the scores of sets or intervals. by_class: the number of classes, to guarantee the coverage of each.
    """
    for name, value in (("coverage", coverage), ("error", error)):
        if value is not None and not 0 < value < 1:
            raise UserError(f"{name} is {value}: give a share between 0 and 1, e.g. 0.9 for coverage, 0.05 for error")
    mine, all_scores = _scores_of(own, kind), _scores_of(of_all, kind)
    sets: conformal.Calibration | conformal.ClassCalibration
    if by_class is not None:
        if len(own.label) < len(own.odd) or len(of_all.label) < len(of_all.odd):
            raise UserError(f"{NO_NEW_SCORES}, so leave --class-conditional out")
        sets = conformal.calibrate_classes(mine, own.label, all_scores, of_all.label, 1 - coverage, by_class)
    else:
        sets = conformal.calibrate(mine, 1 - coverage)
        if sets.is_trivial and len(all_scores) > len(mine):
            sets = conformal.calibrate(all_scores, 1 - coverage, "federation")
    if error is None:
        return Guarantees(sets, None)
    if len(own.sure) >= ROOM * abstention.smallest_sample(error, DELTA) or len(of_all.sure) <= len(own.sure):
        return Guarantees(sets, abstention.calibrate(own.sure, own.wrong, error, DELTA))
    return Guarantees(sets, abstention.calibrate(of_all.sure, of_all.wrong, error, DELTA, "federation"))


def _scores_of(scores: Scores, kind: ScoreKind) -> Tensor:
    """Return the scores (n,) of the true targets for sets or intervals of a kind."""
    if kind in ("lac", "normalised"):
        return _never_empty(scores)
    found: Tensor = getattr(scores, kind)
    if len(found) < len(scores.odd):
        raise UserError(f"{NO_NEW_SCORES}, so there is no {kind}")
    return found


def _never_empty(scores: Scores) -> Tensor:
    """Return the scores of the true targets. In files of early versions that of the most probable label is not 0."""
    return torch.where(scores.wrong, scores.odd, 0.0) if len(scores.wrong) else scores.odd
