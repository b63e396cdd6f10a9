"""Contenders taking turns: everybody ready first, then a few rounds of each in turn, several times over. Who is not on
turn is stopped: some have threads and processes that are never quite idle."""

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
# How far contenders may differ, as a fraction of the way that the models go in a round. Where a gradient is next to
# nothing Adam still takes a full step, so that rounding shows: 2e-4 for the MLP and 3e-3 for the VGG in float32. One
# local step more in twenty is 4e-2 or more.
TOLERANCE, TOLERANCE_TF32 = 0.03, 0.2

# The same for every contender.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # as the command pfedbayes has it
    "GOMP_SPINCOUNT": "500",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Contender:
    """kind: the module of this package that it is; needs: a package of others without which it cannot start;
    same: whether it computes what the first contender of its section computes; beside: the contender that its ratio is
    to, the first if not given."""

    name: str
    kind: str
    work: Work
    options: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    same: bool = False
    beside: str | None = None

    @property
    def missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


@dataclass(frozen=True)
class Turns:
    """repeats: turns of each contender; a turn is so many rounds that it takes about `seconds`, or exactly `rounds`;
    warm_up: rounds before the first turn."""

    repeats: int
    warm_up: int
    seconds: float = 0.0
    rounds: int | None = None


@dataclass(frozen=True)
class Section:
    """Contenders of one table. The first is the one that the others are compared with, if they do not say which."""

    title: str
    note: str
    contenders: list[Contender]
    turns: Turns

    def __post_init__(self) -> None:
        names = {contender.name for contender in self.contenders}
        for contender in self.contenders:
            if contender.beside and contender.beside not in names:
                raise ValueError(
                    f"{contender.name!r} is to stand beside {contender.beside!r}, which is not in the table"
                )


class Disagreement(Exception):
    """Contenders that should compute the same do not."""


class Failed(Exception):
    """A contender's process has ended before its time."""


class Worker:
    """The process of a contender."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender, self.memory_mb, self.tf32 = contender, 0.0, False
        spec = {"kind": contender.kind, "work": dataclasses.asdict(contender.work), "options": contender.options}
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
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
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        with self._process:  # closes the pipes, so that it leaves its loop, and waits for it
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def rest(self) -> None:
        """Stop it with all that it has started."""
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def on_turn(self) -> Iterator[None]:
        """Let it go on for this long."""
        self._signal(signal.SIGCONT)
        yield
        self.rest()

    def _signal(self, number: signal.Signals) -> None:
        for member in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(member, number)

    def hear(self) -> float:
        """Wait for its answer: the seconds that the last order took."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            complaint = self._errors.read_text().strip().splitlines() or ["no word why"]
            raise Failed(f"{self.contender.name}: {complaint[-1]}")
        answer = json.loads(line)
        self.memory_mb, self.tf32 = answer["memory_mb"], answer["tf32"]
        return float(answer["seconds"])

    def tell(self, order: dict[str, object]) -> None:
        """Give it an order and do not wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead one is noticed when it does not answer
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _ask(self, order: dict[str, object]) -> float:
        self.tell(order)
        return self.hear()

    def train(self, rounds: int) -> float:
        """Seconds that so many rounds take."""
        return self._ask({"rounds": rounds})

    def forget_peak(self) -> None:
        """Count its peak memory from here on: setting up may have taken more than training does."""
        self._ask({"forget_peak": True})

    def outcome(self, folder: Path) -> NDArray[np.float64]:
        path = folder / "outcome.npy"
        self._ask({"outcome": str(path)})
        vector: NDArray[np.float64] = np.load(path)
        return vector


def gap(found: NDArray[np.float64], expected: NDArray[np.float64], start: NDArray[np.float64]) -> float:
    """How far two results lie apart, as a fraction of the way that they have come from the start."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected - start))


def require_same(contender: Contender, difference: float, tf32: bool) -> None:
    """Refuse to time what does not compute the same."""
    if not difference < (TOLERANCE_TF32 if tf32 else TOLERANCE):
        raise Disagreement(f"{contender.name} differs by {difference:.1%} of a round from what it should compute")


def race(section: Section, after_turn: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row of raw results for each contender, in the section's order."""
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
            shift = repeat % len(names)  # nobody always comes after the same one
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
    """Train a first round of everybody at the same time, since most of it is setting up; see that those who should
    come to the same models as the first contender do."""
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
    """The median of the ratios turn by turn, so that what slows down the machine for a while cancels."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))
