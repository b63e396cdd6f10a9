"""Split the rows of a client into training rows and held-out rows."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.batches import permutations
from pfedbayes.data.config import rounded

Rows = NDArray[np.int64]
"""Row numbers of a pool or a table."""


class SplitPurpose(IntEnum):
    """The purpose of a random draw. It is part of the key, so that no two purposes share random numbers.

    Key 0 is reserved for the order of batches.
    """

    CLASS_ORDER = 1
    POOL_ORDER = 2
    CLIENT_LABELS = 3
    CLIENT_SHARES = 4
    TRAIN_ORDER = 5
    TEST_CUT = 6
    VALIDATION_CUT = 7
    CERTIFY_CUT = 8
    OVERLAP = 9
    FOLDS = 10

    def stream(self, index: int = 0) -> int:
        """The stream number of this purpose for the class or the client `index`."""
        return (self << 32) | index

    def order(self, seed: int, size: int, index: int = 0) -> Rows:
        """Return a permutation of range(size), (size,)."""
        return permutations(seed, self.stream(index), size, 0, 1).reshape(-1)


def held_out(labels: Rows | None, size: int, fraction: float, stream: int, seed: int) -> NDArray[np.bool_]:
    """Return a mask (size,) of the rows to hold out: a random `fraction`, stratified by label.

    Of two or more rows, at least one is held out (unless fraction is 0) and at least one is left.

    labels: (size,), or None. stream, seed: the key of the random draw.
    """
    mask = np.zeros(size, dtype=np.bool_)
    if fraction == 0 or size < 2:
        return mask
    held = min(max(rounded(fraction * size), 1), size - 1)
    order, other = permutations(seed, stream, size, 0, 2)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    # Take every (size / held)-th row in the order of labels, from a random start: each label gives its share up to one.
    steps = (np.arange(size + 1) * held + other[0]) // size
    mask[order[np.diff(steps) > 0]] = True
    return mask


def folds_of(labels: Rows | None, size: int, count: int, stream: int, seed: int) -> NDArray[np.int64]:
    """Return the fold (size,) of each row, from 0 to count - 1: random, of nearly equal size, stratified by label.

    labels: (size,), or None. stream, seed: the key of the random draw.
    """
    (order,) = permutations(seed, stream, size, 0, 1)
    # Number `size` shares no random words with the order. The start is one of all folds, also for a client of few rows.
    ((start, *_),) = permutations(seed, stream, count, size, 1)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(size, dtype=np.int64)
    fold[order] = (np.arange(size) + start) % count
    return fold
