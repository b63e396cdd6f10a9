"""The time and the memory of a run, estimated from two rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.maths.trees import leaves
from pfedbayes.runs.experiment import Experiment, build_federation


@dataclass(frozen=True)
class Cost:
    """What a run will take."""

    federation: Federation
    """The federation on which it was measured, after two rounds."""
    plan: Plan
    seconds_to_start: float
    """How much longer the first round takes than the others, for example to compile."""
    seconds_per_round: float
    seconds_per_evaluation: float
    evaluations: int
    """Number of evaluations of the run."""
    seconds: float
    """Seconds of the whole run."""
    bytes: int
    """Memory for data and states."""
    file_bytes: int
    """Size of the file in which clients rest."""


def estimate(experiment: Experiment, seeds: Sequence[int], device: str = "auto", data_dir: Path | None = None) -> Cost:
    """Measure two rounds and an evaluation, and extrapolate. Nothing is written."""
    shards = load_shards(experiment.data, data_dir)
    federation = build_federation(experiment, shards, seeds, device=device)
    clock = runs.Clock()
    federation.train_round()
    federation.confirm()  # wait for the GPU
    first = clock.seconds()
    federation.train_round()
    federation.confirm()
    per_round = clock.seconds() - first
    start = max(0.0, first - per_round)
    rounds = experiment.training.rounds
    evaluations = _evaluations(experiment)
    evaluating = 0.0
    for round, count in evaluations.values():
        begun = clock.seconds()
        federation.evaluate(**experiment.evaluation.after(round, rounds))
        evaluating += count * (clock.seconds() - begun)
    count = sum(count for _, count in evaluations.values())
    # During a round the old states, the new states and the gradients are all in memory.
    servers = sum(leaf.nbytes for leaf in leaves(tuple(federation.servers)))
    noise = (
        math.prod(experiment.method.noise_shape(federation.model, int(federation.data.batch_sizes.max())) or (0,)) * 4
    )
    at_once = federation.training_at_once
    working = 3 * (servers + at_once * federation.client_bytes) + at_once * noise
    members = len(seeds) * federation.num_clients
    resting = min(members, rounds * at_once) * federation.client_bytes if at_once < members else 0
    in_file = federation.plan.resting == "file"
    return Cost(
        federation,
        federation.plan,
        start,
        per_round,
        evaluating / count,
        count,
        start + rounds * per_round + evaluating,
        federation.x.nbytes + federation.y.nbytes + working + (0 if in_file else resting),
        resting if in_file else 0,
    )


def _evaluations(experiment: Experiment) -> dict[bool, tuple[int, int]]:
    """Return one round and the number of rounds for each kind of evaluation: with all estimators, or without one."""
    kinds: dict[bool, tuple[int, int]] = {}
    rounds = experiment.training.rounds
    for round in range(1, rounds + 1):
        if experiment.training.evaluates(round):
            whole = round % experiment.evaluation.average_every == 0 or round == rounds
            first, count = kinds.get(whole, (round, 0))
            kinds[whole] = first, count + 1
    return kinds
