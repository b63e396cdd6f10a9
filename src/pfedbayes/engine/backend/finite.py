"""Refusal of rounds in which a client has become non-finite: at once, or deferred on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.setup import Setup
from pfedbayes.engine.state import FederationState
from pfedbayes.errors import Diverged
from pfedbayes.maths.trees import tree_map
from pfedbayes.methods.base import State

MAX_PENDING = 16  # rounds that a GPU works on before it is asked whether all clients were finite


class Pending(NamedTuple):
    """A round that a GPU may still be working on."""

    round: int
    members: list[int]
    """The members that trained."""
    cursors: NDArray[np.int64]
    """How far each member had read before the round."""


class DeferredChecks:
    """Checks that the GPU makes by itself: to ask it after every round would leave it without work."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.clear()

    def clear(self) -> None:
        """Forget all pending rounds."""
        self._pending: list[Pending] = []
        self._failed: Tensor | None = None  # (2,): the first failed round, and the row of the client

    @property
    def full(self) -> bool:
        """Whether it is time to wait for the GPU."""
        return len(self._pending) == MAX_PENDING

    def keep_finite(
        self,
        members: list[int],
        finite: Tensor,
        old: tuple[State, FederationState],
        new: tuple[State, FederationState],
    ) -> tuple[State, FederationState]:
        """Return clients and state after the round; the old ones from the first round with a non-finite client on."""
        (old_clients, before), (new_clients, after) = old, new
        if self._failed is None:
            self._failed = torch.zeros(2, dtype=torch.int64, device=finite.device)
        fails = (self._failed[0] == 0) & ~finite.all()
        names = torch.stack([torch.full_like(self._failed[0], after.round), finite.int().argmin()])
        self._failed = torch.where(fails, names, self._failed)
        self._pending.append(Pending(after.round, members, before.cursors))
        sound = self._failed[0] == 0
        clients, servers, optimizers = tree_map(
            lambda ours, theirs: torch.where(sound, ours, theirs),
            (new_clients, after.servers, after.optimizers),
            (old_clients, before.servers, before.optimizers),
        )
        return clients, FederationState(after.round, servers, optimizers, after.cursors)

    def first_failure(self, state: FederationState) -> tuple[FederationState, Diverged] | None:
        """Wait for the GPU; return the state before the first failed round and the error, None if all went well.

        state: after the last pending round. `keep_finite` has left its servers as they were before the failed round.
        """
        pending, failed = self._pending, self._failed
        self.clear()
        if failed is None:
            return None
        number, row = failed.tolist()
        for round, members, cursors in pending:
            if round == number:
                before = replace(state, round=round - 1, cursors=cursors)
                return before, diverged(self._setup, round, members[row])
        return None


def require_finite(setup: Setup, round: int, members: list[int], finite: Tensor) -> None:
    """Raise an error if a client is not finite (n,)."""
    if not bool(finite.all()):
        raise diverged(setup, round, members[int(finite.int().argmin())])


def diverged(setup: Setup, round: int, member: int) -> Diverged:
    """Return the error that names the round and the client."""
    s, i = divmod(member, setup.num_clients)
    seed = f" (seed {setup.seeds[s]})" if setup.num_reported > 1 else ""
    if s >= setup.num_reported:
        seed = f" ({setup.copies[s - setup.num_reported].describe()})"
    return Diverged(
        f"round {round}: {setup.data.shards.names[i]}{seed} has become non-finite, so the round was not taken: "
        "lower the learning rate or raise the batch size"
    )
