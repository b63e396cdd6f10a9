"""Algorithm 1 as the plain loops of examples/naive_pfedbayes.py: autograd, torch.distributions, torch.optim.Adam."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.ours import EAGER, federation, plan_for
from benchmarks.work import Examples, Work
from pfedbayes.methods import PFedBayes
from pfedbayes.methods.pfedbayes import LocalGaussians
from pfedbayes.nets import Batch, Model

EXAMPLE = Path(__file__).parents[1] / "examples" / "naive_pfedbayes.py"


class Recording(PFedBayes):
    """pFedBayes that records its batches and noise."""

    steps: ClassVar[list[tuple[Batch, Tensor]]] = []

    def step(self, model: Model, local: LocalGaussians, batches: tuple[Batch, ...], noise: Tensor) -> LocalGaussians:
        self.steps.append((Batch(*(part.clone() for part in batches[0])), noise.clone()))
        return super().step(model, local, batches, noise)


class Naive:
    """Plain loops. The first round uses the batches and noise of the engine, so that results can be compared."""

    def __init__(self, work: Work) -> None:
        spec = importlib.util.spec_from_file_location("naive_pfedbayes", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        plan_for(work, {}).activate()

        engine = federation(work, {"over": "loop", **EAGER}, Recording())
        start = engine.servers[0].clone()
        engine.train_round()
        self._recorded, self._work, self._model = Recording.steps, work, engine.model
        self._examples = [Examples(work, engine.shards, i) for i in range(work.clients)]
        self._rows: dict[int, Tensor] = {}
        self._rounds = example.algorithm_1(
            work.module().to(work.device),
            start,
            [len(examples.y) for examples in self._examples],
            self._draw,
            lambda t: range(work.clients),
            R=work.local_steps,
            zeta=engine.method.zeta,  # type: ignore[attr-defined]
        )
        self._last: tuple[Tensor, list[Tensor]] = start, [start] * work.clients

    def _draw(self, i: int, t: int, r: int) -> tuple[Tensor, Tensor, Tensor]:
        if t == 1:
            batch, noise = self._recorded[i * self._work.local_steps + r]
            return self._model.inputs(batch.x, torch.float32), batch.y, noise[0]
        self._recorded.clear()
        if r == 0:
            self._rows[i] = self._examples[i].order(t)
        rows = self._rows[i][r]
        noise = torch.randn(1, self._model.net.num_params, device=self._work.device)
        return self._examples[i].x[rows], self._examples[i].y[rows], noise

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self._last = next(self._rounds)

    def outcome(self) -> Tensor:
        shared, personal = self._last
        return torch.cat([shared.flatten(), *(v.flatten() for v in personal)])


def run(work: Work, options: dict[str, Any], serve: Callable[[Naive], None]) -> None:
    serve(Naive(work))
