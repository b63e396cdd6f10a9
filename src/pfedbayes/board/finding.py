"""Find the run folders below some folders, and read them again when they have changed."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.report import tables
from pfedbayes.runs.folder import JOURNAL, Run

DEPTH = 3  # folders below a given one in which runs are searched
MOST_FOLDERS = 20_000  # folders that a search opens
MOST_RUNS = 200  # runs that the page lists: the newest ones
QUIET_SECONDS = 120.0  # a run that has written nothing for so long, and for five of its intervals, may have stopped
FILES = (runs.INFO, runs.CONFIG, runs.LOG, runs.SUMMARY, JOURNAL)


@dataclass(frozen=True)
class Shown:
    """A run folder as the page shows it."""

    key: str
    """Its name in addresses, which leads nowhere else."""
    name: str
    run: Run | None
    """None if it cannot be read."""
    problem: str
    """Why it cannot be read."""
    changed: float
    """When its newest file was written, in seconds since 1970."""

    @property
    def round(self) -> int:
        """The last round that is known."""
        assert self.run is not None  # noqa: S101, the page shows the problem instead
        journal = [entry.round for entry in self.run.journal if entry.taken and entry.attempt]
        logged = [record.round for record in self.run.rounds]
        return max([0, *logged[-1:], *journal[-1:]])

    @property
    def rounds(self) -> int:
        """The rounds that the run is to have."""
        assert self.run is not None  # noqa: S101
        return self.run.experiment.training.rounds

    def state(self, now: float) -> str:
        """Return whether it trains, has ended, or has written nothing for long."""
        if self.run is None:
            return "unreadable"
        if self.run.summary is not None and self.run.summary.rounds >= min(self.rounds, self.round):
            return "finished"
        waits = [later.seconds - sooner.seconds for sooner, later in pairwise(self.run.rounds)]
        patience = max(QUIET_SECONDS, 5 * statistics.median(waits) if waits else 0.0)
        return "training" if now - self.changed < patience else "silent"

    def seconds_left(self, now: float) -> float | None:
        """Return about how long a run that trains still takes; None if that is not known."""
        if self.run is None or self.state(now) != "training":
            return None
        done = max(
            [(record.round, record.seconds) for record in self.run.rounds[-1:]]
            + [(entry.round, entry.seconds) for entry in self.run.journal[-1:]],
            default=(0, 0.0),
        )
        return done[1] / done[0] * (self.rounds - done[0]) if done[0] else None

    @property
    def nodes(self) -> tuple[int, int] | None:
        """For a federation: the nodes that answered last, and all of them."""
        if self.run is None or self.run.info.federation is None:
            return None
        return (self.run.journal[-1].replies if self.run.journal else 0, len(self.run.info.clients))


class Finder:
    """The runs below some folders. Links are not followed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder: give a run folder, or a folder that holds some")
        self._roots = tuple(Path(os.path.abspath(folder)) for folder in folders)  # noqa: PTH100, follows no link
        self._known: dict[Path, tuple[object, Shown]] = {}

    def find(self) -> dict[str, Shown]:
        """Return the runs by their keys, the newest first."""
        places = sorted(self._places(), key=_changed, reverse=True)[:MOST_RUNS]
        found = [self._show(place) for place in places]
        self._known = {place: self._known[place] for place in places}
        return {each.key: each for each in found}

    def _places(self) -> Iterator[Path]:
        seen = set[Path]()
        ahead = [(root, 0) for root in reversed(self._roots)]
        opened = 0
        while ahead and opened < MOST_FOLDERS:
            folder, depth = ahead.pop()
            opened += 1
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            if any(entry.name == runs.INFO and entry.is_file(follow_symlinks=False) for entry in entries):
                if folder not in seen:
                    seen.add(folder)
                    yield folder
            elif depth < DEPTH:
                below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
                ahead += [(path, depth + 1) for path in below if not path.name.startswith(".")]

    def _show(self, place: Path) -> Shown:
        stamp = tuple(_stamp(place / name) for name in FILES)
        known = self._known.get(place)
        if known is not None and known[0] == stamp:
            return known[1]
        run, problem = None, ""
        try:
            run = runs.read_run(place)
            tables.metric_names(run)  # what the page needs
            run.experiment.training  # noqa: B018, raises if the config is damaged
        except UserError as error:
            run, problem = None, str(error)
        key = hashlib.sha256(os.fsencode(place)).hexdigest()[:12]
        shown = Shown(key, place.name, run, problem, _changed(place))
        self._known[place] = (stamp, shown)
        return shown


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed(place: Path) -> float:
    stamps = [stamp for name in FILES if (stamp := _stamp(place / name))]
    return max((stamp[0] for stamp in stamps), default=0) / 1e9


def now() -> float:
    """Return the time, in seconds since 1970."""
    return time.time()
