"""Contenders take turns: all start up first, then each trains a few rounds per turn, several times.

Contenders that wait are stopped, because some have threads and processes that are never quite idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.work import Work
from benchmarks.worker import family

ROOT = Path(__file__).parents[1]
# How far contenders may differ, as a fraction of the distance that the models move in a round. Adam takes a full step
# even for tiny gradients, so rounding shows: 2e-4 for the MLP and 3e-3 for the VGG in float32. One local step more in
# twenty is 4e-2 or more.
TOLERANCE, TOLERANCE_TF32 = 0.03, 0.2

# The same for every contender.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # as in the command pfedbayes
    "GOMP_SPINCOUNT": "500",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Contender:
    """One row of a table of the page."""

    name: str
    kind: str
    """The module of this package that implements it."""
    work: Work
    options: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    """A package that it requires."""
    same: bool = False
    """Whether it must compute the same as the first contender of its section."""
    beside: str | None = None
    """The contender that its ratio refers to; None: the first."""
    tree: Path = ROOT
    """The work tree whose code it runs."""

    @property
    def missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


@dataclass(frozen=True)
class Turns:
    """How often and how long contenders train."""

    repeats: int
    """Turns of each contender."""
    warm_up: int
    """Rounds before the first turn."""
    seconds: float = 0.0
    """About how long a turn takes."""
    rounds: int | None = None
    """Rounds of a turn; None: as many as fit into `seconds`."""


@dataclass(frozen=True)
class Section:
    """The contenders of one table. Ratios refer to the first unless a contender names another."""

    title: str
    note: str
    contenders: list[Contender]
    turns: Turns

    def __post_init__(self) -> None:
        names = {contender.name for contender in self.contenders}
        for contender in self.contenders:
            if contender.beside and contender.beside not in names:
                raise ValueError(f"{contender.name!r} is compared with {contender.beside!r}, which is not in the table")


class Disagreement(Exception):
    """Contenders that must compute the same do not."""


class Failed(Exception):
    """The process of a contender ended too early."""


class Worker:
    """The process of a contender."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender, self.memory_mb, self.tf32 = contender, 0.0, False
        spec = {"kind": contender.kind, "work": dataclasses.asdict(contender.work), "options": contender.options}
        tree = contender.tree
        paths = [str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")]
        home = {"FLWR_HOME": str(folder / "flwr"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._errors = folder / f"{contender.name}.txt".replace("/", " ")
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT | home,
                cwd=tree,  # python -m looks into the working directory first
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        with self._process:  # closes the pipes, so that the process leaves its loop, and waits
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def rest(self) -> None:
        """Stop the process and all its descendants."""
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def on_turn(self) -> Iterator[None]:
        """Let the process run inside this context."""
        self._signal(signal.SIGCONT)
        yield
        self.rest()

    def _signal(self, number: signal.Signals) -> None:
        for member in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(member, number)

    def hear(self) -> float:
        """Wait for the reply and return the seconds of the last order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            complaint = self._errors.read_text().strip().splitlines() or ["no error message"]
            raise Failed(f"{self.contender.name}: {complaint[-1]}")
        answer = json.loads(line)
        self.memory_mb, self.tf32 = answer["memory_mb"], answer["tf32"]
        return float(answer["seconds"])

    def tell(self, order: dict[str, object]) -> None:
        """Send an order without waiting for the reply."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead process is noticed when it does not reply
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _ask(self, order: dict[str, object]) -> float:
        self.tell(order)
        return self.hear()

    def train(self, rounds: int) -> float:
        """Train this many rounds and return the seconds."""
        return self._ask({"rounds": rounds})

    def forget_peak(self) -> None:
        """Restart the measurement of peak memory: setup may need more than training."""
        self._ask({"forget_peak": True})

    def outcome(self, folder: Path) -> NDArray[np.float64]:
        path = folder / "outcome.npy"
        self._ask({"outcome": str(path)})
        vector: NDArray[np.float64] = np.load(path)
        return vector


def gap(found: NDArray[np.float64], expected: NDArray[np.float64], start: NDArray[np.float64]) -> float:
    """Return the distance of two results as a fraction of the distance from the start."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected - start))


def require_same(contender: Contender, difference: float, tf32: bool) -> None:
    """Raise if a contender does not compute the same."""
    if not difference < (TOLERANCE_TF32 if tf32 else TOLERANCE):
        raise Disagreement(f"{contender.name} differs by {difference:.1%} of a round from what it should compute")


def race(section: Section, after_turn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row of raw results for each contender, in the order of the section."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        workers: dict[str, Worker] = {}
        absent: dict[str, str] = {}
        for contender in section.contenders:
            if contender.missing:
                absent[contender.name] = "not installed"
            else:
                workers[contender.name] = stack.enter_context(Worker(contender, folder))
        for name, worker in list(workers.items()):
            try:
                worker.hear()
            except Failed as failure:
                if worker.contender.needs is None:
                    raise
                absent[name] = f"failed: {failure}"
                del workers[name]
        gaps = _first_round(list(workers.values()), folder)
        turns, rounds = section.turns, {}
        for worker in workers.values():
            worker.rest()
        for name, worker in workers.items():
            with worker.on_turn():
                worker.forget_peak()
                last = [worker.train(1) for _ in range(turns.warm_up)][-1]
            rounds[name] = turns.rounds or max(1, round(turns.seconds / last))
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        names = list(workers)
        for repeat in range(turns.repeats):
            shift = repeat % len(names)  # contenders do not always follow the same one
            for name in names[shift:] + names[:shift]:
                with workers[name].on_turn():
                    seconds[name].append(workers[name].train(rounds[name]) / rounds[name])
            after_turn(f"  turn {repeat + 1} of {turns.repeats}")
        return [
            {"name": contender.name, "absent": absent[contender.name]}
            if contender.name in absent
            else {
                "name": contender.name,
                "seconds": seconds[contender.name],
                "rounds_per_turn": rounds[contender.name],
                "memory_mb": workers[contender.name].memory_mb,
                "tf32": workers[contender.name].tf32,
                "gap": gaps.get(contender.name),
                "beside": contender.beside,
            }
            for contender in section.contenders
        ]


def _first_round(workers: list[Worker], folder: Path) -> dict[str, float]:
    """Train the first round of all contenders at once, since it is mostly setup, and compare the resulting models."""
    first, *others = workers
    comparable = [worker for worker in others if worker.contender.same]
    start = first.outcome(folder) if comparable else np.empty(0)
    for worker in workers:
        worker.tell({"rounds": 1})
    for worker in workers:
        worker.hear()
    expected = first.outcome(folder) if comparable else start
    gaps = {}
    for worker in comparable:
        gaps[worker.contender.name] = gap(worker.outcome(folder), expected, start)
        require_same(worker.contender, gaps[worker.contender.name], first.tf32 or worker.tf32)
    return gaps


def median_ratio(seconds: list[float], reference: list[float]) -> float:
    """Return the median of the ratios of single turns, in which a temporarily slow machine cancels."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))
