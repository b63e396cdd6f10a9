"""Federations of real models for which it is known whom joining helps, by very large test sets.

A client alone fits a ridge regression, linear or logistic. The joined models are a hierarchical ridge regression: each
client's coefficients shrink towards a shared mean, by a shared scale; both are estimated. Clients are batched.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import NamedTuple

import numpy as np

from pfedbayes.trust.joining import PairedLosses, Verdict, judge

TEST = 8000  # test rows per client


class Design(NamedTuple):
    """How the clients of a federation differ."""

    task: str = "regression"
    clients: int = 30
    spread: float = 0.3
    """Standard deviation of the coefficients over clients."""
    strangers: float = 0.0
    """Share of the clients whose coefficients have nothing to do with those of the others."""
    scale: float | None = None
    """Scale to which the joined model shrinks; None: estimated. Too small a one harms large clients."""
    tails: float = np.inf
    """Degrees of freedom of the noise of a regression."""
    features: int = 6
    sizes: tuple[int, int] = (10, 300)
    folds: int = 5


class Simulated(NamedTuple):
    """A federation with the truth about it."""

    losses: list[PairedLosses]
    gain: np.ndarray
    """True difference (clients,) of the losses of the final models, joined minus alone."""
    error: np.ndarray
    """Standard error (clients,) of a mean over as many rows as the client has, of the differences of final models."""
    doubt: np.ndarray
    """Standard error of `gain` itself."""


# The constants of `pfedbayes.trust.joining` were chosen on these, with seeds 0 to 5, and not on OTHERS.
DESIGNS = {
    "alike": Design(spread=0.1, features=20),
    "alike, few columns": Design(spread=0.1, features=5),
    "related": Design(spread=0.3, features=30),
    "unrelated": Design(spread=2.0, features=8),
    "strangers": Design(spread=0.15, strangers=0.2, features=15),
    "too much shrinkage": Design(spread=0.5, scale=0.1, features=10),
    "heavy tails": Design(spread=0.2, strangers=0.15, tails=3, features=15),
    "few large clients": Design(clients=5, spread=0.2, sizes=(40, 300), features=20),
    "many small clients": Design(clients=80, spread=0.2, sizes=(10, 40), strangers=0.1, features=12),
    "classes, alike": Design("classification", spread=0.1, features=12),
    "classes, related": Design("classification", spread=0.4, features=20),
    "classes, unrelated": Design("classification", spread=2.0),
    "classes, strangers": Design("classification", spread=0.2, strangers=0.2, features=15),
    "classes, too much shrinkage": Design("classification", spread=1.0, scale=0.15),
    "classes, few clients": Design("classification", clients=5, spread=0.4, strangers=0.2, features=20),
}
OTHERS = {
    "alike, ten folds": Design(spread=0.15, features=15, folds=10),
    "two kinds of clients": Design(spread=0.25, strangers=0.4, features=10),
    "heavier tails": Design(spread=0.4, tails=2.5, features=25, clients=20),
    "three clients": Design(spread=0.3, clients=3, features=25),
    "many columns": Design(spread=0.2, features=40, clients=15, sizes=(20, 200)),
    "classes, ten folds": Design("classification", spread=0.3, strangers=0.1, features=18, folds=10),
    "classes, three folds": Design("classification", spread=0.5, features=25, folds=3),
    "classes, large clients shrunk": Design("classification", spread=0.7, scale=0.2, features=10, sizes=(100, 300)),
    "classes, small clients": Design("classification", spread=0.3, features=10, sizes=(10, 30), clients=60),
}


def simulate(design: Design, seed: int) -> Simulated:
    """Draw a federation, fit both models to all rows and to each fold's complement, and score them."""
    rng = np.random.default_rng(seed)
    clients, p = design.clients, design.features
    sizes = np.exp(rng.uniform(*np.log(design.sizes), clients)).astype(int)
    centre = rng.normal(size=p)
    beta = centre + design.spread * rng.normal(size=(clients, p))
    strange = rng.random(clients) < design.strangers
    beta[strange] = 1.5 * rng.normal(size=(strange.sum(), p))
    x, y = _draw(rng, design, beta, int(sizes.max()))
    weight = (np.arange(x.shape[1]) < sizes[:, None]).astype(float)
    fold = np.zeros(y.shape, dtype=np.int64)
    for own, n in zip(fold, sizes, strict=True):
        own[:n] = rng.permutation(np.arange(n) % design.folds)
    out = np.zeros((2, *y.shape))
    for k in range(design.folds):
        held_out = fold == k
        for which, fitted in enumerate(_fit_both(design, x, y, weight * ~held_out)):
            out[which] = np.where(held_out, _losses(design, fitted, x, y), out[which])
    losses = [PairedLosses(f"client {i}", *out[:, i, :n], fold[i, :n]) for i, n in enumerate(sizes)]
    alone, joined = _fit_both(design, x, y, weight)
    x, y = _draw(rng, design, beta, TEST)
    difference = _losses(design, joined, x, y) - _losses(design, alone, x, y)
    deviation = difference.std(1)
    return Simulated(losses, difference.mean(1), deviation / np.sqrt(sizes), deviation / np.sqrt(TEST))


class Fitted(NamedTuple):
    """Posteriors of the coefficients of all clients."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: np.ndarray
    """Noise variance (clients,)."""


def _draw(rng, design: Design, beta: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(len(beta), n, beta.shape[1]))
    x[..., 0] = 1
    score = np.einsum("inp,ip->in", x, beta)
    if design.task == "classification":
        return x, (rng.random(score.shape) < 1 / (1 + np.exp(-score))).astype(float)
    noise = rng.normal(size=score.shape) if np.isinf(design.tails) else rng.standard_t(design.tails, score.shape)
    return x, score + noise


def _fit_both(design: Design, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[Fitted, Fitted]:
    """Return the models of clients alone, and the joined ones."""
    clients, p = len(x), x.shape[-1]
    alone = _ridge(design, x, y, weight, np.zeros(p), np.ones(clients))
    centre, scale = alone.mean.mean(0), design.scale or 1.0
    for _ in range(12):
        joined = _ridge(design, x, y, weight, centre, np.full(clients, 1 / scale**2))
        centre = joined.mean.mean(0)
        if design.scale is None:  # by expectation-maximisation, the median over clients against strangers
            spread = np.square(joined.mean - centre).mean(1) + np.trace(joined.covariance, axis1=1, axis2=2) / p
            scale = float(np.clip(np.sqrt(np.median(spread)), 0.02, 3))
    return alone, joined


def _ridge(design: Design, x, y, weight, centre: np.ndarray, precision: np.ndarray) -> Fitted:
    """Fit Bayesian linear or (by Laplace's approximation) logistic regressions with prior N(centre, 1/precision)."""
    p = x.shape[-1]
    prior = precision[:, None, None] * np.eye(p)
    mean, noise = np.tile(centre, (len(x), 1)), np.ones(len(x))
    for _ in range(8):
        score = np.einsum("inp,ip->in", x, mean)
        if design.task == "classification":
            probability = 1 / (1 + np.exp(-score))
            curvature, residual = weight * probability * (1 - probability), weight * (y - probability)
        else:
            residual = weight * (y - score) / noise[:, None]
            curvature = weight / noise[:, None]
        hessian = np.einsum("inp,in,inq->ipq", x, curvature, x, optimize=True) + prior
        slope = np.einsum("inp,in->ip", x, residual) - np.einsum("ipq,iq->ip", prior, mean - centre)
        covariance = np.linalg.inv(hessian)
        step = np.einsum("ipq,iq->ip", covariance, slope)
        if design.task == "classification":  # damped, as Newton's method may overshoot
            step /= np.maximum(1, np.linalg.norm(step, axis=1, keepdims=True))
        mean = mean + step
        if design.task == "regression":
            score = np.einsum("inp,ip->in", x, mean)
            spread = np.einsum("inp,ipq,inq->in", x, covariance, x, optimize=True)
            squares = (weight * (np.square(y - score) + spread)).sum(1)
            noise = (squares + 2) / (weight.sum(1) + 2)
    return Fitted(mean, covariance, noise)


def _losses(design: Design, fitted: Fitted, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the negative log predictive density of each row."""
    score = np.einsum("inp,ip->in", x, fitted.mean)
    variance = np.einsum("inp,ipq,inq->in", x, fitted.covariance, x, optimize=True)
    if design.task == "classification":
        return np.logaddexp(0, (1 - 2 * y) * score / np.sqrt(1 + np.pi * variance / 8))
    variance += fitted.noise[:, None]
    return 0.5 * (np.square(y - score) / variance + np.log(2 * np.pi * variance))


def count(simulated: Simulated, verdicts: list[Verdict]) -> Counter:
    """Count clients by what they were told and what is true, and add up what the default models lose."""
    counts = Counter(clients=len(verdicts))
    for verdict, gain, error, doubt in zip(verdicts, *simulated[1:], strict=True):
        told = {"better": -1, "worse": 1}.get(verdict.conclusion, 0)
        truth = 0 if abs(gain) < 2 * doubt else int(np.sign(gain))
        size = "helped" if gain < -2 * error else "harmed" if gain > 2 * error else "neither"
        counts[size] += 1
        counts[f"{size}, told so"] += told == truth
        counts["told"] += told != 0
        counts["opposite"] += told * truth < 0
        best = min(gain, 0)
        for choice, loss in (("default", gain * (verdict.use == "joined")), ("joined", gain), ("alone", 0)):
            counts[f"regret, {choice}"] += loss - best
    return counts


def tally(designs: dict[str, Design], seeds: range) -> dict[str, Counter]:
    """Judge simulated federations and count, by design and for all."""
    counts = {}
    for name, design in designs.items():
        counts[name] = Counter()
        for simulated in (simulate(design, seed) for seed in seeds):
            counts[name].update(count(simulated, judge(simulated.losses)))
    total: Counter = Counter()
    for counted in counts.values():
        total.update(counted)
    return {**counts, "all": total}


def main() -> None:
    """Print the counts of every design.

    python tests/trust/joining_federations.py [FIRST_SEED] [SEEDS]
    """
    first, number = [int(text) for text in (*sys.argv[1:], *("3000", "4")[len(sys.argv) - 1 :])]
    for designs in (DESIGNS, OTHERS):
        print(f"{'':38}{'clients':>8}{'opposite':>14}{'helped > 2 SE, told':>21}{'harmed > 2 SE, told':>21}", end="")
        print(f"{'regret in mnats: default, always joined, always alone':>56}")
        for name, c in tally(designs, range(first, first + number)).items():
            helped, harmed = (f"{c[f'{kind}, told so']} of {c[kind]}" for kind in ("helped", "harmed"))
            regret = "".join(f"{1000 * c[f'regret, {k}'] / c['clients']:18.2f}" for k in ("default", "joined", "alone"))
            share = f"{c['opposite']:5} {c['opposite'] / c['clients']:7.1%}"
            print(f"{name:38}{c['clients']:8}{share:>14}{helped:>21}{harmed:>21}{regret}")


if __name__ == "__main__":
    main()
