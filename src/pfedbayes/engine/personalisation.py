"""Personal models for clients that may be new to the federation, each trained from a fixed prior."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods import PFedBayes


@dataclass(frozen=True)
class FixedPriors(PFedBayes):
    """pFedBayes without sharing: the server's state (N, 2, T) is a fixed prior for each client."""

    about = PFedBayes.about._replace(shared=False, averages=False)

    def init(self, theta: Tensor, num_clients: int, shapes: tuple[torch.Size, ...]) -> Tensor:
        return super().init(theta, num_clients, shapes).expand(num_clients, 2, -1)

    def download(self, server: Tensor, clients: Tensor) -> Tensor:
        return server[clients.to(server.device)]

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        return server


def personalise(
    federation: Federation,
    shards: Shards,
    start: Which = "shared",
    steps: int = 200,
    zeta: float | None = None,
) -> Federation:
    """Return a federation of the clients of `shards`, each with its own posterior after this many steps.

    start: the prior of each client, where it starts and what the KL term ties it to. "shared" is the shared model of a
    trained federation, for any client; "personal" is the client's own model, for that federation's clients.
    zeta: the weight of the KL term; None for the method's.
    """
    method = federation.method
    if not isinstance(method, PFedBayes):
        raise UserError(
            f"{method.about.title} has no distribution over models to start from: run method.name=pfedbayes"
        )
    changed: dict[str, Any] = {
        "prior": "fixed", "reset_personal": False, "eta_global": 0.0, "eta_data": 0.0, "sigma_by_size": 0.0,
    }  # fmt: skip
    if zeta is not None:
        changed["zeta"] = zeta
    fixed = FixedPriors(**dataclasses.asdict(method) | changed)
    # One round takes all steps, because nothing has to be sent in between.
    training = Training(rounds=1, local_steps=max(1, steps), batch_size=federation.training.batch_size)
    plan = dataclasses.replace(federation.plan, compile=False, resting=None)
    personal = Federation(shards, federation.model, fixed, training, federation.seeds, plan=plan)
    personal.servers = priors_of(federation, start, len(shards.names))
    if steps:
        personal.train_round()
        personal.confirm()
    return personal


def priors_of(federation: Federation, which: Which, num_clients: int) -> list[Tensor]:
    """Return the shared or personal models of a federation as priors (N, 2, T), one tensor per seed."""
    if which == "shared":
        return [broadcast(server, num_clients) for server in federation.servers]
    if num_clients != federation.num_clients:
        raise UserError(
            f"{num_clients} clients cannot start from the personal models of {federation.num_clients}: "
            "start newcomers from the shared model"
        )
    return [
        torch.stack([federation.personal_state(i, s).q for i in range(num_clients)])
        for s in range(len(federation.seeds))
    ]
