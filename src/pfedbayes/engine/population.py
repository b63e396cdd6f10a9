"""The states of the clients between rounds: in memory, or in a file where they are too many for it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import tempfile
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pfedbayes.engine.tensor_files import Rows
from pfedbayes.errors import UserError
from pfedbayes.maths.trees import leaves, named_leaves, rebuild, tree_map
from pfedbayes.memory import give_back_locked_memory, host_memory, to_device
from pfedbayes.methods.base import State

Resting = Literal["device", "host", "file"]
HOST = torch.device("cpu")
Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev

SMALL_SHARE = 1 / 16  # of the device's memory: what may lie there without being trained
HOST_SHARE = 1 / 3  # of the host's memory: the rest is for all else, and for others
BLOCK_BYTES, FEWEST_ROWS = 2**28, 8  # of page-locked memory at a time, at least
WIDEST = 16  # bytes of a number: where a leaf may begin
PER_ROUND = 4  # copies of the states in training that a round makes: received, gathered, trained, kept


@cache
def _movers(process: int) -> ThreadPoolExecutor:
    """Threads that move rows. A forked process has none of its parent's."""
    return ThreadPoolExecutor(8, thread_name_prefix="clients")


class Population(ABC):
    """The states of the clients met so far, by number; `_device` is where they are trained, `_place` where each
    client's state is, in the order in which they were first met."""

    _device: torch.device
    _place: dict[int, Any]

    @property
    def met(self) -> list[int]:
        """The clients that have a state, in the order in which they were first met."""
        return list(self._place)

    def get(self, clients: Sequence[int], fresh: Callable[[Sequence[int]], State]) -> State:
        """Stacked states of these clients, on the device; those that were not met before have fresh ones."""
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
        """Keep the states of these clients, all of them or, if they are refused, none."""

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all states on the host, by the names of their leaves, stacked in the order of `met`."""
        return dict(named_leaves(self._copy(), "clients")) if self.met else {}

    @abstractmethod
    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        """What has to be written down, before states change, to find them again; a file of states is forced to disk at
        `path`."""

    def settle(self) -> None:  # noqa: B027, where nobody is ahead there is nothing to do
        """Wait until states are where they rest."""

    def saved(self) -> None:  # noqa: B027, memory has nothing to do
        """The checkpoint has been written: what only the one before it referred to is needed no more."""

    def close(self) -> None:  # noqa: B027, memory has nothing to do
        """Give back what the population holds; it cannot be used any more."""

    @abstractmethod
    def _read(self, clients: Sequence[int]) -> State: ...

    @abstractmethod
    def _copy(self) -> State: ...


class InMemory(Population):
    """One array per leaf on the device, with a row for each of `size` clients; on a CPU a row takes memory when it is
    first written."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._place: dict[int, int] = {}  # a client has the row of its number
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
                with _refused_memory(self._size, states):
                    self._states = tree_map(self._allocate, states)
            rows = self._index(clients)
            for old, new in zip(leaves(self._states), leaves(states), strict=True):
                old.index_copy_(0, rows, new.to(self._device))
        self._place |= zip(clients, clients, strict=True)

    def _allocate(self, leaf: Tensor) -> Tensor:
        return leaf.new_empty((self._size, *leaf.shape[1:]), device=self._device)

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        if not self.met:
            return {}
        rows = self._index(self.met)

        def rows_of(leaf: Tensor) -> Rows:
            return Rows(leaf[0], len(rows), lambda part: leaf.index_select(0, rows[part]))

        return {name: rows_of(leaf) for name, leaf in named_leaves(self._states, "clients")}

    def _copy(self) -> State:
        return tree_map(Tensor.cpu, self._select(self.met))


class OnHost(Population):
    """Rows of page-locked memory beside a GPU, in blocks that are taken as up to `size` clients are met. A row is the
    leaves of a state one after another.

    The GPU copies rows when it comes to that, one after another with all else that it was told to do: who gives it
    work need not wait for them, and it never finds a row that it has yet to write.
    """

    def __init__(self, size: int, template: State, device: torch.device) -> None:
        self._size, self._template, self._device = size, template, device
        self._leaves = leaves(template)
        self._places: list[slice] = []  # of the leaves in a row
        self._row_bytes = 0
        for leaf in self._leaves:
            self._places.append(slice(self._row_bytes, self._row_bytes + leaf.nbytes))
            self._row_bytes += leaf.nbytes + -leaf.nbytes % WIDEST
        self._row_bytes = max(WIDEST, self._row_bytes)
        # A power of two, to which torch rounds it up, that many rows nearly fill.
        block_bytes = max(BLOCK_BYTES, 1 << (FEWEST_ROWS * self._row_bytes - 1).bit_length())
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
            with _refused_memory(self._size, states):
                self._blocks.append(staging((self._per_block, self._row_bytes), torch.uint8, self._device))
        rows = torch.empty((len(clients), self._row_bytes), dtype=torch.uint8, device=self._device)
        for number, leaf in zip(range(len(self._leaves)), leaves(states), strict=True):
            self._column(number, rows).copy_(leaf)
        places = (divmod(n, self._per_block) for n in range(len(self._place), len(self._place) + len(new)))
        added = {client: self._blocks[block][row] for client, (block, row) in zip(new, places, strict=True)}
        for client, row in zip(clients, rows, strict=True):
            (added[client] if client in added else self._place[client]).copy_(row, non_blocking=True)
        self._place |= added  # last: an interrupt enrols nobody without a state

    def _column(self, leaf: int, rows: Tensor) -> Tensor:
        """One leaf of the states in rows of bytes, over the same memory."""
        like = self._leaves[leaf]
        return rows[:, self._places[leaf]].view(like.dtype).view(len(rows), *like.shape)

    def _stacked(self, leaf: int, part: slice) -> Tensor:
        """One leaf of those that were met, or of a part of them."""
        return torch.cat([self._column(leaf, row[None]) for row in list(self._place.values())[part]])

    def _rebuild(self, make: Callable[[int], Tensor]) -> State:
        return rebuild(self._template, [make(leaf) for leaf in range(len(self._leaves))])

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        self.settle()
        names = [name for name, _ in named_leaves(self._template, "clients")]
        rows = [Rows(like, len(self._place), partial(self._stacked, leaf)) for leaf, like in enumerate(self._leaves)]
        return dict(zip(names, rows, strict=True)) if self.met else {}

    def close(self) -> None:
        self._place, self._blocks = {}, []
        give_back_locked_memory()

    def _copy(self) -> State:
        self.settle()
        return self._rebuild(lambda leaf: self._stacked(leaf, slice(None)))


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
    def rows(self) -> int:
        """How many rows the file has, free ones included."""
        return self._end

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
    """Call `move` with each of these arguments, several at a time. An error if one of the calls has failed, or an
    interrupt, once nobody goes on to move anything."""
    movers, tasks = _movers(os.getpid()), list[Future[None]]()
    try:
        for call in calls:
            tasks.append(movers.submit(move, *call))
        wait(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise
    for task in tasks:
        task.result()


@contextlib.contextmanager
def _refused_memory(size: int, states: State) -> Iterator[None]:
    """Turn the refusal of memory for so many states into one clear line."""
    try:
        yield
    except RuntimeError as error:  # also the GPU's way to say so
        if not re.search("out of memory|allocate", str(error)):
            raise
        total = size * sum(leaf[0].nbytes for leaf in leaves(states))
        raise UserError(
            f"the states of {size} clients take {total / 1e9:.1f} GB, which the memory does not have: "
            "set execution.resting=file"
        ) from None


def _bytes(leaf: Tensor) -> Tensor:
    """A stacked leaf as rows of bytes (n, width), without copying it if it is contiguous."""
    return leaf.contiguous().reshape(len(leaf), math.prod(leaf.shape[1:])).view(torch.uint8)


def to_host(states: State) -> State:
    """States on the host, by way of page-locked memory if they come from a GPU."""
    on_host = tree_map(_send, states)
    for gpu in {leaf.device for leaf in leaves(states) if leaf.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()
    return on_host


def _send(leaf: Tensor) -> Tensor:
    if leaf.device == HOST:
        return leaf
    return staging(leaf.shape, leaf.dtype, leaf.device).copy_(leaf, non_blocking=True)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor on the host for values that go to or come from `device`: page-locked where that is faster."""
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
