"""Many settings at once against one: seconds, and the share of the machine's limits.

    python -m benchmarks.settings [--device cuda] [--settings 32] [--rounds 200]

pFedBayes on small MNIST, with settings that differ in four hyper-parameters. Start-up (compilation, recording) is not
timed. Both contenders take turns in one run.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.limits import floor, measure
from benchmarks.work import Work
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import plan_for
from pfedbayes.engine.settings import federation_of_settings
from pfedbayes.methods import Method
from pfedbayes.sweep.space import SPACES, draw

TURNS, WARM_UP = 3, 3


def build(work: Work, methods: list[Method], device: str) -> Federation:
    """Return the federation of these settings after some rounds that are not timed."""
    shards, model, training = work.shards(), work.model(), work.training()
    plan = plan_for(model, methods[0], training, len(shards.train), len(methods), device)
    federation = federation_of_settings(shards, model, methods, training, work.init, plan)
    train(federation, WARM_UP)
    return federation


def train(federation: Federation, rounds: int) -> float:
    """Train more rounds and return the seconds."""
    start = time.perf_counter()
    for _ in range(rounds):
        federation.train_round()
    federation.confirm()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    methods = draw(Work("pfedbayes", args.device).rule(), SPACES["pfedbayes"], args.settings, seed=1)
    works = [Work("pfedbayes", args.device, seeds=count) for count in (1, args.settings)]
    federations = [build(work, methods[: work.seeds], args.device) for work in works]
    seconds = [min(train(each, args.rounds) for _ in range(TURNS)) for each in federations]
    limits = measure(args.device)
    for work, taken in zip(works, seconds, strict=True):
        share = args.rounds * floor(work, limits, tf32=False) / taken
        print(f"{work.seeds} settings, {args.rounds} rounds: {taken:.2f} s, {share:.0%} of the limits")
    print(f"ratio: {seconds[1] / seconds[0]:.2f} for {args.settings} settings")


if __name__ == "__main__":
    main()
