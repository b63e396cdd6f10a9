"""The states of the clients between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pfedbayes.methods.base import State
from pfedbayes.trees import concat, leaves, pick, stack


class Population:
    """The states of the clients met so far, stacked in the order in which they were first met."""

    def __init__(self) -> None:
        self.row: dict[int, int] = {}
        self.states: State = None

    def get(self, clients: Sequence[int], fresh: Callable[[int], State]) -> State:
        """Stacked states of these clients; one that was not met before has a fresh one."""
        rows = [self.row[k] for k in clients if k in self.row]
        if len(rows) == len(clients):
            side_by_side = rows == list(range(rows[0], rows[0] + len(rows)))
            return pick(self.states, slice(rows[0], rows[0] + len(rows)) if side_by_side else rows)
        return stack([pick(self.states, self.row[k]) if k in self.row else fresh(k) for k in clients])

    def put(self, clients: Sequence[int], states: State) -> None:
        """Keep the states of these clients."""
        if self.states is None or list(clients) == list(self.row):
            self.states = states
        else:
            known = [n for n, client in enumerate(clients) if client in self.row]
            rows = [self.row[clients[n]] for n in known]
            for old, new in zip(leaves(self.states), leaves(states), strict=True):
                old[rows] = new[known]
            if unknown := [n for n, client in enumerate(clients) if client not in self.row]:
                self.states = concat([self.states, pick(states, unknown)])
        for client in clients:
            self.row.setdefault(client, len(self.row))
