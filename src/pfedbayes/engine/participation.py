"""Who takes part in a round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.engine.setup import Setup
from pfedbayes.maths import random


class Chosen(NamedTuple):
    """The clients of one round."""

    averaged: list[NDArray[np.int64]]
    """For each federation, the clients whose uploads the server averages."""
    trained: list[NDArray[np.int64]]
    """For each federation, the clients that train."""
    members: list[int]
    """All members that train: s * num_clients + i for client i of federation s."""


def choose(setup: Setup, round: int) -> Chosen:
    """Draw the random set S^t of Algorithm 1 for each federation."""
    averaged = [random.choose(seed, round, setup.num_clients, setup.participants) for seed in setup.seeds]
    trained = averaged if setup.trains == "chosen" else [np.arange(setup.num_clients)] * len(setup.seeds)
    members = [s * setup.num_clients + int(i) for s, ids in enumerate(trained) for i in ids]
    return Chosen(averaged, trained, members)
