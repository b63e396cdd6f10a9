"""The states of the clients between rounds: in memory, or in a file where they are too many for it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.memory import host_memory
from pfedbayes.methods.base import State
from pfedbayes.tensor_files import Rows
from pfedbayes.trees import leaves, named_leaves, tree_map

Resting = Literal["device", "host", "file"]
HOST = torch.device("cpu")
Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev

SMALL_SHARE = 1 / 16  # of the device's memory: what may lie there without being trained
HOST_SHARE = 1 / 3  # of the host's memory: the rest is for all else, and for others
PER_ROUND = 4  # copies of the states in training that a round makes: received, gathered, trained, on their way


_movers: ThreadPoolExecutor
_waiters: ThreadPoolExecutor  # move what a GPU has yet to finish: the movers' work is not to queue behind it


def _start_threads() -> None:
    global _movers, _waiters
    _movers, _waiters = (ThreadPoolExecutor(8, thread_name_prefix="clients") for _ in range(2))


_start_threads()
os.register_at_fork(after_in_child=_start_threads)  # a child has none of its parent's threads


class Population(ABC):
    """The states of the clients met so far, by number; `_device` is where they are trained."""

    _device: torch.device

    @property
    @abstractmethod
    def met(self) -> list[int]:
        """The clients that have a state, in the order in which they were first met."""

    def get(self, clients: Sequence[int], fresh: Callable[[Sequence[int]], State]) -> State:
        """Stacked states of these clients, on the device; those that were not met before have fresh ones."""
        known = [client for client in clients if self._has(client)]
        if len(known) == len(clients):
            return self._read(known)
        new = [client for client in clients if not self._has(client)]
        enrolled = fresh(new)
        if not known:
            return enrolled
        kept = self._read(known)
        place = {client: n for n, client in enumerate(clients)}
        places = [torch.tensor([place[client] for client in part], device=self._device) for part in (known, new)]

        def merge(*parts: Tensor) -> Tensor:
            merged = parts[0].new_empty((len(clients), *parts[0].shape[1:]))
            for rows, part in zip(places, parts, strict=True):
                merged.index_copy_(0, rows, part)
            return merged

        return tree_map(merge, kept, enrolled)

    @abstractmethod
    def put(self, clients: Sequence[int], states: State) -> None:
        """Keep the states of these clients, all of them or, if they are refused, none."""

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all states on the host, by the names of their leaves, stacked in the order of `met`."""
        return dict(named_leaves(self._copy(), "clients")) if self.met else {}

    @abstractmethod
    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        """What has to be written down, before states change, to find them again; a file of states is forced to disk at
        `path`."""

    def settle(self) -> None:  # noqa: B027, a file has nothing to do
        """Wait for states that are on their way to where they rest."""

    def saved(self) -> None:  # noqa: B027, memory has nothing to do
        """The checkpoint has been written: what only the one before it referred to is needed no more."""

    def close(self) -> None:  # noqa: B027, memory has nothing to do
        """Give back what the population holds; it cannot be used any more."""

    @abstractmethod
    def _has(self, client: int) -> bool: ...

    @abstractmethod
    def _read(self, clients: Sequence[int]) -> State: ...

    @abstractmethod
    def _copy(self) -> State: ...


class InMemory(Population):
    """One array per leaf, with a row for each of `size` clients; on a CPU a row takes memory when it is first written.

    `device` is where clients are trained, `rest` where their states lie. From a GPU to the host they go on their way
    while the next round is trained.
    """

    def __init__(self, size: int, device: torch.device, rest: torch.device) -> None:
        self._size, self._device, self._rest = size, device, rest
        self._met: dict[int, None] = {}
        self._states: State = None
        self._on_their_way: dict[int, Future[None]] = {}

    @property
    def met(self) -> list[int]:
        return list(self._met)

    def _has(self, client: int) -> bool:
        return client in self._met

    def _all(self, clients: Sequence[int]) -> bool:
        return len(clients) == self._size and list(clients) == list(range(self._size))

    def settle(self) -> None:
        for client in list(self._on_their_way):
            self._on_their_way[client].result()
            del self._on_their_way[client]

    def _read(self, clients: Sequence[int]) -> State:
        if self._all(clients):  # nothing to gather, and nothing to copy if they are where they are wanted
            self.settle()
            return tree_map(lambda leaf: leaf.to(self._device), self._states)
        if self._rest != self._device:
            return self._fetch(clients)
        rows = torch.tensor(clients, device=self._rest)
        return tree_map(lambda leaf: leaf.index_select(0, rows), self._states)

    def _fetch(self, clients: Sequence[int]) -> State:
        """States from the host, row by row and several at a time; those that are still on their way are waited for."""
        count, device = len(clients), self._device
        states = tree_map(lambda leaf: staging((count, *leaf.shape[1:]), leaf.dtype, device), self._states)
        sources, targets = _arrays(self._states), _arrays(states)

        def take_up(row: int, client: int) -> None:
            if client in self._on_their_way:
                self._on_their_way[client].result()
            _copy_row(sources, client, targets, row)

        _move_rows(take_up, enumerate(clients))
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True), states)

    def put(self, clients: Sequence[int], states: State) -> None:
        self.settle()  # more than one round under way would pile up
        if self._all(clients):
            self._states = tree_map(lambda leaf: leaf.to(self._rest), states)
        else:
            if self._states is None:
                self._states = self._allocate(states)
            if self._rest != self._device:
                self._send(clients, states)
            else:
                rows = torch.tensor(clients, device=self._rest)
                for old, new in zip(leaves(self._states), leaves(states), strict=True):
                    old.index_copy_(0, rows, new.to(self._rest))
        self._met.update(dict.fromkeys(clients))

    def _send(self, clients: Sequence[int], states: State) -> None:
        """Send states to the host, row by row and several at a time, without waiting for them."""
        journey, targets = Journey(states), _arrays(self._states)

        def lay_down(row: int, client: int) -> None:
            _copy_row(_arrays(journey.arrived()), row, targets, client)

        with _stopping() as tasks:
            for row, client in enumerate(clients):
                tasks.append(_waiters.submit(lay_down, row, client))
            self._on_their_way = dict(zip(clients, tasks, strict=True))

    def _allocate(self, states: State) -> State:
        try:
            return tree_map(lambda leaf: leaf.new_empty((self._size, *leaf.shape[1:]), device=self._rest), states)
        except RuntimeError:  # also the GPU's way to say so
            total = self._size * sum(leaf[0].nbytes for leaf in leaves(states))
            raise UserError(
                f"the states of {self._size} clients take {total / 1e9:.1f} GB, which the memory does not have: "
                "set execution.resting=file"
            ) from None

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        self.settle()
        rows = torch.tensor(self.met, device=self._rest)
        return {name: Rows(leaf, rows) for name, leaf in named_leaves(self._states, "clients")} if self.met else {}

    def _copy(self) -> State:
        self.settle()
        rows = torch.tensor(self.met, device=self._rest)
        return tree_map(lambda leaf: leaf.index_select(0, rows).cpu(), self._states)


class InFile(Population):
    """Rows of a file. A row is the leaves of a state one after another, laid out as in the template.

    A row is never overwritten while a client or the last checkpoint refers to it: new states go to free rows, so a
    run that is killed finds everything its checkpoint knows of. Rows are read and written rather than mapped: mapped
    pages would count as memory of the process until they are given back, and a full disk would be a signal.

    The file lies at `path`, or has no name and vanishes with the population.
    """

    def __init__(self, template: State, device: torch.device, path: Path | None = None) -> None:
        self._template, self._device, self._path = template, device, path
        self._row_bytes = sum(leaf.nbytes for leaf in leaves(template))
        self._descriptors: list[int] = []
        self._close = weakref.finalize(self, _close_all, self._descriptors)
        self._own: int | None = None  # the descriptor that is written to, once there is something to write
        self._place: dict[int, tuple[int, int]] = {}  # descriptor and row of each client
        self._end = 0  # rows that the file has
        self._free: list[int] = []
        self._saved: set[int] = set()  # rows of the last checkpoint

    @property
    def met(self) -> list[int]:
        return list(self._place)

    @property
    def rows(self) -> int:
        """How many rows the file has, free ones included."""
        return self._end

    def _has(self, client: int) -> bool:
        return client in self._place

    def _read(self, clients: Sequence[int]) -> State:
        return tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), self._load(clients, self._device))

    def _copy(self) -> State:
        return self._load(self.met, HOST)

    def _load(self, clients: Sequence[int], device: torch.device) -> State:
        """Stacked states on the host, ready for a device."""
        count = len(clients)
        states = tree_map(lambda leaf: staging((count, *leaf.shape), leaf.dtype, device), self._template)
        with self._refusals("read"):
            self._move_all(os.preadv, [self._place[client] for client in clients], states)
        return states

    def _move_all(self, move: Move, places: Sequence[tuple[int, int]], states: State) -> None:
        """Read or write rows, several at a time."""
        columns = [_bytes(leaf) for leaf in leaves(states)]
        rows = ([column[n].numpy().data for column in columns] for n in range(len(places)))
        moves = ((move, *place, parts) for place, parts in zip(places, rows, strict=True))
        _move_rows(self._move, moves)

    def _move(self, move: Move, descriptor: int, row: int, parts: list[memoryview]) -> None:
        """Read or write a row, all of it: one call may do less than it is asked for."""
        offset = row * self._row_bytes
        for part in parts:
            start = 0
            while start < part.nbytes:
                done = move(descriptor, [part[start:]], offset)
                if not done:
                    raise OSError("it is cut short")
                start, offset = start + done, offset + done

    def put(self, clients: Sequence[int], states: State) -> None:
        own = self._open()
        on_host = to_host(states)
        missing = max(0, len(clients) - len(self._free))
        self._free.extend(range(self._end, self._end + missing))
        self._end += missing
        taken = self._free[: len(clients)]
        with self._refusals("write"):
            self._move_all(os.pwritev, [(own, row) for row in taken], on_host)
        del self._free[: len(clients)]
        for client, row in zip(clients, taken, strict=True):
            before = self._place.get(client)
            self._place[client] = own, row
            if before and before[0] == own and before[1] not in self._saved:
                self._free.append(before[1])

    def _open(self) -> int:
        """The descriptor to write to."""
        if self._own is None:
            with self._refusals("write"):
                if self._path is None:
                    with tempfile.TemporaryFile() as file:
                        descriptor = os.dup(file.fileno())
                else:
                    descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            self._descriptors.append(descriptor)
            _lock(descriptor, fcntl.LOCK_EX, self._path)
            self._own = descriptor
        return self._own

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        if path == self._path:
            with self._refusals("write"):
                os.fsync(self._open())
            rows = [row for _, row in self._place.values()]
        else:
            self._write_copy(path)
            rows = list(range(len(self._place)))
        return {"rows": torch.tensor(rows, dtype=torch.int64), "witness": self._witness()}

    def _witness(self) -> Tensor:
        """Bytes of a row, and the checksum of the last client's: a file in which it differs is another one."""
        last = self.met[-1:]
        checksum = 0
        for leaf in leaves(self._load(last, HOST)):
            checksum = zlib.crc32(_bytes(leaf).numpy().data, checksum)
        return torch.tensor([self._row_bytes, checksum], dtype=torch.int64)

    def _write_copy(self, path: Path) -> None:
        """All states in the order of `met`, written aside and renamed."""
        aside = path.with_name(f".{path.name}.part")
        buffer = memoryview(bytearray(self._row_bytes))
        try:
            with self._refusals("write"), aside.open("wb") as file:
                for descriptor, row in self._place.values():
                    self._move(os.preadv, descriptor, row, [buffer])
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def restore(self, clients: Sequence[int], tensors: dict[str, Tensor], path: Path | None) -> None:
        """Take the states of these clients from where `checkpoint` put them.

        The rows of a file of another's are only read: what is new goes to a file of one's own.
        """
        if path is None:
            raise UserError("the states of the clients are in a file of their own: use pfedbayes.load")
        if path == self._path:
            descriptor = self._open()
        else:
            with self._refusals("read", path):
                descriptor = os.open(path, os.O_RDONLY)
            self._descriptors.append(descriptor)
            _lock(descriptor, fcntl.LOCK_SH, path)
        rows = tensors["rows"].tolist()
        self._place = {client: (descriptor, row) for client, row in zip(clients, rows, strict=True)}
        needed = (max(rows, default=-1) + 1) * self._row_bytes
        length = os.fstat(descriptor).st_size
        if length < needed or not torch.equal(self._witness(), tensors["witness"].cpu()):
            self._place = {}
            raise UserError(f"{path} does not belong to the saved state beside it: put back the file of that run")
        if descriptor == self._own:
            self._end = length // self._row_bytes if self._row_bytes else 0
            self._saved = set(rows)
            self._free = [row for row in range(self._end) if row not in self._saved]

    def saved(self) -> None:
        before, self._saved = self._saved, {row for file, row in self._place.values() if file == self._own}
        self._free.extend(before - self._saved)

    def close(self) -> None:
        self._close()

    @contextlib.contextmanager
    def _refusals(self, verb: Literal["read", "write"], path: Path | None = None) -> Iterator[None]:
        """Turn the file system's refusals into one clear line."""
        path = path or self._path
        try:
            yield
        except OSError as error:
            remedy = "put back the file of that run"
            if verb == "write":
                remedy = (
                    "free space or give another --out; what was saved before is intact, and --resume goes on from it"
                )
            if path is None:
                remedy = "free space there or let TMPDIR name another folder"
            where = path or f"a temporary file in {tempfile.gettempdir()}"
            raise UserError(f"cannot {verb} {where} ({error.strerror or error}): {remedy}") from None


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, path: Path | None) -> None:
    """Keep others from writing to a file that is read, and from reading one that is written to."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path} is in use: wait for the run, or close what has loaded it") from None


def _move_rows(move: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    """Call `move` with each of these arguments, several at a time; an error if one of the calls has failed."""
    with _stopping() as tasks:
        for call in calls:
            tasks.append(_movers.submit(move, *call))
        wait(tasks)
    for task in tasks:
        task.result()


@contextlib.contextmanager
def _stopping() -> Iterator[list[Future[None]]]:
    """A list for tasks, each as it begins. On an error, or an interrupt: nobody goes on to move anything once it is
    told."""
    tasks: list[Future[None]] = []
    try:
        yield tasks
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise


def _arrays(states: State) -> list[NDArray[Any]]:
    """The leaves of states on the host, over the same memory; numpy has no bfloat16, but can copy its bits."""
    return [(leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf).numpy() for leaf in leaves(states)]


def _copy_row(sources: list[NDArray[Any]], source: int, targets: list[NDArray[Any]], target: int) -> None:
    """One row of each; torch would start threads of its own in each of ours."""
    for here, there in zip(sources, targets, strict=True):
        np.copyto(there[target, ...], here[source, ...])


def _bytes(leaf: Tensor) -> Tensor:
    """A stacked leaf as rows of bytes (n, width), without copying it if it is contiguous."""
    return leaf.contiguous().reshape(len(leaf), math.prod(leaf.shape[1:])).view(torch.uint8)


class Journey:
    """States on their way to the host, by way of page-locked memory if they come from a GPU."""

    def __init__(self, states: State) -> None:
        self._arriving = tree_map(self._send, states)
        gpus = {leaf.device for leaf in leaves(states) if leaf.is_cuda}
        self._events = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    @staticmethod
    def _send(leaf: Tensor) -> Tensor:
        if leaf.device == HOST:
            return leaf
        return staging(leaf.shape, leaf.dtype, leaf.device).copy_(leaf, non_blocking=True)

    def arrived(self) -> State:
        """The states, once they are there."""
        for event in self._events:
            event.synchronize()
        return self._arriving


def to_host(states: State) -> State:
    """States on the host."""
    return Journey(states).arrived()


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor on the host for values on their way to or from `device`: page-locked where that is faster."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def choose_resting(state_bytes: int, clients: int, training: int, copies: int, device: torch.device) -> Resting:
    """Where `clients` states of so many bytes rest, of which so many are in training at a time: on the device if all
    are or if they are small; on the host if so many copies of them, and what a round takes, are a part of its memory
    that can be spared; else in a file.
    """
    if training == clients:
        return "device"
    total, memory = state_bytes * clients, host_memory()
    on_device = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory
    if total <= SMALL_SHARE * on_device:
        return "device"
    needed = copies * total + PER_ROUND * training * state_bytes
    return "host" if needed <= HOST_SHARE * memory else "file"
