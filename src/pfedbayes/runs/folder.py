"""The run folder: the config, the machine, the scores, and the state from which a run resumes.

    config.toml        the resolved experiment
    run.json           `RunInfo`: versions, commit, hardware, execution plan, clients
    rounds.jsonl       one `RoundRecord` per evaluated round, append-only
    state.safetensors  the last checkpoint, with its round and the length of the log at that moment
    calibration.safetensors  how the final models did on validation data, for predictions
    preprocessing.json how inputs and targets are made from the user's own data
    clients.bin        the client states of a checkpoint, where clients rest in a file
    finished.safetensors  the state of the last result while a finished run is extended
    summary.json       `Summary`: the result of a finished run
    report.html        the report
    federation.jsonl   on Flower: one `JournalEntry` per attempt at a round, append-only

A checkpoint is one file that is replaced as a whole, so a run killed at any moment finds either the old or the new
one. On resume the log is cut back to the length that the checkpoint names.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pfedbayes.errors import UserError, one_line
from pfedbayes.files.checksums import dump_json, note_unchecked
from pfedbayes.files.locking import lock
from pfedbayes.files.reading import parse_object, parse_toml, read_bytes, read_object, reading
from pfedbayes.files.tensors import Rows, TensorFile, open_tensors, write_tensors
from pfedbayes.files.typed import from_json, to_json
from pfedbayes.files.writing import open_to_write, replacing, write_file, writing
from pfedbayes.nets.import_path import refuse_untrusted
from pfedbayes.runs.consistency import require_info, require_rounds, require_summary
from pfedbayes.runs.experiment import Experiment, from_sections
from pfedbayes.runs.naming import MakeMethod, make_method, make_without_code, method_name
from pfedbayes.runs.schema import FORMAT, UNCHECKED_FORMAT, JournalEntry, RoundRecord, RunInfo, Summary

CONFIG, INFO, LOG, STATE, CLIENTS, SUMMARY, REPORT, JOURNAL = (
    "config.toml", "run.json", "rounds.jsonl", "state.safetensors", "clients.bin", "summary.json", "report.html",
    "federation.jsonl",
)  # fmt: skip
PREPROCESSING, CALIBRATION, FINISHED = "preprocessing.json", "calibration.safetensors", "finished.safetensors"
TUNING, TUNING_PAGE = "tuning.json", "tuning.html"  # of a search for settings before the run
RESUME = "; the last checkpoint is intact: resume from it with pfedbayes run --resume"
ROW_LOSSES = "row_losses"  # the tensor of `Best.row_losses`
BEST = "best."  # prefix of the tensors of the best round
NEW_RUN = "start the run again in a new folder"
LARGEST_LOG = 2**36  # bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    sections: dict[str, dict[str, Any]]
    """config.toml, to print it and to compare it."""
    info: RunInfo
    rounds: list[RoundRecord]
    summary: Summary | None
    """None while the run is unfinished."""
    journal: list[JournalEntry] = field(default_factory=list)
    """Empty unless the run was made on Flower."""

    @cached_property
    def experiment(self) -> Experiment:
        """The config; code that it names is not imported. On Flower its section `data` says nothing."""
        return self._experiment(make_without_code)

    def with_method(self, trust_module: bool) -> Experiment:
        """Return the config with its method; refuse one whose code has to be imported, unless it is trusted."""
        refuse_untrusted(method_name(self.experiment.method), self.folder, trust_module, "method")
        return self._experiment(make_method)

    def _experiment(self, make: MakeMethod) -> Experiment:
        if self.info.federation is None:
            return from_sections(self.sections, make=make)
        kept = {name: values for name, values in self.sections.items() if name not in ("data", "federation")}
        return from_sections(kept | {"data": {"validation": 0.1}}, make=make)


@dataclass(frozen=True)
class Best:
    """The round that early stopping keeps."""

    round: int
    loss: float
    """Validation loss."""
    tensors: dict[str, Tensor]
    """State of the federation after that round."""
    row_losses: Tensor | None = None
    """Smoothed validation loss (S, n) by seed and row; None in checkpoints of early versions."""


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
        best = self.best and replace(
            self.best,
            tensors={name: one.clone() for name, one in self.best.tensors.items()},
            row_losses=None if self.best.row_losses is None else self.best.row_losses.clone(),
        )
        return replace(self, tensors={}, best=best)


def read_run(folder: Path, log_bytes: int | None = None) -> Run:
    """Read a run folder, finished or not. The last line of a log may be cut short by a kill: it is left out.

    log_bytes: read only this much of the log; a checkpoint names the length that belongs to it.

    While a finished run is being extended, the folder still shows its last result, and the log ends there; with
    `log_bytes` it does not.
    """
    info = read_info(folder)
    checked = info.format > UNCHECKED_FORMAT
    with reading(folder / CONFIG, NEW_RUN):
        sections = parse_toml(read_bytes(folder / CONFIG, follow=False).decode())
        if not all(isinstance(values, dict) for values in sections.values()):
            raise ValueError("it has settings outside of sections")
        if "path" in sections.get("data", {}):  # earlier versions had no piecewise-linear inputs
            sections["data"].setdefault("pieces", 0)
    summary = None
    if _exists(folder / SUMMARY):
        with reading(folder / SUMMARY, NEW_RUN):
            summary = from_json(Summary, _require_checksum(*read_object(folder / SUMMARY, follow=False), checked))
            require_summary(info, summary)
    rounds = _read_lines(folder / LOG, RoundRecord, checked, log_bytes)
    with reading(folder / LOG, NEW_RUN):
        require_rounds(info, rounds)
    if summary is not None and log_bytes is None:
        rounds = [record for record in rounds if record.round <= summary.rounds]
    return Run(folder, sections, info, rounds, summary, _read_lines(folder / JOURNAL, JournalEntry, checked))


def read_info(folder: Path) -> RunInfo:
    """Read run.json; refuse a folder that is not a run folder."""
    with reading(folder, "give the folder of a run"):
        if not (_exists(folder / INFO) and _exists(folder / CONFIG)):
            raise UserError(f"{folder} is not a run folder ({INFO} or {CONFIG} is missing): give the folder of a run")
    path = folder / INFO
    with reading(path, NEW_RUN):
        content, checked = read_object(path, follow=False)
        format = content.get("format")
        if format not in (UNCHECKED_FORMAT, FORMAT):
            raise UserError(
                f"{folder} has format {one_line(repr(format), 40)}, not {FORMAT}: read it with pfedbayes "
                f"{one_line(content.get('version'), 40)}"
            )
        if format == UNCHECKED_FORMAT:
            note_unchecked(str(folder))
        info = from_json(RunInfo, _require_checksum(content, checked, format != UNCHECKED_FORMAT))
        require_info(info)
        return info


def _exists(path: Path) -> bool:
    """Return whether there is a file or a link, even one that leads nowhere."""
    return os.path.lexists(path)


def _require_checksum(content: dict[str, Any], checked: bool, required: bool) -> dict[str, Any]:
    if required and not checked:
        raise ValueError("its checksum is missing")
    return content


def _read_lines(path: Path, cls: type[T], checked: bool, length: int | None = None) -> list[T]:
    """Read the records of a log, or of its first `length` bytes. checked: whether every line must have a checksum."""
    content = b""
    with reading(path, f"put back the file of this run, or {NEW_RUN}"):
        if _exists(path):
            content = read_bytes(path, follow=False, largest=LARGEST_LOG)
        if length is not None:
            if len(content) < length:
                raise ValueError(f"it has {len(content):,} bytes, fewer than the {length:,} of the last checkpoint")
            content = content[:length]
            if content and not content.endswith(b"\n"):
                raise ValueError("its line at the last checkpoint is incomplete")
        records = []
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                records.append(from_json(cls, _require_checksum(*parse_object(line), checked)))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return records


def read_checkpoint(folder: Path, name: str = STATE) -> Checkpoint | None:
    """Read the last checkpoint, or a kept one; None if there is none, as before the first one."""
    path = folder / name
    if not _exists(path):
        return None
    with open_state(path) as file:
        meta, tensors, best = file.about, file.tensors(), None
        if "best_round" in meta:
            kept = {name.removeprefix(BEST): tensors.pop(name) for name in list(tensors) if name.startswith(BEST)}
            best = Best(_count(meta, "best_round"), float(meta["best_loss"]), kept, tensors.pop(ROW_LOSSES, None))
        return Checkpoint(_count(meta, "round"), float(meta["seconds"]), _count(meta, "log_bytes"), tensors, best)


@contextlib.contextmanager
def open_state(path: Path) -> Iterator[TensorFile]:
    """Open the state file of a run folder."""
    with open_tensors(path, NEW_RUN, follow=False) as file:
        if "format" in file.about:
            _require_checksum({}, file.checked, required=True)
        yield file


def _count(meta: Mapping[str, str], name: str) -> int:
    value = int(meta[name])
    if value < 0:
        raise ValueError(f"{name} is negative")
    return value


class Writer:
    """Write one run folder. The writer locks the folder until it is closed or its process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder, RESUME):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_to_write(folder / ".lock", os.O_WRONLY)
        if not lock(self._lock):
            self._lock.close()
            raise UserError(f"{folder} is in use by another run: wait for it or give another folder")

    def close(self) -> None:
        """Unlock the folder; delete it if nothing was written to it."""
        with contextlib.suppress(OSError):  # it is only tidying up
            if [path.name for path in self.folder.iterdir()] == [".lock"]:
                (self.folder / ".lock").unlink()
                self.folder.rmdir()
        self._lock.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the folder as a whole."""
        write_file(self.folder / name, content, RESUME)

    def write_info(self, info: RunInfo) -> None:
        """Write run.json."""
        self.write(INFO, dump_json(to_json(info), indent=1))

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json, which marks the run as finished."""
        self.write(SUMMARY, dump_json(to_json(summary), indent=1))
        with writing(self.folder, RESUME):
            (self.folder / FINISHED).unlink(missing_ok=True)

    def append(self, record: RoundRecord | JournalEntry) -> None:
        """Add a line to the log of its kind."""
        name = LOG if isinstance(record, RoundRecord) else JOURNAL
        with writing(self.folder, RESUME), open_to_write(self.folder / name) as file:
            file.write(dump_json(to_json(record)).encode())

    def cut_torn_line(self, name: str) -> None:
        """Cut off a last line that a kill or a full disk has left incomplete."""
        path = self.folder / name
        if path.exists():
            with writing(self.folder, RESUME), open_to_write(path, os.O_RDWR) as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def truncate_log(self, log_bytes: int) -> None:
        """Cut the log back to the length that a checkpoint names."""
        with writing(self.folder, RESUME), open_to_write(self.folder / LOG) as file:
            if os.fstat(file.fileno()).st_size < log_bytes:
                raise UserError(f"{self.folder / LOG} is shorter than the last checkpoint says: put the file back")
            file.truncate(log_bytes)

    def keep_finished_state(self) -> None:
        """Keep the state of a finished run while the run is extended, so that its result stays complete."""
        with writing(self.folder, RESUME):
            aside = self.folder / f".{FINISHED}.part"
            aside.unlink(missing_ok=True)
            os.link(self.folder / STATE, aside)
            aside.replace(self.folder / FINISHED)

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
        with writing(self.folder, RESUME), open_to_write(path) as file:
            os.fsync(file.fileno())
        length = path.stat().st_size if log_bytes is None else log_bytes
        meta = {"format": str(FORMAT), "round": str(round), "seconds": repr(seconds), "log_bytes": str(length)}
        if best:
            meta |= {"best_round": str(best.round), "best_loss": repr(best.loss)}
            tensors = {**tensors, **{BEST + name: tensor for name, tensor in best.tensors.items()}}
            tensors |= {} if best.row_losses is None else {ROW_LOSSES: best.row_losses}
        with replacing(self.folder / STATE, RESUME) as file:
            write_tensors(file, tensors, meta)


class Clock:
    """Seconds of work, continued over resumes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """Return the seconds so far."""
        return time.monotonic() - self._start
