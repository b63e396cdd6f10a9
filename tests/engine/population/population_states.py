"""Small states of clients, and populations that hold them."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.engine.population import HOST, DevicePopulation, FilePopulation, HostPopulation
from pfedbayes.maths.trees import stack

SIZE = 12


class Kept(NamedTuple):
    """Leaves of several types and ranks."""

    q: Tensor
    steps: Tensor
    seen: Tensor


def state(number: int) -> Kept:
    return Kept(torch.full((2, 3), number + 0.5), torch.tensor(number), torch.tensor([number % 2 == 0]))


def states(numbers: list[int]) -> Kept:
    return stack([state(number) for number in numbers])


def fresh(clients: list[int]) -> Kept:
    return states([-client for client in clients])


def in_file(path: Path | None = None) -> FilePopulation:
    return FilePopulation(state(0), HOST, path)


def in_memory() -> DevicePopulation:
    return DevicePopulation(SIZE, HOST)


def on_host(template=state(0)) -> HostPopulation:  # noqa: B008, nothing changes it
    """The host itself stands for a GPU: it copies at once what a GPU would copy when it comes to that."""
    return HostPopulation(SIZE, template, HOST)
