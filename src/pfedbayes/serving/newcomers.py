"""Give a client that was not in the run its own model, trained from the shared one in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Preprocessing, Shards, load_shards
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.data.splits import SplitPurpose, held_out
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import personalise, start_alone
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import TrainedModel, trained_model
from pfedbayes.maths.metrics import log_average
from pfedbayes.nets import Batch
from pfedbayes.runs.calibration import CalibrationRecord, read_calibration
from pfedbayes.runs.copies import left_out
from pfedbayes.runs.folder import Run
from pfedbayes.runs.joining import losses_of
from pfedbayes.runs.sections import MOST_FOLDS
from pfedbayes.serving.client import Client, Gated
from pfedbayes.serving.open import out_of_fold
from pfedbayes.serving.saved_models import saved_models
from pfedbayes.trust import gate
from pfedbayes.trust.calibration import DRAWS, NO_SCORES, Fold, Scores, score, score_gated, scores_at
from pfedbayes.trust.certificate import Certificate, certify_newcomer
from pfedbayes.trust.joining import PairedLosses, Verdict, judge
from pfedbayes.trust.strangeness import Reference, fit_inputs, held_out_distances, model_scores

STEPS = 200
FOLDS = 5
COMPARED = 20  # rows from which the models are compared


@dataclass(frozen=True)
class Joined:
    """A newcomer and how well its model does."""

    client: Client
    """The newcomer with the model that it uses: the joined one, or the one that it has trained alone."""
    trained: int
    """Rows that the model was trained on."""
    held: int
    """Rows held out for calibration."""
    folds: int
    """Folds of the cross-validation over the training rows; 0 if there was none."""
    own: dict[str, float]
    """Metrics of its joined model on the rows held out, or left out by folds; empty if there are none."""
    shared: dict[str, float]
    """Metrics of the shared model on the same rows."""
    alone: dict[str, float]
    """Metrics of the model that it trains alone on the same rows; empty if there is none."""
    personalised: Verdict | None
    """The joined model against the shared one; None if there are fewer than `COMPARED` rows."""
    joining: Verdict | None
    """The joined model against the one that it trains alone."""
    label: str | None
    """The label of all its rows; None if they have several, or numbers."""
    certificate: Certificate | None
    """Bound on the error of its joined model."""
    without: str | None
    """The reason if there is no certificate."""
    unchecked: bool
    """Whether the run's data were missing, so that nothing shows that the newcomer's rows are new to the run."""

    @property
    def verdicts(self) -> dict[str, Verdict | None]:
        """The comparisons by name."""
        return {"personalised": self.personalised, "joining": self.joining}

    def describe(self) -> list[str]:
        """Return the result as lines of text."""
        what = "model trained alone, on" if self.client.which == "alone" else "own model trained on"
        held = f"; {self.held:,} rows held out for calibration" if self.held else ""
        return [f"{self.client.name}: {what} {_rows(self.trained)}{held}", *self._comparison(), *self._certificate()]

    def _comparison(self) -> list[str]:
        """Compare the newcomer's models, if there are rows for it."""
        if self.personalised is None:
            few = self.folds or self.held or self.trained == 1
            return [f"too few rows to compare its model with others: {COMPARED} are needed"] if few else []
        models = {"its own model": self.own, "the shared model": self.shared, "a model trained alone": self.alone}
        measured = "; ".join(f"{_figures(scores)} with {name}" for name, scores in models.items() if scores)
        where = f"by cross-validation in {self.folds} folds" if self.folds else "on the rows held out"
        lines = [f"{where}: {measured}", f"its own model against the shared one: {_sentence(self.personalised)}"]
        if self.joining is not None:
            instead = ": it uses the model that it trains alone" if self.client.which == "alone" else ""
            lines.append(f"joining against training alone: {_sentence(self.joining)}{instead}")
        if self.label is not None:
            lines.append(f"all its rows are {self.label!r}, so they do not show how well it tells labels apart")
        return lines

    def _certificate(self) -> list[str]:
        if self.certificate is None:
            return [f"no certificate: {self.without}"]
        one = self.certificate
        vacuous = " (vacuous: no better than guessing)" if one.vacuous else ""
        every = "all " if one.certified.size > 1 else ""
        seen = f"of which {one.certified.gibbs:.1%} are wrong"
        if one.largest is not None:
            seen = f"where it is {one.shown(one.certified.gibbs):.4g}"
        lines = [
            f"certificate: with {1 - one.delta:.0%} confidence, a network drawn from its model {one.claim()}{vacuous}; "
            f"based on {every}{_rows(one.certified.size)}, {seen}, and a KL of {one.kl:.1f} nats from the shared model"
        ]
        if self.unchecked:
            lines.append("it holds only if the run was not trained on these rows; its data are not here to check")
        return lines


def join(
    run: str | Path,
    data: str | Path | Mapping[str, Any],
    name: str | None = None,
    steps: int = STEPS,
    zeta: float | None = None,
    hold_out: float = 0.0,
    certify: bool = True,
    device: str = "auto",
    trust_module: bool = False,
    folds: int = FOLDS,
    model: str | None = None,
) -> Joined:
    """Train a model for a newcomer from the shared model of a run, and one that starts alone for comparison.

    The data of the run are not needed. If they are there, `join` checks that the newcomer's rows are not among them.
    The model trains on all rows; models that leave out one fold each calibrate it and compare it with the shared model
    and, if the clients of the run have trained alone too, with one that the newcomer trains alone.

    data: the newcomer's rows with the target: a file, images, or a table in memory. name: of the newcomer; default:
    that of the file. steps: local steps from the shared model. zeta: weight of the
    KL term (default: the run's). hold_out: share of the rows to hold out for calibration, instead of folds. certify:
    bound the error of the model, which is slow for convolutional networks. trust_module: see `open_client`. folds:
    number of folds; 0 for none. model: the "joined" model, or the one trained "alone"; default: the joined one, unless
    the comparison shows that it is worse.
    """
    run = Path(run)
    if name is None:
        if not isinstance(data, str | Path):
            raise UserError("a table in memory has no name: give join() the name of the newcomer")
        name = Path(data).stem
    record = read_calibration(run)
    _check(name, record.names, hold_out, folds, model)
    opened = runs.read_run(run)
    if opened.info.method.name not in ("pfedbayes", "hierarchical"):
        raise UserError(
            f"{run} has no distribution over models to start from: a newcomer needs a run of pfedbayes or hierarchical"
        )
    saved = saved_models(run, record, device, trust_module)
    of_run = saved.trained_model("shared", 0)
    prior = saved.shared_prior()
    shards = _newcomer(record.preprocessing, data, name, hold_out)
    sets = _sets(shards, 0 if hold_out else folds, opened)
    joined = personalise(prior, shards, steps, zeta, sets)
    own = _Models(joined, _folds(joined, sets))
    alone = None
    if model == "alone" or (own.num_rows >= COMPARED and opened.experiment.evaluation.alone):
        training = dataclasses.replace(opened.experiment.training, rounds=_rounds(opened))
        trained_alone = start_alone(prior, shards, training, record.net.init, sets)
        alone = _Models(trained_alone, _folds(trained_alone, sets))
    evidence = _compare(name, own, of_run, alone)
    worse = evidence.joining is not None and evidence.joining.conclusion == "worse"
    use = model or ("alone" if worse else "joined")
    known = _training_data(opened) if certify else None
    certificate, without = None, None if certify else "none was requested"
    try:
        if certify and use == "alone":
            raise UserError("it bounds the error of a model that starts from the shared one")
        certificate = certify_newcomer(prior, joined, known) if certify else None
    except UserError as error:
        without = str(error)
    used = own if alone is None or use == "joined" else alone
    final = used.final
    gated = _gated(own, of_run, record) if used is own else None
    client = Client(
        name=name,
        which="alone" if used is alone else "personal" if gated is None else "gated",
        preprocessing=record.preprocessing,
        likelihood=joined.model.likelihood,
        outputs=final.outputs,
        own=used.scores if gated is None else scores_at(gated.own, gated.usual_share()),
        of_all=NO_SCORES,
        notes=(out_of_fold(len(sets)),) if sets else (),
        weights=final.weights,
        net=record.net,
        gated=gated,
        reference=_reference(used, gated),
    )
    return Joined(
        client=client,
        trained=len(shards.train[0]),
        held=len(shards.validation[0]),
        folds=len(sets),
        own=evidence.own,
        shared=evidence.shared,
        alone=evidence.alone,
        personalised=evidence.personalised,
        joining=evidence.joining,
        label=_only_label(shards, record.preprocessing),
        certificate=certificate,
        without=without,
        unchecked=known is None,
    )


def _check(name: str, known: Sequence[str], hold_out: float, folds: int, model: str | None) -> None:
    """Refuse arguments that make no sense."""
    if name in known:
        raise UserError(f"{name!r} is already a client of the run: choose another name with --client")
    if not 0 <= hold_out < 1:
        raise UserError(f"--hold-out is {hold_out}: give a share of at least 0 and less than 1, e.g. 0.3")
    if folds == 1 or not 0 <= folds <= MOST_FOLDS:
        raise UserError(f"--folds is {folds}: give 2 to {MOST_FOLDS}, or 0 for none")
    if model not in (None, "joined", "alone"):
        raise UserError(f"there is no model {model!r}: choose joined or alone")


@dataclass(frozen=True, eq=False)
class _Models:
    """A newcomer's model, with those that predict rows without having been trained on them."""

    federation: Federation
    folds: Sequence[Fold]
    """The folds that have rows, or the rows held out."""

    @property
    def final(self) -> TrainedModel:
        """The model that is trained on all training rows."""
        return trained_model(self.federation, "personal", 0)

    @property
    def num_rows(self) -> int:
        """The number of rows that are predicted."""
        return sum(len(rows) for _, (rows,) in self.folds)

    @property
    def batch(self) -> Batch:
        """These rows, fold by fold."""
        return self.federation.batch_of(torch.cat([rows for _, (rows,) in self.folds]))

    @cached_property
    def outputs(self) -> Tensor:
        """The predictions (K, n, ...) of these rows."""
        parts = [
            trained_model(self.federation, "personal", 0, index).outputs(DRAWS)(self.federation.batch_of(rows).x)
            for index, (rows,) in self.folds
        ]
        return torch.cat(parts, dim=1)

    @property
    def scores(self) -> Scores:
        """The calibration scores of these rows."""
        return score(self.federation.model.likelihood, self.outputs, self.batch.y) if self.folds else NO_SCORES


def _gated(own: _Models, of_run: TrainedModel, record: CalibrationRecord) -> Gated | None:
    """Return what gates the newcomer's model by the shared one; None without classes that it lacks, or without rows."""
    likelihood = own.federation.model.likelihood
    if likelihood.task != "classification" or not own.folds:
        return None
    plain = gate.gates(own.federation.data)[0]
    if gate.is_open(plain):
        return None
    personal, shared = (log_average(outputs).cpu() for outputs in (own.outputs, of_run.outputs(DRAWS)(own.batch.x)))
    rows = gate.HeldOut(personal, shared, own.batch.y.cpu())
    fitted = gate.of_newcomer(plain.own, record.gates, rows)
    return Gated(fitted, of_run.outputs, of_run.weights, score_gated(fitted, [(fitted, rows)]), gate.NO_SUMMARIES)


def _reference(used: _Models, gated: Gated | None) -> Reference | None:
    """Return what the strangeness of new rows needs; None without rows that the models were not trained on."""
    if not used.folds:
        return None
    shards, likelihood = used.federation.shards, used.federation.model.likelihood
    by_model = model_scores(likelihood, used.outputs).cpu() if gated is None else -gated.own.evidence
    (far,) = held_out_distances(used.federation, used.folds)
    both = torch.stack([by_model, far.to(by_model)], dim=1).float()
    return Reference(fit_inputs(shards.x[shards.train[0]]), both, gated is not None)


class _Evidence(NamedTuple):
    """How the models of a newcomer compare, see `Joined`."""

    own: dict[str, float]
    shared: dict[str, float]
    alone: dict[str, float]
    personalised: Verdict | None
    joining: Verdict | None


def _compare(name: str, own: _Models, shared: TrainedModel, alone: _Models | None) -> _Evidence:
    """Compare the joined model with the shared one and with that of the newcomer alone, on rows new to them."""
    if not own.folds:
        return _Evidence({}, {}, {}, None, None)
    likelihood, batch = own.federation.model.likelihood, own.batch
    fold = np.repeat(np.arange(len(own.folds)), [len(rows) for _, (rows,) in own.folds])

    def figures(outputs: Tensor) -> dict[str, float]:
        return dict(zip(likelihood.metrics, likelihood.scores(outputs, batch.y).tolist(), strict=True))

    def verdict(other: Tensor) -> Verdict | None:
        """Judge the joined model against another one."""
        if own.num_rows < COMPARED:
            return None
        theirs, ours = (losses_of(likelihood, outputs, batch.y) for outputs in (other, own.outputs))
        return judge([PairedLosses(name, theirs, ours, fold if len(own.folds) > 1 else None)])[0]

    of_shared = shared.outputs(DRAWS)(batch.x)
    return _Evidence(
        own=figures(own.outputs),
        shared=figures(of_shared),
        alone=figures(alone.outputs) if alone else {},
        personalised=verdict(of_shared),
        joining=verdict(alone.outputs) if alone else None,
    )


def _sets(shards: Shards, folds: int, run: Run) -> list[tuple[Tensor, ...]]:
    """Return the rows of each fold that has any; there are none for a single row."""
    sets = left_out(shards, folds, run.experiment.data.seed) if folds else []
    return [rows for rows in sets if len(rows[0])]


def _folds(federation: Federation, sets: Sequence[tuple[Tensor, ...]]) -> list[Fold]:
    """Return the folds with the federations that left them out; without folds, the rows held out."""
    (held,) = federation.shards.validation
    if len(held):
        return [(0, (held,))]
    return [(len(federation.seeds) + k, rows) for k, rows in enumerate(sets)]


def _rounds(run: Run) -> int:
    """Return the number of rounds after which the models of a run were kept."""
    return (run.summary and (run.summary.kept_round or run.summary.rounds)) or run.experiment.training.rounds


def _training_data(run: Run) -> Shards | None:
    """Load the data of a run; None if they are gone or have changed since."""
    if run.info.digest is None:  # a federation made in Python
        return None
    try:
        shards = load_shards(run.experiment.data)
    except UserError:
        return None
    return shards if run.info.fingerprint in (None, shards.fingerprint()) else None


def _newcomer(preprocessing: Preprocessing, data: str | Path | Mapping[str, Any], name: str, hold_out: float) -> Shards:
    """Read the newcomer's rows; a share of each label is held out as validation data."""
    x, y = read_examples(data, preprocessing)
    classes = preprocessing.target.classes
    labels = preprocessing.target.strata(y)
    held = torch.from_numpy(held_out(labels, len(y), hold_out, SplitPurpose.VALIDATION_CUT.stream(), seed=1))
    none = torch.empty(0, dtype=torch.int64)
    return Shards(
        x, y, ((~held).nonzero().flatten(),), (none,), (held.nonzero().flatten(),), (name,),
        None if classes is None else len(classes), preprocessing,
    )  # fmt: skip


def _only_label(shards: Shards, preprocessing: Preprocessing) -> str | None:
    """Return the label that all rows have; None if there are several, or numbers."""
    classes = preprocessing.target.classes
    found = torch.unique(shards.y).tolist() if classes is not None else []
    return classes[found[0]] if classes is not None and len(found) == 1 else None


def _sentence(verdict: Verdict) -> str:
    """Return a verdict in words."""
    shown = verdict.conclusion != "no difference shown"
    return f"NLL {verdict.change}, {verdict.evidence}" if shown else verdict.evidence


def _figures(scores: dict[str, float]) -> str:
    """Return the main metrics in words."""
    shown = {"accuracy": "accuracy {:.4g} %", "rmse": "RMSE {:.4g}", "c_index": "C-index {:.4g}"}
    named = (text.format(scores[name]) for name, text in shown.items() if math.isfinite(scores.get(name, math.nan)))
    return " and ".join([*named, f"NLL {scores['nll']:.3f}"])


def _rows(number: int) -> str:
    return f"{number:,} row{'s' * (number != 1)}"
