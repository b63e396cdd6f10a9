"""Personal posteriors from a fixed prior, for clients that need not have been in the federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.setup import Copy
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.maths.gaussian import MeanField, gaussian, grad_in_rho, kl_grad_q, mean_field, rho_of
from pfedbayes.maths.optim import Adam, adam_init
from pfedbayes.maths.stacked import broadcast
from pfedbayes.methods import Hierarchical, PFedBayes
from pfedbayes.methods.base import Method, Needs, Shard, State, weights_posterior
from pfedbayes.methods.hierarchical import Client, adam_of_gaussian, annealed, grad_expected_nll
from pfedbayes.nets import Batch, Init, Model, Net


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
    method, seeds = federation.method, range(len(federation.seeds))
    _require_posterior(method)
    if which == "shared":
        states = tuple(as_prior(method, federation.servers[s]) for s in seeds)
    else:
        clients = range(federation.num_clients)
        states = tuple(torch.stack([federation.personal_state(i, s).q for i in clients]) for s in seeds)
    return Prior(method, federation.model, federation.plan, federation.training.batch_size, federation.seeds, states)


def as_prior(method: Method, server: State) -> Tensor:
    """Return means and rhos (2, T) of the distribution of a new client's weights."""
    if isinstance(server, Tensor):
        return server
    q = weights_posterior(method, server)
    return torch.stack([q.mu, rho_of(q.sigma)])


class FixedPriors(Method):
    """Clients without aggregation: the server state (N, 2, T) holds one fixed prior per client."""

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Tensor:
        return gaussian(theta, 0.0).expand(num_clients, 2, -1)

    def download(self, server: Tensor, clients: Tensor) -> Tensor:
        return server[clients.to(server.device)]

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        return server


@dataclass(frozen=True)
class PFedBayesFromPriors(FixedPriors, PFedBayes):
    """pFedBayes, each client from its own fixed prior."""

    about = PFedBayes.about._replace(shared=False, averages=False)


class _LocalPosterior(NamedTuple):
    """The state of a round of `HierarchicalFromPriors`."""

    q: Tensor
    adam: Adam[Tensor]
    prior: Tensor
    size: Tensor
    taken: Tensor


@dataclass(frozen=True)
class HierarchicalFromPriors(FixedPriors):
    """A posterior over the weights of each client, under a fixed prior: that of a new client, or its own posterior."""

    eta_mean: float
    eta_rho: float
    anneal: int
    full_batch: bool
    kl: float
    """Weight of KL(q || prior)."""

    about = Hierarchical.about._replace(shared=False)

    @property
    def needs(self) -> Needs:
        return Needs(full_batch=self.full_batch, mapped=False, shuffled=not self.full_batch)

    def enrol(self, received: Tensor) -> Client:
        return Client(received, received, adam_init(received), torch.zeros_like(received))

    def begin(self, client: Client, received: Tensor, shard: Shard) -> _LocalPosterior:
        return _LocalPosterior(client.q, client.adam, received, shard.size, torch.zeros_like(shard.size))

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return model.noise_shape(batch_size)

    def step(self, model: Model, local: _LocalPosterior, batches: tuple[Batch, ...], noise: Tensor) -> _LocalPosterior:
        """Take a step against the gradient of E[nll] + KL(q || prior)."""
        (batch,) = batches
        q = mean_field(local.q)
        in_mean, in_variance = grad_expected_nll(model, q.mu, q.sigma.square(), batch, local.size, noise)
        divergence = kl_grad_q(q, mean_field(local.prior), self.kl)
        in_sigma = 2 * q.sigma * in_variance + divergence.sigma
        grad = torch.stack([in_mean + divergence.mu, grad_in_rho(in_sigma, local.q[..., 1, :])], -2)
        moved, adam = adam_of_gaussian(
            local.q, grad, local.adam, annealed((self.eta_mean, self.eta_rho), local.taken, self.anneal)
        )
        return local._replace(q=moved, adam=adam, taken=local.taken + 1)

    def end(self, local: _LocalPosterior) -> tuple[Client, Tensor]:
        return Client(local.q, local.q, local.adam, torch.zeros_like(local.q)), local.q

    def posterior(self, state: Client) -> MeanField:
        return mean_field(state.q)


def personalise(
    prior: Prior,
    shards: Shards,
    steps: int = 200,
    zeta: float | None = None,
    left_out: Sequence[tuple[Tensor, ...]] = (),
    method: Method | None = None,
) -> Federation:
    """Train a posterior for each client of `shards` and return them as a federation.

    Training starts at the prior. The KL term, with weight `zeta` (default: the method's), ties the posterior to it.
    method: another one to train with, from fixed priors.

    left_out: for each fold of a cross-validation, the pool rows that each client leaves out. Posteriors without them
    train in the same batch, as copies of the federation of the first seed.
    """
    fixed = method or _from_priors(_require_posterior(prior.method), steps, zeta)
    # All steps fit in one round, because nothing has to be sent in between.
    training = Training(rounds=1, local_steps=max(1, steps), batch_size=prior.batch_size)
    copies = [Copy(rows) for rows in left_out]
    personal = Federation(shards, prior.model, fixed, training, prior.seeds, plan=_plan(prior), copies=copies)
    priors = prior.per_client(len(shards.names))
    personal.servers = (*priors, *(priors[0] for _ in copies))
    if steps:
        personal.train_round()
        personal.confirm()
    return personal


def start_alone(
    prior: Prior, shards: Shards, training: Training, init: Init | None, left_out: Sequence[tuple[Tensor, ...]] = ()
) -> Federation:
    """Train the method of a prior on the one client of `shards`, as if there were neither prior nor other clients.

    training: that of the run, with its number of rounds; there is no early stopping. left_out: see `personalise`.
    """
    if len(shards.names) != 1:
        raise ValueError(f"{len(shards.names)} clients are not alone")
    training = dataclasses.replace(training, participants=None, patience=None)
    copies = [Copy(rows) for rows in left_out]
    alone = Federation(
        shards, prior.model, prior.method, training, prior.seeds[:1], init, plan=_plan(prior), copies=copies
    )
    for _ in alone.rounds():
        pass
    return alone


def _plan(prior: Prior) -> Plan:
    """Return the plan of the prior for few steps of few clients."""
    return dataclasses.replace(prior.plan, compile=False, resting=None)


def weight_of_kl(method: Method) -> float | None:
    """Return the weight of the KL term with which `personalise` has trained; None for another method."""
    if isinstance(method, HierarchicalFromPriors):
        return method.kl
    return method.zeta if isinstance(method, PFedBayes) else None


def _from_priors(method: PFedBayes | Hierarchical, steps: int, zeta: float | None) -> Method:
    """Return the method with which clients train from fixed priors."""
    if isinstance(method, Hierarchical):
        kl = method.kl_personal if zeta is None else zeta
        return HierarchicalFromPriors(method.eta_mean, method.eta_rho, max(1, steps), method.full_batch, kl)
    changed: dict[str, Any] = {
        "prior": "fixed", "reset_personal": False, "eta_global": 0.0, "eta_data": 0.0, "sigma_by_size": 0.0,
    }  # fmt: skip
    return PFedBayesFromPriors(**dataclasses.asdict(method) | changed | ({} if zeta is None else {"zeta": zeta}))


def _require_posterior(method: Method) -> PFedBayes | Hierarchical:
    if not isinstance(method, PFedBayes | Hierarchical):
        raise UserError(
            f"{method.about.title} has no distribution over models to start from: run method.name=pfedbayes or "
            "hierarchical"
        )
    return method
