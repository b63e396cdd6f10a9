"""The mini-batches and noise of a round, found by name; beside a GPU, one round ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data import positions_of_many
from pfedbayes.engine.participation import Chosen, choose
from pfedbayes.engine.setup import Setup
from pfedbayes.maths.random import Purpose, keys

BESIDE_A_GPU = ThreadPoolExecutor(1, thread_name_prefix="batches")


class Batches(NamedTuple):
    """The mini-batches of all members that train in a round, on the host."""

    rows: NDArray[np.int64]
    """Pool rows, combined with the view of each example: (R, batches per step, members, b), see `Work`."""
    names: NDArray[np.int64]
    """Keys of the noise of each step: (R, members)."""


def lay_out(setup: Setup, round: int, chosen: Chosen, cursors: NDArray[np.int64]) -> Batches:
    """Return the mini-batches and noise keys of a round; cursors: how far each member has read."""
    seeds = np.repeat(setup.seeds, [len(ids) for ids in chosen.trained])
    clients, steps = setup.data.numbers[np.concatenate(chosen.trained)], np.arange(setup.training.local_steps)
    names = keys(seeds, Purpose.TRAINING, round, clients, steps[:, None])
    rows = _batch_rows(setup, np.array(chosen.members), cursors)
    views = setup.views.count
    if views > 1:
        batches, places = np.arange(rows.shape[1])[:, None, None], np.arange(rows.shape[3])
        drawn = keys(seeds[:, None], Purpose.VIEW, round, clients[:, None], steps[:, None, None, None], batches, places)
        rows = rows * views + drawn % views
    return Batches(rows, names)


def _batch_rows(setup: Setup, members: NDArray[np.int64], cursors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pool rows of the batches from the cursors on: (R, batches per step, members, width).

    A client with fewer examples than the width is padded with its first row, whose weight is then 0. (1, ...) if
    batches are not shuffled.
    """
    data = setup.data
    if not setup.method.needs.shuffled:
        return data.padded_rows[None, None, members]
    steps, per_step = setup.training.local_steps, setup.method.needs.batches_per_step
    rows = np.empty((steps, per_step, len(members), int(data.batch_sizes.max())), dtype=np.int64)
    seeds, clients = np.divmod(members, setup.num_clients)
    for size in np.unique(data.sizes[members]):  # clients with equally many examples together
        alike = np.flatnonzero(data.sizes[members] == size)
        own = np.stack([data.train_sets[member].numpy() for member in members[alike]])
        batch = int(data.batch_sizes[members[alike[0]]])
        names = [(setup.seeds[s], int(data.numbers[i])) for s, i in zip(seeds[alike], clients[alike], strict=True)]
        starts = cursors[members[alike]]
        taken = positions_of_many(names, int(size), starts, steps * per_step * batch)
        batches = np.take_along_axis(own, taken, axis=1).reshape(-1, steps, per_step, batch)
        rows[:, :, alike, batch:] = own[:, :1]
        rows[:, :, alike, :batch] = batches.transpose(1, 2, 0, 3)
    return rows


def advance(setup: Setup, cursors: NDArray[np.int64], members: Sequence[int]) -> NDArray[np.int64]:
    """Return how far each member has read after these members have trained a round."""
    after = cursors.copy()
    batches = setup.training.local_steps * setup.method.needs.batches_per_step
    after[members] += batches * setup.data.batch_sizes[members]
    return after


class Prefetcher:
    """Lays out the mini-batches of rounds; while a GPU trains a round, a thread lays out the next one."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._next: tuple[tuple[int, bytes], Future[Batches]] | None = None

    def get(self, round: int, chosen: Chosen, cursors: NDArray[np.int64]) -> Batches:
        """Return the mini-batches of a round."""
        ahead, self._next = self._next, None
        known = ahead is not None and ahead[0] == (round, cursors.tobytes())
        batches = ahead[1].result() if ahead and known else lay_out(self._setup, round, chosen, cursors)
        if self._setup.data.device.type == "cuda":
            after = advance(self._setup, cursors, chosen.members)
            self._next = (round + 1, after.tobytes()), BESIDE_A_GPU.submit(self._lay_out, round + 1, after)
        return batches

    def _lay_out(self, round: int, cursors: NDArray[np.int64]) -> Batches:
        return lay_out(self._setup, round, choose(self._setup, round), cursors)
