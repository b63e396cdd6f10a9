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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from .bases import IN_FILE, MORE, RUN, SEARCH, Bases
from .disk import Disk, Way
from .forks import Ended, command, in_child, preload, spread

KILLS = 5  # in one play
TIMES = ("seconds", "commit", "source", "checksum")  # what two equal sweeps may differ in


class Scenario(NamedTuple):
    """A command whose work must never be lost."""

    command: list[str]
    """It is called again after whatever has happened, until it succeeds."""
    result: Callable[[Path], Any]
    """Returns everything that has to be the same in the end."""
    bases: tuple[str, ...] = ()
    """What it starts from."""
    stays: tuple[list[str], ...] = ()
    """Commands that succeed before it, and must never fail, whatever happens to it."""


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
    return [{key: value for key, value in record.items() if key not in TIMES} for record in plain]


def of_search(folder: Path) -> Any:
    """Return what a search has found; settings that train beside fewer others differ in the last digits."""
    from pfedbayes.sweep.tuning import read_tuning

    found = read_tuning(folder / "search" / "tuning.json")
    return {
        "chosen": found.chosen,
        "scores": [[score and f"{score:.4g}" for score in trial.scores] for trial in found.trials],
        "left": sorted(path.name for path in folder.rglob("*.part")),
        "experiment": (folder / "search" / "tuned.toml").read_text(),
        "page": (folder / "search" / "tuning.html").read_text().endswith("</html>\n"),
    }


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


USABLE = (
    ["report", "run", "--out", "page.html"],
    ["predict", "run", "--client", "client 0", "--input", "blobs.csv"],
)
SCENARIOS: dict[str, Scenario] = {
    "run": Scenario([*RUN, "--resume"], of_run),
    "run, in a file": Scenario([*RUN, *IN_FILE, *MORE, "--resume"], of_run),
    "run, early stopping": Scenario([*RUN, "--set", "training.patience=9", "--resume"], of_run),
    "resume": Scenario([*RUN, *MORE, "--resume"], of_run, ("part/run",)),
    "extend": Scenario([*RUN, "--set", "training.rounds=3", "--resume"], of_run, ("finished/run", "blobs.csv"), USABLE),
    "extend, in a file": Scenario(
        [*RUN, *IN_FILE, "--set", "training.rounds=3", "--resume"], of_run, ("in-file/run", "blobs.csv"), USABLE
    ),
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
    "tune": Scenario(["tune", *SEARCH, "--settings", "4", "--out", "search"], of_search),
}  # fmt: skip


class Trouble(Exception):
    """What is not as it should be."""


class Undisturbed(NamedTuple):
    """A scenario that was left alone."""

    result: str
    operations: list[str]
    """What it did to the disk."""
    seconds: float


class Bench:
    """A folder in which scenarios are played."""

    def __init__(self, root: Path, bases: Bases) -> None:
        self.root, self.bases = root, bases
        self._count = 0

    def fresh(self, scenario: Scenario) -> Path:
        """Return a new folder with what the scenario starts from."""
        self._count += 1
        folder = self.root / f"{os.getpid()}-{self._count}"
        (folder / "work").mkdir(parents=True)
        for name in scenario.bases:
            self.bases.copy(name, folder / "work" / Path(name).name)
        return folder

    def stays(self, folder: Path, scenario: Scenario) -> None:
        """Check that what could be used before can still be used."""
        for arguments in scenario.stays:
            ended = in_child(lambda a=arguments: os.chdir(folder / "work") or command(*a), folder, 120)
            if ended.code:
                raise Trouble(f"{arguments[0]} is no longer possible: {ended.err[-500:]}")

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

    def undisturbed(self, scenario: Scenario) -> Undisturbed:
        """Play a scenario that is left alone."""
        folder = self.fresh(scenario)
        ended = self.call(folder, scenario, Disk(folder / "work"))
        if ended.code:
            raise Trouble(f"it fails undisturbed: {ended.err[-500:]}")
        return Undisturbed(self.result(folder, scenario), (folder / "done").read_text().splitlines(), ended.seconds)

    def recover(self, folder: Path, scenario: Scenario, expected: str) -> None:
        """Call the command again, without trouble, and compare."""
        ended = self.call(folder, scenario)
        if ended.code:
            raise Trouble(f"it cannot be resumed: {ended.err[-500:]}")
        if (found := self.result(folder, scenario)) != expected:
            pairs = zip(found.splitlines(), expected.splitlines(), strict=False)
            raise Trouble(f"another result: {next((pair for pair in pairs if pair[0] != pair[1]), 'of other length')}")
        shutil.rmtree(folder)


class Played(NamedTuple):
    """What came of one play."""

    scenario: str
    kinds: list[str]
    """How the disturbed calls ended."""
    trouble: str | None
    """What went wrong afterwards."""


def play_failure(bench: Bench, known: dict[str, Undisturbed], name: str, way: Way, at: int) -> Played:
    """Let one operation on the disk fail, then call the command again without trouble."""
    scenario = SCENARIOS[name]
    folder = bench.fresh(scenario)
    ended = bench.call(folder, scenario, Disk(folder / "work", way, at))
    refused = (1, 2) if scenario.command[0] == "sweep" else (2,)  # a sweep goes on without the cell
    kinds = {0: "went on", -9: "killed"} | dict.fromkeys(refused, "refused")
    kind = kinds.get(99 if ended.code is None else ended.code, "crashed")
    try:
        if kind == "crashed" or "Traceback" in ended.err:
            raise Trouble(f"exit code {ended.code}: {ended.err.strip()[-600:]}")
        bench.stays(folder, scenario)
        bench.recover(folder, scenario, known[name].result)
    except Trouble as trouble:
        return Played(name, [kind], f"{name}, {way} at {at} ({known[name].operations[at - 1]}): {trouble}")
    return Played(name, [kind], None)


def play_kills(bench: Bench, known: dict[str, Undisturbed], name: str, seed: int) -> Played:
    """Kill a command at KILLS random moments; whenever it was faster, compare and start anew."""
    rng, scenario, killed = random.Random(seed), SCENARIOS[name], 0
    folder = bench.fresh(scenario)
    try:
        while killed < KILLS:
            ended = bench.call(folder, scenario, kill_after=rng.uniform(0.0, known[name].seconds))
            if ended.code not in (0, -9):
                raise Trouble(f"exit code {ended.code}: {ended.err.strip()[-600:]}")
            killed += ended.code == -9
            if ended.code == 0 or killed == KILLS:
                bench.stays(folder, scenario)
                bench.recover(folder, scenario, known[name].result)
                folder = bench.fresh(scenario)
    except Trouble as trouble:
        return Played(name, ["killed"] * killed, f"{name}, killed with seed {seed}: {trouble}")
    return Played(name, ["killed"] * killed, None)


def table(played: list[Played], known: dict[str, Undisturbed]) -> str:
    """Return how often each scenario was disturbed, how that ended, and how often the result was wrong."""
    headings = ("steps", "disturbed", "refused", "went on", "killed", "wrong")
    lines = [f"{'scenario':<22}{''.join(f'{heading:>11}' for heading in headings)}"]
    for name, undisturbed in known.items():
        own = [each for each in played if each.scenario == name]
        kinds = [kind for each in own for kind in each.kinds]
        wrong = sum(each.trouble is not None for each in own)
        ends = [kinds.count(kind) for kind in headings[2:5]]
        figures = (len(undisturbed.operations), len(kinds), *ends, wrong)
        lines.append(f"{name:<22}{''.join(f'{figure:>11}' for figure in figures)}")
    return "\n".join(lines)


def main() -> int:
    """Return 1 if a result was lost or has other bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.crashes", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="kill so many times, at random moments")
    parser.add_argument("--workers", type=int, default=2)
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
        bases.ensure()
        bench, names = Bench(Path(name).resolve(), bases), options.scenario or list(SCENARIOS)
        known = {each: bench.undisturbed(SCENARIOS[each]) for each in names}
        plays: list[Callable[[], Played]] = []
        if options.failures:
            plays += [
                partial(play_failure, bench, known, each, way, at)
                for each in names
                for way in options.way or get_args(Way)[1:]
                for at in range(1, len(known[each].operations) + 1, options.every)
            ]
        count = -(-options.kills // KILLS)
        plays += [partial(play_kills, bench, known, names[k % len(names)], k) for k in range(count)]
        played: list[Played] = []
        for one in spread(plays, lambda play: play(), options.workers):
            played.append(one)
            if one.trouble:
                print(one.trouble, flush=True)
        print(table(played, known))
    return int(len(played) != len(plays) or any(one.trouble for one in played))


if __name__ == "__main__":
    sys.exit(main())
