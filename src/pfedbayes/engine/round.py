"""One round of a federation: Algorithm 1, for all seeds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.backend.batches import advance
from pfedbayes.engine.backend.executor import Executor
from pfedbayes.engine.participation import Chosen, choose
from pfedbayes.engine.population import Population
from pfedbayes.engine.server_optimizer import ServerOptimizer, server_step
from pfedbayes.engine.setup import Setup
from pfedbayes.engine.state import FederationState
from pfedbayes.maths.trees import concat, pick, tree_map
from pfedbayes.methods.base import Method, State

Download = Callable[[int, NDArray[np.int64]], State]  # (seed index, clients) -> what they receive, stacked


def train_round(setup: Setup, state: FederationState, population: Population, executor: Executor) -> FederationState:
    """Train one round of Algorithm 1 and return the next state. A round that fails changes nothing."""
    executor.plan.activate()  # another federation may have set torch's switches otherwise
    round = state.round + 1
    # Algorithm 1: the server draws the random set S^t of clients whose uploads it will average.
    chosen = choose(setup, round)
    # Algorithm 1: the server sends its model to the clients that train.
    received = download(setup, state.servers, chosen)
    # Algorithm 1: each client takes R local steps from its own state and what it received, and uploads its result.
    before = enrolled_clients(setup, state.servers, population, chosen.members)
    clients, uploads, finite = executor.train(round, chosen, state.cursors, before, received)
    # Algorithm 1: the server averages the uploads of S^t and moves to its next model.
    servers, optimizers = aggregate(setup, state, chosen, uploads)

    after = FederationState(round, servers, optimizers, advance(setup, state.cursors, chosen.members))
    clients, after = executor.keep_finite(chosen, finite, (before, state), (clients, after))
    population.put(chosen.members, clients)
    return after


def download(setup: Setup, servers: Sequence[State], chosen: Chosen) -> State:
    """Return what each client that trains receives from its server, stacked over members."""
    cut = setup.first_alone
    parts = [receive(setup.method, *each) for each in zip(servers[:cut], chosen.trained[:cut], strict=True)]
    if cut < len(servers):
        own = [pick(server, setup.send(ids)) for server, ids in zip(servers[cut:], chosen.trained[cut:], strict=True)]
        parts.append(_receive_alone(setup, concat(own)))
    return concat(parts)


def receive(method: Method, server: State, clients: Sequence[int] | NDArray[np.int64]) -> State:
    """Return what these clients receive from a server, stacked."""
    return method.download(server, torch.as_tensor(clients))


def _receive_alone(setup: Setup, servers: State) -> State:
    """Return what clients receive that train alone, from their own servers (clients, ...)."""
    return torch.func.vmap(lambda server: pick(receive(setup.method, server, [0]), 0))(servers)


def receive_from(setup: Setup, index: int, server: State, clients: Sequence[int] | NDArray[np.int64]) -> State:
    """Return what these clients of a federation receive, stacked; those that train alone have servers of their own."""
    if index < setup.first_alone:
        return receive(setup.method, server, clients)
    return _receive_alone(setup, pick(server, setup.send(np.asarray(clients))))


def enrolled_clients(setup: Setup, servers: Sequence[State], population: Population, members: Sequence[int]) -> State:
    """Return the stacked states of these members; a client that is new starts from what it receives."""

    def fresh(new: Sequence[int]) -> State:
        return fresh_clients(setup, lambda s, clients: receive_from(setup, s, servers[s], clients), new)

    return population.get(members, fresh)


def fresh_clients(setup: Setup, download: Download, members: Sequence[int]) -> State:
    """Return the stacked states of clients that take part for the first time."""
    parts = []
    for s, own in groupby(members, lambda member: member // setup.num_clients):
        received = download(s, np.remainder(list(own), setup.num_clients))
        parts.append(torch.func.vmap(setup.method.enrol)(received))
    # Clients may share memory until here.
    return tree_map(torch.Tensor.contiguous, concat(parts))


def aggregate(
    setup: Setup, state: FederationState, chosen: Chosen, uploads: State
) -> tuple[tuple[State, ...], tuple[ServerOptimizer, ...]]:
    """Return the next state of each server and its optimiser, from the uploads of the chosen clients."""
    averages, alone = [], []
    for s, (server, averaged, trained) in enumerate(zip(state.servers, chosen.averaged, chosen.trained, strict=True)):
        own = pick(uploads, slice(s * len(trained), (s + 1) * len(trained)))
        if len(averaged) < len(trained):
            own = pick(own, setup.send(np.flatnonzero(np.isin(trained, averaged))))
        sizes = setup.of_members(setup.shard.size, [s * setup.num_clients + int(i) for i in averaged])
        if s < setup.first_alone:
            averages.append(setup.method.aggregate(server, own, sizes, torch.from_numpy(averaged)))
        else:
            alone.append(_Alone(server, own, sizes, setup.send(averaged)))
    averages += _aggregate_alone(setup, alone) if alone else []
    if not state.optimizers:
        return tuple(averages), ()
    step = partial(server_step, setup.training, setup.method)
    steps = [
        (step if s < setup.first_alone else torch.func.vmap(step))(*each)
        for s, each in enumerate(zip(state.servers, averages, state.optimizers, strict=True))
    ]
    return tuple(server for server, _ in steps), tuple(optimizer for _, optimizer in steps)


class _Alone(NamedTuple):
    """A federation whose clients train alone: every client aggregates its own upload."""

    servers: State
    """One for each client, (N, ...)."""
    uploads: State
    sizes: Tensor
    clients: Tensor
    """The clients (n,) of the uploads."""


def _aggregate_alone(setup: Setup, federations: Sequence[_Alone]) -> list[State]:
    """Return the next servers of federations whose clients train alone, all of them computed at once."""

    def aggregate(server: State, upload: State, size: Tensor, client: Tensor) -> State:
        return setup.method.aggregate(server, tree_map(lambda leaf: leaf[None], upload), size[None], client[None])

    every = [each._replace(servers=pick(each.servers, each.clients)) for each in federations]
    after = torch.func.vmap(aggregate)(*concat(every))
    results, start = [], 0
    for servers, _, _, clients in federations:
        own = pick(after, slice(start, start := start + len(clients)))
        complete = len(clients) == setup.num_clients
        results.append(own if complete else tree_map(partial(_put, clients), servers, own))
    return results


def _put(rows: Tensor, whole: Tensor, own: Tensor) -> Tensor:
    """Return `whole` with other values in these rows."""
    return whole.index_copy(0, rows, own)
