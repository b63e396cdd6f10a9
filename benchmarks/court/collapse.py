"""How the prior of pFedBayes collapses onto few clients, and how a hyper-prior prevents it: exact steps, no training.

Clients solve their problem, Eq. (5), in closed form: among independent Gaussians, in linear regression. The server then
takes Lemma A.2, with or without the hyper-prior. Both repeat until the prior no longer moves.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.court.cases import TAU2, simulate
from benchmarks.court.exact import Sums, sums
from pfedbayes.maths.gaussian import barycentre, mean_field, rho_of
from pfedbayes.report import charts

ROUNDS, DATASETS = 300, 20
SERVERS = {"Lemma A.2": 0.0, "hyper-prior": 4.0}
ZETAS = (1.0, 10.0)
EXPECTED = 0.7  # the deviation that the hyper-prior expects; the true one is 0.55


def best_clients(data: Sums, v: Tensor, zeta: float) -> Tensor:
    """Return the minima (N, 2, d) of E[nll] + zeta KL(q || prior) for the prior v (2, d)."""
    prior = mean_field(v)
    precision = zeta / prior.sigma.square()
    mean = torch.linalg.solve(data.a + torch.diag(precision), data.b + precision * prior.mu)
    variance = zeta / (data.a.diagonal(dim1=-2, dim2=-1) + precision)
    return torch.stack([mean, rho_of(variance.sqrt())], 1)


def spreads(data: Sums, zeta: float, weight: float, rounds: int = ROUNDS) -> Tensor:
    """Return the standard deviations of the prior (rounds, d)."""
    v = torch.stack([torch.zeros(data.b.shape[1]), torch.full((data.b.shape[1],), 0.5413)]).double()
    found = []
    for _ in range(rounds):
        clients = best_clients(data, v, zeta)
        v = barycentre(clients, torch.ones(len(clients)).double(), weight, EXPECTED)
        found.append(mean_field(v).sigma)
    return torch.stack(found)


def curves(clients: int, datasets: int = DATASETS, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return the prior's deviation by round, the geometric mean over weights and data sets, for each server."""
    problems = [sums(simulate("B", 3000 + k, clients)) for k in range(datasets)]
    return {
        f"{server}, ζ = {zeta:g}": [
            float(each)
            for each in torch.stack([spreads(data, zeta, weight, rounds) for data in problems]).log().mean((0, 2)).exp()
        ]
        for zeta in ZETAS
        for server, weight in SERVERS.items()
    }


def picture(found: dict[str, list[float]]) -> str:
    """Draw the curves beside the true deviation."""
    rounds = len(next(iter(found.values())))
    kept = sorted({int(each) for each in np.linspace(0, rounds - 1, 40)})
    series = [
        charts.Series(
            label, kept, [values[k] for k in kept], [0.0] * len(kept), style=k, thin=True, dash="" if k % 2 else "6 3"
        )
        for k, (label, values) in enumerate(found.items())
    ]
    true = TAU2**0.5
    series.append(
        charts.Series(
            "true deviation of the clients", [0, rounds - 1], [true, true], [0.0, 0.0], style=5, dash="2 3", thin=True
        )
    )
    return charts.line_chart(
        "Standard deviation of the shared prior",
        series,
        x_label="round",
        y_label="deviation",
        description="With Lemma A.2 the prior becomes narrower in every round; with the hyper-prior it stays wide.",
    )
