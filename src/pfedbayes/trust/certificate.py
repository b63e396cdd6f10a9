"""Certificates: upper bounds on the error of a client's model that hold with high probability.

The bound is on the Gibbs error: the error of one network drawn from the client's posterior. For numbers it is on the
squared error, clipped at `CLIP` variances of the targets. The bound counts examples that a prior has never seen:

- A run with data.certify withholds part of each client's training data from the federation. The prior is the client's
  personal model after the run.
- A client that was not in the federation. It trains on half of its examples, from the shared model, and this makes the
  prior. The other half counts.

Each prior competes at several widths, with two kinds of bounds, each at half of delta. The prior as it is has a
binomial bound, like any model on held-out examples. A posterior that has trained on the counted examples too has the
PAC-Bayes-kl bound, which holds for all posteriors at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import Prior, personalise, prior_of, weight_of_kl
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import personal_posterior
from pfedbayes.maths.gaussian import kl, rho_of, sigma
from pfedbayes.maths.intervals import binomial_upper, kl_inverse, pac_bayes_kl, sampled_mean_upper
from pfedbayes.maths.likelihoods import is_of_labels, is_of_numbers
from pfedbayes.maths.metrics import log_average
from pfedbayes.nets import Model
from pfedbayes.nets.reparametrisation import dense_layers, num_drawn_weights
from pfedbayes.trust.bound_training import TowardsBound

Objective = Literal["bound", "elbo"]
ZETAS = (10.0, 30.0)  # weights of the KL term, for the objective "elbo"
SCALES = (1.0, 0.3, 0.1)  # widths of the priors, as shares of the model's own
INFORMED = 0.5  # share of a new client's examples that make its prior
DRAWS_SHARE = 0.2  # share of a PAC-Bayes bound's delta for the weight draws; the rest is for the examples
DRAWS_PER_EXAMPLE, DRAWS_IN_COMMON = 200, 1000  # see `_draws_per_example`
SCREENING = 10  # every tenth draw compares a candidate with the others
CLIP = 4.0  # variances of the targets at which squared errors are clipped


@dataclass(frozen=True)
class Measured:
    """Errors on a set of examples; for numbers, clipped squared errors as shares of `CLIP` variances."""

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
    """The model that the prior comes from."""
    scale: float
    """Width of the prior, as a share of that of the model."""
    objective: Objective | None
    """What the posterior was trained for; None if it is the prior itself."""
    zeta: float | None
    """Weight of the KL term, if the objective has one."""
    kl: float
    """KL(posterior || prior) in nats."""
    draws: int
    """Networks drawn per example."""
    delta: float
    bound: float
    vacuous: bool
    """Whether the bound is no better than guessing among all labels, or than always predicting the mean."""
    certified: Measured
    """Errors on the examples that the bound counts."""
    test: Measured | None
    """Errors on test data, which the bound does not use."""
    hold_out: float
    """The plain alternative: hold-out bound at the same delta on the error of the prior's averaged prediction."""
    held_out: Measured
    """Errors of the prior on the examples that the bound counts."""
    posterior: Tensor = field(repr=False, compare=False)
    """Means and rhos (2, T) of the certified model."""
    largest: float | None = None
    """For numbers, the squared error, in squared units of the target, that counts as 1."""

    def shown(self, share: float) -> float:
        """Return an error as users read it: in percent, or as a root mean squared error in units of the target."""
        return 100 * share if self.largest is None else math.sqrt(share * self.largest)

    def claim(self) -> str:
        """Return what is certified of a drawn network, as the end of a sentence."""
        if self.largest is None:
            return f"is wrong on at most {self.bound:.1%} of new rows"
        most, end = self.shown(self.bound), self.shown(1.0)
        return f"has a root mean squared error of at most {most:.4g}, with errors above {end:.4g} counted as {end:.4g}"

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the posterior."""
        plain = dataclasses.asdict(dataclasses.replace(self, posterior=torch.empty(0)))
        del plain["posterior"]
        return plain


class _Recipe(NamedTuple):
    """How a candidate is made."""

    scale: float = 1.0
    objective: Objective | None = None
    """None for the prior itself."""
    zeta: float | None = None


def certify(
    federation: Federation,
    newcomers: Shards | None = None,
    delta: float = 0.05,
    objective: Objective | None = None,
    zetas: Sequence[float] = ZETAS,
    scales: Sequence[float] = SCALES,
    steps: int = 100,
    draws: int | None = None,
) -> list[Certificate]:
    """Return the certificates of all seeds and clients, on withheld examples or on newcomers' training data.

    Priors of several widths, and posteriors that start from them and train for `steps` steps, compete for the smallest
    bound.

    objective: "bound" trains for a PAC-Bayes bound; "elbo" as the method does, once for each zeta. Default: "bound" for
    labels, "elbo" for numbers.
    """
    _require_certifiable(federation.model)
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}: give a probability between 0 and 1, e.g. 0.05")
    of_labels = is_of_labels(federation.model.likelihood)
    objective = objective or ("bound" if of_labels else "elbo")
    if objective == "bound" and not of_labels:
        raise UserError("training for the bound needs class probabilities, but these targets are numbers: use elbo")
    if newcomers is None:
        which: Which = "personal"
        prior, shards = prior_of(federation, "personal"), _withheld(federation.shards)
    else:
        which = "shared"
        _require_new(federation.shards, newcomers)
        prior, shards = _informed(prior_of(federation, "shared"), newcomers, steps)
    as_it_is = personalise(prior, shards, steps=0)
    candidates: dict[_Recipe, Federation] = {}
    for scale in scales:
        narrow = _scaled(prior, scale)
        candidates[_Recipe(scale)] = personalise(narrow, shards, steps=0)
        if objective == "bound":
            noise = getattr(prior.method, "noise_std", 1.0)
            method = TowardsBound(steps, delta, noise, prior.method.needs.full_batch)
            candidates[_Recipe(scale, "bound")] = personalise(narrow, shards, steps, method=method)
        else:
            for zeta in zetas:
                candidates[_Recipe(scale, "elbo", zeta)] = personalise(narrow, shards, steps, zeta)
    return [
        _certificate(
            {_Recipe(): as_it_is} | candidates,
            tuple(candidates),
            which,
            client,
            s,
            delta,
            draws,
            _unit(federation.shards),
        )
        for s in range(len(federation.seeds))
        for client in range(len(shards.names))
    ]


def _scaled(prior: Prior, scale: float) -> Prior:
    """Return a prior whose standard deviations are multiplied by `scale`."""
    if scale == 1:
        return prior
    states = (torch.stack([v[..., 0, :], rho_of(scale * sigma(v[..., 1, :]))], -2) for v in prior.states)
    return dataclasses.replace(prior, states=tuple(states))


def _informed(shared: Prior, newcomers: Shards, steps: int) -> tuple[Prior, Shards]:
    """Return priors that were trained on a random part of each client's examples, and the clients with the others."""
    generator = torch.Generator().manual_seed(0)
    mixed = [rows[torch.randperm(len(rows), generator=generator)] for rows in newcomers.train]
    cuts = [int(INFORMED * len(rows)) for rows in mixed]
    first = dataclasses.replace(newcomers, train=tuple(rows[:cut] for rows, cut in zip(mixed, cuts, strict=True)))
    rest = dataclasses.replace(newcomers, train=tuple(rows[cut:] for rows, cut in zip(mixed, cuts, strict=True)))
    trained = personalise(shared, first, steps)
    states = [torch.stack([trained.personal_state(i, s).q for i in range(len(cuts))]) for s in range(len(shared.seeds))]
    return dataclasses.replace(shared, states=tuple(states)), rest


def _unit(shards: Shards) -> float:
    """Return the variance of a federation's training targets, which no counted example has a part in; 1 for labels."""
    return float(shards.y[torch.cat(shards.train)].double().var(0).mean()) if shards.num_classes is None else 1.0


def certify_newcomer(prior: Prior, joined: Federation, known: Shards | None, delta: float = 0.05) -> Certificate:
    """Return the certificate of the one client of `joined`, whose model was trained from the shared model `prior`.

    All of its examples count, also those that it was trained on: the prior has seen none of them, and the bound allows
    the posterior to depend on them.

    known: the data of the run, to check that they share no example; None if they are not available.
    """
    _require_certifiable(joined.model)
    shards = joined.shards
    (rows,) = (torch.cat(parts) for parts in zip(shards.train, shards.validation, shards.test, strict=True))
    whole = dataclasses.replace(shards, train=(rows,), validation=(rows[:0],), test=(rows[:0],))
    if known is not None:
        _require_new(known, whole)
    trained = _Recipe(1.0, "elbo", weight_of_kl(joined.method))
    candidates = {_Recipe(): personalise(prior, whole, steps=0), trained: joined}
    return _certificate(candidates, (trained,), "shared", 0, 0, delta, None, 1.0 if known is None else _unit(known))


def _require_certifiable(model: Model) -> None:
    if not is_of_labels(model.likelihood) and not is_of_numbers(model.likelihood):
        raise UserError("there is no certificate for times to an event: it needs an error that is known for every row")


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
    candidates: Mapping[_Recipe, Federation],
    eligible: Sequence[_Recipe],
    prior: Which,
    client: int,
    s: int,
    delta: float,
    draws: int | None,
    unit: float,
) -> Certificate:
    """Return the smallest bound among the eligible candidates.

    A few draws choose the candidate, and all draws then bound it. The bounds of all candidates hold at once, so the
    choice costs no more than their shares of delta.

    unit: the variance of the targets, for numbers.
    """
    as_prior = candidates[_Recipe()]
    likelihood, rows, test_rows = as_prior.model.likelihood, as_prior.shards.train[client], as_prior.shards.test[client]
    draws = draws or (DRAWS_PER_EXAMPLE if _draws_per_example(as_prior) else DRAWS_IN_COMMON)
    few = max(1, draws // SCREENING)
    divergence = {each: _divergence(candidates[each], candidates[_Recipe(each.scale)], client, s) for each in eligible}

    def bound(recipe: _Recipe, losses: Tensor) -> float:
        rivals = [each for each in eligible if (each.objective is None) == (recipe.objective is None)]
        kinds, widths = 1 + (len(rivals) < len(eligible)), len({each.scale for each in rivals})
        share, of_one_width = delta / (kinds * widths), len(rivals) / widths
        return _bound(as_prior, recipe, losses, divergence[recipe], share, of_one_width)

    screened = {each: bound(each, _losses(candidates[each], client, s, rows, few, unit)[0]) for each in eligible}
    best = min(screened, key=lambda each: screened[each])
    losses, averaged = _losses(candidates[best], client, s, rows, draws, unit)
    of_prior = _losses(as_prior, client, s, rows, few, unit)
    found = bound(best, losses)
    if is_of_numbers(likelihood):
        y = as_prior.shards.y[rows].double()
        guess = float(_squared(y.mean(0) - y, unit).mean())
        hold_out = kl_inverse(float(of_prior[1].mean()), math.log(1 / delta) / len(rows))
    else:
        guess = 1 - 1 / (as_prior.shards.num_classes or 1)
        hold_out = binomial_upper(int(of_prior[1].sum()), len(rows), delta)
    preprocessing = as_prior.shards.preprocessing
    largest = CLIP * unit * (preprocessing.target.deviation if preprocessing else 1.0) ** 2
    tested = _losses(candidates[best], client, s, test_rows, few, unit) if len(test_rows) else None
    return Certificate(
        client=as_prior.shards.names[client],
        seed=as_prior.seeds[s],
        prior=prior,
        scale=best.scale,
        objective=best.objective,
        zeta=best.zeta,
        kl=divergence[best],
        draws=draws,
        delta=delta,
        bound=found,
        vacuous=found >= guess,
        certified=_measured(losses, averaged),
        test=tested and _measured(*tested),
        hold_out=hold_out,
        held_out=_measured(*of_prior),
        posterior=candidates[best].personal_state(client, s).q.cpu(),
        largest=largest if is_of_numbers(likelihood) else None,
    )


def _bound(
    federation: Federation, recipe: _Recipe, losses: Tensor, divergence: float, delta: float, sharing: float
) -> float:
    """Return the bound of a candidate from the losses (K, n) of its draws.

    sharing: by how many candidates the delta of the draws is shared.
    """
    draws, size = losses.shape
    own_draws, labels = _draws_per_example(federation), is_of_labels(federation.model.likelihood)
    if recipe.objective is None and own_draws and labels:
        # The errors of one draw per example are independent trials, whose rate is the Gibbs error.
        return binomial_upper(int(losses[0].sum()), size, delta)
    trials, of_draws = draws * size if own_draws else draws, DRAWS_SHARE * delta / sharing
    if own_draws and labels:
        # The rates of the examples differ, but such a sum is no more likely to be small (Hoeffding 1956).
        gibbs = binomial_upper(int(losses.sum()), trials, of_draws)
    else:
        gibbs = sampled_mean_upper(float(losses.mean()), trials, of_draws)
    delta = (1 - DRAWS_SHARE) * delta
    if recipe.objective is None:
        return kl_inverse(gibbs, math.log(1 / delta) / size)
    return pac_bayes_kl(gibbs, divergence, size, delta)


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


def _losses(
    federation: Federation, client: int, s: int, rows: Tensor, draws: int, unit: float
) -> tuple[Tensor, Tensor]:
    """Return the losses in [0, 1] of each draw of a client's model (K, n), and of the averaged prediction (n,).

    rows: of the pool. unit: the variance of the targets, for numbers.
    """
    likelihood, batch = federation.model.likelihood, federation.batch_of(rows)
    outputs = federation.predict("personal", client, batch.x, draws, s, sampling="activations")
    if is_of_labels(likelihood):
        logits = likelihood.logits(outputs)
        single, averaged = (said.argmax(-1) != batch.y for said in (logits, log_average(logits)))
        return single.double().cpu(), averaged.double().cpu()
    assert is_of_numbers(likelihood)  # noqa: S101, checked by `_require_certifiable`
    points = likelihood.point(outputs)
    single, averaged = (_squared((said - batch.y).double(), unit) for said in (points, points.mean(0)))
    return single.cpu(), averaged.cpu()


def _squared(error: Tensor, unit: float) -> Tensor:
    """Return clipped squared errors (..., n) of errors (..., n, d), as shares of `CLIP` variances."""
    return (error.square() / (CLIP * unit)).clamp(max=1).mean(-1)


def _measured(losses: Tensor, averaged: Tensor) -> Measured:
    return Measured(len(averaged), float(losses.mean()), float(averaged.mean()))
