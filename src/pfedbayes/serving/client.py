"""Predict new rows with a client's model: labels or numbers, their uncertainty, and what is guaranteed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Preprocessing
from pfedbayes.data.own.familiarity import Familiarity
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.evaluation.estimators import Served
from pfedbayes.evaluation.posterior import OutputFunction, Weights
from pfedbayes.maths.likelihoods import Likelihood, is_of_labels, is_of_numbers, is_of_times
from pfedbayes.maths.metrics import Gaussians, confidence, decompose_uncertainty, entropy, log_average, moments
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving import times
from pfedbayes.serving.options import Options, require
from pfedbayes.serving.tables import open_table
from pfedbayes.trust import conformal, gate
from pfedbayes.trust.calibration import (
    DELTA,
    DRAWS,
    Guarantees,
    ScoreKind,
    Scores,
    default_rule,
    guarantee,
    label_set_scores,
    menus,
    scores_at,
    stretched_band,
)
from pfedbayes.trust.gate import Gate, Summaries
from pfedbayes.trust.menu import Menu
from pfedbayes.trust.recalibration import RAW, Map
from pfedbayes.trust.strangeness import Reference, model_scores

OUTPUTS_AT_ONCE = 1 << 24  # numbers, over all draws, that are computed in one pass


class Gated(NamedTuple):
    """What gated predictions need besides the personal model, see `trust.gate`."""

    gate: Gate
    outputs: Callable[[int], OutputFunction]
    """Returns the output function of the shared model for a number of weight draws."""
    weights: Weights | None
    """Posterior over the weights of the shared model; None if it is more than the weights of a network."""
    own: Summaries
    """Gated predictions of the client's validation data."""
    of_all: Summaries
    """Those of all clients, each with its own gate."""

    def usual_share(self) -> float:
        """Return the share of other labels that is estimated for the client's validation data."""
        return gate.share_of_others(self.own.evidence, self.gate.usual)


@dataclass(frozen=True, eq=False)
class Client:
    """A client's model, or the shared one, with all that predictions need."""

    name: str | None
    """The client; None for the shared model without a client."""
    which: Served
    """The client's model of the federation, the same gated by the shared model, the one that it has trained alone, or
    the shared one."""
    preprocessing: Preprocessing
    """How inputs and targets are encoded."""
    likelihood: Likelihood
    """Classification or regression."""
    outputs: Callable[[int], OutputFunction]
    """Returns the output function of the model for a number of weight draws."""
    own: Scores
    """Calibration scores of the client's validation data."""
    of_all: Scores
    """Calibration scores of the validation data of all clients."""
    notes: tuple[str, ...]
    """Caveats of the guarantees."""
    weights: Weights | None
    """Posterior over the weights; None if the model is more than the weights of a network."""
    net: NetConfig
    """The network."""
    gated: Gated | None = None
    """The shared model, if predictions are gated."""
    reference: Reference | None = None
    """What the strangeness of new rows needs; None for a client that was not in the run and for early files."""
    map: Map = RAW
    """Makes the predictions calibrated."""

    def __repr__(self) -> str:
        """Return a short description."""
        what = self.preprocessing.target
        return f"Client({self.title}; {what.task} of {what.name}, {len(self.own.odd):,} own calibration rows)"

    @property
    def title(self) -> str:
        """The name of the model for messages."""
        if self.which == "shared":
            return "the shared model" + (f" for {self.name}" if self.name else "")
        if self.which == "gated":
            return f"the model of {self.name}, gated by the shared model"
        return f"the model that {self.name} trained alone" if self.which == "alone" else f"the model of {self.name}"

    @property
    def is_stochastic(self) -> bool:
        """Whether predictions average over weight draws."""
        models = (self.weights, self.gated and self.gated.weights)
        return any(weights is not None and weights.deviation is not None for weights in models)

    def predict(self, rows: str | Path | Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Return the columns of `rows` and those of the prediction, see `Predictor`.

        Warn of columns that are unlike the training data, since the guarantees may not hold for them.

        rows: a file, a pandas frame, or a mapping from column names to arrays. options: see `Options`.
        """
        familiarity = Familiarity(self.preprocessing)
        chunks = list(self.predictor(Options(**options)).predict(rows, familiarity))
        for sentence in familiarity.warnings():
            warnings.warn(sentence, stacklevel=2)
        return {name: np.concatenate([np.asarray(chunk[name]) for chunk in chunks]) for name in chunks[0]}

    def statements(self, **options: Any) -> list[str]:
        """Return sentences on what is guaranteed for predictions with these options, and what is not."""
        return self.predictor(Options(**options)).statements()

    def predictor(self, options: Options) -> Predictor:
        """Calibrate the client for these options."""
        require(options, self.likelihood, self.gated is not None)
        shared = self.gated and self.gated.outputs(options.samples)
        return Predictor(self, options, *self.promises(options), self.outputs(options.samples), shared)

    def promises(self, options: Options, share: float | None = None) -> tuple[Guarantees, tuple[Menu, ...]]:
        """Return the guarantees, and the menus of those at other error rates.

        share: of other labels, for gated predictions; default: as among the calibration rows.
        """
        own, of_all, predicts = self.own, self.of_all, self.likelihood.predicts
        if self.gated is not None and (share := options.others if share is None else share) is not None:
            own, of_all = (scores_at(rows, share) for rows in (self.gated.own, self.gated.of_all))
        kind: ScoreKind = options.sets if predicts == "labels" else options.intervals
        classes = len(self.preprocessing.target.classes or ()) if options.class_conditional else None
        found = guarantee(own, of_all, options.coverage, options.error, kind, classes)
        offered = menus(own, of_all) if predicts == "labels" else ()
        if options.error is None and options.abstain_at is None and predicts == "labels":
            found = found._replace(rule=default_rule(offered))
        return found, offered


@dataclass(frozen=True, eq=False)
class Predictor:
    """A calibrated client with fixed options.

    Columns for all: strangeness, the share of the client's held-out rows that look less strange, see
    `trust.strangeness`.

    Columns for labels: label, p_CLASS, entropy = aleatoric + epistemic (nats), abstain, conformal_set (classes joined
    by |). Columns for numbers, in the units of the target: mean, deviation with deviation^2 = aleatoric^2 +
    epistemic^2, the model's own interval from lower to upper, the guaranteed one from conformal_lower to
    conformal_upper, and abstain if `abstain_at` is given. Columns for survival: see `times.columns`.
    """

    client: Client
    options: Options
    guarantees: Guarantees
    menus: tuple[Menu, ...]
    """What could be promised at other error rates: by the client's own calibration rows, and by those of all."""
    outputs: OutputFunction
    shared: OutputFunction | None = None
    """The output function of the shared model, if predictions are gated."""

    def predict(self, source: str | Path | Mapping[str, Any], familiarity: Familiarity) -> Iterator[dict[str, Any]]:
        """Yield the rows of a table and their predictions, chunk by chunk.

        If the table has a column of the same name, the name of the new column begins with "predicted_".

        familiarity: counts the rows.
        """
        for chunk in read_chunks(source, self.client.preprocessing):
            familiarity.add(chunk.table, chunk.x)
            taken = set(chunk.kept)
            yield {**chunk.kept, **{_free(name, taken): column for name, column in self.columns(chunk.x).items()}}

    def columns(self, x: Tensor) -> dict[str, NDArray[Any]]:
        """Return the predictions for inputs x (n, ...) by column."""
        target = self.client.preprocessing.target
        width = self.options.samples * len(target.classes or (0,))
        make = {"labels": self._labels, "numbers": self._numbers, "times": self._times}[self.client.likelihood.predicts]
        passes = torch.split(x, max(1, OUTPUTS_AT_ONCE // width))
        if self.shared is not None:
            return self._gated(passes)
        parts = []
        for part in passes:
            outputs = self.outputs(part).cpu()
            by_model = model_scores(self.client.likelihood, outputs)
            parts.append(make(part, outputs) | self._strangeness(by_model, part))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _gated(self, passes: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
        """Return the gated predictions for inputs in passes, with the share of other labels among all of them."""
        likelihood, gated, shared = self.client.likelihood, self.client.gated, self.shared
        assert is_of_labels(likelihood)  # noqa: S101, checked by `columns`
        assert gated is not None  # noqa: S101
        assert shared is not None  # noqa: S101
        share = self.options.others
        if share is None:
            averages = torch.cat([log_average(likelihood.logits(shared(x).cpu())) for x in passes])
            share = gate.share_of_others(gate.parts(averages, averages, gated.gate).evidence, gated.gate.usual)
        (guarantees, _), found = self.client.promises(self.options, share), []
        for x in passes:
            draws = [likelihood.logits(outputs(x).cpu()) for outputs in (self.outputs, shared)]
            personal, of_all = (log_average(logits) for logits in draws)
            log_probs = gate.gated(personal, of_all, gated.gate, share)
            # A model without draws is paired with every draw of the other.
            single = gate.gated(draws[0].log_softmax(-1), draws[1].log_softmax(-1), gated.gate, share)
            evidence = gate.parts(personal, of_all, gated.gate).evidence
            columns = self._columns(x, single, log_probs, log_probs, guarantees)
            found.append(columns | self._strangeness(-evidence, x))
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}

    def _strangeness(self, by_model: Tensor, x: Tensor) -> dict[str, NDArray[Any]]:
        reference = self.client.reference
        return {} if reference is None else {"strangeness": reference.of(by_model, x.cpu()).numpy()}

    def _labels(self, x: Tensor, outputs: Tensor) -> dict[str, NDArray[Any]]:
        assert is_of_labels(self.client.likelihood)  # noqa: S101, checked by `columns`
        draws = self.client.likelihood.logits(outputs)
        average = log_average(draws)
        return self._columns(x, draws, average, self.client.map.of_labels(average), self.guarantees)

    def _columns(
        self, x: Tensor, draws: Tensor, average: Tensor, log_probs: Tensor, guarantees: Guarantees
    ) -> dict[str, NDArray[Any]]:
        """Return the columns of log-probabilities (n, C), which calibrate the average of draws (K, n, C) of logits."""
        classes = self.client.preprocessing.target.classes or ()
        # The calibrated entropy is divided as the raw one.
        parts = decompose_uncertainty(draws, average)
        total = entropy(log_probs)
        aleatoric = total * (parts.aleatoric / parts.total.clamp_min(torch.finfo(total.dtype).tiny)).clamp(0, 1)
        probs = log_probs.exp().numpy()
        scores = label_set_scores(log_probs, self.options.sets, conformal.uniforms(x))
        within = conformal.label_sets(scores, guarantees.sets).numpy()
        if guarantees.rule is not None:
            abstain = ~guarantees.rule.answers(confidence(log_probs)).numpy()
        else:
            abstain = probs.max(-1) < self.options.abstain_at
        return {
            "label": np.array(classes)[log_probs.argmax(-1).numpy()],
            **{f"p_{name}": probs[:, k] for k, name in enumerate(classes)},
            "entropy": total.numpy(),
            "aleatoric": aleatoric.numpy(),
            "epistemic": (total - aleatoric).numpy(),
            "abstain": abstain,
            "conformal_set": np.array(["|".join(np.array(classes)[row]) for row in within], dtype=str),
        }

    def _numbers(self, x: Tensor, outputs: Tensor) -> dict[str, NDArray[Any]]:
        assert is_of_numbers(self.client.likelihood)  # noqa: S101, checked by `columns`
        target, likelihood = self.client.preprocessing.target, self.client.likelihood
        predicted, factor = moments(likelihood, outputs), self.client.map.factor
        ends = likelihood.interval(outputs, self.options.coverage)
        lower, upper = (predicted.mean + factor * (end - predicted.mean) if factor != 1 else end for end in ends)
        predicted = Gaussians(predicted.mean, factor * predicted.deviation, factor * predicted.model_deviation)
        sets = self.guarantees.sets
        assert isinstance(sets, conformal.Calibration)  # noqa: S101, numbers have no classes
        if self.options.intervals == "quantile":
            low, high = conformal.band_interval(stretched_band(likelihood, outputs, predicted.mean, factor), sets)
        else:
            low, high = conformal.interval(predicted, sets)
        noise = (predicted.deviation.square() - predicted.model_deviation.square()).clamp_min(0).sqrt()
        places = {
            "mean": predicted.mean,
            "lower": lower,
            "upper": upper,
            "conformal_lower": low,
            "conformal_upper": high,
        }
        spreads = {"deviation": predicted.deviation, "aleatoric": noise, "epistemic": predicted.model_deviation}
        inner = {name: values * target.deviation + target.mean for name, values in places.items()}
        inner |= {name: values * target.deviation for name, values in spreads.items()}
        columns: dict[str, NDArray[Any]] = {}
        for name, values in inner.items():
            several = values.shape[1] > 1  # targets
            columns |= {f"{name}_{k + 1}" if several else name: values[:, k].numpy() for k in range(values.shape[1])}
        if self.options.abstain_at is not None:
            columns["abstain"] = (inner["deviation"].amax(1) > self.options.abstain_at).numpy()
        return columns

    def _times(self, x: Tensor, outputs: Tensor) -> dict[str, NDArray[Any]]:
        assert is_of_times(self.client.likelihood)  # noqa: S101, checked by `columns`
        options, sets = self.options, self.guarantees.sets
        assert isinstance(sets, conformal.Calibration)  # noqa: S101, times have no classes
        return times.columns(self.client.likelihood, outputs, options.coverage, options.at, sets)

    def statements(self) -> list[str]:
        """Return sentences on what is guaranteed, from how many examples, and what is not."""
        sets, rule = self.guarantees
        kind = {"labels": "sets", "numbers": "intervals"}.get(self.client.likelihood.predicts, times.KIND)
        sentences = [f"conformal {kind}: {sets.statement()}"]
        if rule is not None:
            sentences.append(f"abstention: {rule.statement()}{self._hint()}")
        elif self.options.abstain_at is not None:
            sentences.append(f"abstention: at the given threshold {self.options.abstain_at:g}, without a guarantee")
        sentences += [f"menu: {one.statement()}" for one in self.menus]
        if self.client.is_stochastic and self.options.samples != DRAWS:
            sentences.append(
                f"calibrated with {DRAWS} draws but predicted with {self.options.samples}, so it holds only roughly"
            )
        if self.client.gated is not None and self.options.others is None:
            sentences.append(
                "the share of labels that the client has no rows of is estimated from the rows that are predicted "
                "together, so this holds approximately (--others gives a share)"
            )
        return [*sentences, *self.client.notes, "all of this for new rows from the same source as the calibration rows"]

    def as_json(self) -> dict[str, Any]:
        """Return the guarantees as a JSON object, with null for infinite thresholds."""
        sets, rule = self.guarantees
        plain: dict[str, Any] = {"conformal": dataclasses.asdict(sets), "abstention": rule and dataclasses.asdict(rule)}
        for each in filter(None, plain.values()):
            for one in each.get("labels", [each]):
                one["threshold"] = one["threshold"] if math.isfinite(one["threshold"]) else None
        menus = {one.whose: [offer.as_json() for offer in one.offers] for one in self.menus}
        return {**plain, "menu": menus, "statements": self.statements()}

    def _hint(self) -> str:
        """Name the smallest error rate that the examples can show, if there are too few for the requested one."""
        rule = self.guarantees.rule
        if rule is None or rule.answered or not rule.size:
            return ""
        least = math.ceil(1000 * (1 - DELTA ** (1 / rule.size))) / 1000
        return f"; the smallest they can show is --error {least:g}" if rule.target < least < 1 else ""


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"predicted_{name}"
    return name


class Outcome(NamedTuple):
    """The size of a prediction."""

    rows: int
    """Rows predicted."""
    abstained: int | None
    """Rows from which the client abstains; None if there is no threshold for abstaining."""
    familiarity: Familiarity
    """How the rows compare with the training data."""


def predict_file(predictor: Predictor, source: Path, out: Path | None) -> Outcome:
    """Predict the rows of a file into another file, or to the standard output, chunk by chunk."""
    rows, abstained = 0, None
    familiarity = Familiarity(predictor.client.preprocessing)
    abstains = predictor.guarantees.rule is not None or predictor.options.abstain_at is not None
    with open_table(out) as write:
        for columns in predictor.predict(source, familiarity):
            write(columns)
            rows += len(next(iter(columns.values())))
            flag = next((name for name in reversed(columns) if name.endswith("abstain")), None)
            if abstains:
                abstained = (abstained or 0) + int(np.sum(columns[str(flag)]))
    return Outcome(rows, abstained, familiarity)
