"""What models say to inputs that their client knows, and to inputs that are strange to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.evaluation.estimators import MODELS, Served, Which
from pfedbayes.evaluation.posthoc import Ensemble
from pfedbayes.maths.likelihoods import LabelLikelihood, Likelihood
from pfedbayes.maths.metrics import decompose_uncertainty, log_average
from pfedbayes.trust import gate
from pfedbayes.trust.gate import Gate, HeldOut, Parts
from pfedbayes.trust.shifts import some_rows, strange_inputs, strange_rows
from pfedbayes.trust.strangeness import distances, fit_inputs, model_scores

ALPHA = 0.1  # miscoverage of conformal sets and intervals

Predict = Callable[[Which, int, Tensor, int], Tensor]
"""Returns outputs (K, n, C) of a model for a client, inputs (n, ...) and the index of a seed."""


@dataclass(frozen=True, eq=False)
class Models:
    """The models of the clients of a federation."""

    data: ClientData
    likelihood: Likelihood
    names: Sequence[Which]
    """Which models there are."""
    num_seeds: int
    """The number of federations, one per seed."""
    averages: bool
    """Whether a prediction is the average of several networks, which may disagree."""
    predict: Predict

    @classmethod
    def of(cls, federation: Federation, samples: int) -> Models:
        """Return the models of one federation per seed, with this many weight draws where the method draws weights."""
        stochastic = federation.method.about.stochastic

        def predict(which: Which, client: int, x: Tensor, s: int) -> Tensor:
            return federation.predict(which, client, x, samples if stochastic else None, s)

        seeds, likelihood = len(federation.seeds), federation.model.likelihood
        averages = stochastic or isinstance(federation.method, Ensemble)
        return cls(federation.data, likelihood, federation.models(), seeds, averages, predict)

    @property
    def shards(self) -> Shards:
        """The clients' data as they were given."""
        return self.data.shards

    @property
    def has_gates(self) -> bool:
        """Whether there is something to gate: both models, and a client that lacks a label."""
        both = len(self.names) == len(MODELS) and self.likelihood.task == "classification"
        return both and not all(map(gate.is_open, gate.gates(self.data)))


class Answers(NamedTuple):
    """Predictions of a model for n examples."""

    log_probs: Tensor
    """Log-probabilities (n, C); for numbers, the outputs (K, n, ...)."""
    epistemic: Tensor
    """Epistemic uncertainty (n,) in nats; for numbers, the predicted deviation."""
    gated: tuple[Parts, Gate] | None = None
    """What a gated prediction consists of."""
    by_model: Tensor = torch.empty(0)
    """Score (n,) of the strangeness by the model."""
    distance: Tensor = torch.empty(0)
    """Distance (n,) from the client's training inputs."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the models of a client are asked."""

    known: dict[str, tuple[Tensor, Tensor]]
    """Inputs and labels: "own" and, if there are any, "validation" and "unseen"; "all": test data of all clients."""
    strange: dict[str, Tensor]
    """Out-of-distribution inputs by name."""
    distance: dict[str, Tensor]
    """Distances (n,) of all inputs from the client's training inputs, by kind."""

    @classmethod
    def of(cls, shards: Shards, client: int, others: dict[str, Tensor]) -> Inputs:
        """Return the inputs for a client; others: further out-of-distribution inputs by name."""
        rows = {"own": shards.test[client], "validation": shards.validation[client]}
        _, rows["unseen"], generator = strange_rows(shards, client)
        rows["all"] = some_rows(torch.cat(shards.test), generator)
        known = {name: (shards.x[each], shards.y[each]) for name, each in rows.items() if len(each)}
        found = cls(known, dict(strange_inputs(shards, client, others)), {})
        own = fit_inputs(shards.x[shards.train[client]])
        found.distance.update({kind: distances(x, own) for kind, x in found.every().items()})
        return found

    def every(self) -> dict[str, Tensor]:
        """Return all inputs by kind."""
        return {name: x for name, (x, _) in self.known.items()} | {f"strange {k}": x for k, x in self.strange.items()}


def answer_labels(
    models: Models, likelihood: LabelLikelihood, client: int, inputs: Inputs, s: int
) -> dict[str, dict[Served, Answers]]:
    """Return what the models of a seed say to all inputs of a client, by kind and model."""
    every = inputs.every()
    found: dict[str, dict[Served, Answers]] = {kind: {} for kind in every}
    for which in models.names:
        outputs = models.predict(which, client, torch.cat(list(every.values())), s)
        draws = likelihood.logits(outputs)
        log_probs = log_average(draws)
        epistemic = decompose_uncertainty(draws, log_probs).epistemic
        whole = (log_probs, epistemic, model_scores(likelihood, outputs))
        sizes = [len(x) for x in every.values()]
        for kind, *parts in zip(every, *(torch.split_with_sizes(each.cpu(), sizes) for each in whole), strict=True):
            log_probs, epistemic, by_model = parts
            found[kind][which] = Answers(log_probs, epistemic, None, by_model, inputs.distance[kind])
    return found


def add_gated(models: Models, answers: dict[int, dict[str, dict[Served, Answers]]]) -> list[Served]:
    """Add gated predictions if there is something to gate, and return the models that have answered.

    The gates are fitted to validation data if there are any.
    """
    if not models.has_gates:
        return [*models.names]
    shards, plain = models.shards, gate.gates(models.data)
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
    return [*models.names, "gated"]
