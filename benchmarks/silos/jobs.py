"""The jobs of the benchmark: each fits one method to one split and leaves one record.

Rivals and the protocols that need their packages are imported lazily: a machine that trains the methods of this package
only need not have them.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks.silos import activity, newcomers, ours, rates, text
from benchmarks.silos.records import Record, read_record, record_file, write_record
from benchmarks.silos.scores import NotFitted, Predictions, score
from benchmarks.silos.tables import TEST, TRAIN, VALIDATION, Split, Table, split_table
from pfedbayes.errors import Diverged, UserError, one_line
from pfedbayes.runs import describe_code, describe_machine, now

RIVAL_SECONDS = 300  # limit of a rival's time
SPLIT = ("tables", "heart")  # the protocols whose data are a `Split`


@dataclass(frozen=True)
class Job:
    """One method on one split."""

    protocol: str
    table: Table
    split: int
    method: str
    quick: bool = False
    """A small version, for a trial."""

    def file(self, records: Path) -> Path:
        """Return the file of its record."""
        return record_file(records, self.protocol, self.table.name, self.split, self.method)

    def __str__(self) -> str:
        return f"{self.table.name}, split {self.split}, {self.method}"


@dataclass(frozen=True)
class Circumstances:
    """What all jobs of a call share."""

    records: Path
    """The folder of the records."""
    version: str
    commit: str | None
    machine: str
    workers: int
    device: str = "cpu"
    """Where the networks of the protocol "activity" train."""

    @classmethod
    def here(cls, records: Path, workers: int, device: str = "cpu") -> Circumstances:
        """Return those of this machine and checkout."""
        code, machine = describe_code(), describe_machine()
        name = machine["gpu"] if device == "cuda" else machine["cpu"]
        return cls(records, code["version"], code["commit"], name, workers, device)


@dataclass(frozen=True)
class Result:
    """What a job measures."""

    scores: dict[str, float]
    by_client: dict[str, float]
    seconds: float
    resolved: str | None = None
    per_client: dict[str, dict[str, float]] | None = None

    @classmethod
    def of(cls, predictions: Predictions, seconds: float, resolved: str | None = None) -> Result:
        """Score predictions."""
        return cls(*score(predictions), seconds, resolved)


def unfinished(jobs: Sequence[Job], records: Path, retry: bool) -> list[Job]:
    """Return the jobs without a record of the present rows and settings. retry: also those that failed."""
    known: dict[tuple[str, Table, int, bool], tuple[str, str]] = {}  # digest and task
    left = []
    for job in jobs:
        if job.file(records).exists():
            place = (job.protocol, job.table, job.split, job.quick)
            if place not in known:
                data = data_of(job)
                known[place] = data.digest, data.task
            digest, task = known[place]
            done = read_record(job.file(records))
            same = done.digest == digest and done.settings == settings_of(job, task)
            if same and not (retry and done.failed):
                continue
        left.append(job)
    return left


def settings_of(job: Job, task: str) -> str | None:
    """Return a hash of the settings of a method of this package, which change with its defaults; None for rivals."""
    own = job.method in ours.METHODS and job.protocol in (*SPLIT, "newcomers")
    return ours.settings_digest(job.method, task) if own else None


def data_of(job: Job) -> Any:
    """Return the data of a job: a `Split`, or what its protocol has instead, with a digest."""
    if text.holds(job.table.path):
        return text.read(job.table, "newcomers" if job.protocol == "newcomers" else "tables", job.split)
    if job.protocol in ("tables", rates.PROTOCOL):
        return split_table(job.table, job.split)
    if job.protocol == "heart":
        from benchmarks.silos import flamby  # noqa: PLC0415  (see above)

        return flamby.split_heart(job.table, job.split)
    if job.protocol == "survival":
        from benchmarks.silos import survival  # noqa: PLC0415  (see above)

        return survival.read(job.table.path)
    if job.protocol == "newcomers":
        return newcomers.read(job.table, job.split)
    return activity.read(job.table.path, job.table.name, job.split, job.quick)


def run(jobs: Sequence[Job], circumstances: Circumstances) -> None:
    """Run jobs in several processes and show the progress. A stop keeps the records of finished jobs."""
    from rich.console import Console  # noqa: PLC0415  (see above)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs))
        for record in finished(jobs, circumstances):
            said = result_text(record)
            bar.update(task, advance=1, description=said)
            if not console.is_terminal or record.failed:
                console.print(said, soft_wrap=True, markup=False, highlight=False)


def result_text(record: Record) -> str:
    """Return a record in a few words."""
    job = f"{record.table}, split {record.split}, {record.method}"
    if record.scores is None:
        return f"{job}: failed: {record.failed}"
    name, value = next(iter(record.scores.items()))
    return f"{job}: {name} {value:.4f} in {record.seconds:.1f} s"


def finished(jobs: Sequence[Job], circumstances: Circumstances, seconds: float = math.inf) -> Iterator[Record]:
    """Run jobs and yield their records as they come. seconds: start no job after this time."""
    end = time.monotonic() + seconds
    waiting = takewhile(lambda job: time.monotonic() < end, jobs)
    if circumstances.workers == 1:
        yield from (work(job, circumstances) for job in waiting)
        return
    pool = ProcessPoolExecutor(circumstances.workers, multiprocessing.get_context("spawn"))
    try:
        running = {pool.submit(work, job, circumstances) for job in islice(waiting, circumstances.workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(work, job, circumstances) for job in islice(waiting, len(done))}
            yield from (each.result() for each in done)
    finally:
        pool.shutdown(cancel_futures=True)


def work(job: Job, circumstances: Circumstances) -> Record:
    """Run a job on one thread and write its record. A method that fails leaves a record with the reason."""
    data = data_of(job)
    result, failed, start = None, None, time.monotonic()
    try:
        with one_torch_thread():
            result = measure(job, data, circumstances)
    except (UserError, Diverged, NotFitted, TimeoutError) as error:
        failed = one_line(error)
    except Exception as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {one_line(error)}"
    task, rows, clients = outline(data)
    record = Record(
        protocol=job.protocol,
        table=job.table.name,
        split=job.split,
        method=job.method,
        task=task,
        digest=data.digest,
        rows=rows,
        clients=clients,
        scores=result.scores if result else None,
        by_client=result.by_client if result else None,
        seconds=result.seconds if result else time.monotonic() - start,
        failed=failed,
        settings=settings_of(job, task),
        resolved=result.resolved if result else None,
        version=circumstances.version,
        commit=circumstances.commit,
        machine=circumstances.machine,
        workers=circumstances.workers,
        date=now(),
        per_client=result.per_client if result else None,
    )
    write_record(circumstances.records, record)
    return record


def outline(data: Any) -> tuple[str, tuple[int, int, int], int]:
    """Return the task, the numbers of training, validation and test rows, and the number of clients."""
    if isinstance(data, Split):
        train, validation, test = (int((data.parts == part).sum()) for part in (TRAIN, VALIDATION, TEST))
        return data.task, (train, validation, test), len(data.clients)
    return data.task, data.rows, data.num_clients


def measure(job: Job, data: Any, circumstances: Circumstances) -> Result:
    """Fit the method of a job and score it."""
    if job.protocol == "survival":
        from benchmarks.silos import survival  # noqa: PLC0415  (see above)

        with tempfile.TemporaryDirectory() as folder:
            return Result(*survival.measure(data, job.method, Path(folder)))
    if job.protocol == rates.PROTOCOL:
        with tempfile.TemporaryDirectory() as folder:
            loss, seconds = ours.validate(data, *rates.parse(job.method), Path(folder))
            return Result({"nll": loss}, {}, seconds)
    if job.protocol == "newcomers":
        if job.method == newcomers.RIVAL:
            return limited(lambda: _rivals_of_newcomers(data))
        with tempfile.TemporaryDirectory() as folder:
            return Result(**newcomers.measure(data, Path(folder))._asdict())
    if job.protocol == "activity":
        # A long run: its folder stays, so that a rerun continues it.
        kept = job.file(circumstances.records).with_suffix("")
        result = Result(**activity.measure(data, job.method, kept, circumstances.device)._asdict())
        shutil.rmtree(kept)
        return result
    if job.method not in ours.METHODS:
        return limited(lambda: _rival(data, job.method))
    with tempfile.TemporaryDirectory() as folder:
        fit = ours.fit(data, job.method, Path(folder))
        return Result.of(fit.predictions, fit.seconds, fit.method)


def _rival(data: Split, method: str) -> Result:
    from benchmarks.silos import rivals  # noqa: PLC0415  (see above)
    from benchmarks.silos.encoding import encode  # noqa: PLC0415

    rival = rivals.find(method, data.task)
    if rival is None:
        raise ValueError(f"there is no rival {method!r}")
    start = time.monotonic()
    predictions = rivals.predict(rival, encode(data))
    return Result.of(predictions, time.monotonic() - start)


def _rivals_of_newcomers(data: newcomers.Newcomers) -> Result:
    from benchmarks.silos import newcomer_rivals  # noqa: PLC0415  (see above)

    return Result(**newcomer_rivals.measure(data)._asdict())


def limited(fit: Callable[[], Result]) -> Result:
    """Fit rivals with one thread and in limited time."""
    from threadpoolctl import threadpool_limits  # noqa: PLC0415  (see above)

    with threadpool_limits(1), at_most(RIVAL_SECONDS):
        return fit()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this time, in the main thread of a process; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)  # a timer of the caller goes on
