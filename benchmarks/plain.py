"""FedAvg as a plain PyTorch loop over clients and steps, with one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.ours import plan_for
from benchmarks.work import Examples, Work, split_theta


@torch.no_grad()
def put(module: nn.Module, theta: Tensor) -> None:
    """Overwrite the module's weights with theta (T,)."""
    for weight, part in zip(module.parameters(), split_theta(theta, module).values(), strict=True):
        weight.copy_(part)


def train_client(module: nn.Module, batches: Iterable[Sequence[Tensor]], rate: float) -> None:
    """Train the module in place on the batches of a round."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(module(x), y))
        optimizer.step()


class Plain:
    """The loop over clients; loader: batches come from torch's DataLoader."""

    def __init__(self, work: Work, loader: bool = False) -> None:
        plan_for(work, {}).activate()
        shards = work.shards()
        self._examples = [Examples(work, shards, i) for i in range(work.clients)]
        self._module = work.module().to(work.device)
        self._theta, self._round, self._loader = work.first_theta(), 0, loader
        self._rate: float = work.rule().eta  # type: ignore[attr-defined]

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round += 1
            total = torch.zeros_like(self._theta)
            for examples in self._examples:
                put(self._module, self._theta)
                train_client(self._module, examples.batches(self._round, self._loader), self._rate)
                total += nn.utils.parameters_to_vector(self._module.parameters()).detach() * len(examples.y)
            self._theta = total / sum(len(examples.y) for examples in self._examples)

    def outcome(self) -> Tensor:
        return self._theta


def run(work: Work, options: dict[str, Any], serve: Callable[[Plain], None]) -> None:
    serve(Plain(work, **options))
