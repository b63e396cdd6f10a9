"""Compare the speed of this tree with that of another commit: both take turns in one run.

    python -m benchmarks.commits 578dd4b

Each tree runs its own `benchmarks.worker`, so the other commit needs one that obeys the same orders. A ratio below 1
means that this tree is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="few turns, for a trial")
    wanted = parser.parse_args(argv)
    device = choose_device(wanted.device)
    torch.set_num_threads(cores())
    turns = Turns(repeats=3, warm_up=1, seconds=0.2) if wanted.quick else Turns(repeats=15, warm_up=3, seconds=0.7)
    print(f"| seconds of this tree / seconds of {wanted.commit} | median | quartiles |\n|---|---|---|", flush=True)
    with checked_out(wanted.commit) as other:
        for title, (work, options) in works(device, wanted.quick).items():
            contenders = [Contender(THIS, "ours", work, options), Contender(OTHER, "ours", work, options, tree=other)]
            rows = race(Section(title, "", contenders, turns), lambda text: print(text, file=sys.stderr, flush=True))
            this, that = (row["seconds"] for row in rows)
            ratios = sorted(a / b for a, b in zip(this, that, strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(f"| {title} | {median_ratio(this, that):.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (Disagreement, Failed) as error:
        sys.exit(f"error: {error}")
