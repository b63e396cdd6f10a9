"""PAC-Bayes-kl certificates: upper bounds on the error of a client's model that hold with high probability.

The bound is on the Gibbs error: the error of one network drawn from the client's posterior. It compares the posterior
with a prior and counts examples that the prior has never seen. There are two sources of such examples:

- A run with data.certify withholds part of each client's training data from the federation. The prior is the client's
  personal model after the run. The posterior continues training on the withheld examples.
- A client that was not in the federation. The prior is the shared model, and all of its examples count.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import Prior, personalise, prior_of, weight_of_kl
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import personal_posterior
from pfedbayes.maths.gaussian import kl
from pfedbayes.maths.intervals import binomial_upper, pac_bayes_kl, sampled_mean_upper
from pfedbayes.maths.metrics import log_average
from pfedbayes.nets import Model
from pfedbayes.nets.reparametrisation import dense_layers, num_drawn_weights

ZETAS = (10.0, 30.0)
DRAWS_SHARE = 0.2  # share of delta for the weight draws; the rest is for the examples
DRAWS_PER_EXAMPLE, DRAWS_IN_COMMON = 20, 1000  # see `_draws_per_example`


@dataclass(frozen=True)
class Measured:
    """Errors on a set of examples."""

    size: int
    """Number of examples."""
    gibbs: float
    """Mean error of single draws."""
    mc: float
    """Error of the average over the draws."""


@dataclass(frozen=True)
class Certificate:
    """With probability at least 1 - delta, the Gibbs error of `posterior` on new examples is at most `bound`."""

    client: str
    seed: int
    prior: Which
    """The model that the posterior is compared with."""
    zeta: float | None
    """Weight of the KL term in training; None if the posterior is the prior itself."""
    kl: float
    """KL(posterior || prior) in nats."""
    draws: int
    """Networks drawn per example."""
    delta: float
    bound: float
    vacuous: bool
    """Whether the bound is no better than guessing among all labels."""
    certified: Measured
    """Errors on the examples that the bound counts."""
    test: Measured | None
    """Errors on test data, which the bound does not use."""
    hold_out: float
    """The plain alternative: exact binomial bound at the same delta on the error of the prior's averaged prediction."""
    held_out: Measured
    """Errors of the prior on the examples that the bound counts."""
    posterior: Tensor = field(repr=False, compare=False)
    """Means and rhos (2, T) of the certified model."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the posterior."""
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
    """Return the certificates of all seeds and clients, on withheld examples or on the newcomers' training data.

    For each zeta, a posterior is trained for `steps` steps. The one with the smallest bound is certified; the prior
    itself is a candidate too. This choice costs nothing in the bound on the examples, which holds for all posteriors
    at once. Only the share of delta for the draws is divided among the candidates.
    """
    _require_labels(federation.model)
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}: give a probability between 0 and 1, e.g. 0.05")
    which: Which = "personal" if newcomers is None else "shared"
    if newcomers is None:
        shards = _withheld(federation.shards)
    else:
        _require_new(federation.shards, newcomers)
        shards = newcomers
    prior = prior_of(federation, which)
    candidates: dict[float | None, Federation] = {None: personalise(prior, shards, steps=0)}
    for zeta in zetas:
        candidates[zeta] = personalise(prior, shards, steps, zeta)
    return [
        _certificate(candidates, tuple(candidates), which, client, s, delta, draws)
        for s in range(len(federation.seeds))
        for client in range(len(shards.names))
    ]


def certify_newcomer(prior: Prior, joined: Federation, known: Shards | None, delta: float = 0.05) -> Certificate:
    """Return the certificate of the one client of `joined`, whose model was trained from the shared model `prior`.

    All of its examples count, also those that it was trained on: the prior has seen none of them, and the bound allows
    the posterior to depend on them. known: the data of the run, to check that they share no example; None if they are
    not available.
    """
    _require_labels(joined.model)
    shards = joined.shards
    (rows,) = (torch.cat(parts) for parts in zip(shards.train, shards.validation, shards.test, strict=True))
    whole = dataclasses.replace(shards, train=(rows,), validation=(rows[:0],), test=(rows[:0],))
    if known is not None:
        _require_new(known, whole)
    zeta = weight_of_kl(joined.method)
    candidates = {None: personalise(prior, whole, steps=0), zeta: joined}
    return _certificate(candidates, (zeta,), "shared", 0, 0, delta, None)


def _require_labels(model: Model) -> None:
    if model.likelihood.task != "classification":
        raise UserError("a certificate bounds an error rate, but these targets are numbers: give a run with labels")


def _withheld(shards: Shards) -> Shards:
    """Return the clients with their withheld examples as training data."""
    if not shards.certify:
        raise UserError(
            "this run was trained on all training data, so no example is left for a certificate: run again with "
            "--set data.certify=0.5"
        )
    known = torch.cat([*shards.train, *shards.validation])
    for name, rows in zip(shards.names, shards.certify, strict=True):
        if not len(rows):
            raise UserError(f"no example of {name} was withheld: leave the client out, or give it more examples")
        if torch.isin(rows, known).any():
            raise UserError(
                f"another client was trained on withheld examples of {name}: give each example to one client only"
            )
    return dataclasses.replace(shards, train=shards.certify, certify=())


def _require_new(known: Shards, newcomers: Shards) -> None:
    """Refuse newcomers with examples that the federation was trained on."""
    seen = set(_fingerprints(known, torch.cat([*known.train, *known.validation])))
    for name, rows in zip(newcomers.names, newcomers.train, strict=True):
        if found := sum(fingerprint in seen for fingerprint in _fingerprints(newcomers, rows)):
            raise UserError(
                f"{found} of {len(rows)} examples of {name} are in the training data of the run, so they cannot count "
                "for a certificate: leave them out"
            )


def _fingerprints(shards: Shards, rows: Tensor) -> Iterator[bytes]:
    """Yield a hash of each example."""
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
    """Return the smallest bound among the eligible candidates.

    candidates: posteriors by their zeta; that of None is the prior itself.
    """
    as_prior = candidates[None]
    rows, test_rows = as_prior.shards.train[client], as_prior.shards.test[client]
    size, per_example = len(rows), _draws_per_example(as_prior)
    draws = draws or (DRAWS_PER_EXAMPLE if per_example else DRAWS_IN_COMMON)
    trials = draws * size if per_example else draws
    measured = {zeta: _measure(candidate, client, s, rows, draws) for zeta, candidate in candidates.items()}
    divergence = {zeta: _divergence(candidate, as_prior, client, s) for zeta, candidate in candidates.items()}
    bounds = {}
    for zeta in eligible:
        gibbs = sampled_mean_upper(measured[zeta].gibbs, trials, DRAWS_SHARE * delta / len(eligible))
        bounds[zeta] = pac_bayes_kl(gibbs, divergence[zeta], size, (1 - DRAWS_SHARE) * delta)
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
    """Return KL(posterior || prior) in nats, computed in double precision."""
    q, p = (personal_posterior(each, client, s, torch.float64) for each in (candidate, prior))
    return float(kl(q, p))


def _draws_per_example(federation: Federation) -> bool:
    """Return whether every example has its own draws.

    If all layers are dense, their outputs are drawn instead of their weights, and each of the draws * size errors is
    an independent trial. Otherwise a trial is a whole network.
    """
    x = federation.model.inputs(federation.x[:1], federation.dtype)
    return num_drawn_weights(federation.model.net, dense_layers(federation.model.net, x, federation.dtype)) == 0


def _measure(federation: Federation, client: int, s: int, rows: Tensor, draws: int) -> Measured:
    """Return the errors of a client's model on rows of the pool."""
    batch = federation.batch_of(rows)
    outputs = federation.predict("personal", client, batch.x, draws, s, sampling="activations")
    gibbs = (outputs.argmax(-1) != batch.y).double().mean()
    mc = (log_average(outputs).argmax(-1) != batch.y).double().mean()
    return Measured(len(rows), float(gibbs), float(mc))
