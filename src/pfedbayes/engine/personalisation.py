"""Own models for clients that the federation may never have met: each from a prior that stands still."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation, Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation.prediction import Which
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods import PFedBayes


@dataclass(frozen=True)
class OwnPriors(PFedBayes):
    """pFedBayes where nothing is shared any more: the server's state (N, 2, T) is a prior for each client, for good."""

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
    """A federation of the clients of `shards` in which each has its own posterior after so many steps.

    Its prior, where it starts and what the KL term (with weight zeta, the method's if not given) ties it to, is the
    "shared" model of a trained federation, which any client may have, or, for that federation's own clients, the
    "personal" model of each.
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
    own = OwnPriors(**dataclasses.asdict(method) | changed)
    # A round is all the steps there are: nothing has to be sent in between.
    training = Training(rounds=1, local_steps=max(1, steps), batch_size=federation.training.batch_size)
    plan = dataclasses.replace(federation.plan, compile=False, resting=None)
    ours = Federation(shards, federation.model, own, training, federation.seeds, plan=plan)
    ours.servers = list(priors_of(federation, start, len(shards.names)))
    if steps:
        ours.train_round()
        ours.confirm()
    return ours


def priors_of(federation: Federation, which: Which, num_clients: int) -> list[Tensor]:
    """The shared or the personal models of a federation as priors (N, 2, T), one tensor for each seed."""
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
