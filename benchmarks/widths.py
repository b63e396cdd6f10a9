"""The posterior widths of the hierarchical method against exact ones, in linear regression.

    python -m benchmarks.widths [--federations 1000] [--out docs/results/widths.md]

Data come from the prior: mu ~ N(0, S^2), delta_i ~ N(0, T^2), and y = x'(mu + delta_i) + noise. With the true scales,
the method ends at the mean-field optimum in (mu, delta), as tests/methods/test_hierarchical.py shows. So its widths
are known in closed form, and nothing is trained here.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

INPUTS, CORRELATION, NOISE, TEST_ROWS, LEVEL = 4, 0.6, 0.5, 50, 0.9
NUMBERS, ROWS, SPREADS = (2, 8, 50), (5, 20, 80), (0.3, 1.0)
HEAD = """# Posterior widths of the hierarchical method

The posterior of a client's weights θᵢ = μ + δᵢ is too narrow if inputs are correlated or clients have few rows. With
correlation 0.6 and eight clients of 20 rows, intervals of 90 % cover 78 to 85 % of the true weights. This hardly
matters for predictions: from 20 rows on, they lose at most 0.006 nats against the exact posterior. With five rows for
five weights, they lose up to 0.09 nats.

The method takes μ and δᵢ as independent and adds their variances. The columns of the tables are:

- now: the method, with the variance s² + σᵢ².
- correlated: the exact correlation of μ and δᵢ for each weight by itself. This would be a cheap correction, but it
  makes θᵢ narrower, so the method does not use it. For a single weight, s² + σᵢ² is too large, which partly makes up
  for the neglected correlation between weights.
- factorised: the best posterior of θᵢ with independent weights. It shows what independent weights alone cost.

T/S is the ratio of two standard deviations: of the clients' differences and of the shared weights. Widths are geometric
means of the ratio to the exact standard deviation of θᵢ. Losses are the mean negative log-likelihood of new rows, minus
that of the exact posterior.
"""
TITLE = """
## Inputs with correlation {correlation}

Federations of N clients, {clients} clients in all per row of the table, {inputs} inputs and a constant, noise {noise}.

| N | rows | T/S | width: now | correlated | factorised | coverage: exact | now | correlated | loss: now | correlated |
|---|---|---|---|---|---|---|---|---|---|---|
"""
FOOT = "\nWritten by `python -m benchmarks.widths --federations {federations}`; do not edit.\n"


class Sample(NamedTuple):
    """A simulated federation of N clients with n rows of K inputs each, the last of which is constant."""

    x: Tensor
    """Inputs (N, n, K)."""
    y: Tensor
    """Targets (N, n)."""
    theta: Tensor
    """True weights (N, K)."""
    scale: Tensor
    """S of each weight (K,)."""
    spread: Tensor
    """T of each weight (K,)."""


class Exact(NamedTuple):
    """The exact posterior of theta."""

    mean: Tensor
    """(N, K)."""
    covariance: Tensor
    """(N, K, K)."""


def simulate(number: int, rows: int, ratio: float, correlation: float, generator: torch.Generator) -> Sample:
    """Draw a federation from the prior, with S^2 as at the start of the method: 1 / inputs, and 1 for the constant."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    identity = torch.eye(INPUTS, dtype=torch.float64)
    mix = torch.linalg.cholesky((1 - correlation) * identity + correlation)
    scale = torch.tensor([INPUTS**-0.5] * INPUTS + [1.0], dtype=torch.float64)
    x = torch.cat([normal(number, rows, INPUTS) @ mix.T, torch.ones(number, rows, 1, dtype=torch.float64)], -1)
    theta = scale * normal(INPUTS + 1) + ratio * scale * normal(number, INPUTS + 1)
    return Sample(x, times(x, theta) + NOISE * normal(number, rows), theta, scale, ratio * scale)


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the products (..., n) of matrices (..., n, K) and vectors (..., K)."""
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def information(sample: Sample) -> Tensor:
    """Return the precision (N, K, K) that the data of each client give its weights."""
    return sample.x.mT @ sample.x / NOISE**2


def exact(sample: Sample) -> Exact:
    """Return the exact posterior of theta: that of mu with all delta integrated out, then that of theta given mu."""
    own, prior = information(sample), (sample.spread**-2).diag()
    target = times(sample.x.mT, sample.y) / NOISE**2
    given = torch.linalg.inv(own + prior)
    carried = own @ given
    of_mu = torch.linalg.inv((sample.scale**-2).diag() + (own - carried @ own).sum(0))
    mean_of_mu = of_mu @ (target - times(carried, target)).sum(0)
    weight = given @ prior
    return Exact(times(given, target + prior @ mean_of_mu), given + weight @ of_mu @ weight.mT)


def mean_field_variances(sample: Sample) -> tuple[Tensor, Tensor]:
    """Return s^2 (K,) and sigma_i^2 (N, K) of the mean-field optimum: 1 / diag of the precision of (mu, delta)."""
    own = information(sample).diagonal(dim1=-2, dim2=-1)
    return 1 / (own.sum(0) + sample.scale**-2), 1 / (own + sample.spread**-2)


def independent(sample: Sample) -> Tensor:
    """Return the variance (N, K) of theta_i if mu and delta_i are independent."""
    shared, personal = mean_field_variances(sample)
    return shared + personal


def correlated(sample: Sample) -> Tensor:
    """Return the variance (N, K) of theta_i with the exact correlation of mu and delta_i, for each weight by itself.

    Given mu, theta_i has the variance sigma_i^2 and follows mu with the slope sigma_i^2 / T^2. So the data of client i
    give mu the precision (1 - sigma_i^2 / T^2) / T^2.
    """
    slope = mean_field_variances(sample)[1] / sample.spread**2
    of_mu = 1 / (sample.scale**-2 + ((1 - slope) / sample.spread**2).sum(0))
    return slope * sample.spread**2 + slope**2 * of_mu


def factorised(posterior: Exact) -> Tensor:
    """Return the variances (N, K) of the best Gaussian q of independent weights, by KL(q || posterior)."""
    precision: Tensor = torch.linalg.inv(posterior.covariance)
    return precision.diagonal(dim1=-2, dim2=-1).reciprocal()


def coverage(sample: Sample, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the share of true weights in the central intervals."""
    half = math.sqrt(2) * torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)) * variance.sqrt()
    return ((sample.theta - mean).abs() < half).double().mean()


def loss(squares: Tensor, variance: Tensor) -> Tensor:
    """Return the mean negative log-density of squared residuals, up to a constant."""
    return 0.5 * (squares / variance + variance.log()).mean()


def measure(sample: Sample, test: Sample) -> Tensor:
    """Return the numbers of a row of the table; test: new rows of the same clients."""
    posterior = exact(sample)
    exact_variance = posterior.covariance.diagonal(dim1=-2, dim2=-1)
    ours, other = independent(sample), correlated(sample)
    widths = [0.5 * (each / exact_variance).log().mean() for each in (ours, other, factorised(posterior))]
    covered = [coverage(sample, posterior.mean, each) for each in (exact_variance, ours, other)]
    squares = (test.y - times(test.x, posterior.mean)).square()
    best = loss(squares, ((test.x @ posterior.covariance) * test.x).sum(-1) + NOISE**2)
    lost = [loss(squares, times(test.x.square(), each) + NOISE**2) - best for each in (ours, other)]
    return torch.stack([*widths, *covered, *lost])


def row(number: int, rows: int, ratio: float, correlation: float, federations: int) -> str:
    """Return a row of the table, over at least 20 federations, which have 2 * `federations` clients in all."""
    found = []
    for seed in range(max(20, 2 * federations // number)):
        whole = simulate(number, rows + TEST_ROWS, ratio, correlation, torch.Generator().manual_seed(seed))
        parts = [whole._replace(x=whole.x[:, part], y=whole.y[:, part]) for part in (slice(rows), slice(rows, None))]
        found.append(measure(*parts))
    means = torch.stack(found).mean(0)
    means[:3] = means[:3].exp()
    cells = [f"{value:.2f}" for value in means[:3]] + [f"{100 * value:.1f} %" for value in means[3:6]]
    return f"| {number} | {rows} | {ratio} | {' | '.join([*cells, *(f'{value:.3f}' for value in means[6:])])} |\n"


def main() -> None:
    """Simulate the federations and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--federations", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = HEAD
    for correlation in (CORRELATION, 0.0):
        title = TITLE.format(correlation=correlation, clients=f"{2 * args.federations:,}", inputs=INPUTS, noise=NOISE)
        print(title, end="", flush=True)
        text += title
        for ratio, number, rows in itertools.product(SPREADS, NUMBERS, ROWS):
            line = row(number, rows, ratio, correlation, args.federations)
            print(line, end="", flush=True)
            text += line
    if args.out:
        args.out.write_text(text + FOOT.format(federations=args.federations))


if __name__ == "__main__":
    main()
