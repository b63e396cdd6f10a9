"""Aggregation of uploads: the method's own, optionally robust or differentially private.

An update is an upload minus the server's state, for methods that average.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

from pfedbayes.flower.settings import FederationConfig
from pfedbayes.maths.trees import stack
from pfedbayes.methods.base import Method, State


def combine(
    method: Method, config: FederationConfig, server: State, uploads: list[State], sizes: Tensor, clients: Tensor
) -> State:
    """Return the next server state from the uploads of these clients (n,) with `sizes` (n,) examples each."""
    stacked = stack(uploads)
    if config.robust == "median-norm":
        return method.aggregate(server, server + shortened(stacked - server), sizes, clients)
    if config.robust == "trimmed-mean":
        mean = trimmed_mean(stacked, config.trim)
    elif config.privacy_noise:
        updates = (stacked - server).reshape(len(stacked), 2 if method.about.gaussian else 1, -1)
        longest = torch.tensor([config.privacy_clip, config.privacy_clip_rho][: updates.shape[1]])
        mean = server + private_mean(updates, longest.to(updates), config.privacy_noise).view_as(server)
    else:
        return method.aggregate(server, stacked, sizes, clients)
    # The method aggregates the mean as a single upload.
    return method.aggregate(server, mean[None], sizes.sum()[None], clients[:1])


def shortened(updates: Tensor) -> Tensor:
    """Scale down updates (n, ...) whose norm exceeds the median norm."""
    norms = updates.flatten(1).norm(dim=1)
    factors = (norms.median() / norms).nan_to_num(1.0).clamp(max=1)
    short: Tensor = updates * factors.view(-1, *[1] * (updates.dim() - 1))
    return short


def trimmed_mean(uploads: Tensor, share: float) -> Tensor:
    """Return the entrywise mean of uploads (n, ...) without the largest and smallest `share` of values, rounded up."""
    count = len(uploads)
    cut = min(math.ceil(share * count), (count - 1) // 2)
    kept: Tensor = uploads.sort(dim=0).values[cut : count - cut]
    return kept.mean(0)


def private_mean(updates: Tensor, longest: Tensor, noise: float) -> Tensor:
    """Return the mean (P, T) of updates (n, P, T) by the Gaussian mechanism; longest (P,): the clipping norms.

    Part p of every update is clipped to the norm C_p. In units of C_p, one client then contributes at most sqrt(P),
    and the sum gets noise of standard deviation z sqrt(P) C_p. Replacing one client's update by zero therefore costs
    as much privacy as a Gaussian mechanism with noise multiplier z.
    """
    count, num_parts, _ = updates.shape
    factors = (longest / updates.norm(dim=2)).nan_to_num(1.0).clamp(max=1)
    clipped = (updates * factors[:, :, None]).mean(0)
    deviation = longest * (noise * math.sqrt(num_parts) / count)
    return torch.addcmul(clipped, deviation[:, None], secret_normals(clipped.shape).to(clipped))


def secret_normals(shape: torch.Size) -> Tensor:
    """Draw standard normal noise from the system's random bits, which nobody can reproduce.

    A torch generator on the CPU uses 32 bits of its seed: an attacker could try out all of its noise.
    """
    bits = np.frombuffer(os.urandom(8 * shape.numel()), dtype=np.uint64)
    uniform = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1)
    normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform)).view(shape)
    return normal


def epsilon(rounds: int, noise: float, delta: float) -> float:
    """Return the epsilon of (epsilon, delta)-privacy for a client that took part in this many rounds.

    noise: the noise multiplier z. k Gaussian mechanisms equal one with mu = sqrt(k) / z, for which (Balle and Wang
    2018; Dong, Roth and Su 2022) delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu). This
    is exact, and does not use that clients are drawn at random.
    """
    if not rounds:
        return 0.0
    mu = math.sqrt(rounds) / noise

    def lost(eps: float) -> float:
        above, below = torch.tensor([mu / 2 - eps / mu, -mu / 2 - eps / mu], dtype=torch.float64)
        return float(torch.special.ndtr(above) - (eps + torch.special.log_ndtr(below)).exp())

    low, high = 0.0, 1.0
    while lost(high) > delta:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lost(middle) > delta else (low, middle)
    return high
