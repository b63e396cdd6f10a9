"""Clients' states on the device that trains them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pfedbayes.engine.population.base import Population, memory_errors
from pfedbayes.files.tensors import Rows
from pfedbayes.maths.trees import leaves, named_leaves, tree_map
from pfedbayes.methods.base import State


class DevicePopulation(Population):
    """One tensor per leaf on the device, with a row for each of `size` clients.

    On a CPU a row takes up memory only once it is written.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self.clear()

    def clear(self) -> None:
        self._place: dict[int, int] = {}  # a client's row is its number
        self._states: State = None

    def _all(self, clients: Sequence[int]) -> bool:
        return len(clients) == self._size and list(clients) == list(range(self._size))

    def _read(self, clients: Sequence[int]) -> State:
        return self._states if self._all(clients) else self._select(clients)

    def _select(self, clients: Sequence[int]) -> State:
        rows = self._index(clients)
        return tree_map(lambda leaf: leaf.index_select(0, rows), self._states)

    def put(self, clients: Sequence[int], states: State) -> None:
        if self._all(clients):
            self._states = tree_map(lambda leaf: leaf.to(self._device), states)
        else:
            if self._states is None:
                with memory_errors(self._size, states):
                    self._states = tree_map(self._allocate, states)
            rows = self._index(clients)
            for old, new in zip(leaves(self._states), leaves(states), strict=True):
                old.index_copy_(0, rows, new.to(self._device))
        self._place |= zip(clients, clients, strict=True)

    def _allocate(self, leaf: Tensor) -> Tensor:
        return leaf.new_empty((self._size, *leaf.shape[1:]), device=self._device)

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        if not self._place:
            return {}
        rows = self._index(self.enrolled)

        def rows_of(leaf: Tensor) -> Rows:
            return Rows(leaf[0], len(rows), lambda part: leaf.index_select(0, rows[part]))

        return {name: rows_of(leaf) for name, leaf in named_leaves(self._states, "clients")}

    def _copy(self) -> State:
        return tree_map(Tensor.cpu, self._select(self.enrolled))
