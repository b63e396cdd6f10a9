"""The state of a federation as named tensors, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pfedbayes.engine.population import FilePopulation, Population
from pfedbayes.engine.setup import Setup
from pfedbayes.engine.state import FederationState
from pfedbayes.errors import UserError
from pfedbayes.files.tensors import rows_at_once
from pfedbayes.maths.trees import fill, leaves, named_leaves, pick, tree_map
from pfedbayes.methods.base import State


def named_tensors(state: FederationState, population: Population) -> dict[str, Tensor]:
    """Return copies of everything that training changes, by name, except the clients' states."""
    named: dict[str, Tensor] = {
        "cursors": torch.from_numpy(state.cursors),
        "enrolled": torch.tensor(population.enrolled, dtype=torch.int64),
    }
    for s, server in enumerate(state.servers):
        named.update(named_leaves(server, f"server.{s}"))
    for s, optimizer in enumerate(state.optimizers):
        named.update(named_leaves(optimizer, f"server_optimizer.{s}"))
    # Copies, because training continues in place.
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}


def restore(
    setup: Setup,
    state: FederationState,
    population: Population,
    client: State,
    tensors: dict[str, Tensor],
    round: int,
    clients_file: Path | None,
) -> FederationState:
    """Return the saved state after `round` rounds, and fill the population with the saved clients.

    state, client: the present state and the state of a new client, as templates. clients_file: where the clients'
    states lie if they were saved in a file.
    """
    refuse_foreign(setup, named_tensors(state, population), client, tensors)
    # Fresh copies: memory straight from a file may be aligned differently, and kernels round accordingly.
    copies = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("clients")}
    members = copies["enrolled"].tolist()
    population.clear()
    if "rows" in copies:
        if not isinstance(population, FilePopulation):
            raise UserError("the saved clients rest in a file: set execution.resting=file")
        population.restore(members, copies, clients_file)
    elif members:
        clients, step = fill(client, tensors, "clients"), rows_at_once(sum(leaf.nbytes for leaf in leaves(client)))
        for part in (slice(start, start + step) for start in range(0, len(members), step)):
            population.put(members[part], tree_map(torch.clone, pick(clients, part)))
    on_device = {name: copy.to(setup.data.device) for name, copy in copies.items() if name.startswith("server")}
    return FederationState(
        round,
        tuple(fill(server, on_device, f"server.{s}") for s, server in enumerate(state.servers)),
        tuple(fill(optimizer, on_device, f"server_optimizer.{s}") for s, optimizer in enumerate(state.optimizers)),
        copies["cursors"].cpu().numpy(),
    )


def refuse_foreign(setup: Setup, present: dict[str, Tensor], client: State, tensors: dict[str, Tensor]) -> None:
    """Refuse the state of another experiment, before any of it is used."""
    for name, expected in (present | dict(named_leaves(client, "clients"))).items():
        found = tensors.get(name)
        if found is None:
            if name.startswith("clients") and ("rows" in tensors or not tensors["enrolled"].numel()):
                continue  # the clients are in a separate file, or the state was saved before the first round
        elif name == "enrolled" or (name.startswith("server.") and not setup.method.about.averages):
            continue  # its length changes during a run
        elif found.dtype == expected.dtype and found.shape[name.startswith("clients") :] == expected.shape:
            continue
        raise UserError(f"the saved state does not fit this experiment ({name} differs): start a new run")
