"""The state of a federation between two rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pfedbayes.engine.server_optimizer import ServerOptimizer, first_optimizer
from pfedbayes.engine.setup import Setup, first_server
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods.base import State
from pfedbayes.nets import Init, Model


@dataclass(frozen=True, eq=False)
class FederationState:
    """Everything that a round changes, except the clients' states: those are in the population."""

    round: int
    """The number of rounds trained so far."""
    servers: tuple[State, ...]
    """The server's state of each federation, with a leading client axis where clients train alone."""
    optimizers: tuple[ServerOptimizer, ...]
    """The state of each federation's server optimiser; empty if there is none."""
    cursors: NDArray[np.int64]
    """How many training examples each member has read so far: (members,)."""


def first_state(setup: Setup, model: Model, init: Init | None) -> FederationState:
    """Return the state before the first round; model: as it was before the plan changed how it is computed."""
    like = torch.empty((), dtype=setup.data.dtype, device=setup.data.device)
    servers, optimizers = [], []
    for s, seed in enumerate(setup.seeds):
        alone, clients = s >= setup.first_alone, setup.num_clients
        server = first_server(model, setup.method, 1 if alone else clients, seed, init, like)
        optimizer = first_optimizer(setup.training, setup.method, server)
        servers.append(broadcast(server, clients) if alone else server)
        optimizers.append(broadcast(optimizer, clients) if alone and optimizer is not None else optimizer)
    return FederationState(
        round=0,
        servers=tuple(servers),
        optimizers=tuple(optimizer for optimizer in optimizers if optimizer is not None),
        cursors=np.zeros(setup.num_members, dtype=np.int64),
    )
