"""Clients' states in page-locked memory of the host, beside a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pfedbayes.engine.population.base import Population, memory_errors, staging
from pfedbayes.files.tensors import Rows
from pfedbayes.maths.trees import leaves, named_leaves, rebuild
from pfedbayes.memory import give_back_locked_memory
from pfedbayes.methods.base import State

MIN_BLOCK_BYTES, MIN_BLOCK_ROWS = 2**28, 8  # page-locked memory is allocated in blocks of at least this size
ALIGNMENT = 16  # bytes; the widest number has as many


class HostPopulation(Population):
    """Rows of page-locked memory, allocated in blocks as clients enrol, at most `size` of them.

    A row holds the leaves of one state one after another. The GPU copies rows in the order of its other work: the
    caller need not wait for a copy, and the GPU never reads a row that it has yet to write.
    """

    def __init__(self, size: int, template: State, device: torch.device) -> None:
        self._size, self._template, self._device = size, template, device
        self._leaves = leaves(template)
        self._columns: list[slice] = []  # the bytes of each leaf in a row
        self._row_bytes = 0
        for leaf in self._leaves:
            self._columns.append(slice(self._row_bytes, self._row_bytes + leaf.nbytes))
            self._row_bytes += leaf.nbytes + -leaf.nbytes % ALIGNMENT
        self._row_bytes = max(ALIGNMENT, self._row_bytes)
        # torch rounds page-locked allocations up to a power of two, so a block has nearly that size.
        block_bytes = max(MIN_BLOCK_BYTES, 1 << (MIN_BLOCK_ROWS * self._row_bytes - 1).bit_length())
        self._per_block = min(size, block_bytes // self._row_bytes)
        self._blocks: list[Tensor] = []
        self._place: dict[int, Tensor] = {}  # rows of the blocks

    def _read(self, clients: Sequence[int]) -> State:
        rows = torch.empty((len(clients), self._row_bytes), dtype=torch.uint8, device=self._device)
        for client, row in zip(clients, rows, strict=True):
            row.copy_(self._place[client], non_blocking=True)
        return self._rebuild(lambda leaf: self._column(leaf, rows).clone(memory_format=torch.contiguous_format))

    def put(self, clients: Sequence[int], states: State) -> None:
        new = [client for client in dict.fromkeys(clients) if client not in self._place]
        while len(self._blocks) * self._per_block < len(self._place) + len(new):
            with memory_errors(self._size, states):
                self._blocks.append(staging((self._per_block, self._row_bytes), torch.uint8, self._device))
        rows = torch.empty((len(clients), self._row_bytes), dtype=torch.uint8, device=self._device)
        for number, leaf in zip(range(len(self._leaves)), leaves(states), strict=True):
            self._column(number, rows).copy_(leaf)
        places = (divmod(n, self._per_block) for n in range(len(self._place), len(self._place) + len(new)))
        added = {client: self._blocks[block][row] for client, (block, row) in zip(new, places, strict=True)}
        for client, row in zip(clients, rows, strict=True):
            (added[client] if client in added else self._place[client]).copy_(row, non_blocking=True)
        self._place |= added  # last, so that an interrupt enrols no client without a state

    def _column(self, leaf: int, rows: Tensor) -> Tensor:
        """Return one leaf of the states in rows of bytes, as a view of the same memory."""
        like = self._leaves[leaf]
        return rows[:, self._columns[leaf]].view(like.dtype).view(len(rows), *like.shape)

    def _stacked(self, leaf: int, part: slice) -> Tensor:
        """Return one leaf of this part of the enrolled clients."""
        return torch.cat([self._column(leaf, row[None]) for row in list(self._place.values())[part]])

    def _rebuild(self, make: Callable[[int], Tensor]) -> State:
        return rebuild(self._template, [make(leaf) for leaf in range(len(self._leaves))])

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        self.wait()
        names = [name for name, _ in named_leaves(self._template, "clients")]
        rows = [Rows(like, len(self._place), partial(self._stacked, leaf)) for leaf, like in enumerate(self._leaves)]
        return dict(zip(names, rows, strict=True)) if self._place else {}

    def clear(self) -> None:
        self._place, self._blocks = {}, []
        give_back_locked_memory()

    def close(self) -> None:
        self.clear()

    def _copy(self) -> State:
        self.wait()
        return self._rebuild(lambda leaf: self._stacked(leaf, slice(None)))
