"""Random draws that depend on what they are for and on nothing else.

A draw is named by (seed, purpose, round, client, step). It is the same whether clients are trained together, one
after another or on their own machines, whoever else takes part, and after a run was killed and resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw is for; keeps the streams of one seed apart."""

    INIT = 0
    CHOICE = 1
    TRAINING = 2
    PERSONAL_PREDICTION = 3
    SHARED_PREDICTION = 4
    ADAPTATION = 5


_MASK = (1 << 64) - 1


def key(seed: int, purpose: Purpose, *counters: int) -> int:
    """A 63-bit seed from the name of a draw: counters are folded in one by one through SplitMix64's mixer.

    torch's generator on a CPU keeps 32 bits of it: a few of the 160,000 draws of an 800-round run may coincide.
    """
    state = 0
    for word in (seed, int(purpose), *counters):
        state = (state + word + 1) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def fill_normal(out: Tensor, generator: torch.Generator, seed: int) -> None:
    """Fill a contiguous slice with the standard normal draw of this seed; the generator is only the engine of it."""
    generator.manual_seed(seed)
    torch.randn(out.shape, out=out, generator=generator)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The standard normal draw of this seed."""
    out = torch.empty(shape, dtype=dtype, device=device)
    fill_normal(out, torch.Generator(device), seed)
    return out


def normals(shape: tuple[int, ...], seeds: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The standard normal draws of these seeds, stacked."""
    out = torch.empty((len(seeds), *shape), dtype=dtype, device=device)
    generator = torch.Generator(device)
    for row, seed in zip(out, seeds, strict=True):
        fill_normal(row, generator, seed)
    return out


def choose(seed: int, round: int, num_clients: int, count: int) -> np.ndarray:
    """The random set S^t of Algorithm 1: `count` of the clients, without replacement, in ascending order."""
    rng = np.random.Generator(np.random.Philox(key=key(seed, Purpose.CHOICE, round)))
    return np.sort(rng.permutation(num_clients)[:count])
