"""Only the matrix products of the MLP, in a training round or an evaluation: a lower limit of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.work import Work

ROWS = 1000  # examples per product in an evaluation: more do not fit into a cache


class Products:
    """job: train is a training round of all clients at once, mean is both models on all test sets."""

    def __init__(self, work: Work, job: Literal["train", "mean"] = "train") -> None:
        evaluates = job == "mean"
        self._repeats = work.local_steps
        if evaluates:
            self._repeats = 2 * sum(len(rows) for rows in work.shards().test) // ROWS
        members, rows = (1, ROWS) if evaluates else (work.clients, work.batch_size)
        shapes = [weight.shape for weight in work.module().parameters() if weight.dim() > 1]

        def random(*sizes: int) -> Tensor:
            return torch.rand(members, *sizes, device=work.device)

        self._forward = [(random(rows, inputs), random(inputs, outputs)) for outputs, inputs in shapes]
        self._backward: list[tuple[Tensor, Tensor]] = []
        for layer, (outputs, inputs) in enumerate([] if evaluates else shapes):
            grad = random(rows, outputs)
            self._backward.append((random(rows, inputs).mT, grad))  # the gradient of the weights
            if layer:
                self._backward.append((grad, random(inputs, outputs).mT))  # the gradient of the inputs

    def train(self, rounds: int) -> None:
        for _ in range(rounds * self._repeats):
            for left, right in (*self._forward, *self._backward):
                torch.bmm(left, right)

    def outcome(self) -> Tensor:
        raise NotImplementedError("matrix products have no model")


def run(work: Work, options: dict[str, Any], serve: Callable[[Products], None]) -> None:
    serve(Products(work, **options))
