"""Personal posteriors from a fixed prior, for clients that need not have been in the federation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods import PFedBayes
from pfedbayes.methods.base import Method
from pfedbayes.nets import Model, Net


@dataclass(frozen=True)
class Prior:
    """Trained posteriors that clients start from and are tied to, with the settings to continue training."""

    method: Method
    model: Model
    plan: Plan
    batch_size: int
    seeds: tuple[int, ...]
    states: tuple[Tensor, ...]
    """Per seed: means and rhos of the shared model (2, T), or of one model per client (N, 2, T)."""

    def per_client(self, num_clients: int) -> list[Tensor]:
        """Return one prior per client, (N, 2, T) for each seed."""
        if self.states[0].dim() == 2:
            return [broadcast(state, num_clients) for state in self.states]
        if num_clients != len(self.states[0]):
            raise UserError(
                f"{num_clients} clients cannot start from the personal models of {len(self.states[0])}: "
                "start newcomers from the shared model"
            )
        return list(self.states)


def prior_of(federation: Federation, which: Which) -> Prior:
    """Return the shared model of a federation, or its personal models, as a prior."""
    _require_posterior(federation.method)
    states = tuple(federation.servers)
    if which == "personal":
        states = tuple(
            torch.stack([federation.personal_state(i, s).q for i in range(federation.num_clients)])
            for s in range(len(federation.seeds))
        )
    return Prior(
        federation.method,
        federation.model,
        federation.plan,
        federation.training.batch_size,
        federation.seeds,
        states,
    )


@dataclass(frozen=True)
class FixedPriors(PFedBayes):
    """pFedBayes without aggregation: the server state (N, 2, T) holds one fixed prior per client."""

    about = PFedBayes.about._replace(shared=False, averages=False)

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Tensor:
        return super().init(theta, num_clients, net).expand(num_clients, 2, -1)

    def download(self, server: Tensor, clients: Tensor) -> Tensor:
        return server[clients.to(server.device)]

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        return server


def personalise(prior: Prior, shards: Shards, steps: int = 200, zeta: float | None = None) -> Federation:
    """Train a posterior for each client of `shards` and return them as a federation.

    Training starts at the prior. The KL term, with weight `zeta` (default: the method's), ties the posterior to it.
    """
    method = _require_posterior(prior.method)
    changed: dict[str, Any] = {
        "prior": "fixed", "reset_personal": False, "eta_global": 0.0, "eta_data": 0.0, "sigma_by_size": 0.0,
    }  # fmt: skip
    if zeta is not None:
        changed["zeta"] = zeta
    fixed = FixedPriors(**dataclasses.asdict(method) | changed)
    # All steps fit in one round, because nothing has to be sent in between.
    training = Training(rounds=1, local_steps=max(1, steps), batch_size=prior.batch_size)
    plan = dataclasses.replace(prior.plan, compile=False, resting=None)
    personal = Federation(shards, prior.model, fixed, training, prior.seeds, plan=plan)
    personal.servers = prior.per_client(len(shards.names))
    if steps:
        personal.train_round()
        personal.confirm()
    return personal


def _require_posterior(method: Method) -> PFedBayes:
    if not isinstance(method, PFedBayes):
        raise UserError(
            f"{method.about.title} has no distribution over models to start from: run method.name=pfedbayes"
        )
    return method
