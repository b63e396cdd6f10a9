"""Asking the model of one client about new rows: what it says, how sure it is, and what is guaranteed of that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Preprocessing
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import Answer, Weights
from pfedbayes.maths.likelihoods import Likelihood, Regression
from pfedbayes.maths.metrics import confidence, doubt, log_average, moments
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.sheets import sheet
from pfedbayes.trust import conformal
from pfedbayes.trust.calibration import DELTA, DRAWS, Promises, Scores, promise

AT_ONCE = 1 << 24  # numbers that come out of all draws for the rows predicted together


class Wish(NamedTuple):
    """samples: weight draws averaged in a prediction; coverage: of sets and intervals; error: how many of the answers
    may be wrong, the client abstains from the others. abstain_at: abstain instead where the label's probability is
    less, or the predicted standard deviation more than this."""

    samples: int = DRAWS
    coverage: float = 0.9
    error: float | None = None
    abstain_at: float | None = None


DEFAULT_ERROR = 0.05


@dataclass(frozen=True, eq=False)
class Client:
    """A client's own model, or the shared one, with all that is needed to use it: how inputs are made, the scores of
    the client's own validation data and of those of all clients, and notes on what these are worth.

    drawn: the model with so many draws; weights: the same as tensors, where it is no more than these.
    """

    name: str | None
    which: Which
    preprocessing: Preprocessing
    likelihood: Likelihood
    drawn: Callable[[int], Answer]
    own: Scores
    of_all: Scores
    notes: tuple[str, ...]
    weights: Weights | None
    net: NetConfig

    @property
    def title(self) -> str:
        """Whose model it is, for people."""
        if self.which == "shared":
            return "the shared model" + (f" for {self.name}" if self.name else "")
        return f"the model of {self.name}"

    @property
    def draws(self) -> bool:
        """Whether its weights are drawn."""
        return self.weights is not None and self.weights.deviation is not None

    def predict(self, rows: str | Path | Mapping[str, Any], **wish: Any) -> dict[str, Any]:
        """What is known of each row of a file, a frame or a mapping from names to columns: its own columns and those of
        the prediction, see `Asked`. wish: see `Wish`."""
        parts = list(self.ask(Wish(**wish)).rows(rows))
        return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}

    def statements(self, **wish: Any) -> list[str]:
        """What is guaranteed of such predictions, and what is not."""
        return self.ask(Wish(**wish)).statements()

    def ask(self, wish: Wish) -> Asked:
        """The client with a wish, ready for rows."""
        regression = isinstance(self.likelihood, Regression)
        if regression and wish.error is not None:
            raise UserError(
                "an error rate is about labels, and numbers are predicted here: leave --error out; --abstain-at "
                "abstains where the predicted standard deviation is larger"
            )
        if wish.error is not None and wish.abstain_at is not None:
            raise UserError("--error finds the threshold that --abstain-at gives: leave one of them out")
        if wish.abstain_at is not None and not 0 < wish.abstain_at < (math.inf if regression else 1):
            raise UserError(f"--abstain-at is {wish.abstain_at}: give a probability, or for numbers a deviation")
        by_rate = not regression and wish.abstain_at is None
        error = (DEFAULT_ERROR if wish.error is None else wish.error) if by_rate else None
        promises = promise(self.own, self.of_all, wish.coverage, error)
        return Asked(self, wish, promises, self.drawn(wish.samples))


@dataclass(frozen=True, eq=False)
class Asked:
    """A client and what is wanted of it.

    Columns of labels: label, p_CLASS, entropy = aleatoric + epistemic (nats), abstain, conformal_set (classes joined
    by |). Columns of numbers, in the units of the target: mean, its deviation with deviation^2 = aleatoric^2 +
    epistemic^2, the model's own interval lower to upper, the one that is guaranteed, and abstain if asked for.
    """

    client: Client
    wish: Wish
    promises: Promises
    answer: Answer

    def rows(self, source: str | Path | Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of a table with what is predicted, chunk by chunk. Where a name is taken, "predicted_" is put before
        the new one."""
        for chunk in read_chunks(source, self.client.preprocessing):
            new = self.columns(chunk.x)
            taken = set(chunk.kept)
            yield {**chunk.kept, **{_free(name, taken): column for name, column in new.items()}}

    def columns(self, x: Tensor) -> dict[str, NDArray[Any]]:
        """What is predicted for inputs x (n, ...)."""
        target = self.client.preprocessing.target
        outputs = self.wish.samples * len(target.classes or (0,))
        make = self._numbers if isinstance(self.client.likelihood, Regression) else self._labels
        parts = [make(self.answer(part).cpu()) for part in torch.split(x, max(1, AT_ONCE // outputs))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _labels(self, outputs: Tensor) -> dict[str, NDArray[Any]]:
        classes = self.client.preprocessing.target.classes or ()
        log_probs = log_average(outputs)
        doubts = doubt(outputs, log_probs)
        probs = log_probs.exp().numpy()
        within = conformal.label_sets(conformal.label_scores(log_probs), self.promises.sets).numpy()
        if self.promises.rule is not None:
            abstain = ~self.promises.rule.answers(confidence(log_probs)).numpy()
        else:
            abstain = probs.max(-1) < self.wish.abstain_at
        return {
            "label": np.array(classes)[probs.argmax(-1)],
            **{f"p_{name}": probs[:, k] for k, name in enumerate(classes)},
            "entropy": doubts.total.numpy(),
            "aleatoric": doubts.aleatoric.numpy(),
            "epistemic": doubts.epistemic.numpy(),
            "abstain": abstain,
            "conformal_set": np.array(["|".join(np.array(classes)[row]) for row in within], dtype=str),
        }

    def _numbers(self, outputs: Tensor) -> dict[str, NDArray[Any]]:
        assert isinstance(self.client.likelihood, Regression)  # noqa: S101, asked by `columns`
        target, likelihood = self.client.preprocessing.target, self.client.likelihood
        predicted = moments(likelihood, outputs)
        low, high = conformal.interval(predicted, self.promises.sets)
        reach = math.sqrt(2) * float(torch.erfinv(torch.tensor(self.wish.coverage, dtype=torch.float64)))
        noise = (predicted.deviation.square() - predicted.model_deviation.square()).clamp_min(0).sqrt()
        places = {
            "mean": predicted.mean,
            "lower": predicted.mean - reach * predicted.deviation,
            "upper": predicted.mean + reach * predicted.deviation,
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
        if self.wish.abstain_at is not None:
            columns["abstain"] = (inner["deviation"].amax(1) > self.wish.abstain_at).numpy()
        return columns

    def statements(self) -> list[str]:
        """What is guaranteed, from how many examples, and what is not."""
        sets, rule = self.promises
        kind = "intervals" if isinstance(self.client.likelihood, Regression) else "sets"
        said = [f"conformal {kind}: {sets.statement()}"]
        if rule is not None:
            said.append(f"abstention: {rule.statement()}{self._hint()}")
        elif self.wish.abstain_at is not None:
            said.append(f"abstention: at {self.wish.abstain_at:g}, as asked for; nothing is guaranteed of it")
        if self.client.draws and self.wish.samples != DRAWS:
            said.append(f"calibrated with {DRAWS} draws and asked with {self.wish.samples}, so it holds only roughly")
        return [*said, *self.client.notes, "all of it for new rows that come from where the calibration rows came from"]

    def as_json(self) -> dict[str, Any]:
        """The same for scripts: thresholds are null where they are infinite."""
        sets, rule = self.promises
        plain: dict[str, Any] = {"conformal": dataclasses.asdict(sets), "abstention": rule and dataclasses.asdict(rule)}
        for each in filter(None, plain.values()):
            each["threshold"] = each["threshold"] if math.isfinite(each["threshold"]) else None
        return {**plain, "statements": self.statements()}

    def _hint(self) -> str:
        """Which error could be shown at best, where there are too few examples for the one that is wanted."""
        rule = self.promises.rule
        if rule is None or rule.answered or not rule.size:
            return ""
        least = math.ceil(1000 * (1 - DELTA ** (1 / rule.size))) / 1000
        return f"; the least that they could show is --error {least:g}" if rule.target < least < 1 else ""


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"predicted_{name}"
    return name


class Outcome(NamedTuple):
    """How many rows were predicted, and of how many the client abstained (None: it was not asked to)."""

    rows: int
    abstained: int | None


def predict_file(asked: Asked, source: Path, out: Path | None) -> Outcome:
    """Predict the rows of a file into another, or to the standard output, without holding all of them."""
    rows, abstained = 0, None
    with sheet(out) as write:
        for columns in asked.rows(source):
            write(columns)
            rows += len(next(iter(columns.values())))
            flag = next((name for name in reversed(columns) if name.endswith("abstain")), None)
            if asked.promises.rule is not None or asked.wish.abstain_at is not None:
                abstained = (abstained or 0) + int(np.sum(columns[str(flag)]))
    return Outcome(rows, abstained)
