"""Compare the speed of this tree with that of another commit: both take turns in one run.

    python -m benchmarks.commits 578dd4b
    python -m benchmarks.commits 7980d03 --table examples/heart.csv:disease:hospital

Each tree runs its own `benchmarks.worker`, so the other commit needs one that obeys the same orders. A ratio below 1
means that this tree is faster. With --table, both run `pfedbayes run --data` on a table, from the start of the process
to its report, with the defaults of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.ours import EAGER
from benchmarks.race import ROOT, Contender, Disagreement, Failed, Section, Turns, median_ratio, race
from benchmarks.work import Work
from benchmarks.worker import cores
from pfedbayes.engine.plan import choose_device, has_compiler

THIS, OTHER = "this tree", "the other commit"


def works(device: str, quick: bool) -> dict[str, tuple[Work, dict[str, object]]]:
    """Return what is compared: a work and the options of `benchmarks.ours`, by title."""
    steps = 2 if quick else 20
    mlp, fedavg = (Work(name, device, local_steps=steps) for name in ("pfedbayes", "fedavg"))
    clients, few = (20, steps) if device == "cuda" else (4, 2)
    images = Work("pfedbayes", device, data="images", clients=clients, local_steps=few, batch_size=50)
    many = Work("pfedbayes", device, data="many", clients=1000, chosen=100, local_steps=2)
    eager: dict[str, object] = {"plan": EAGER}
    compiled: dict[str, object] = {"plan": {"compile": has_compiler(device)}}
    return {
        "pFedBayes, MNIST, eager": (mlp, eager),
        "pFedBayes, MNIST, compiled": (mlp, compiled),
        "FedAvg, MNIST, eager": (fedavg, eager),
        "FedAvg, MNIST, compiled": (fedavg, compiled),
        "pFedBayes, VGG": (images, {"plan": {}}),
        "pFedBayes, MNIST, five seeds": (dataclasses.replace(mlp, seeds=5), compiled),
        "pFedBayes, 1,000 clients, 100 a round": (many, eager),
        "evaluation, mean networks": (mlp, {"plan": {}, "job": "mean"}),
        "evaluation, ten weight samples": (mlp, {"plan": {}, "job": "mc10"}),
    }


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a temporary work tree of a commit."""
    with tempfile.TemporaryDirectory(prefix="commit") as parent:
        folder = Path(parent) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def whole_runs(table: str, other: Path, turns: int) -> list[float]:
    """Return the ratios of the seconds of `pfedbayes run --data` in this tree and in the other one."""
    path, target, client = table.rsplit(":", 2)
    data = ["--data", str(Path(path).resolve()), "--target", target, "--client-column", client]
    ratios = []
    for turn in range(turns + 1):
        seconds = []
        for tree in (ROOT, other):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "pfedbayes", "run", *data, "--out", f"{folder}/run"]
                environment = os.environ | {"PYTHONPATH": str(tree / "src")}
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
                seconds.append(time.perf_counter() - start)
        print(f"{THIS} {seconds[0]:.1f} s, {OTHER} {seconds[1]:.1f} s", file=sys.stderr, flush=True)
        ratios += [seconds[0] / seconds[1]] if turn else []  # the first turn warms up the disk
    return ratios


def print_ratios(title: str, ratios: list[float], median: float) -> None:
    """Print a row of the table."""
    ratios = sorted(ratios)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(f"| {title} | {median:.2f} | {low:.2f} to {high:.2f} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="few turns, for a trial")
    parser.add_argument("--table", metavar="FILE:TARGET:CLIENT", help="compare whole runs on this table instead")
    wanted = parser.parse_args(argv)
    device = choose_device(wanted.device)
    torch.set_num_threads(cores())
    turns = Turns(repeats=3, warm_up=1, seconds=0.2) if wanted.quick else Turns(repeats=15, warm_up=3, seconds=0.7)
    print(f"| seconds of this tree / seconds of {wanted.commit} | median | quartiles |\n|---|---|---|", flush=True)
    with checked_out(wanted.commit) as other:
        if wanted.table:
            ratios = whole_runs(wanted.table, other, turns=3 if wanted.quick else 7)
            print_ratios(wanted.table, ratios, statistics.median(ratios))
            return
        for title, (work, options) in works(device, wanted.quick).items():
            contenders = [Contender(THIS, "ours", work, options), Contender(OTHER, "ours", work, options, tree=other)]
            rows = race(Section(title, "", contenders, turns), lambda text: print(text, file=sys.stderr, flush=True))
            this, that = (row["seconds"] for row in rows)
            print_ratios(title, [a / b for a, b in zip(this, that, strict=True)], median_ratio(this, that))


if __name__ == "__main__":
    try:
        main()
    except (Disagreement, Failed) as error:
        sys.exit(f"error: {error}")
