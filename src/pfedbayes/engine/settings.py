"""Many settings of one method, trained at once: each is a federation of its own along the batch axis of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, plan_for
from pfedbayes.engine.setup import Copy, first_server
from pfedbayes.engine.training import Training
from pfedbayes.methods.base import Method
from pfedbayes.methods.hierarchical import with_schedule
from pfedbayes.methods.varied import Varied, varied
from pfedbayes.nets import Init, Model

Folds = Sequence[tuple[Tensor, ...]]
"""For each fold, the pool rows that each client leaves out."""


def federation_of_settings(
    shards: Shards,
    model: Model,
    methods: Sequence[Method],
    training: Training,
    init: Init | None = None,
    plan: Plan | None = None,
    folds: Folds = (),
) -> Federation:
    """Return a federation for each setting, with the seed of `training`: they differ by their settings alone.

    With folds there is one for each setting and fold: fold f of setting k has the index k * len(folds) + f.
    """
    methods = [with_schedule(method, training.rounds * training.local_steps) for method in methods]
    together, each = varied(methods), max(1, len(folds))
    plan = plan or plan_for(model, methods[0], training, len(shards.train), len(methods) * each)
    federation = _federation(shards, model, together, training, init, plan, folds, len(methods))
    clients, like = federation.num_clients, federation.x.new_empty((), dtype=federation.dtype)
    federation.servers = [
        together.tagged(method, first_server(model, method, clients, training.seed, init, like))
        for method in methods
        for _ in range(each)
    ]
    return federation


def _federation(
    shards: Shards,
    model: Model,
    method: Method,
    training: Training,
    init: Init | None,
    plan: Plan,
    folds: Folds,
    count: int,
) -> Federation:
    seeds = () if folds else (training.seed,) * count
    copies = [Copy(rows) for _ in range(count) for rows in folds]
    return Federation(shards, model, method, training, seeds, init, plan, copies=copies)


def keep_settings(federation: Federation, kept: Sequence[int], model: Model, folds: Folds = ()) -> Federation:
    """Return a federation of some of the settings, as they are now. model, folds: as it was built with."""
    each, clients = max(1, len(folds)), federation.num_clients
    indices = [k * each + f for k in kept for f in range(each)]
    members = [s * clients + i for s in indices for i in range(clients)]
    states = federation.client_states(members)
    narrow = _federation(
        federation.shards, model, federation.method, federation.training, None, federation.plan, folds, len(kept)
    )
    narrow.population.put(range(len(members)), states)
    narrow.state = replace(
        narrow.state,
        round=federation.round,
        servers=tuple(federation.servers[s] for s in indices),
        cursors=federation.state.cursors[np.array(members)],
    )
    federation.population.close()
    return narrow


def diverged(federation: Federation, index: int) -> bool:
    """Return whether a client of this federation has not been finite."""
    if not isinstance(federation.method, Varied):
        raise TypeError("only federations of many settings go on after one has diverged")
    return bool(federation.servers[index].diverged)
