"""Certificates: with high probability, how often a client's own model errs at most on new examples (PAC-Bayes-kl).

What is bounded is the Gibbs error, that of one network drawn from the client's posterior. The bound compares the
posterior with a prior and counts examples that the prior has never seen. There are two ways to have such examples:

- A run with data.certify keeps a part of each client's training data from the federation. The prior is then the
  client's personal model as the federation left it, and the posterior goes on from there on what was kept back.
- A client that was not in the federation. The prior is the shared model, and all of its examples count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import personalise
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.maths.gaussian import kl
from pfedbayes.maths.intervals import binomial_upper, pac_bayes_kl, sampled_mean_upper
from pfedbayes.maths.metrics import log_average
from pfedbayes.methods import PFedBayes
from pfedbayes.methods.base import weights_posterior
from pfedbayes.nets.reparametrisation import dense_layers, num_drawn_weights
from pfedbayes.runs import saving

CERTIFICATES, POSTERIORS = "certificate.json", "certified.safetensors"
ZETAS = (10.0, 30.0)
SHARE_OF_DRAWS = 0.2  # of delta; the rest is for the examples
DRAWS_APART, DRAWS_TOGETHER = 20, 1000  # see _drawn_apart


@dataclass(frozen=True)
class Measured:
    """Errors on `size` examples: of single draws on average (Gibbs), and of the average of the draws (mc)."""

    size: int
    gibbs: float
    mc: float


@dataclass(frozen=True)
class Certificate:
    """With probability at least 1 - delta the Gibbs error of `posterior` (2, T) on new examples is at most `bound`.

    prior: which model it was compared with. zeta: the weight of the KL term when the posterior was trained on the
    examples that certify; None: it is the prior itself, and kl (nats) is 0. draws: networks drawn per example. vacuous:
    the bound says no more than that the model is better than guessing among all labels, if that.
    certified: errors on the examples that the bound counts; test: on test data, which have no part in it.
    hold_out: the plain alternative, an exact binomial bound at the same delta on the error of the *prior's* averaged
    prediction, whose errors on the same examples are `held_out`.
    """

    client: str
    seed: int
    prior: Which
    zeta: float | None
    kl: float
    draws: int
    delta: float
    bound: float
    vacuous: bool
    certified: Measured
    test: Measured | None
    hold_out: float
    held_out: Measured
    posterior: Tensor = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """All but the posterior."""
        plain = dataclasses.asdict(dataclasses.replace(self, posterior=torch.empty(0)))
        del plain["posterior"]
        return plain


def certify(
    federation: Federation,
    newcomers: Shards | None = None,
    delta: float = 0.05,
    zetas: Sequence[float] = ZETAS,
    steps: int = 100,
    draws: int | None = None,
) -> list[Certificate]:
    """Certificates of all clients and seeds, on what was kept back by data.certify or on the newcomers' training data.

    For each zeta a posterior is trained in so many steps, and the one with the least bound is taken, among them the
    prior itself. That is allowed: the bound holds for all posteriors at once. Only the draws are shared out.
    """
    _require_labels(federation)
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}: give a probability between 0 and 1, e.g. 0.05")
    shards = _kept_back(federation) if newcomers is None else _unknown(federation, newcomers)
    prior: Which = "personal" if newcomers is None else "shared"
    candidates: dict[float | None, Federation] = {None: personalise(federation, shards, prior, steps=0)}
    for zeta in zetas:
        candidates[zeta] = personalise(federation, shards, prior, steps, zeta)
    return [
        _certificate(candidates, tuple(candidates), prior, client, s, delta, draws)
        for s in range(len(federation.seeds))
        for client in range(len(shards.names))
    ]


def certify_joined(federation: Federation, joined: Federation, delta: float = 0.05) -> Certificate:
    """The certificate of the one client of `joined`, which has made its model of a part of its examples from the shared
    one of a federation: of this very model, by all of its examples, since the prior has seen none and the bound
    allows a posterior to be chosen by any of them."""
    _require_labels(federation)
    shards = joined.shards
    (rows,) = (torch.cat(parts) for parts in zip(shards.train, shards.validation, shards.test, strict=True))
    whole = dataclasses.replace(shards, train=(rows,), validation=(rows[:0],), test=(rows[:0],))
    zeta = joined.method.zeta if isinstance(joined.method, PFedBayes) else None
    candidates = {None: personalise(federation, _unknown(federation, whole), "shared", steps=0), zeta: joined}
    return _certificate(candidates, (zeta,), "shared", 0, 0, delta, None)


def _require_labels(federation: Federation) -> None:
    if federation.model.likelihood.task != "classification":
        raise UserError("a certificate bounds an error rate: it needs labels, and these targets are numbers")


def _kept_back(federation: Federation) -> Shards:
    """The clients with the examples that the federation has not seen in the place of those it has."""
    shards = federation.shards
    if not shards.certify:
        raise UserError(
            "every model of this run has seen all training data of its clients, so nothing is left to certify with: "
            "run again with --set data.certify=0.5"
        )
    known = torch.cat([*shards.train, *shards.validation])
    for name, rows in zip(shards.names, shards.certify, strict=True):
        if not len(rows):
            raise UserError(f"nothing of {name} was kept back: leave it out, or give it more examples")
        if torch.isin(rows, known).any():
            raise UserError(f"examples kept back by {name} were trained on by another client: deal them out once")
    return dataclasses.replace(shards, train=shards.certify, certify=())


def _unknown(federation: Federation, newcomers: Shards) -> Shards:
    """The newcomers, none of whose examples may be among those that the federation was trained on."""
    ours = federation.shards
    known = set(_fingerprints(ours, torch.cat([*ours.train, *ours.validation])))
    for name, rows in zip(newcomers.names, newcomers.train, strict=True):
        if found := sum(print in known for print in _fingerprints(newcomers, rows)):
            raise UserError(
                f"{found} of {len(rows)} examples of {name} are in the training data of the run, so they certify "
                "nothing: leave them out"
            )
    return newcomers


def _fingerprints(shards: Shards, rows: Tensor) -> Iterator[bytes]:
    for x, y in zip(shards.x[rows].numpy(), shards.y[rows].numpy(), strict=True):
        yield hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=16).digest()


def _certificate(
    candidates: dict[float | None, Federation],
    eligible: Sequence[float | None],
    prior: Which,
    client: int,
    s: int,
    delta: float,
    draws: int | None,
) -> Certificate:
    """The least bound among the eligible candidates, posteriors by their zeta; the one of None is the prior itself."""
    as_prior = candidates[None]
    rows, test_rows = as_prior.shards.train[client], as_prior.shards.test[client]
    size, apart = len(rows), _drawn_apart(as_prior)
    draws = draws or (DRAWS_APART if apart else DRAWS_TOGETHER)
    trials = draws * size if apart else draws
    measured = {zeta: _measure(candidate, client, s, rows, draws) for zeta, candidate in candidates.items()}
    divergence = {zeta: _divergence(candidate, as_prior, client, s) for zeta, candidate in candidates.items()}
    bounds = {}
    for zeta in eligible:
        gibbs = sampled_mean_upper(measured[zeta].gibbs, trials, SHARE_OF_DRAWS * delta / len(eligible))
        bounds[zeta] = pac_bayes_kl(gibbs, divergence[zeta], size, (1 - SHARE_OF_DRAWS) * delta)
    zeta = min(bounds, key=lambda zeta: bounds[zeta])
    errors = round(measured[None].mc * size)
    return Certificate(
        client=as_prior.shards.names[client],
        seed=as_prior.seeds[s],
        prior=prior,
        zeta=zeta,
        kl=divergence[zeta],
        draws=draws,
        delta=delta,
        bound=bounds[zeta],
        vacuous=bounds[zeta] >= 1 - 1 / (as_prior.shards.num_classes or 1),
        certified=measured[zeta],
        test=_measure(candidates[zeta], client, s, test_rows, draws) if len(test_rows) else None,
        hold_out=binomial_upper(errors, size, delta),
        held_out=measured[None],
        posterior=candidates[zeta].personal_state(client, s).q.cpu(),
    )


def _divergence(candidate: Federation, prior: Federation, client: int, s: int) -> float:
    """KL(posterior || prior) in nats, in double precision."""
    q, p = (weights_posterior(each.method, each.personal_state(client, s).q.double()) for each in (candidate, prior))
    return float(kl(q, p))


def _drawn_apart(federation: Federation) -> bool:
    """Whether every example gets draws of its own: where all layers are dense, what they put out is drawn instead of
    their weights, and each of draws * size errors is an independent trial; else only whole networks are."""
    x = federation.model.inputs(federation.x[:1], federation.dtype)
    return num_drawn_weights(federation.model.net, dense_layers(federation.model.net, x, federation.dtype)) == 0


def _measure(federation: Federation, client: int, s: int, rows: Tensor, draws: int) -> Measured:
    batch = federation.batch_of(rows)
    outputs = federation.predict("personal", client, batch.x, draws, s, sampling="activations")
    gibbs = (outputs.argmax(-1) != batch.y).double().mean()
    mc = (log_average(outputs).argmax(-1) != batch.y).double().mean()
    return Measured(len(rows), float(gibbs), float(mc))


def certify_run(folder: Path, device: str = "auto", **settings: Any) -> list[Certificate]:
    """Certify the clients of a run folder, and keep the certificates and the posteriors that they are about in it."""
    federation = saving.load(folder, device=device)
    certificates = certify(federation, **settings)
    writer = runs.Writer(folder)
    try:
        texts = [certificate.as_json() for certificate in certificates]
        stacked = torch.stack([certificate.posterior for certificate in certificates])
        writer.write(POSTERIORS, save({"q": stacked}))
        writer.write(CERTIFICATES, json.dumps(texts, indent=1) + "\n")
    finally:
        writer.close()
    return certificates
