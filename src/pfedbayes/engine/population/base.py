"""The interface of a population, and the transfers between host and device that populations share."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.files.tensors import Rows
from pfedbayes.maths.trees import leaves, named_leaves, tree_map
from pfedbayes.memory import to_device
from pfedbayes.methods.base import State

HOST = torch.device("cpu")


class Population(ABC):
    """The states of all clients that have taken part so far, by client number."""

    _device: torch.device
    """The device that trains the clients."""
    _place: dict[int, Any]
    """Where each client's state is, in the order in which the clients first took part."""

    @property
    def enrolled(self) -> list[int]:
        """The clients that have a state, in the order in which they first took part."""
        return list(self._place)

    def get(self, clients: Sequence[int], fresh: Callable[[Sequence[int]], State]) -> State:
        """Return the stacked states of these clients on the device; `fresh` makes those of new clients."""
        known = [n for n, client in enumerate(clients) if client in self._place]
        new = [n for n, client in enumerate(clients) if client not in self._place]
        if not new:
            return self._read(clients)
        enrolled = fresh([clients[n] for n in new])
        if not known:
            return enrolled
        kept = self._read([clients[n] for n in known])
        places = [self._index(part) for part in (known, new)]

        def merge(*parts: Tensor) -> Tensor:
            merged = parts[0].new_empty((len(clients), *parts[0].shape[1:]))
            for rows, part in zip(places, parts, strict=True):
                merged.index_copy_(0, rows, part)
            return merged

        return tree_map(merge, kept, enrolled)

    def _index(self, places: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(places), self._device)

    @abstractmethod
    def put(self, clients: Sequence[int], states: State) -> None:
        """Store the stacked states of these clients: all of them or, after an error, none."""

    def tensors(self) -> dict[str, Tensor]:
        """Return host copies of all states by leaf name, stacked in the order of `enrolled`."""
        return dict(named_leaves(self._copy(), "clients")) if self._place else {}

    @abstractmethod
    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        """Return what a checkpoint must hold to find the states again.

        Write it before the states change. A population in a file forces its states to disk at `path`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all clients."""

    def wait(self) -> None:  # noqa: B027, most populations copy at once
        """Wait until all states have been copied to where they rest."""

    def saved(self) -> None:  # noqa: B027, memory has nothing to do
        """Note that the last checkpoint has been written, which frees what only the one before it needed."""

    def pin(self, rows: Sequence[int]) -> None:  # noqa: B027, memory has nothing to do
        """Do not reuse these rows of a file, on which an earlier result depends."""

    def close(self) -> None:  # noqa: B027, memory has nothing to do
        """Release files and page-locked memory. The population cannot be used afterwards."""

    @abstractmethod
    def _read(self, clients: Sequence[int]) -> State: ...

    @abstractmethod
    def _copy(self) -> State: ...


@contextlib.contextmanager
def memory_errors(size: int, states: State) -> Iterator[None]:
    """Turn a failed allocation for the states of `size` clients into a UserError."""
    try:
        yield
    except RuntimeError as error:  # a GPU reports it this way too
        if not re.search("out of memory|allocate", str(error)):
            raise
        total = size * sum(leaf[0].nbytes for leaf in leaves(states))
        raise UserError(
            f"the states of {size} clients take {total / 1e9:.1f} GB, more than there is memory: "
            "set execution.resting=file"
        ) from None


def to_host(states: State) -> State:
    """Return the states on the host; those on a GPU are copied through page-locked memory."""
    on_host = tree_map(_send, states)
    for gpu in {leaf.device for leaf in leaves(states) if leaf.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()
    return on_host


def _send(leaf: Tensor) -> Tensor:
    if leaf.device == HOST:
        return leaf
    return staging(leaf.shape, leaf.dtype, leaf.device).copy_(leaf, non_blocking=True)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty host tensor for transfers to or from `device`, page-locked if the device is a GPU."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")
