"""Predictions of one or many models: all draws of all models in as few calls as fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pfedbayes.evaluation.client_data import take
from pfedbayes.evaluation.estimators import EstimatorSpec, Sampling, Which
from pfedbayes.evaluation.models import (
    FederatedModels,
    members_of,
    personal_state,
    rows_at_once,
    shared_state,
    slices,
)
from pfedbayes.evaluation.posthoc import num_drawn
from pfedbayes.maths.random import Purpose, key, normals
from pfedbayes.maths.trees import pick, stack
from pfedbayes.memory import device_memory, refuse_too_large
from pfedbayes.methods.base import State, weights_posterior
from pfedbayes.nets.reparametrisation import Dense, dense_layers, drawn_outputs, num_drawn_weights


def predict(
    federation: FederatedModels,
    which: Which,
    client: int,
    x: Tensor,
    samples: int | None = None,
    seed_index: int = 0,
    sampling: Sampling = "weights",
) -> Tensor:
    """Return outputs (K, n, ...) of a client's model or the shared one at inputs x (n, ...).

    One output per draw of the weights, or that of the mean network if `samples` is None.
    """
    federation.plan.activate()
    spec, rows = EstimatorSpec(samples or 0, sampling=sampling), torch.arange(len(x), device=federation.data.device)
    pool, parts = federation.data.to_device(x), []
    for s in members_of(federation, seed_index):
        state = personal_state(federation, client, s) if which == "personal" else shared_state(federation, s, client)
        own = model_outputs(federation, which, [s], [client], pool, rows[None], spec, stack([state]), samples)
        parts.append(own[0])
    return torch.cat(parts)


def model_outputs(
    federation: FederatedModels,
    which: Which,
    seeds: Sequence[int],
    clients: Sequence[int],
    pool: Tensor,
    rows: Tensor,
    spec: EstimatorSpec,
    states: State,
    draws: int | None,
) -> Tensor:
    """Return outputs (S * c, K, n, ...) for rows (c, n) of a pool.

    states: stacked over members, or over seeds for the shared model. draws: compute the first `draws` of spec.samples
    draws, or the mean network if None.
    """
    method, predictor, dtype = federation.method, federation.predictor, federation.data.dtype
    dense: tuple[Dense, ...] = ()
    noise: tuple[Tensor, ...] = ()
    if draws is not None and method.about.stochastic:
        if spec.sampling == "activations" and method.about.gaussian:
            dense = dense_layers(predictor.net, federation.model.inputs(pool[:1], dtype), dtype)
        drawn = _noise(federation, which, seeds, clients, rows.shape[1], spec, dense)
        noise = tuple(each[:, :draws] for each in drawn)
    own = which == "personal"
    # The shared model predicts the examples of all clients as one long batch, the same for every seed.
    arguments = (states, rows.repeat(len(seeds), 1) if own else rows.flatten(), *noise)
    axes = (0, 0 if own else None, *(0 for _ in noise))
    count = len(seeds) * (len(clients) if own else 1)
    one_model = partial(_one_model, federation, dense)
    # Some methods cannot be mapped by vmap; and libraries are fast at convolutions of one network with many images.
    if count == 1 or predictor.net.convolutional:
        each_alone = (
            [pick(each, k) if axis == 0 else each for each, axis in zip(arguments, axes, strict=True)]
            for k in range(count)
        )
        at_once = _rows_of_one_network(federation)
        outputs = torch.stack([_in_passes(one_model, 1, pool, at_once, *alone) for alone in each_alone])
    else:
        together = torch.func.vmap(one_model, in_dims=axes)
        outputs = _in_passes(together, 2, pool, rows_at_once(federation) // count or 1, *arguments)
    if own:
        return outputs
    return outputs.view(*outputs.shape[:2], *rows.shape, *outputs.shape[3:]).transpose(1, 2).flatten(0, 1)


def _one_model(
    federation: FederatedModels, dense: tuple[Dense, ...], state: State, x: Tensor, *noise: Tensor
) -> Tensor:
    """Return outputs (K, n, ...) of one model at x (n, ...); without noise, of its mean network."""
    predictor = federation.predictor
    if dense:
        q = weights_posterior(federation.method, state)
        inputs = federation.model.inputs(x, federation.data.dtype)
        return drawn_outputs(predictor.net, dense, q.mu, q.sigma, inputs, *noise)
    return federation.method.predict(predictor, state, x, noise[0] if noise else None)


def _noise(
    federation: FederatedModels,
    which: Which,
    seeds: Sequence[int],
    clients: Sequence[int],
    size: int,
    spec: EstimatorSpec,
    dense: Sequence[Dense],
) -> tuple[Tensor, ...]:
    """Return noise (models, K, W) for the weights and, if dense layers are drawn, (models, K, n, U) for their outputs.

    Each client's model has its own draws; the shared model's weights are drawn once for all clients. In pairs g, -g the
    terms that are linear in the noise cancel in the average, and every draw keeps its distribution.
    """
    data, samples, round = federation.data, spec.samples, federation.round
    purpose = Purpose.PERSONAL_PREDICTION if which == "personal" else Purpose.SHARED_PREDICTION
    names = [(federation.seed(s), int(data.numbers[i])) for s in seeds for i in clients]
    if which == "personal":
        keys = [key(seed, purpose, round, i) for seed, i in names]
    else:
        keys = [key(federation.seed(s), purpose, round) for s in seeds]
    pairs = spec.sampling == "pairs"
    drawn = (samples + 1) // 2 if pairs else samples
    net = federation.model.net
    width = num_drawn_weights(net, dense) if dense else num_drawn(federation.method, net)
    needed = len(keys) * drawn * width * data.dtype.itemsize
    refuse_too_large(needed, device_memory(data.device), "a prediction", "the number of samples")
    weights = normals((drawn, width), keys, data.dtype, data.device)
    if pairs:
        weights = torch.stack([weights, -weights], dim=2).flatten(1, 2)[:, :samples]
    if not dense:
        return (weights,)
    width = sum(layer.units for layer in dense)
    keys = [key(seed, purpose, round, i, 0) for seed, i in names]
    units = normals((samples, size, width), keys, data.dtype, data.device)
    if which == "shared":
        units = units.view(len(seeds), len(clients), *units.shape[1:]).transpose(1, 2).flatten(2, 3)
    return weights, units


def _rows_of_one_network(federation: FederatedModels) -> int:
    """Return how many examples one network predicts at once.

    A CPU keeps few examples in its caches. A model that is made from a whole training set does much work per call, so
    it takes more of them.
    """
    few = federation.data.device.type == "cpu" and not federation.method.needs.full_batch
    return min(rows_at_once(federation), 2000) if few else rows_at_once(federation)


def _in_passes(
    function: Callable[..., Tensor], axis: int, pool: Tensor, at_once: int, state: State, rows: Tensor, *noise: Tensor
) -> Tensor:
    """Apply a function to rows (..., n) of a pool, `at_once` at a time, and join the outputs along this axis."""
    parts = []
    for part in slices(rows.shape[-1], at_once):
        units = [each[..., part, :] for each in noise[1:]]
        parts.append(function(state, take(pool, rows[..., part]), *noise[:1], *units))
    return torch.cat(parts, dim=axis)
