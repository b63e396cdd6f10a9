"""Bayesian linear regression, where posteriors and the best local fits have closed forms."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from federations import make_model, randn
from pfedbayes.maths.descent import split_rows
from pfedbayes.maths.gaussian import MeanField, from_natural, natural, rho_of
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.optim import adam_init
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import Shard
from pfedbayes.nets import Batch

SIGMA, SIZES, D = 0.5, (6, 9, 14, 7, 20), 4


class Problem(NamedTuple):
    x: list[Tensor]
    y: list[Tensor]
    a: Tensor  # X'X / sigma^2, (N, d, d)
    b: Tensor  # X'y / sigma^2, (N, d)

    @property
    def precision(self):
        """Of the posterior under the prior N(0, I)."""
        return torch.eye(D).double() + self.a.sum(0)

    @property
    def mean(self):
        return torch.linalg.solve(self.precision, self.b.sum(0))


def problem(orthogonal=False, same=False):
    """Return regression data; features are correlated, or orthogonal within each client."""
    mixing = (
        torch.eye(D).double()
        if orthogonal
        else torch.linalg.cholesky(torch.full((D, D), 0.6) + 0.4 * torch.eye(D)).double()
    )
    theta, x, y = randn(D, seed=90), [], []
    for i, size in enumerate(SIZES):
        rows = randn(size, D, seed=91 + (0 if same else i))
        if orthogonal:
            rows = torch.linalg.qr(rows)[0] * torch.linspace(1, 2, D).double()
        x.append((rows if not same else randn(8, D, seed=91)) @ mixing.T)
        y.append(x[-1] @ theta + SIGMA * randn(len(x[-1]), seed=191 + (0 if same else i)))
    a = torch.stack([each.T @ each for each in x]) / SIGMA**2
    b = torch.stack([each.T @ target for each, target in zip(x, y, strict=True)]) / SIGMA**2
    return Problem(x, y, a, b)


def model():
    return make_model(nn.Linear(D, 1, bias=False), Regression(SIGMA))


def simplex():
    """Return D + 1 vectors with mean 0 and covariance I: over them, a quadratic loss averages to its expectation."""
    rows = torch.linalg.qr(torch.cat([torch.ones(D + 1, 1), torch.eye(D + 1)[:, :D]], 1).double())[0][:, 1:]
    return rows * (D + 1) ** 0.5


def batch_of(data, i):
    return Batch(data.x[i], data.y[i][:, None], torch.ones(len(data.x[i]), dtype=torch.float64))


def shard_of(data, i):
    return Shard(torch.tensor(float(len(data.x[i])), dtype=torch.float64), torch.empty(0))


def best_fit(cavity, a, b, moments=False):
    """Return the best mean-field Gaussian for cavity * likelihood: by KL(q || p), or by matching moments."""
    eta, precision = cavity
    tilted = precision.diag() + a
    mean = torch.linalg.solve(tilted, eta + b)
    variance = tilted.inverse().diagonal() if moments else 1 / tilted.diagonal()
    return MeanField(mean, variance.sqrt())


def moving(q):
    v = torch.stack([q.mu, rho_of(q.sigma)])
    return split_rows(v, adam_init(v))


def solved_by_pvi(method, data, i, client, received, moments=False):
    """Return a client's new factor and upload after enough steps to reach the best fit."""
    local = method.begin(client, received, shard_of(data, i))
    fit = best_fit(local.old - local.factor, data.a[i], data.b[i], moments)
    return method.end(local._replace(q=moving(fit)))


def solved_by_tilting(method, data, i, client, received):
    """The same for FedEP and FedSEP, whose Fisher information is the diagonal of A_i."""
    local = method.begin(client, received, shard_of(data, i))
    fit = best_fit(local.tilted.cavity, data.a[i], data.b[i])
    one = torch.ones_like(local.tilted.steps)
    information = data.a[i].diagonal() / local.tilted.size
    return method.end(local._replace(tilted=local.tilted._replace(mean=fit.mu, fisher=information, steps=one)))


def federate(method, data, rounds, solve, chosen=lambda round: range(len(SIZES)), server=None, kept=None):
    """Return the server and the clients' states after rounds in which every client finds its best fit."""
    clients = {} if kept is None else dict(kept)
    server = method.init(torch.zeros(D).double(), len(SIZES), None) if server is None else server
    for round in range(rounds):
        uploads, members = [], list(chosen(round))
        received = method.download(server, torch.tensor(members))
        for k, i in enumerate(members):
            own = pick(received, k)
            client = clients[i] if i in clients else method.enrol(own)
            clients[i], upload = solve(method, data, i, client, own)
            uploads.append(upload)
        sizes = torch.tensor([float(len(data.x[i])) for i in members], dtype=torch.float64)
        server = method.aggregate(server, torch.stack(uploads), sizes, torch.tensor(members))
    return server, clients


def prior_naturals():
    return natural(MeanField(torch.zeros(D).double(), torch.ones(D).double()))


def found(server):
    return from_natural(server.q)
