"""Clients' states as rows of a file, for populations larger than the memory."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pfedbayes.engine.population.base import HOST, Population, staging, to_host
from pfedbayes.errors import UserError
from pfedbayes.files.locking import lock
from pfedbayes.files.tensors import Rows
from pfedbayes.files.writing import NO_DETOUR, open_to_write
from pfedbayes.maths.trees import leaves, tree_map
from pfedbayes.methods.base import State

Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


class FilePopulation(Population):
    """Rows of a file. A row holds the leaves of one state one after another, in the order of the template.

    A row is never overwritten while a client or the last checkpoint refers to it: new states go to free rows. A run
    that is killed therefore finds everything that its checkpoint refers to. Rows are read and written rather than
    memory-mapped: mapped pages would count as memory of the process, and a full disk would raise a signal.

    path: where the file lies; without one, the population uses a temporary file without a name.
    """

    def __init__(self, template: State, device: torch.device, path: Path | None = None) -> None:
        self._template, self._device, self._path = template, device, path
        self._row_bytes = sum(leaf.nbytes for leaf in leaves(template))
        self._descriptors: list[int] = []
        weakref.finalize(self, _close_all, self._descriptors)
        self._forget()

    def _forget(self) -> None:
        self._own: int | None = None  # the descriptor that is written to, once there is something to write
        self._place: dict[int, tuple[int, int]] = {}  # descriptor and row of each client
        self._end = 0  # rows of the file
        self._free: list[int] = []
        self._saved: set[int] = set()  # rows that the last checkpoint refers to
        self._pinned: set[int] = set()  # rows that the last result of an extended run refers to
        self._checksums: dict[int, int] = {}  # of each client's row; files of earlier versions have none

    @property
    def rows(self) -> int:
        """The number of rows in the file, including free ones."""
        return self._end

    def _read(self, clients: Sequence[int]) -> State:
        return tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), self._load(clients, self._device))

    def _copy(self) -> State:
        return self._load(self.enrolled, HOST)

    def _load(self, clients: Sequence[int], device: torch.device) -> State:
        """Return stacked states on the host, ready to be copied to the device."""
        count = len(clients)
        states = tree_map(lambda leaf: staging((count, *leaf.shape), leaf.dtype, device), self._template)
        with self._file_errors("read"):
            checksums = self._move_all(os.preadv, [self._place[client] for client in clients], states)
            for client, checksum in zip(clients, checksums, strict=True):
                if self._checksums.get(client, checksum) != checksum:
                    raise OSError(f"the state of client {client} is damaged")
        return states

    def _move_all(self, move: Move, places: Sequence[tuple[int, int]], states: State) -> list[int]:
        """Read or write rows in parallel, and return their checksums."""
        columns = [_bytes(leaf) for leaf in leaves(states)]
        rows = ([column[n].numpy().data for column in columns] for n in range(len(places)))
        moves = ((move, *place, parts) for place, parts in zip(places, rows, strict=True))
        return _move_rows(self._move, moves)

    def _move(self, move: Move, descriptor: int, row: int, parts: list[memoryview]) -> int:
        """Read or write a whole row: one system call may transfer only a part of it. Return the row's checksum."""
        offset = row * self._row_bytes
        checksum = 0
        for part in parts:
            start = 0
            while start < part.nbytes:
                done = move(descriptor, [part[start:]], offset)
                if not done:
                    raise OSError("it is too short")
                start, offset = start + done, offset + done
            checksum = zlib.crc32(part, checksum)
        return checksum

    def put(self, clients: Sequence[int], states: State) -> None:
        own = self._open()
        on_host = to_host(states)
        missing = max(0, len(clients) - len(self._free))
        self._free.extend(range(self._end, self._end + missing))
        self._end += missing
        taken = self._free[: len(clients)]
        with self._file_errors("write"):
            checksums = self._move_all(os.pwritev, [(own, row) for row in taken], on_host)
        self._checksums.update(zip(clients, checksums, strict=True))
        del self._free[: len(clients)]
        for client, row in zip(clients, taken, strict=True):
            before = self._place.get(client)
            self._place[client] = own, row
            if before and before[0] == own and before[1] not in self._saved | self._pinned:
                self._free.append(before[1])

    def _open(self) -> int:
        """Return the descriptor to write to."""
        if self._own is None:
            path = self._path
            with (
                self._file_errors("write"),
                open_to_write(path, os.O_RDWR) if path else tempfile.TemporaryFile() as file,
            ):
                descriptor = os.dup(file.fileno())
            self._descriptors.append(descriptor)
            _lock(descriptor, self._path)
            self._own = descriptor
        return self._own

    def checkpoint(self, path: Path) -> dict[str, Tensor | Rows]:
        if path == self._path:
            with self._file_errors("write"):
                os.fsync(self._open())
            rows = [row for _, row in self._place.values()]
        else:
            self._write_copy(path)
            rows = list(range(len(self._place)))
        checksums = [self._checksums[client] for client in self._place if client in self._checksums]
        return {
            "rows": torch.tensor(rows, dtype=torch.int64),
            "witness": self._fingerprint(),
            # A population that was restored from a file of an earlier version does not know them all.
            **({"checksums": torch.tensor(checksums)} if len(checksums) == len(rows) else {}),
        }

    def _fingerprint(self) -> Tensor:
        """Return the bytes per row and a checksum of the last client's row, to recognise the file of another run."""
        buffer = memoryview(bytearray(self._row_bytes))
        with self._file_errors("read"):
            checksums = [self._move(os.preadv, *self._place[last], [buffer]) for last in self.enrolled[-1:]]
        return torch.tensor([self._row_bytes, *(checksums or [0])], dtype=torch.int64)

    def _write_copy(self, path: Path) -> None:
        """Write all states in the order of `enrolled` to a new file, then rename it."""
        aside = path.with_name(f".{path.name}.part")
        buffer = memoryview(bytearray(self._row_bytes))
        try:
            with self._file_errors("write"), open_to_write(aside, os.O_WRONLY | os.O_TRUNC) as file:
                for descriptor, row in self._place.values():
                    self._move(os.preadv, descriptor, row, [buffer])
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def restore(self, clients: Sequence[int], tensors: dict[str, Tensor], path: Path | None) -> None:
        """Take over the states of these clients from a checkpoint whose states lie at `path`.

        A file of another run is only read: new states go to this population's own file.
        """
        if path is None:
            raise UserError("the clients' states are in a separate file: open the run with pfedbayes.load")
        if path == self._path:
            descriptor = self._open()
        else:
            with self._file_errors("read", path):
                descriptor = os.open(path, os.O_RDONLY | NO_DETOUR)
            self._descriptors.append(descriptor)
            _lock(descriptor, path, shared=True)
        rows = tensors["rows"].tolist()
        length = os.fstat(descriptor).st_size
        there = min(rows, default=0) >= 0 and (max(rows, default=-1) + 1) * self._row_bytes <= length
        fits = len(rows) == len(clients) and there
        if fits:
            self._place = {client: (descriptor, row) for client, row in zip(clients, rows, strict=True)}
            fits = torch.equal(self._fingerprint(), tensors["witness"].cpu())
        if not fits:
            self._place = {}
            raise UserError(f"{path} does not belong to the saved state beside it: put back the file of that run")
        if "checksums" in tensors:
            self._checksums = dict(zip(clients, tensors["checksums"].tolist(), strict=False))
        if descriptor == self._own:
            self._end = length // self._row_bytes if self._row_bytes else 0
            self._saved = set(rows)
            self._free = [row for row in range(self._end) if row not in self._saved]

    def pin(self, rows: Sequence[int]) -> None:
        self._pinned = set(rows)
        self._free = [row for row in self._free if row not in self._pinned]

    def saved(self) -> None:
        before, self._saved = self._saved, {row for file, row in self._place.values() if file == self._own}
        self._free.extend(before - self._saved - self._pinned)

    def clear(self) -> None:
        _close_all(self._descriptors)
        self._forget()

    def close(self) -> None:
        _close_all(self._descriptors)

    @contextlib.contextmanager
    def _file_errors(self, verb: Literal["read", "write"], path: Path | None = None) -> Iterator[None]:
        """Turn errors of the file system into UserErrors."""
        path = path or self._path
        try:
            yield
        except OSError as error:
            remedy = "put back the file of that run"
            if verb == "write":
                remedy = (
                    "free space or choose another --out; the last checkpoint is intact, continue from it with --resume"
                )
            if path is None:
                remedy = "free space there or set TMPDIR to another folder"
            where = path or f"a temporary file in {tempfile.gettempdir()}"
            raise UserError(f"cannot {verb} {where} ({error.strerror or error}): {remedy}") from None


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _lock(descriptor: int, path: Path | None, shared: bool = False) -> None:
    """Lock a file: shared to read it, exclusively to write to it."""
    if not lock(descriptor, shared):
        raise UserError(f"{path} is in use: wait for the run, or close the program that has loaded it")


@cache
def _movers(process: int) -> ThreadPoolExecutor:
    """Return the threads that move rows. A forked process has none of its parent's."""
    return ThreadPoolExecutor(8, thread_name_prefix="clients")


def _move_rows(move: Callable[..., int], calls: Iterable[tuple[Any, ...]]) -> list[int]:
    """Call `move` with each of these arguments in parallel, and return the results.

    Raise the error of a failed call, or an interrupt, only after all calls have ended.
    """
    movers, tasks = _movers(os.getpid()), list[Future[int]]()
    try:
        for call in calls:
            tasks.append(movers.submit(move, *call))
        wait(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise
    return [task.result() for task in tasks]


def _bytes(leaf: Tensor) -> Tensor:
    """Return a stacked leaf as rows of bytes (n, width), without a copy if it is contiguous."""
    return leaf.contiguous().reshape(len(leaf), math.prod(leaf.shape[1:])).view(torch.uint8)
