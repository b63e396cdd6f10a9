"""Random draws that depend on their names only.

A draw is named by (seed, purpose, round, client, step). It does not depend on whether clients train with vmap, one
after another or on their own machines, on which other clients take part, or on interruptions of the run.

Two generators turn a name into normal numbers. "torch" reseeds torch's generator for each draw, which is fastest on a
CPU. "philox" is counter-based and consists of tensor operations: it draws for all clients at once, without the host,
and gives the same numbers on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Purpose(IntEnum):
    """What a draw is for. It separates the streams of one seed."""

    INIT = 0
    CHOICE = 1
    TRAINING = 2
    PERSONAL_PREDICTION = 3
    SHARED_PREDICTION = 4
    ADAPTATION = 5
    VIEW = 6


_MASK = (1 << 64) - 1


def keys(seed: int | NDArray[np.int64], purpose: Purpose, *counters: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 63-bit seeds from the names of draws, by folding in the counters with SplitMix64's mixer.

    Each number may be an array; NumPy's broadcasting rules apply.
    """
    state: NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)  # arrays wrap around silently, scalars warn
    for number in (seed, int(purpose), *counters):
        word = np.asarray(number & _MASK if isinstance(number, int) else number).astype(np.uint64)
        state = (state + word + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state = state ^ state >> np.uint64(31)
    return (state >> np.uint64(1)).astype(np.int64)


def key(seed: int, purpose: Purpose, *counters: int) -> int:
    """Return the seed of one draw, see `keys`.

    torch's CPU generator keeps 32 bits of it, so a few of the 160,000 draws of an 800-round run may coincide.
    """
    return int(keys(seed, purpose, *counters).item())


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="draws")


def _fill(rows: Tensor, seeds: Sequence[int]) -> None:
    generator = torch.Generator(rows.device)
    for row, seed in zip(rows, seeds, strict=True):
        generator.manual_seed(seed)
        torch.randn(row.shape, out=row, generator=generator)


def normals(shape: tuple[int, ...], seeds: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the standard normal draws of these seeds by torch's generator, (len(seeds), *shape)."""
    out = torch.empty((len(seeds), *shape), dtype=dtype, device=device)
    threads = min(torch.get_num_threads() if device.type == "cpu" else 1, len(seeds))
    if threads < 2 or out.numel() < 1 << 16:
        _fill(out, seeds)
    else:  # torch draws with one thread only
        each = -(-len(seeds) // threads)
        shares = [(out[start : start + each], seeds[start : start + each]) for start in range(0, len(seeds), each)]
        others = [_workers(threads).submit(_fill, *share) for share in shares[1:]]
        _fill(*shares[0])  # in this thread: the system may put two new threads on one core
        for other in others:
            other.result()
    return out


def ragged_normals(
    shape: tuple[int, ...], seeds: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return draws (len(seeds), *shape) whose rows from `sizes[k]` on are zero for seed k.

    The draws of a seed depend on its own size only: they are those of `normal((size, *shape[1:]), seed)`.
    """
    out = torch.zeros((len(seeds), *shape), dtype=dtype, device=device)
    for own, seed, size in zip(out, seeds, sizes, strict=True):
        _fill(own[None, :size], [seed])
    return out


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the standard normal draw of this seed by torch's generator."""
    return normals(shape, [seed], dtype, device)[0]


def philox_normals(shape: tuple[int, ...], names: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the standard normal draws of these names (n,) by the counter-based generator, (n, *shape).

    The lower half of a name is the key, the upper half is one word of the counter; the other word counts the pairs.
    """
    if not shape:
        return names.to(dtype)  # there is nothing to draw
    place = torch.arange(math.prod(shape), device=names.device)
    first, second = philox(names[:, None] >> 32, place >> 1, names[:, None] & 0xFFFFFFFF)
    # Box-Muller: two uniform numbers become two normal numbers. The second one takes the sine, which is the cosine a
    # quarter turn earlier. Adding 0.5 keeps the logarithm finite.
    radius = (-2 * ((first.to(dtype) + 0.5) * 2.0**-32).log()).sqrt()
    turn = second - ((place & 1) << 30) & 0xFFFFFFFF
    return (radius * (turn.to(dtype) * (2 * math.pi * 2.0**-32)).cos()).view(len(names), *shape)


def philox(low: Tensor, high: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random words for each counter: Philox2x32-10 (Salmon et al. 2011), 32-bit words held in 64 bits."""
    for _ in range(10):
        product = low * 0xD256D193  # wraps around at 64 bits; both halves are used
        low, high = (product >> 32 & 0xFFFFFFFF) ^ seed ^ high, product & 0xFFFFFFFF
        seed = seed + 0x9E3779B9 & 0xFFFFFFFF
    return low, high


def choose(seed: int, round: int, num_clients: int, count: int) -> NDArray[np.int64]:
    """Return the random set S^t of Algorithm 1: `count` clients without replacement, in ascending order."""
    rng = np.random.Generator(np.random.Philox(key=key(seed, Purpose.CHOICE, round)))
    return np.sort(rng.permutation(num_clients)[:count])
