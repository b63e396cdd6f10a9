"""The scores of gated predictions on the clients' own data, for the final models."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from pfedbayes.evaluation.estimators import MODELS, EstimatorSpec, EvaluationSplit, Which
from pfedbayes.evaluation.evaluate import predict_blocks
from pfedbayes.evaluation.models import FederatedModels, headline_estimator
from pfedbayes.maths.metrics import log_average
from pfedbayes.runs.sections import Evaluation
from pfedbayes.trust import gate
from pfedbayes.trust.gate import HeldOut


def gated_scores(
    federation: FederatedModels, evaluation: Evaluation, clients: Sequence[int]
) -> dict[str, list[list[float | None]]]:
    """Return the metrics [seed][client] of gated predictions; none if there is nothing to gate.

    The gates are fitted to validation data if there are any. The share of labels that a client lacks is estimated from
    all rows on which it is scored.
    """
    if not gate.applies(federation):
        return {}
    likelihood, plain = federation.model.likelihood, gate.gates(federation.data)
    validation, scored = (_both(federation, evaluation, split) for split in ("validation", evaluation.split))
    found: dict[str, list[list[float | None]]] = {name: [] for name in likelihood.metrics}
    for s in range(len(federation.seeds)):
        gates = gate.fit(plain, {i: [(plain[i], rows)] for (seed, i), rows in validation.items() if seed == s})
        by_client = {}
        for i in (i for seed, i in scored if seed == s):
            rows = scored[s, i]
            evidence = gate.parts(rows.personal, rows.shared, gates[i]).evidence
            share = gate.share_of_others(evidence, gates[i].usual)
            log_probs = gate.gated(rows.personal, rows.shared, gates[i], share)
            by_client[i] = likelihood.scores(log_probs[None], rows.y).tolist()
        for k, values in enumerate(found.values()):
            of_seed = [by_client[i][k] if i in by_client else math.nan for i in clients]
            values.append([value if math.isfinite(value) else None for value in of_seed])
    return found


def _both(
    federation: FederatedModels, evaluation: Evaluation, split: EvaluationSplit
) -> dict[tuple[int, int], HeldOut]:
    """Return what both models predict for a split, by seed and client."""
    personal, shared = (_averages(federation, which, evaluation, split) for which in MODELS)
    return {place: HeldOut(log_probs, shared[place][0], y) for place, (log_probs, y) in personal.items()}


def _averages(
    federation: FederatedModels, which: Which, evaluation: Evaluation, split: EvaluationSplit
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    headline = headline_estimator(federation.method, evaluation.samples)
    spec = EstimatorSpec(evaluation.samples, (headline,), evaluation.sampling)
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for block in predict_blocks(federation, which, split, spec, evaluation.clients):
        places = ((s, i) for s in block.seeds for i in block.clients)
        log_probs = log_average(block.outputs[headline]).cpu()
        found |= dict(zip(places, zip(log_probs, block.y.cpu(), strict=True), strict=True))
    return found
