"""The run folder: what was asked for, where it ran, what came out, and the state to go on from.

    config.toml        the resolved experiment
    run.json           format, versions, commit, hardware, execution plan, clients
    rounds.jsonl       one line per evaluated round, append-only
    state.safetensors  the last checkpoint, with its round and the length of the log at that moment
    calibration.safetensors  what its models take and how they did on validation data, once the run is finished
    preprocessing.json how inputs and targets were made from one's own data
    clients.bin        the states that a checkpoint refers to, where clients rest in a file
    summary.json       the result, once the run is finished
    report.html        the page for people
    federation.jsonl   on Flower: one line per attempt at a round, who was refused and why; nothing is cut from it

A checkpoint is one file, written aside and renamed, so that a run killed at any moment finds either the old or the
new one; the log is cut back to the length that the checkpoint names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import pfedbayes
from pfedbayes.engine.tensor_files import Rows, write_tensors
from pfedbayes.errors import UserError

FORMAT = 1
CONFIG, INFO, LOG, STATE, CLIENTS, SUMMARY, REPORT, JOURNAL = (
    "config.toml", "run.json", "rounds.jsonl", "state.safetensors", "clients.bin", "summary.json", "report.html",
    "federation.jsonl",
)  # fmt: skip
PREPROCESSING, CALIBRATION = "preprocessing.json", "calibration.safetensors"
RESUME = "; what was saved before is intact: start again (pfedbayes run with --resume) to go on from it"
BEST = "best."  # begins the names of the tensors of the best round, where one is kept


@dataclass(frozen=True)
class Run:
    """A run folder as read back."""

    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    rounds: list[dict[str, Any]]
    summary: dict[str, Any] | None
    journal: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Best:
    """The round with the least loss on validation data, and the tensors of the federation after it."""

    round: int
    loss: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a federation after `round` rounds and `seconds` of work; `log_bytes` of the log belong to it. best:
    with early stopping, what is kept."""

    round: int
    seconds: float
    log_bytes: int
    tensors: dict[str, Tensor]
    best: Best | None = None

    def let_go(self) -> Checkpoint:
        """It without its tensors, and with a copy of the best ones: nothing of it is in the file any more."""
        best = self.best and replace(self.best, tensors={name: one.clone() for name, one in self.best.tensors.items()})
        return replace(self, tensors={}, best=best)


def read(folder: Path) -> Run:
    """Read a run folder, finished or not; a log line cut short by a kill is left out."""
    if not (folder / INFO).is_file() or not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder ({INFO} or {CONFIG} is missing): give the folder of a run")
    try:
        info = json.loads((folder / INFO).read_text())
        config = tomllib.loads((folder / CONFIG).read_text())
        summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).exists() else None
        rounds, journal = (_lines(folder / name) for name in (LOG, JOURNAL))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} holds a damaged file ({error}): start the run again in a new folder") from None
    if info.get("format") != FORMAT:
        raise UserError(
            f"{folder} has format {info.get('format')}, not {FORMAT}: read it with pfedbayes {info.get('version')}"
        )
    return Run(folder, config, info, rounds, summary, journal)


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint, or None if the run was stopped before its first."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        best = None
        if "best_round" in meta:
            kept = {name.removeprefix(BEST): tensors.pop(name) for name in list(tensors) if name.startswith(BEST)}
            best = Best(int(meta["best_round"]), float(meta["best_loss"]), kept)
        return Checkpoint(int(meta["round"]), float(meta["seconds"]), int(meta["log_bytes"]), tensors, best)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): start the run again in a new folder") from None


class Writer:
    """Writes one run folder. Holds a lock while it lives: a folder has one writer, and a killed one leaves no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder, RESUME):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"{folder} is in use by another run: wait for it or give another folder") from None

    def close(self) -> None:
        """Give the folder free; one that nothing was written to goes."""
        if [path.name for path in self.folder.iterdir()] == [".lock"]:
            (self.folder / ".lock").unlink()
            self.folder.rmdir()
        self._lock.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the folder, see `write_file`."""
        write_file(self.folder / name, content, RESUME)

    def append(self, record: dict[str, Any], name: str = LOG) -> None:
        """Add a line to the log."""
        with writing(self.folder, RESUME), (self.folder / name).open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def cut_torn_line(self, name: str) -> None:
        """Cut off what a kill or a full disk has left of a line, so that the next one begins one of its own."""
        path = self.folder / name
        if path.exists():
            with writing(self.folder, RESUME), path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def truncate_log(self, log_bytes: int) -> None:
        """Cut the log back to what a checkpoint knows of."""
        with writing(self.folder, RESUME), (self.folder / LOG).open("a") as file:
            file.truncate(log_bytes)

    def checkpoint(
        self, tensors: Mapping[str, Tensor | Rows], round: int, seconds: float, best: Best | None = None
    ) -> None:
        """Save the state after a round, together with the length of the log and the best round so far."""
        path = self.folder / LOG
        with writing(self.folder, RESUME), path.open("a") as file:
            os.fsync(file.fileno())
        meta = {"round": str(round), "seconds": repr(seconds), "log_bytes": str(path.stat().st_size)}
        if best:
            meta |= {"best_round": str(best.round), "best_loss": repr(best.loss)}
            tensors = {**tensors, **{BEST + name: tensor for name, tensor in best.tensors.items()}}
        with replacing(self.folder / STATE, RESUME) as file:
            write_tensors(file, tensors, meta)


def write_file(path: Path, content: str | bytes, hint: str = "") -> None:
    """Write a file of which the whole content is known, see `replacing`."""
    with replacing(path, hint) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, hint: str = "") -> Iterator[BinaryIO]:
    """A file that is written aside, forced to disk and renamed: it is there whole or not at all."""
    refuse_folder(path)
    aside = path.with_name(f".{path.name}.part")
    with writing(path, hint):
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def refuse_folder(path: Path) -> None:
    """Refuse to write a file over a folder."""
    with writing(path):
        if path.is_dir():
            raise UserError(f"{path} is a folder: give the name of a file")


@contextlib.contextmanager
def writing(path: Path, hint: str = "") -> Iterator[None]:
    """Turn the file system's refusals into one clear line, which ends with the hint."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {path} ({error.strerror or error}): free space or give another path{hint}"
        ) from None


def describe_machine() -> dict[str, Any]:
    """The hardware and versions behind a result."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe_code() -> dict[str, Any]:
    """Version of the package, a digest of its source files and, in a checkout, its commit."""
    here = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        source.update(f"{path.relative_to(here).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    git = ["git", "-C", str(here)]
    commit = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__], check=False, capture_output=True, timeout=10
        )
        if tracked.returncode == 0:
            found = subprocess.run(
                [*git, "describe", "--always", "--dirty"], check=False, capture_output=True, timeout=10, text=True
            )
            commit = found.stdout.strip() or None
    return {"version": pfedbayes.__version__, "commit": commit, "source": source.hexdigest()[:16]}


def now() -> str:
    """The time, in a form that sorts."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Clock:
    """Seconds of work, counted on over resumes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start
