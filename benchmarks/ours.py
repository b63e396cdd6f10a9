"""The package itself with any plan: a training round or an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.work import SEED, Work
from pfedbayes.engine import plan as engine
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.methods import Method

Job = Literal["train", "mean", "mc10", "activations"]
EAGER = {"compile": False, "graph": False}
RUN = 800  # rounds of a run in the paper


def plan_for(work: Work, settings: dict[str, Any]) -> Plan:
    """Return the plan that the package chooses for a run of 800 rounds, with these fields changed."""
    training = dataclasses.replace(work.training(), rounds=RUN)
    plan = engine.plan_for(work.model(), work.rule(), training, work.clients, work.seeds, work.device)
    return dataclasses.replace(plan, **settings)


def federation(work: Work, settings: dict[str, Any], method: Method | None = None) -> Federation:
    seeds = range(SEED, SEED + work.seeds)
    plan = plan_for(work, settings)
    return Federation(work.shards(), work.model(), method or work.rule(), work.training(), seeds, work.init, plan)


def state(federation: Federation) -> Tensor:
    """Return the shared model and the personal models, if any, as one vector."""
    parts = [federation.servers[0].flatten()]
    if federation.method.about.personal:
        parts += [federation.personal_state(i).q.flatten() for i in range(federation.num_clients)]
    return torch.cat(parts)


class Ours:
    """One federation and a job to repeat."""

    def __init__(self, work: Work, plan: dict[str, Any], job: Job = "train") -> None:
        self.federation = federation(work, plan)
        if job != "train":
            self.federation.train_round()  # so that every client has a personal model
        jobs: dict[Job, Callable[[], object]] = {
            "train": self.federation.train_round,
            "mean": self._mean,
            "mc10": lambda: self.federation.evaluate(samples=10),
            "activations": lambda: self.federation.evaluate(samples=10, sampling="activations"),
        }
        self._job = jobs[job]

    def _mean(self) -> None:
        """Evaluate the mean network of both models on all test sets."""
        self.federation.evaluate(estimators=("mean",))

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self._job()
        self.federation.confirm()

    def outcome(self) -> Tensor:
        return state(self.federation)


def run(work: Work, options: dict[str, Any], serve: Callable[[Ours], None]) -> None:
    serve(Ours(work, **options))
