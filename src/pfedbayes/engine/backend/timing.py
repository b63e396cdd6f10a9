"""A measurement of how to train clients with convolutions on a CPU: together, or one after another."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from pfedbayes.engine.backend.batches import lay_out
from pfedbayes.engine.backend.local_training import LocalTraining, Work
from pfedbayes.engine.participation import choose
from pfedbayes.engine.plan import Over, Plan
from pfedbayes.engine.setup import Setup
from pfedbayes.methods.base import State

CLIENTS_TIMED = 4


def faster_over(
    setup: Setup, plan: Plan, fresh: Callable[[list[int]], State], received: Callable[[list[int]], State]
) -> Over:
    """Return which of vmap and loop takes less time for a local step of a few clients. Nothing is trained.

    fresh: make the stacked states of new members; received: return what members receive from the server.
    """
    chosen = choose(setup, 1)
    few = chosen.members[:CLIENTS_TIMED]
    batches = lay_out(setup, 1, chosen, np.zeros(setup.num_members, dtype=np.int64))
    shard, weight = setup.of_members((setup.shard, setup.weight), few)
    work = Work(torch.from_numpy(batches.rows[:1, :, : len(few)].copy()), weight, batches.names[:1, : len(few)])
    downloads, seconds = received(few), dict[Over, float]()
    for over in ("vmap", "loop"):
        plain = Plan(over=over, threads=plan.threads, dtype=plan.dtype)
        train = LocalTraining(setup.method, setup.model, setup.data.x, setup.data.y, plain, setup.views)
        times = []
        for _ in range(3):  # the first one includes initialisation
            start = time.perf_counter()
            train(fresh(few), downloads, shard, work)
            times.append(time.perf_counter() - start)
        seconds[over] = min(times)
    return min(seconds, key=lambda over: seconds[over])
