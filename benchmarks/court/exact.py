"""Exact posteriors and the baselines of the court, as Gaussians (closed forms), or as draws that NUTS has made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from benchmarks.court.cases import CASES, NOISE, WIDE, Data, Name
from benchmarks.court.draws import CHECKSUMS, FOLDER


class Gaussian(NamedTuple):
    """What a method claims of the weights of each client, (N, d) and (N, d, d); N is 1 for shared weights."""

    mean: Tensor
    covariance: Tensor


class Sums(NamedTuple):
    """The information in the data of each client."""

    a: Tensor
    """X'X / sigma^2, (N, d, d)."""
    b: Tensor
    """X'y / sigma^2, (N, d)."""


def sums(data: Data) -> Sums:
    """Return what linear regression needs of the data."""
    a = np.stack([x.T @ x for x in data.x]) / NOISE**2
    b = np.stack([x.T @ y for x, y in zip(data.x, data.y, strict=True)]) / NOISE**2
    return Sums(torch.from_numpy(a), torch.from_numpy(b))


def prior_variance(name: Name) -> float:
    """Return the prior variance of the shared weights, or of the mean of the clients' weights."""
    return 1.0 if name in "AE" else WIDE**2


def linear(data: Data, variance: float) -> Gaussian:
    """Return the posterior of one theta ~ N(0, variance) from the data of all clients."""
    a, b = sums(data)
    covariance = torch.linalg.inv(a.sum(0) + torch.eye(a.shape[-1]).double() / variance)
    return Gaussian((covariance @ b.sum(0))[None], covariance[None])


def hierarchical(data: Data, variance: float, tau2: float) -> Gaussian:
    """Return the posteriors of theta_i ~ N(w, tau2), w ~ N(0, variance), with w integrated out.

    With P_i = A_i + I / tau2, a client's information on w is J_i = A_i - A_i P_i^-1 A_i and e_i = b_i - A_i P_i^-1 b_i.
    """
    a, b = sums(data)
    eye = torch.eye(a.shape[-1]).double()
    inverse = torch.linalg.inv(a + eye / tau2)
    carried = a @ inverse
    of_w = torch.linalg.inv(eye / variance + (a - carried @ a).sum(0))
    mean = of_w @ (b - (carried @ b[..., None])[..., 0]).sum(0)
    means = (inverse @ (b + mean / tau2)[..., None])[..., 0]
    return Gaussian(means, inverse + inverse @ of_w @ inverse / tau2**2)


def mean_field(data: Data, name: Name) -> Gaussian:
    """Return the Gaussian with independent weights of least KL(q || posterior): exact mean, 1 / diag precision."""
    a, _ = sums(data)
    if CASES[name].personal:
        exact, precision = (
            hierarchical(data, prior_variance(name), data.tau2),
            a.diagonal(dim1=-2, dim2=-1) + 1 / data.tau2,
        )
    else:
        exact = linear(data, prior_variance(name))
        precision = a.sum(0).diagonal()[None] + 1 / prior_variance(name)
    return Gaussian(exact.mean, torch.diag_embed(1 / precision))


def laplace(x: Tensor, y: Tensor, variance: float) -> Gaussian:
    """Return the Laplace approximation of logistic regression with theta ~ N(0, variance), by Newton's method."""
    theta, eye = torch.zeros(x.shape[1]).double(), torch.eye(x.shape[1]).double() / variance
    for _ in range(100):
        p = torch.sigmoid(x @ theta)
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + eye
        theta = theta - torch.linalg.solve(hessian, x.T @ (p - y) + theta / variance)
    return Gaussian(theta[None], torch.linalg.inv(hessian)[None])


def baselines(name: Name, data: Data) -> dict[str, Gaussian]:
    """Return what needs no training: the exact mean-field optimum, the prior, each client alone, and all as one.

    In logistic regression, "local only" and "pooled only" are Laplace approximations; tau^2 = 1 stands for its prior.
    """
    case, variance = CASES[name], prior_variance(name)
    spread = (1.0 if name == "D" else data.tau2) if case.personal else 0.0
    count, dims = (len(data.x) if case.personal else 1), data.x[0].shape[1]
    own = [data._replace(x=[x], y=[y]) for x, y in zip(data.x, data.y, strict=True)]

    def fit(one: Data, variance: float) -> Gaussian:
        if not case.binary:
            return linear(one, variance)
        x, y = (torch.from_numpy(np.concatenate(part)) for part in (one.x, one.y))
        return laplace(x, y, variance)

    flat = (variance + spread) * torch.eye(dims).double().expand(count, dims, dims)
    found = {"prior": Gaussian(torch.zeros(count, dims).double(), flat)}
    if not case.binary:
        found = {"exact mean-field optimum": mean_field(data, name)} | found
    if case.personal:
        alone = [fit(each, variance + spread) for each in own]
        found["local only"] = Gaussian(*(torch.cat(part) for part in zip(*alone, strict=True)))
        pooled = fit(data, variance)
        found["pooled only"] = Gaussian(pooled.mean.expand(count, -1), pooled.covariance.expand(count, -1, -1))
    elif case.binary:
        found["pooled Laplace"] = fit(data, variance)
    else:
        found["largest client only"] = linear(own[int(np.argmax([len(y) for y in data.y]))], variance)
    return found


def stored(folder: Path = FOLDER) -> dict[str, list[int]]:
    """Return the numbers of the data sets of each case that have draws."""
    sums = json.loads((folder / CHECKSUMS).read_text()) if (folder / CHECKSUMS).exists() else {}
    return {name: sorted(int(each[1:].split(".")[0]) for each in sums if each[0] == name) for name in "CDE"}


def draws(name: Name, number: int, folder: Path = FOLDER) -> dict[str, Tensor]:
    """Return the draws of a data set, after comparing the file with its checksum."""
    content = (folder / f"{name}{number}.safetensors").read_bytes()
    if (
        hashlib.sha256(content).hexdigest()
        != json.loads((folder / CHECKSUMS).read_text())[f"{name}{number}.safetensors"]
    ):
        raise ValueError(f"{name}{number}.safetensors is not the file that was made: make the draws again")
    return {key: each.double() for key, each in load(content).items()}


def of_draws(theta: Tensor) -> Gaussian:
    """Return the moments of draws (K, N, d)."""
    centred = theta - theta.mean(0)
    return Gaussian(theta.mean(0), torch.einsum("kni,knj->nij", centred, centred) / (len(theta) - 1))
