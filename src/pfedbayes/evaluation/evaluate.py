"""Scores of all models on all clients' data, many clients and seeds at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.evaluation.client_data import Group
from pfedbayes.evaluation.estimators import (
    ENSEMBLE,
    MODELS,
    EstimatorSpec,
    EvaluationSplit,
    Sampling,
    Which,
    estimator_names,
)
from pfedbayes.evaluation.models import (
    FederatedModels,
    available_models,
    further_views,
    personal_states,
    rows_at_once,
    shared_state,
    slices,
)
from pfedbayes.evaluation.posthoc import Ensemble
from pfedbayes.evaluation.predict import model_outputs
from pfedbayes.maths.metrics import log_average
from pfedbayes.maths.trees import concat, stack

OUTPUTS_SCORED_AT_ONCE = 2**23  # on a CPU: enough to keep its threads busy, and 32 MB


class Block(NamedTuple):
    """Predictions for c clients of S seeds."""

    seeds: Sequence[int]
    clients: list[int]
    y: Tensor
    """Targets: (S * c, n, ...)."""
    outputs: dict[str, Tensor]
    """Outputs (S * c, K, n, ...) of each estimator."""


def evaluate(
    federation: FederatedModels,
    samples: int = 10,
    split: EvaluationSplit = "test",
    label_prior: bool = False,
    estimators: Sequence[str] | None = None,
    sampling: Sampling = "weights",
    clients: int | None = None,
) -> dict[str, Any]:
    """Score every model on every client's own data: `{model: {estimator: {metric: [seed][client]}}}`.

    Estimators are "one" draw of the weights, "mc10" (the average over `samples` = 10 draws) and the "mean" network; a
    method's further `views`; and with `label_prior` each of them again with the client's label prior.

    estimators: compute only these. sampling: see `EstimatorSpec`. clients: score only this many clients, see
    `ClientData.evaluation_sets`; the others get NaN.
    """
    data, spec = federation.data, EstimatorSpec(samples, estimators, sampling, label_prior)
    likelihood, existing = federation.model.likelihood, available_models(federation.method)
    metrics = likelihood.metrics
    table: dict[tuple[Which, str], Tensor] = {}
    places: dict[Which, list[int]] = {}
    for which in existing:
        parts: dict[str, list[Tensor]] = {}
        places[which] = []
        blocks = predict_blocks(federation, which, split, spec, clients)
        for some in _collect(blocks, OUTPUTS_SCORED_AT_ONCE if data.device.type == "cpu" else 0):
            members = ((s * data.num_evaluated + i for s in block.seeds for i in block.clients) for block in some)
            places[which] += chain.from_iterable(members)
            y = concat([block.y for block in some])
            for name in some[0].outputs:
                outputs = concat([block.outputs[name] for block in some])
                parts.setdefault(name, []).append(likelihood.scores(outputs, y))
        table |= {(which, name): torch.cat(values) for name, values in parts.items()}
    result: dict[str, Any] = {which: {} if which in existing else None for which in MODELS}
    if not table:
        return result
    fetched = torch.stack(list(table.values())).cpu()  # the only place that waits for a GPU
    for (which, name), values in zip(table, fetched, strict=True):
        full = values.new_full((len(metrics), len(federation.seeds) * data.num_evaluated), torch.nan)
        full[:, places[which]] = values.T
        by_seed = full.view(len(metrics), len(federation.seeds), -1).tolist()
        result[which][name] = dict(zip(metrics, by_seed, strict=True))
    return result


def estimates(
    federation: FederatedModels,
    which: Which,
    client: int,
    rows: Tensor,
    samples: int,
    seed_index: int = 0,
    label_prior: bool = False,
) -> dict[str, Tensor]:
    """Return outputs (K, n, ...) of a model by estimator, for these rows (n,) of the pool; see `evaluate`."""
    spec, rows = EstimatorSpec(samples, label_prior=label_prior), rows[None].to(federation.data.device)
    outputs = _estimates(federation, which, [seed_index], [client], rows, spec)
    block = _block(federation, [seed_index], [client], rows, outputs, spec)
    return {name: output[0] for name, output in block.outputs.items()}


def predict_blocks(
    federation: FederatedModels,
    which: Which,
    split: EvaluationSplit,
    spec: EstimatorSpec,
    clients: int | None = None,
) -> Iterator[Block]:
    """Predict with a model for all clients that have data, or for `clients` of them, in blocks that fit the memory.

    As far as memory allows, the number of calls depends on the number of different test set sizes and not on the number
    of clients and seeds.
    """
    known = (*estimator_names(spec.samples), *[ENSEMBLE] * isinstance(federation.method, Ensemble))
    if unknown := [name for name in spec.wanted if name not in known]:
        raise UserError(f"there is no estimator {unknown[0]!r}: choose among {', '.join(known)}")
    num_seeds = len(federation.seeds)
    for group in federation.data.evaluation_groups(split, federation.seeds[0], clients):
        seeds_at_once, clients_at_once = _block_size(federation, which, group.rows.shape[1])
        for some in slices(num_seeds, seeds_at_once):
            seeds = range(num_seeds)[some]
            if _predicts_once(federation, which, spec):
                shared = _shared_estimates(federation, seeds, group, spec)
                yield _block(federation, seeds, group.clients, group.rows, shared, spec)
                continue
            for part in slices(len(group.clients), clients_at_once):
                ids, rows = group.clients[part], group.rows[part]
                outputs = _estimates(federation, which, seeds, ids, rows, spec)
                yield _block(federation, seeds, ids, rows, outputs, spec)


def _block(
    federation: FederatedModels,
    seeds: Sequence[int],
    clients: list[int],
    rows: Tensor,
    outputs: dict[str, Tensor],
    spec: EstimatorSpec,
) -> Block:
    """Add the targets at rows (c, n) and, if asked for, the estimators with label priors."""
    if spec.label_prior:
        outputs |= _with_label_prior(federation, outputs, seeds, clients)
    return Block(seeds, clients, concat([federation.data.y[rows]] * len(seeds)), outputs)


def _predicts_once(federation: FederatedModels, which: Which, spec: EstimatorSpec) -> bool:
    """Return whether one prediction of an example serves all clients.

    That holds for the shared model, unless it draws activations: each client has its own draws of those.
    """
    draws_activations = federation.method.about.stochastic and spec.draws and spec.sampling == "activations"
    return which == "shared" and not draws_activations


def _shared_estimates(
    federation: FederatedModels, seeds: Sequence[int], group: Group, spec: EstimatorSpec
) -> dict[str, Tensor]:
    """Predict each distinct example of a group once with the shared model, and return the outputs of every client."""
    once = _estimates(federation, "shared", seeds, [], group.distinct[None], spec)
    return {name: outputs[:, :, group.place].transpose(1, 2).flatten(0, 1) for name, outputs in once.items()}


def _block_size(federation: FederatedModels, which: Which, size: int) -> tuple[int, int]:
    """Return how many seeds, and how many clients with `size` examples each, are predicted together.

    No more personal models than train in a round: the others may rest elsewhere, and scores must not depend on where.
    """
    rows, num_seeds = rows_at_once(federation), len(federation.seeds)
    mapped = federation.plan.over == "vmap" and (which == "personal" or federation.method.about.averages)
    seeds = max(1, min(rows // size, num_seeds)) if mapped else 1
    if which == "personal" and not mapped:
        return 1, 1
    clients = max(1, rows // (size * seeds))
    if which == "personal":
        clients = min(clients, max(1, federation.training_at_once // seeds))
    return seeds, clients


def _estimates(
    federation: FederatedModels,
    which: Which,
    seeds: Sequence[int],
    clients: list[int],
    rows: Tensor,
    spec: EstimatorSpec,
) -> dict[str, Tensor]:
    """Return outputs (S * c, K, n, ...) by estimator for the examples at rows (c, n) of these clients.

    The outputs of an ensemble are those of all seeds, the same for each of them.
    """
    if not isinstance(federation.method, Ensemble):
        return _own_estimates(federation, which, seeds, clients, rows, spec)
    every = [_own_estimates(federation, which, [s], clients, rows, spec) for s in range(len(federation.seeds))]
    (mean,) = estimator_names(spec.samples)[2:]
    together = torch.cat([each[mean] for each in every], dim=1)
    own = {name: concat([every[s][name] for s in seeds]) for name in every[0]}
    return {ENSEMBLE: concat([together] * len(seeds))} | own


def _own_estimates(
    federation: FederatedModels,
    which: Which,
    seeds: Sequence[int],
    clients: list[int],
    rows: Tensor,
    spec: EstimatorSpec,
) -> dict[str, Tensor]:
    """Return the outputs of each seed's own models, see `_estimates`."""
    federation.plan.activate()
    stochastic = federation.method.about.stochastic
    if which == "shared":
        states = stack([shared_state(federation, s) for s in seeds])
    else:
        states = personal_states(federation, seeds, clients, rows)
    outputs = partial(model_outputs, federation, which, seeds, clients, federation.data.x, rows, spec)
    one, average, mean = estimator_names(spec.samples)
    found = {}
    if stochastic and spec.draws:
        draws = outputs(states, spec.draws)
        found = {name: drawn for name, drawn in ((one, draws[:, :1]), (average, draws)) if name in spec.wanted}
    if mean in spec.wanted or not stochastic:
        found[mean] = outputs(states, None)
    if which == "personal":
        views = further_views(federation, seeds, clients, states)
        found |= {name: outputs(view, None) for name, view in views.items()}
    return found


def _with_label_prior(
    federation: FederatedModels, outputs: dict[str, Tensor], seeds: Sequence[int], clients: list[int]
) -> dict[str, Tensor]:
    """Return the same estimators with the label prior of each client; none in regression."""
    if federation.model.likelihood.task != "classification":
        return {}
    prior = federation.data.label_priors[clients].repeat(len(seeds), 1)[:, None]
    averages = {name: log_average(output) for name, output in outputs.items()}
    return {f"{name}+prior": (average + prior)[:, None] for name, average in averages.items()}


def _collect(blocks: Iterable[Block], limit: int) -> Iterator[list[Block]]:
    """Collect blocks of equal test set size until they have `limit` outputs, at least one block at a time.

    Scoring few outputs would cost a CPU more time to wake its threads than to compute.
    """
    some: list[Block] = []
    collected = 0
    for block in blocks:
        own = sum(each.numel() for each in block.outputs.values())
        if some and (collected + own > limit or block.y.shape[1] != some[0].y.shape[1]):
            yield some
            some, collected = [], 0
        some.append(block)
        collected += own
    if some:
        yield some
