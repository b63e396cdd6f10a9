"""A posterior as a product of factors: q = prior * product of t_i, in natural parameters.

Natural parameters stay as they are from round to round. Turning them into (mu, rho) and back would lose the identity
q = prior + sum t_i to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.gaussian import MeanField, from_natural, gaussian, natural, rho_of
from pfedbayes.maths.stacked import broadcast


class Product(NamedTuple):
    """The server's state."""

    q: Tensor
    """Natural parameters of the posterior, (2, T)."""
    start: Tensor
    """Where clients start, v (2, T): q, but before the first round the initial network. A network whose weights all
    have mean 0 is a saddle point."""
    most: Tensor
    """The largest number of uploads of a round so far; 0 before the first."""
    share: Tensor
    """1 / N."""


class Received(NamedTuple):
    """What a client receives."""

    q: Tensor
    start: Tensor
    damping: Tensor
    """The share of a client's change that is made."""


def prior_of(theta: Tensor, mean: float, sigma: float) -> Tensor:
    """Return the natural parameters (2, T) of the prior N(mean, sigma^2) of weights like theta (T,)."""
    return natural(MeanField(torch.zeros_like(theta) + mean, torch.zeros_like(theta) + sigma))


def first_product(prior: Tensor, theta: Tensor, rho0: float, num_clients: int) -> Product:
    """Return the product before the first round: the prior."""
    return Product(prior, gaussian(theta, rho0), theta.new_zeros(()), theta.new_tensor(1 / num_clients))


def send(product: Product, damping: float | None, clients: int) -> Received:
    """Return what clients receive, stacked. Without a given damping it is 1/S for S uploads, and 1/N at first.

    With a damping of at most 1/S, the next q is a convex combination of the old one and of the clients' fits, so that
    precisions stay positive.
    """
    safe = torch.where(product.most > 0, 1 / product.most.clamp(min=1), product.share)
    made = safe if damping is None else torch.zeros_like(safe) + damping
    received: Received = broadcast(Received(product.q, product.start, made), clients)
    return received


def add_changes(product: Product, changes: Tensor) -> Product:
    """q <- q + sum of the clients' changes (n, 2, T). The sum has no weights: sizes are in the likelihoods."""
    q = product.q + changes.sum(0)
    most = product.most.clamp(min=float(len(changes)))
    return product._replace(q=q, start=_as_v(q), most=most)


def without(product: Product, factor: Tensor) -> Product:
    """q <- q - t_i. Where no proper distribution is left, the posterior keeps its old parameters."""
    rest = product.q - factor
    q = torch.where(rest[1] > 0, rest, product.q)
    return product._replace(q=q, start=_as_v(q))


def centre(received: Received) -> MeanField:
    """Return the received q as the start of later rounds has it, to the last bit."""
    q = from_natural(received.q)
    return MeanField(q.mu, torch.nn.functional.softplus(rho_of(q.sigma)))


def _as_v(q: Tensor) -> Tensor:
    found = from_natural(q)
    return torch.stack([found.mu, rho_of(found.sigma)])
