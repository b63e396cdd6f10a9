"""Kills, failures and full disks at every moment: what is resumed afterwards has the same bits.

python -m tests.fuzz.crashes --kills 200
python -m tests.fuzz.crashes --failures
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from .bases import BLOBS, TINY, Bases, stopped
from .disk import Disk, Way
from .forks import Ended, command, in_child, preload

RUN = ["run", *BLOBS, *TINY, "--set", "data.validation=0.2", "--set", "execution.checkpoint_seconds=0", "--out", "run"]
MORE = ["--set", "training.rounds=3", "--set", "training.participants=2"]
IN_FILE = ["--set", "training.train=chosen", "--set", "execution.resting=file"]


class Scenario(NamedTuple):
    """A command whose work must never be lost."""

    command: list[str]
    """It is called again after whatever has happened, until it succeeds."""
    result: Callable[[Path], Any]
    """Returns everything that has to be the same in the end."""
    bases: tuple[str, ...] = ()
    """What it starts from."""


def of_run(folder: Path) -> Any:
    """Return the bits of a run: states, scores, summary and calibration, without times."""
    import torch

    from pfedbayes import load, runs

    run = runs.read_run(folder / "run")
    tensors = load(folder / "run").tensors()
    calibration = (folder / "run" / runs.CALIBRATION).read_bytes()
    return {
        "tensors": {
            name: _hash(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, one in tensors.items()
        },
        "log": [str(dataclasses.replace(record, seconds=0.0)) for record in run.rounds],
        "summary": str(dataclasses.replace(run.summary, seconds=0.0)) if run.summary else None,
        "calibration": _hash(calibration),
        "config": str(run.sections),
        "left": sorted(path.name for path in (folder / "run").rglob("*.part")),
        "page": (folder / "run" / runs.REPORT).read_text().endswith("</html>\n"),
    }


def of_file(name: str) -> Callable[[Path], Any]:
    """Return a function that reads the bits of one file."""
    return lambda folder: (_hash((folder / name).read_bytes()), sorted(path.name for path in folder.rglob("*.part")))


def of_sweep(folder: Path) -> Any:
    """Return the results of a sweep, without times."""
    records = json.loads((folder / "results.json").read_text())
    plain = records if isinstance(records, list) else records["records"]
    return [{key: value for key, value in record.items() if key not in ("seconds", "checksum")} for record in plain]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


SCENARIOS: dict[str, Scenario] = {
    "run": Scenario([*RUN, "--resume"], of_run),
    "run, in a file": Scenario([*RUN, *IN_FILE, *MORE, "--resume"], of_run),
    "run, early stopping": Scenario([*RUN, "--set", "training.patience=9", "--resume"], of_run),
    "resume": Scenario([*RUN, *MORE, "--resume"], of_run, ("part/run",)),
    "extend": Scenario([*RUN, "--set", "training.rounds=3", "--resume"], of_run, ("finished/run",)),
    "extend, in a file": Scenario([*RUN, *IN_FILE, "--set", "training.rounds=3", "--resume"], of_run, ("in-file/run",)),
    "personalize": Scenario(
        ["personalize", "table", "--data", "east.csv", "--steps", "2", "--client", "new"],
        of_file("table/newcomers/new.safetensors"), ("table", "east.csv"),
    ),
    "certify": Scenario(["certify", "table", "--steps", "1", "--draws", "2"], of_file("table/certificate.json"),
        ("table",)),
    "export": Scenario(["export", "table", "--client", "north", "-o", "x.safetensors"], of_file("x.safetensors"),
        ("table",)),
    "export all": Scenario(["export", "table", "--all", "-o", "x"], of_file("x/west.safetensors"), ("table",)),
    "predict": Scenario(
        ["predict", "table", "--client", "north", "--input", "new.csv", "-o", "x.csv"], of_file("x.csv"),
        ("table", "new.csv")
    ),
    "report": Scenario(["report", "table"], of_file("table/report.html"), ("table",)),
    "sweep": Scenario(
        ["sweep", "sweep/sweep.toml", "--out", "out", "--results", "results.json"], of_sweep, ("sweep",)
    ),
}  # fmt: skip


class Trouble(Exception):
    """What is not as it should be."""


class Bench:
    """A folder in which scenarios are played."""

    def __init__(self, root: Path, bases: Bases) -> None:
        self.root, self.bases = root, bases
        self._count = 0

    def fresh(self, scenario: Scenario) -> Path:
        """Return a new folder with what the scenario starts from."""
        self._count += 1
        folder = self.root / f"bench-{self._count}"
        (folder / "work").mkdir(parents=True)
        for name in scenario.bases:
            self.bases.copy(name, folder / "work" / Path(name).name)
        return folder

    def call(
        self, folder: Path, scenario: Scenario, disk: Disk | None = None, kill_after: float | None = None
    ) -> Ended:
        """Call the command of a scenario in a child."""

        def work() -> int:
            os.chdir(folder / "work")
            if disk:
                disk.install()
            code = command(*scenario.command)
            if disk:
                (folder / "done").write_text("\n".join(disk.done))
            return code

        return in_child(work, folder, 120, kill_after)

    def result(self, folder: Path, scenario: Scenario) -> str:
        """Return what the scenario has led to, as a text."""

        def work() -> int:
            (folder / "result").write_text(json.dumps(scenario.result(folder / "work"), indent=1))
            return 0

        ended = in_child(work, folder, 120)
        if ended.code:
            raise Trouble(f"the result cannot be read: {ended.err[-500:]}")
        return (folder / "result").read_text()

    def undisturbed(self, scenario: Scenario) -> tuple[str, list[str], float]:
        """Return the result, the operations on the disk and the seconds of a scenario that is left alone."""
        folder = self.fresh(scenario)
        ended = self.call(folder, scenario, Disk(folder / "work"))
        if ended.code:
            raise Trouble(f"it fails undisturbed: {ended.err[-500:]}")
        return self.result(folder, scenario), (folder / "done").read_text().splitlines(), ended.seconds

    def recover(self, folder: Path, scenario: Scenario, expected: str) -> None:
        """Call the command again, without trouble, and compare."""
        ended = self.call(folder, scenario)
        if ended.code:
            raise Trouble(f"it cannot be resumed: {ended.err[-500:]}")
        if (found := self.result(folder, scenario)) != expected:
            pairs = zip(found.splitlines(), expected.splitlines(), strict=False)
            raise Trouble(f"another result: {next((pair for pair in pairs if pair[0] != pair[1]), 'of other length')}")
        shutil.rmtree(folder)


def make_bases(bases: Bases) -> None:
    """Add runs to continue."""
    bases.ensure()
    if (bases.root / "part").exists():
        return
    for name, more in (("finished", []), ("in-file", [*IN_FILE, *MORE, "--set", "training.rounds=2"])):
        folder = bases.root / name
        folder.mkdir()
        scenario = Scenario([*RUN, *more], of_run)
        ended = in_child(lambda f=folder, s=scenario: os.chdir(f) or command(*s.command), folder, 120)
        if ended.code:
            raise RuntimeError(ended.err)
    (bases.root / "part").mkdir()
    unfinished = lambda: os.chdir(bases.root / "part") or stopped([*RUN, *MORE], Path("run"), 1)  # noqa: E731
    if (ended := in_child(unfinished, bases.root / "part", 120)).code:
        raise RuntimeError(ended.err)


def play_failures(bench: Bench, names: list[str], every: int, ways: list[Way]) -> list[str]:
    """Let each operation on the disk fail in each way, and return what went wrong."""
    troubles = []
    print(
        f"{'scenario':<22}{'operations':>11}{'troubled':>10}{'refused':>9}{'went on':>9}{'killed':>8}{'different':>11}"
    )
    for name in names:
        scenario = SCENARIOS[name]
        expected, done, _ = bench.undisturbed(scenario)
        counts = {"refused": 0, "went on": 0, "killed": 0}
        bad = 0
        for way in ways:
            for at in range(1, len(done) + 1, every):
                folder = bench.fresh(scenario)
                ended = bench.call(folder, scenario, Disk(folder / "work", way, at))
                kind = {0: "went on", 2: "refused", -9: "killed"}.get(ended.code if ended.code is not None else 1)
                try:
                    if kind is None or "Traceback" in ended.err:
                        raise Trouble(f"exit code {ended.code}: {ended.err.strip()[-600:]}")
                    counts[kind] += 1
                    bench.recover(folder, scenario, expected)
                except Trouble as trouble:
                    bad += 1
                    troubles.append(f"{name}, {way} at {at} ({done[at - 1]}): {trouble}")
        tried = len(ways) * len(range(0, len(done), every))
        figures = (len(done), tried, *counts.values(), bad)
        print(f"{name:<22}{''.join(f'{figure:>10}' for figure in figures)}", flush=True)
    return troubles


def play_kills(bench: Bench, names: list[str], kills: int, seed: int) -> list[str]:
    """Kill commands at random moments, several times each before they may finish; return what went wrong."""
    rng, troubles = random.Random(seed), []
    print(f"{'scenario':<22}{'kills':>7}{'recoveries':>12}{'different':>11}")
    for k, name in enumerate(names):
        scenario = SCENARIOS[name]
        expected, _, seconds = bench.undisturbed(scenario)
        wanted = kills * (k + 1) // len(names) - kills * k // len(names)
        killed = recoveries = bad = 0
        while killed < wanted:
            folder = bench.fresh(scenario)
            for _ in range(rng.randint(1, 6)):
                ended = bench.call(folder, scenario, kill_after=rng.uniform(0.0, 1.1 * seconds))
                killed += ended.code == -9
                if ended.code != -9:
                    break
            try:
                recoveries += 1
                bench.recover(folder, scenario, expected)
            except Trouble as trouble:
                bad += 1
                troubles.append(f"{name}, killed: {trouble}")
        print(f"{name:<22}{killed:>7}{recoveries:>12}{bad:>11}", flush=True)
    return troubles


def main() -> int:
    """Return 1 if a result was lost or has other bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.crashes", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="kill so many times, at random moments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", action="store_true", help="let every operation on the disk fail")
    parser.add_argument("--every", type=int, default=1, help="only every so many operations")
    parser.add_argument("--way", choices=get_args(Way)[1:], action="append", help="default: all ways")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="default: all")
    parser.add_argument("--bases", type=Path, help="keep the good files here")
    options = parser.parse_args()
    preload()
    os.environ.update(OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="crashes-") as name:
        bases = Bases(options.bases or Path(name) / "bases")
        make_bases(bases)
        bench, names = Bench(Path(name).resolve(), bases), options.scenario or list(SCENARIOS)
        troubles = []
        if options.failures:
            troubles += play_failures(bench, names, options.every, options.way or list(get_args(Way)[1:]))
        if options.kills:
            troubles += play_kills(bench, names, options.kills, options.seed)
        for trouble in troubles:
            print(trouble)
    return int(bool(troubles))


if __name__ == "__main__":
    sys.exit(main())
