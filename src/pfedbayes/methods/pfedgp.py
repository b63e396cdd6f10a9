"""pFedGP (Achituve et al. 2021): a shared deep kernel, and per client a tree of Gaussian-process classifiers.

This is the variant that conditions on all training data; the inducing-point variants are not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.methods.base import Adaptation, Method, Shard, State, require, weighted_mean
from pfedbayes.nets import Batch, Model
from pfedbayes.polyagamma import Link, gibbs, moments, rbf, side_probabilities
from pfedbayes.streams import Purpose, key

FLOOR = 1e-12  # the probability of what is held to be impossible
MAX_ENUMERATED = 12  # labels whose bipartitions are all tried


class Local(NamedTuple):
    """A round under way: phi (T,), the momentum of its SGD, steps taken, and the splits (nodes, 2, C) of the tree."""

    phi: Tensor
    momentum: Tensor
    step: Tensor
    splits: Tensor


class Node(NamedTuple):
    """A binary classifier: features z (n, F) of its examples, kappa (n,) and the last omega (chains, n)."""

    z: Tensor
    kappa: Tensor
    omega: Tensor


class Personal(NamedTuple):
    """What a client predicts with: phi (T,), its tree, and which of the C labels it has (C,)."""

    phi: Tensor
    splits: Tensor
    nodes: tuple[Node, ...]
    has: Tensor


@dataclass(frozen=True)
class PFedGP(Method):
    """eta, momentum, weight_decay, clip: rate, momentum and weight decay of the local SGD, which is fresh every round,
    and the largest norm of its gradients; inner_steps: full-batch steps per round, whatever training.local_steps says.

    features: size of the network's output; outputscale, lengthscale: of the kernel on normalised features; jitter:
    added to the diagonal of its matrices. gibbs_steps, chains, test_chains: of the Gibbs sampling, with more chains in
    prediction. target_share: part of a node's examples that the others have to predict. link: "reference" takes the
    authors' probability of a side, a lower bound that leans towards the right.
    """

    eta: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.001
    clip: float = 50.0
    inner_steps: int = 1
    features: int = 84
    outputscale: float = 8.0
    lengthscale: float = 1.0
    jitter: float = 0.001
    gibbs_steps: int = 5
    chains: int = 20
    test_chains: int = 30
    target_share: float = 0.5
    link: Link = "mean"

    title = "pFedGP"
    reference = "Achituve et al., NeurIPS 2021"
    learns = "a shared feature extractor; every client classifies by Gaussian processes on its own data"
    personal = True
    shared = False
    adapts = True
    batched = False
    full_batch = True
    classifies = True

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(0 <= self.momentum < 1, f"momentum must be at least 0 and less than 1, got {self.momentum}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        require(self.jitter >= 0, f"jitter must not be negative, got {self.jitter}")
        for name in ("clip", "outputscale", "lengthscale"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name in ("inner_steps", "features", "gibbs_steps", "chains", "test_chains"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(0 < self.target_share < 1, f"target_share must be between 0 and 1, got {self.target_share}")

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """The plain mean of the copies of phi, each with weight 1/S."""
        return weighted_mean(uploads, torch.ones_like(sizes))

    def begin(self, client: State, received: Tensor, shard: Shard) -> Local:
        step = torch.zeros((), dtype=torch.int64)
        splits = torch.zeros((0, 2, len(shard.labels)), dtype=torch.bool)
        return Local(received, torch.zeros_like(received), step, splits)

    @property
    def outputs(self) -> int:
        return self.features

    def noise_shape(self, num_params: int) -> tuple[int, ...]:
        """Two numbers whose digits are the seed of the step."""
        return (2,)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """g = clip(grad of the objective) + weight_decay phi; m <- momentum m + g; phi <- phi - eta m."""
        if local.step >= self.inner_steps:
            return local
        (batch,) = batches
        real = batch.weight > 0
        x, y = batch.x[real], batch.y[real]
        with torch.enable_grad():
            phi = local.phi.detach().requires_grad_()
            features = self.normalised(model, phi, x)
            z = features.detach().requires_grad_()
            splits = local.splits if local.step else tree(z.detach(), y, local.splits.shape[-1])
            grad_z = torch.zeros_like(z)
            for loss in self.losses(z, y, splits, _generator(_seed(noise), phi.device)):
                grad_z += torch.autograd.grad(loss, z)[0]  # node by node: a node's memory is free before the next
            (grad,) = torch.autograd.grad(features, phi, grad_z)
        grad = grad * (self.clip / grad.norm()).clamp_max(1) + self.weight_decay * local.phi
        momentum = self.momentum * local.momentum + grad
        return Local(local.phi - self.eta * momentum, momentum, local.step + 1, splits)

    def normalised(self, model: Model, phi: Tensor, x: Tensor) -> Tensor:
        """z = phi(x) / ||phi(x)||, (n, F)."""
        return functional.normalize(model.outputs(phi, x), dim=-1)

    def losses(self, z: Tensor, y: Tensor, splits: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """The objective, minus a predictive likelihood, is the sum over nodes of these losses.

        At a node a part of the examples, drawn from both sides, is predicted from the others: the mean of
        -log p(side) over that part.
        """
        for rows, left in members(y, splits):
            target = self._draw_targets(left, generator)
            if not target.any():
                continue
            node = self._classifier(z[rows[~target]], left[~target], self.chains, generator)
            sides = self._sides(z[rows[target]], node)
            yield -torch.log(torch.where(left[target], *sides) + FLOOR).mean()

    def _draw_targets(self, left: Tensor, generator: torch.Generator) -> Tensor:
        """Which examples of a node have to be predicted: a random share of those of each side, rounded down."""
        target = torch.zeros_like(left)
        for side in (left, ~left):
            rows = side.nonzero()[:, 0]
            order = torch.randperm(len(rows), generator=generator, device=rows.device)
            target[rows[order[: int(self.target_share * len(rows))]]] = True
        return target

    def _classifier(self, z: Tensor, left: Tensor, chains: int, generator: torch.Generator) -> Node:
        """Learn which examples go left from their features z (n, F); omega carries no gradient."""
        kappa = left.to(z.dtype) - 0.5
        return Node(z, kappa, gibbs(self._covariance(z.detach()), kappa, chains, self.gibbs_steps, generator))

    def _sides(self, z: Tensor, node: Node) -> tuple[Tensor, Tensor]:
        """Probabilities (m,) that examples with features z (m, F) go left and right at a node."""
        cross = rbf(z, node.z, self.outputscale, self.lengthscale)
        mean, variance = moments(self._covariance(node.z), cross, self.outputscale, node.omega, node.kappa)
        return side_probabilities(mean, variance, self.link)

    def _covariance(self, z: Tensor) -> Tensor:
        """K (n, n) = k(z, z) + jitter I."""
        identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
        return rbf(z, z, self.outputscale, self.lengthscale) + self.jitter * identity

    def end(self, local: Local) -> tuple[State, Tensor]:
        return (), local.phi

    def prepare(self, data: Adaptation) -> Adaptation:
        return data

    @torch.no_grad()
    def adapt(self, model: Model, client: State, received: Tensor, prepared: Adaptation) -> Personal:
        """The tree and its classifiers from the client's whole training set, with the shared features."""
        x, y, _ = prepared.train
        z = self.normalised(model, received, x)
        num_classes = prepared.num_classes or 0  # there are some, since the method classifies
        splits = tree(z, y, num_classes)
        generator = _generator(prepared.seed, z.device)
        nodes = [self._classifier(z[rows], left, self.test_chains, generator) for rows, left in members(y, splits)]
        return Personal(received, splits, tuple(nodes), torch.bincount(y, minlength=num_classes) > 0)

    @torch.no_grad()
    def predict_personal(self, model: Model, client: Personal, x: Tensor, noise: Tensor | None) -> Tensor:
        """Log-probabilities (1, n, C): a label's is the product of the probabilities along its path in the tree."""
        z = self.normalised(model, client.phi, x)
        log_probs = torch.where(client.has, 0.0, math.log(FLOOR)).to(z).expand(len(z), -1)
        for node, split in zip(client.nodes, client.splits.to(z.dtype), strict=True):
            for probability, labels in zip(self._sides(z, node), split, strict=True):
                log_probs = log_probs + probability.clamp_min(FLOOR).log()[:, None] * labels
        return log_probs[None]


def tree(z: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """How a tree of binary decisions parts the labels y (n,), as splits (nodes, 2, C): which of the C labels go left
    and which go right at each node, the root first. Similar labels, by the means of their features z (n, F), part late.
    """
    onehot = functional.one_hot(y, num_classes).double()
    means = (onehot.mT @ z.double()) / onehot.sum(0)[:, None]
    splits = torch.zeros((0, 2, num_classes), dtype=torch.bool, device=y.device)
    groups = [onehot.any(0).nonzero()[:, 0]]
    while groups:
        labels = groups.pop()
        if len(labels) == 1:
            continue
        left = two_means(means[labels])
        split = splits.new_zeros((1, 2, num_classes))
        split[0, 0, labels[left]] = True
        split[0, 1, labels[~left]] = True
        splits = torch.cat([splits, split])
        groups += [labels[~left], labels[left]]
    return splits


def two_means(points: Tensor) -> Tensor:
    """Which of the points (c, F) lie in the cluster of the first of them, for the two clusters with the least squared
    distances to their means: of all bipartitions or, where these are too many, of those that put every point with the
    nearer one of a pair of points.
    """
    count = len(points)
    each = torch.arange(count, device=points.device)
    if count <= MAX_ENUMERATED:
        numbers = torch.arange(2 ** (count - 1) - 1, device=points.device)
        inside = (2 * numbers + 1)[:, None] >> each & 1 == 1
    else:
        distance = torch.cdist(points, points)
        one, other = torch.combinations(each).unbind(1)
        inside = (distance[one] < distance[other]) | (each == one[:, None])
        inside = inside ^ ~inside[:, :1]
    # The squared distances to the means are those to the common mean less size * ||mean||^2 of either cluster.
    centred = points - points.mean(0)
    weight = inside.to(points.dtype)
    first, second = ((side @ centred).square().sum(-1) / side.sum(-1) for side in (weight, 1 - weight))
    return inside[(first + second).argmax()]


def members(y: Tensor, splits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For every node the rows of y (n,) that reach it, and which of them go left."""
    for left, right in splits:
        rows = (left | right)[y].nonzero()[:, 0]
        yield rows, left[y[rows]]


def _seed(noise: Tensor) -> int:
    """A seed from two numbers, the same from double as from single precision."""
    first, second = noise.float().view(torch.int32).tolist()
    return key(first, Purpose.TRAINING, second)


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
