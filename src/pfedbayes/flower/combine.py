"""Aggregation of uploads: the method's own, optionally robust or differentially private.

An update is an upload minus the server's state, for methods that average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfedbayes.flower.privacy import private_mean
from pfedbayes.flower.settings import FederationConfig, Rule
from pfedbayes.maths.trees import stack, tree_map
from pfedbayes.methods.base import Method, State


def combine(
    method: Method,
    config: FederationConfig,
    server: State,
    uploads: list[State],
    sizes: Tensor,
    clients: Tensor,
    count: int | None = None,
    unchanged: State = None,
) -> State:
    """Return the next server state from the uploads of these clients (n,) with `sizes` (n,) examples each.

    count: with differential privacy, the number that the sum is divided by; None for the number of uploads.
    unchanged: for methods whose server uses the mean of trees, the upload of a client that has taken no step.
    """
    if config.privacy_noise:
        num_parts = 2 if method.about.gaussian else 1
        updates = stack(uploads) - server if uploads else server.new_zeros(0, *server.shape)
        longest = torch.tensor([config.privacy_clip, config.privacy_clip_rho][:num_parts]).to(updates)
        parts = updates.view(len(updates), num_parts, server.shape[-1])
        mean = private_mean(parts, longest, config.privacy_noise, count)
        return _aggregate_mean(method, server, server + mean.view_as(server))
    stacked, rule = stack(uploads), config.rule(method)
    if method.about.mean_only:
        return method.aggregate(server, robust_tree(stacked, rule, unchanged, config.trim), sizes, clients)
    if rule == "trimmed-mean":
        return _aggregate_mean(method, server, trimmed_mean(stacked, config.trim))
    if rule == "median-norm":
        stacked = server + shortened(stacked - server)
    return method.aggregate(server, stacked, limited(sizes, method, config), clients)


def _aggregate_mean(method: Method, server: Tensor, mean: Tensor) -> State:
    """Let the method aggregate a mean as a single upload."""
    return method.aggregate(server, mean[None], mean.new_ones(1), torch.zeros(1, dtype=torch.int64))


def robust_tree(stacked: State, rule: Rule, unchanged: State, trim: float) -> State:
    """Return stacked uploads with a robust mean: each leaf is treated on its own, as if it were a model.

    Updates are the differences from the upload of a client that has taken no step.
    """
    if rule == "trimmed-mean":
        return tree_map(lambda leaf: trimmed_mean(leaf, trim).expand_as(leaf), stacked)
    if rule == "median-norm":
        return tree_map(lambda leaf, start: start + shortened(leaf - start), stacked, unchanged)
    return stacked


def limited(sizes: Tensor, method: Method, config: FederationConfig) -> Tensor:
    """Return the sizes (n,) that count: nobody owns an average by claiming to have more examples than others.

    With "median-norm" a size above the median counts as the median, otherwise at most as `largest_size` times it.
    """
    factor = 1.0 if config.rule(method) == "median-norm" else config.largest_size
    return sizes.clamp(max=factor * sizes.median())


def shortened(updates: Tensor) -> Tensor:
    """Scale down updates (n, ...) whose norm exceeds the median norm."""
    norms = updates.reshape(len(updates), -1).norm(dim=1)
    factors = (norms.median() / norms).nan_to_num(1.0).clamp(max=1)
    short: Tensor = updates * factors.view(-1, *[1] * (updates.dim() - 1))
    return short


def trimmed_mean(uploads: Tensor, share: float) -> Tensor:
    """Return the entrywise mean of uploads (n, ...) without the largest and smallest `share` of values, rounded up."""
    count = len(uploads)
    cut = min(math.ceil(share * count), (count - 1) // 2)
    kept: Tensor = uploads.sort(dim=0).values[cut : count - cut]
    return kept.mean(0)
