"""Differential privacy of the shared model with respect to one client: noise, secret draws, and what they cost."""

from __future__ import annotations

import math
import os
import secrets

import numpy as np
import torch
from torch import Tensor

ORDERS = (*range(2, 129), 160, 192, 256, 384, 512, 1024)  # of Renyi divergences


def draw(num_clients: int, rate: float) -> list[int]:
    """Draw who takes part in a round: each client independently with probability `rate` (Poisson sampling).

    The draw comes from the system's random bits. Nodes know the seed of a run and could reproduce any draw from it.
    """
    source = secrets.SystemRandom()
    return [i for i in range(num_clients) if source.random() < rate]


def private_mean(updates: Tensor, longest: Tensor, noise: float, count: int | None = None) -> Tensor:
    """Return the mean (P, T) of updates (n, P, T) by the Gaussian mechanism; longest (P,): the clipping norms.

    count: the number that the sum is divided by, if it must not depend on who takes part; None for n.

    Part p of every update is clipped to the norm C_p. In units of C_p, one client then contributes at most sqrt(P),
    and the sum gets noise of standard deviation z sqrt(P) C_p. Replacing one client's update by zero therefore costs
    as much privacy as a Gaussian mechanism with noise multiplier z.
    """
    count, num_parts = count or len(updates), updates.shape[1]
    factors = (longest / updates.norm(dim=2)).nan_to_num(1.0).clamp(max=1)
    clipped = (updates * factors[:, :, None]).sum(0) / count
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


def sampled_epsilon(rounds: int, noise: float, delta: float, rate: float) -> float:
    """Return the epsilon of this many rounds in each of which every client takes part with probability `rate`.

    One round is the sampled Gaussian mechanism with Poisson sampling (Mironov, Talwar and Zhang 2019). Renyi
    divergences add up over rounds; Proposition 12 of Canonne, Kamath and Steinke (2020) turns them into epsilon. The
    result is an upper bound, and never above that without sampling.
    """
    if not rounds:
        return 0.0
    bounds: list[float] = [
        rounds * sampled_renyi(order, noise, rate) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order in ORDERS
    ]
    return max(0.0, min([*bounds, epsilon(rounds, noise, delta)]))


def sampled_renyi(order: int, noise: float, rate: float) -> float:
    """Return the Renyi divergence of this order of (1 - q) N(0, z^2) + q N(1, z^2) from N(0, z^2); noise: z, rate: q.

    It is log(sum over k of binom(order, k) (1 - q)^(order - k) q^k exp(k (k - 1) / (2 z^2))) / (order - 1), and bounds
    the divergence in the other direction too.
    """
    k = torch.arange(order + 1, dtype=torch.float64)
    n = torch.tensor(float(order), dtype=torch.float64)
    binomial = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    chances = torch.special.xlogy(k, rate) + torch.special.xlogy(n - k, 1 - rate)
    terms = binomial + chances + k * (k - 1) / (2 * noise**2)
    return float(terms.logsumexp(0)) / (order - 1)
