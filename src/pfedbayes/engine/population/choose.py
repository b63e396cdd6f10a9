"""The choice of where clients' states rest between rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from pfedbayes.engine.population.base import HOST, Population
from pfedbayes.engine.population.device import DevicePopulation
from pfedbayes.engine.population.file import FilePopulation
from pfedbayes.engine.population.host import HostPopulation
from pfedbayes.memory import host_memory
from pfedbayes.methods.base import State

Resting = Literal["device", "host", "file"]

SMALL_SHARE = 1 / 16  # of the device's memory: states that take less stay on the device
HOST_SHARE = 1 / 3  # of the host's memory: the rest is for everything else
COPIES_PER_ROUND = 4  # of the states in training: received, gathered, trained, stored


def choose_resting(state_bytes: int, clients: int, training: int, copies: int, device: torch.device) -> Resting:
    """Return where the states of `clients` clients rest, `training` of which train in a round.

    On the device if all clients train or their states are small. On the host if `copies` copies of all states and the
    states in training fit into a third of its memory. Otherwise in a file. state_bytes: bytes of one state.
    """
    if training == clients:
        return "device"
    total, memory = state_bytes * clients, host_memory()
    on_device = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory
    if total <= SMALL_SHARE * on_device:
        return "device"
    needed = copies * total + COPIES_PER_ROUND * training * state_bytes
    return "host" if needed <= HOST_SHARE * memory else "file"


def make_population(
    resting: Resting, clients: int, template: State, device: torch.device, path: Path | None
) -> Population:
    """Return an empty population; template: the state of one client; path: of the file, None for a temporary one."""
    if resting == "file":
        return FilePopulation(template, device, path)
    if resting == "host" and device != HOST:
        return HostPopulation(clients, template, device)
    return DevicePopulation(clients, device)
