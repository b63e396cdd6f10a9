"""Run something in a forked child: imports are paid once, and a crash, a hang or a kill stays in the child."""

import faulthandler
import gc
import importlib
import io
import os
import pkgutil
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import pfedbayes.cli
from pfedbayes.errors import UserError

MEMORY = 12 << 30  # bytes of addresses; torch alone maps several GiB
FILE_BYTES = 1 << 30

T = TypeVar("T")
R = TypeVar("R")


class Ended(NamedTuple):
    """How a child has ended."""

    code: int | None
    """The exit code; negative for a signal, None for a child that was killed because it took too long."""
    out: str
    err: str
    seconds: float


def in_child(work: Callable[[], int], folder: Path, seconds: float = 20.0, kill_after: float | None = None) -> Ended:
    """Return how `work` ended in a child whose output goes to `folder`.

    seconds: a child that takes longer hangs. kill_after: kill it after so many seconds, to see what that leaves.
    """
    for name in ("stdout", "stderr"):
        (folder / name).write_bytes(b"")
    start = time.monotonic()
    child = os.fork()
    if not child:
        _be_child(work, folder, seconds)
    descriptor = os.pidfd_open(child)
    left = seconds if kill_after is None else kill_after
    while not (ready := select.select([descriptor], [], [], left)[0]) and kill_after is None:
        left = seconds + _waited(child) - (time.monotonic() - start)  # a busy machine is no hang
        if left <= 0:
            break
    if not ready:
        os.killpg(child, signal.SIGKILL) if _leads_group(child) else os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(status) if ready or kill_after is not None else None
    out, err = ((folder / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
    return Ended(code, out, err, time.monotonic() - start)


def _waited(pid: int) -> float:
    """Return for how many seconds a process was ready to run, but had no core; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _leads_group(child: int) -> bool:
    try:
        return os.getpgid(child) == child
    except ProcessLookupError:
        return False


def _be_child(work: Callable[[], int], folder: Path, seconds: float) -> None:
    code = 70
    try:
        os.setsid()
        _redirect(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * seconds) + 1, int(2 * seconds) + 2))
        tempfile.tempdir = None
        faulthandler.dump_traceback_later(0.95 * seconds, file=2)
        code = work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def _redirect(folder: Path) -> None:
    """Let the standard streams be files, and behave as those of a fresh process in a UTF-8 locale."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", errors, write_through=True)
        setattr(sys, name, stream)


def command(*arguments: str) -> int:
    """Call `pfedbayes …` in this process and return its exit code."""
    sys.argv = ["pfedbayes", *map(_as_argument, arguments)]
    try:
        pfedbayes.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _as_argument(text: str) -> str:
    """Return a text as Python would find it in its arguments: bytes that are not UTF-8 are half surrogate pairs."""
    return text.replace("\0", "").encode(errors="surrogatepass").decode(errors="surrogateescape")


def library(function: Callable[[], object]) -> int:
    """Call a function of the library as the command line would: a UserError is one line and exit code 2."""
    try:
        function()
    except UserError as error:
        print(f"pfedbayes: {error}", file=sys.stderr)
        return 2
    return 0


def preload() -> None:
    """Import whatever a command may import later, and let no thread of torch start before a fork."""
    import torch._dynamo
    from PIL import Image

    torch.set_num_threads(1)
    Image.init()
    with warnings.catch_warnings(action="ignore"):  # of the libraries of Flower, about each other
        for module in pkgutil.walk_packages(pfedbayes.__path__, "pfedbayes."):
            if ".template." not in module.name and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def spread(tasks: Sequence[T], work: Callable[[T], R], workers: int) -> Iterator[R]:
    """Do tasks in several forked workers, and yield the results as they come."""
    receivers: list[Connection] = []
    for k in range(workers):
        receiver, sender = Pipe(duplex=False)
        if not os.fork():
            try:
                for task in tasks[k::workers]:
                    sender.send(work(task))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        sender.close()
        receivers.append(receiver)
    while receivers:
        for ready in wait(receivers):
            try:
                yield ready.recv()
            except EOFError:
                receivers.remove(ready)
    for _ in range(workers):
        os.wait()
