"""The analysis of the final models: calibration, risk-coverage curves, and single predictions."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.evaluation.estimators import EstimatorSpec
from pfedbayes.evaluation.evaluate import predict_blocks
from pfedbayes.evaluation.models import FederatedModels, available_models, headline_estimator, personal_state
from pfedbayes.maths.censoring import kaplan_meier
from pfedbayes.maths.gaussian import kl
from pfedbayes.maths.likelihoods import Likelihood, TimeLikelihood, is_of_times
from pfedbayes.maths.metrics import (
    BINS,
    adaptive_ece,
    confidence,
    entropy,
    log_average,
    mutual_information,
    reliability,
    risk_coverage,
)
from pfedbayes.methods.base import weights_posterior
from pfedbayes.runs.description import scored_clients
from pfedbayes.runs.gated_scores import gated_scores
from pfedbayes.runs.schema import (
    Answer,
    ClientFacts,
    Example,
    FinalAnalysis,
    Image,
    Reliability,
    RiskCoverage,
    SurvivalCurves,
)
from pfedbayes.runs.sections import Evaluation

EXAMPLES_PER_KIND = 4
CURVE_POINTS = 100
LEAST_AT_RISK = 10  # rows on which an observed survival curve rests


@dataclass(frozen=True)
class _Prediction:
    """Predictions of one model for the scored examples of a client."""

    outputs: Tensor
    """(K, n, C): the outputs of K weight draws."""
    log_probs: Tensor
    """(n, C): log-probabilities of their average."""


class _Pooled(NamedTuple):
    """What a model says of the rows of all clients."""

    gist: Tensor
    """See `Likelihood.gist`: (n, R)."""
    y: Tensor
    """Targets (n, ...)."""


def analyse_final_models(federation: FederatedModels, evaluation: Evaluation) -> FinalAnalysis:
    """Compute what is computed for the final models only, with the headline estimator."""
    likelihood = federation.model.likelihood
    scored = scored_clients(federation, evaluation)
    clients = _client_facts(federation, scored)
    gists = _pooled_gists(federation, evaluation) if likelihood.pooled_metrics else {}
    scores = {which: _pooled_scores(likelihood, of_seeds) for which, of_seeds in gists.items()}
    if likelihood.task != "classification":
        curves_of_time = _survival_curves(likelihood, gists) if gists and is_of_times(likelihood) else None
        return FinalAnalysis(clients=clients, pooled=scores, survival=curves_of_time)
    samples, split = evaluation.samples, evaluation.split
    data, headline = federation.data, headline_estimator(federation.method, samples)
    spec = EstimatorSpec(samples, (headline,), evaluation.sampling)
    diagrams: dict[str, Reliability | None] = {}
    curves: dict[str, RiskCoverage | None] = {}
    predicted: dict[str, dict[int, _Prediction]] = {}
    for which in available_models(federation.method):
        predicted[which] = {}
        sums = torch.zeros(3, BINS, dtype=data.dtype, device=data.device)
        pooled: list[tuple[Tensor, Tensor]] = []
        for block in predict_blocks(federation, which, split, spec, evaluation.clients):
            outputs = block.outputs[headline]
            log_probs = log_average(outputs)
            sums += torch.stack(reliability(log_probs, block.y)).sum(1)
            pooled.append((log_probs.flatten(0, 1), block.y.flatten()))
            if 0 in block.seeds:
                first = zip(block.clients, outputs.cpu(), log_probs.cpu(), strict=False)  # the first seed comes first
                predicted[which] |= {i: _Prediction(*prediction) for i, *prediction in first}
        confidence_sum, correct, count = sums.tolist()
        diagrams[which] = Reliability(
            confidence=[_ratio(*pair) for pair in zip(confidence_sum, count, strict=True)],
            accuracy=[_ratio(*pair) for pair in zip(correct, count, strict=True)],
            count=count,
        )
        curves[which] = _risk_coverage(*(torch.cat(parts) for parts in zip(*pooled, strict=True))) if pooled else None
    examples = _examples(data.shards, getattr(data.shards, split), predicted)
    gated = gated_scores(federation, evaluation, scored)
    return FinalAnalysis(diagrams, curves, clients, examples, scores, gated=gated)


def _pooled_gists(federation: FederatedModels, evaluation: Evaluation) -> dict[str, list[_Pooled]]:
    """Return by model and seed the gist and the target of all clients' rows together."""
    likelihood, samples = federation.model.likelihood, evaluation.samples
    headline = headline_estimator(federation.method, samples)
    spec = EstimatorSpec(samples, (headline,), evaluation.sampling)
    found: dict[str, list[_Pooled]] = {}
    for which in available_models(federation.method):
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for block in predict_blocks(federation, which, evaluation.split, spec, evaluation.clients):
            gists = likelihood.gist(block.outputs[headline])
            for seed, *rows in zip(
                block.seeds, *(each.chunk(len(block.seeds)) for each in (gists, block.y)), strict=True
            ):
                parts.setdefault(seed, []).append((rows[0].flatten(0, 1), rows[1].flatten(0, 1)))
        if parts:
            found[which] = [_Pooled(*map(torch.cat, zip(*rows, strict=True))) for rows in parts.values()]
    return found


def _pooled_scores(likelihood: Likelihood, of_seeds: Sequence[_Pooled]) -> dict[str, float | None]:
    """Return the scores of all clients' rows together, the mean over seeds; None where it is undefined."""
    means = torch.stack([likelihood.pooled_scores(*pair) for pair in of_seeds]).mean(0).tolist()
    names = likelihood.pooled_metrics
    return {name: mean if math.isfinite(mean) else None for name, mean in zip(names, means, strict=True)}


def _survival_curves(likelihood: TimeLikelihood, gists: dict[str, list[_Pooled]]) -> SurvivalCurves:
    """Return the observed curve of all rows beside the mean predicted ones, while `LEAST_AT_RISK` rows are observed."""
    time, event = next(iter(gists.values()))[0].y.unbind(-1)
    grid = likelihood.grid(time)
    grid = grid[grid <= time.sort(descending=True).values[:LEAST_AT_RISK].min()]
    means = {which: torch.stack([each.gist.mean(0) for each in of_seeds]).mean(0) for which, of_seeds in gists.items()}
    return SurvivalCurves(
        times=[0.0, *grid.tolist()],
        observed=[1.0, *kaplan_meier(time, event, grid).tolist()],
        predicted={which: [1.0, *mean[: len(grid)].tolist()] for which, mean in means.items()},
    )


def _risk_coverage(log_probs: Tensor, y: Tensor) -> RiskCoverage:
    """Return the risk-coverage curve of log-probabilities (n, C) and labels (n,), at CURVE_POINTS points."""
    risk = risk_coverage(confidence(log_probs), log_probs.argmax(-1) != y)
    size = len(risk)
    points = sorted({-(-size * k // CURVE_POINTS) - 1 for k in range(1, CURVE_POINTS + 1)})
    return RiskCoverage(
        coverage=[(point + 1) / size for point in points],
        risk=risk[points].tolist(),
        aurc=float(risk.mean()),
        adaptive_ece=float(adaptive_ece(log_probs, y)),
    )


def _client_facts(federation: FederatedModels, clients: list[int]) -> ClientFacts:
    """Return the distance of each personal model from the shared one (mean over seeds), and each rarest label."""
    shards, method = federation.data.shards, federation.method
    distances: list[float | None] | None = None
    if method.about.gaussian and method.about.personal and method.about.shared:
        shared = [weights_posterior(method, server) for server in federation.servers[: len(federation.seeds)]]
        distances = [
            sum(float(kl(weights_posterior(method, personal_state(federation, i, s)), w)) for s, w in enumerate(shared))
            / len(shared)
            for i in clients
        ]
    rarest = None
    if shards.num_classes is not None:
        counts = [torch.bincount(shards.y[shards.train[i]]) for i in clients]
        rarest = [int(count[count > 0].min()) for count in counts]
    return ClientFacts(distances, rarest)


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def _examples(shards: Shards, sets: Sequence[Tensor], predicted: dict[str, dict[int, _Prediction]]) -> list[Example]:
    """Choose examples on which the first model is confident and right, uncertain, and confident and wrong."""
    first = next(iter(predicted.values()))
    kinds: dict[str, list[tuple[float, int, int]]] = {"confident": [], "uncertain": [], "wrong": []}
    for i, prediction in first.items():
        uncertainty = entropy(prediction.log_probs)
        right = prediction.log_probs.argmax(-1) == shards.y[sets[i]]
        ranks = {
            "confident": torch.where(right, -uncertainty, -torch.inf),
            "uncertain": uncertainty,
            "wrong": torch.where(right, -torch.inf, -uncertainty),
        }
        for kind, rank in ranks.items():
            if (best := float(rank.max())) > -torch.inf:
                kinds[kind].append((best, i, int(rank.argmax())))
    chosen = {(i, row) for ranked in kinds.values() for _, i, row in sorted(ranked)[-EXAMPLES_PER_KIND:]}
    return [_example(shards, i, row, int(sets[i][row]), predicted) for i, row in sorted(chosen)]


def _example(
    shards: Shards, client: int, row: int, pool_row: int, predicted: dict[str, dict[int, _Prediction]]
) -> Example:
    x = shards.x[pool_row]
    image = None
    if x.dtype == torch.uint8 and x.dim() == 3:
        image = Image(list(x.shape), base64.b64encode(x.numpy().tobytes()).decode())
    answers = {which: _answer(of_clients[client], row) for which, of_clients in predicted.items()}
    label = int(shards.y[pool_row])
    return Example(shards.names[client], label, image, answers.get("personal"), answers.get("shared"))


def _answer(prediction: _Prediction, row: int) -> Answer:
    draws = prediction.outputs[:, row : row + 1]
    return Answer(
        probabilities=prediction.log_probs[row].exp().tolist(),
        spread=draws.softmax(-1).std(0, correction=0)[0].tolist(),
        entropy=float(entropy(prediction.log_probs[row])),
        mutual_information=float(mutual_information(draws)),
    )
