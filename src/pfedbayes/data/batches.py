"""The order in which a client sees its examples: an endless stream of keyed permutations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORDS_PER_COUNT = 4  # Philox yields four 64-bit words for each step of its counter


def permutations(seed: int, stream: int, size: int, first: int, count: int) -> NDArray[np.int64]:
    """Return permutations number first .. first + count - 1 of range(size), keyed by (seed, stream): (count, size)."""
    return _order(_words(seed, stream, size, first, count))


def _words(seed: int, stream: int, size: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return random words (count, size); sorting each row gives a permutation.

    NumPy guarantees that the words of a bit generator never change, but not those of `Generator.permutation`.
    """
    counts_each = -(-size // WORDS_PER_COUNT)
    words_each = counts_each * WORDS_PER_COUNT
    bits = np.random.Philox(key=(stream << 64) | seed, counter=first * counts_each)
    return bits.random_raw(count * words_each).reshape(count, words_each)[:, :size]


def _order(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the order of the upper 32 bits of each row.

    Two passes over 16 bits each are several times faster in NumPy than one over 32.
    """
    count, size = words.shape
    start = size * np.arange(count)[:, None]  # where each row begins in a flat array
    by_low = (words >> np.uint64(32)).astype(np.uint16).argsort(axis=1, kind="stable")
    high = (words >> np.uint64(48)).astype(np.uint16).ravel()[by_low + start]
    by_high = high.argsort(axis=1, kind="stable")
    order: NDArray[np.int64] = by_low.ravel()[by_high + start].astype(np.int64, copy=False)
    return order


def positions(seed: int, client: int, size: int, start: int, count: int) -> NDArray[np.int64]:
    """Return entries start .. start + count - 1 of a client's stream of positions in its `size` examples: (count,).

    The stream is permutation 0 of range(size), then permutation 1, and so on; permutation number e depends on
    (seed, client, e) alone. A batch is `batch_size` consecutive entries, so batches are always full: the tail
    of an epoch is filled from the next permutation. The caller keeps the cursor, the number of entries consumed.
    """
    own: NDArray[np.int64] = positions_of_many([(seed, client)], size, np.array([start]), count)[0]
    return own


def positions_of_many(
    names: Sequence[tuple[int, int]], size: int, starts: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return `positions` of clients (seed, client) with the same number of examples: (clients, count)."""
    firsts, offsets = np.divmod(starts, size)
    epochs = -(-(int(offsets.max()) + count) // size)
    words = [
        _words(seed, client, size, int(first), epochs) for (seed, client), first in zip(names, firsts, strict=True)
    ]
    streams = _order(np.concatenate(words)).reshape(len(names), -1)
    if (offsets == offsets[0]).all():
        return streams[:, offsets[0] : offsets[0] + count]
    return np.take_along_axis(streams, offsets[:, None] + np.arange(count), axis=1)
