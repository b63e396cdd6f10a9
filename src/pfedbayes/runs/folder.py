"""The run folder: the config, the machine, the scores, and the state from which a run resumes.

    config.toml        the resolved experiment
    run.json           `RunInfo`: versions, commit, hardware, execution plan, clients
    rounds.jsonl       one `RoundRecord` per evaluated round, append-only
    state.safetensors  the last checkpoint, with its round and the length of the log at that moment
    calibration.safetensors  how the final models did on validation data, for predictions
    preprocessing.json how inputs and targets are made from the user's own data
    clients.bin        the client states of a checkpoint, where clients rest in a file
    summary.json       `Summary`: the result of a finished run
    report.html        the report
    federation.jsonl   on Flower: one `JournalEntry` per attempt at a round, append-only

A checkpoint is one file that is replaced as a whole, so a run killed at any moment finds either the old or the new
one. On resume the log is cut back to the length that the checkpoint names.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.files.tensors import Rows, write_tensors
from pfedbayes.files.typed import from_json, to_json
from pfedbayes.files.writing import replacing, write_file, writing
from pfedbayes.runs.experiment import Experiment, from_sections
from pfedbayes.runs.schema import FORMAT, JournalEntry, RoundRecord, RunInfo, Summary

CONFIG, INFO, LOG, STATE, CLIENTS, SUMMARY, REPORT, JOURNAL = (
    "config.toml", "run.json", "rounds.jsonl", "state.safetensors", "clients.bin", "summary.json", "report.html",
    "federation.jsonl",
)  # fmt: skip
PREPROCESSING, CALIBRATION = "preprocessing.json", "calibration.safetensors"
RESUME = "; the last checkpoint is intact: resume from it with pfedbayes run --resume"
BEST = "best."  # prefix of the tensors of the best round
NEW_RUN = "start the run again in a new folder"

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    sections: dict[str, dict[str, Any]]
    """config.toml as it was written, to print it and to compare it."""
    info: RunInfo
    rounds: list[RoundRecord]
    summary: Summary | None
    """None while the run is unfinished."""
    journal: list[JournalEntry] = field(default_factory=list)
    """Empty unless the run was made on Flower."""

    @cached_property
    def experiment(self) -> Experiment:
        """The config. On Flower the nodes have the data, so its section `data` says nothing."""
        if self.info.federation is None:
            return from_sections(self.sections)
        kept = {name: values for name, values in self.sections.items() if name not in ("data", "federation")}
        return from_sections(kept | {"data": {"validation": 0.1}})


@dataclass(frozen=True)
class Best:
    """The round with the smallest validation loss."""

    round: int
    loss: float
    tensors: dict[str, Tensor]
    """State of the federation after that round."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved state of a federation."""

    round: int
    """Rounds done."""
    seconds: float
    """Seconds of work since the start of the run."""
    log_bytes: int
    """Length of the log at the time of the checkpoint."""
    tensors: dict[str, Tensor]
    best: Best | None = None
    """With early stopping: the best round so far."""

    def release_file(self) -> Checkpoint:
        """Return the checkpoint without its tensors and with a copy of the best ones, so that no tensor maps the file.

        Otherwise the mapped file would keep its disk space after the next checkpoint has replaced it.
        """
        best = self.best and replace(self.best, tensors={name: one.clone() for name, one in self.best.tensors.items()})
        return replace(self, tensors={}, best=best)


def read_run(folder: Path) -> Run:
    """Read a run folder, finished or not. The last line of a log may be cut short by a kill: it is left out."""
    info = read_info(folder)
    try:
        sections = tomllib.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is damaged ({error}): {NEW_RUN}") from None
    return Run(
        folder,
        sections,
        info,
        _read_lines(folder / LOG, RoundRecord),
        _parse(folder / SUMMARY, _read_json(folder / SUMMARY), Summary) if (folder / SUMMARY).exists() else None,
        _read_lines(folder / JOURNAL, JournalEntry),
    )


def read_info(folder: Path) -> RunInfo:
    """Read run.json; refuse a folder that is not a run folder."""
    if not (folder / INFO).is_file() or not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder ({INFO} or {CONFIG} is missing): give the folder of a run")
    path = folder / INFO
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder ({INFO} is missing): give the folder of a run")
    content = _read_json(path)
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise UserError(
            f"{folder} has format {content.get('format')}, not {FORMAT}: read it with pfedbayes "
            f"{content.get('version')}"
        )
    return _parse(path, content, RunInfo)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {NEW_RUN}") from None


def _read_lines(path: Path, cls: type[T]) -> list[T]:
    try:
        text = path.read_text() if path.exists() else ""
        contents = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {NEW_RUN}") from None
    return [_parse(f"{path}, line {number}", content, cls) for number, content in enumerate(contents, 1)]


def _parse(where: Path | str, content: Any, cls: type[T]) -> T:
    try:
        return from_json(cls, content)
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}): {NEW_RUN}") from None


def read_checkpoint(folder: Path, name: str = STATE) -> Checkpoint | None:
    """Read the last checkpoint, or a kept one; None if there is none, as before the first one."""
    path = folder / name
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
        raise UserError(f"{path} is damaged ({error}): {NEW_RUN}") from None


class Writer:
    """Write one run folder. The writer locks the folder until it is closed or its process ends."""

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
        """Unlock the folder; delete it if nothing was written to it."""
        if [path.name for path in self.folder.iterdir()] == [".lock"]:
            (self.folder / ".lock").unlink()
            self.folder.rmdir()
        self._lock.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the folder as a whole."""
        write_file(self.folder / name, content, RESUME)

    def write_info(self, info: RunInfo) -> None:
        """Write run.json."""
        self.write(INFO, _dumps(info, indent=1))

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json, which marks the run as finished."""
        self.write(SUMMARY, _dumps(summary, indent=1))

    def append(self, record: RoundRecord | JournalEntry) -> None:
        """Add a line to the log of its kind."""
        name = LOG if isinstance(record, RoundRecord) else JOURNAL
        with writing(self.folder, RESUME), (self.folder / name).open("a") as file:
            file.write(_dumps(record))

    def cut_torn_line(self, name: str) -> None:
        """Cut off a last line that a kill or a full disk has left incomplete."""
        path = self.folder / name
        if path.exists():
            with writing(self.folder, RESUME), path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def truncate_log(self, log_bytes: int) -> None:
        """Cut the log back to the length that a checkpoint names."""
        with writing(self.folder, RESUME), (self.folder / LOG).open("a") as file:
            file.truncate(log_bytes)

    def checkpoint(
        self,
        tensors: Mapping[str, Tensor | Rows],
        round: int,
        seconds: float,
        best: Best | None = None,
        log_bytes: int | None = None,
    ) -> None:
        """Save the state after a round, the length of the log and the best round so far.

        log_bytes: the length of the log that belongs to the state; None for its length now.
        """
        path = self.folder / LOG
        with writing(self.folder, RESUME), path.open("a") as file:
            os.fsync(file.fileno())
        length = path.stat().st_size if log_bytes is None else log_bytes
        meta = {"round": str(round), "seconds": repr(seconds), "log_bytes": str(length)}
        if best:
            meta |= {"best_round": str(best.round), "best_loss": repr(best.loss)}
            tensors = {**tensors, **{BEST + name: tensor for name, tensor in best.tensors.items()}}
        with replacing(self.folder / STATE, RESUME) as file:
            write_tensors(file, tensors, meta)


def _dumps(record: RunInfo | Summary | RoundRecord | JournalEntry, indent: int | None = None) -> str:
    return json.dumps(to_json(record), indent=indent, allow_nan=False) + "\n"


class Clock:
    """Seconds of work, continued over resumes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """Return the seconds so far."""
        return time.monotonic() - self._start
