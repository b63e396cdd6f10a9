"""pFedGP (Achituve et al. 2021): a shared deep kernel, and per client a tree of Gaussian-process classifiers.

This is the variant that conditions on all training data; the inducing-point variants are not here.

The trees, and who goes where in them, are decided on the host. What comes of that is a `Task` for each node of each
client, and tasks with equally many examples are done together, whosever they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.maths.random import Purpose, key
from pfedbayes.maths.trees import alike, stack, tree_map
from pfedbayes.methods.base import About, Adaptation, Method, Needs, Shard, State, require, together, weighted_mean
from pfedbayes.methods.pfedgp.polya_gamma import Draws, Link, at_once, draw, gibbs, moments, rbf, side_probabilities
from pfedbayes.nets import Batch, Model

FLOOR = 1e-12  # the probability of what is held to be impossible
MAX_ENUMERATED = 12  # labels whose bipartitions are all tried


class Local(NamedTuple):
    """A round under way: phi (T,), the momentum of its SGD, and the tree's splits (C - 1, 2, C), none at first."""

    phi: Tensor
    momentum: Tensor
    splits: Tensor


class Node(NamedTuple):
    """A binary classifier or a group of them: features z (..., n, F) of its examples, kappa (..., n) and the last
    omega (..., chains, n)."""

    z: Tensor
    kappa: Tensor
    omega: Tensor


class Task(NamedTuple):
    """What a node of a client's tree is to do: learn from the examples in rows `old` (n,) of the client's, of which
    `left` (n,) go left, and predict those in rows `new` (m,).

    truth (m,): which of the new ones go left, if that is known; given: the draws of the node's Gibbs chains or, where
    they have run, the last omega (chains, n).
    """

    client: Tensor
    node: Tensor
    old: Tensor
    left: Tensor
    new: Tensor
    truth: Tensor
    given: Any


class Prepared(NamedTuple):
    """What a client's model is made from: its examples, which of the C labels it has (C,), and a seed."""

    x: Tensor
    y: Tensor
    has: Tensor
    seed: Tensor


class Personal(NamedTuple):
    """What a client predicts with: phi (T,), features z (n, F) and labels y (n,) of its examples, which of the C labels
    it has (C,), its tree, and for each node the last omega (chains, n): of the examples that reach it, then zeros."""

    phi: Tensor
    z: Tensor
    y: Tensor
    has: Tensor
    splits: Tensor
    omega: Tensor


NONE = torch.empty(0, dtype=torch.int64)


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

    about = About(
        "pFedGP",
        "Achituve et al., NeurIPS 2021",
        "a shared feature extractor; every client classifies by Gaussian processes on its own data",
        personal=True,
        shared=False,
    )

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

    @property
    def needs(self) -> Needs:
        return Needs(
            full_batch=True,
            labels=True,
            eager=True,
            full_precision=True,
            max_steps=self.inner_steps,
            outputs=self.features,
        )

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """The plain mean of the copies of phi, each with weight 1/S."""
        return weighted_mean(uploads, torch.ones_like(sizes))

    def begin(self, client: State, received: Tensor, shard: Shard) -> Local:
        no_splits = torch.zeros((0, 2, len(shard.labels)), dtype=torch.bool, device=received.device)
        return Local(received, torch.zeros_like(received), _padded(no_splits))

    def noise_shape(self, num_params: int) -> tuple[int, ...]:
        """Two numbers whose digits are the seed of the step."""
        return (2,)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """g = clip(grad of the objective) + weight_decay phi; m <- momentum m + g; phi <- phi - eta m."""
        (batch,) = batches
        z, pull_back, *_ = torch.func.vjp(lambda phi: self.normalised(model, phi, batch.x), local.phi)
        grad_z, splits = together(self._gradients, z, batch.y, batch.weight, local.splits, noise)
        (grad,) = pull_back(grad_z)
        grad = grad * (self.clip / grad.norm()).clamp_max(1) + self.weight_decay * local.phi
        momentum = self.momentum * local.momentum + grad
        return Local(local.phi - self.eta * momentum, momentum, splits)

    def normalised(self, model: Model, phi: Tensor, x: Tensor) -> Tensor:
        """z = phi(x) / ||phi(x)||, (n, F)."""
        return functional.normalize(model.outputs(phi, x), dim=-1)

    def _gradients(self, z: Tensor, y: Tensor, weight: Tensor, splits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Of stacked clients: gradients of the objectives in the features z (clients, b, F), and the splits, which are
        made where there are none yet. What fills up a batch comes last in it."""
        y, splits = y.cpu(), splits.cpu().clone()
        sizes = weight.sum(1).long().tolist()
        tasks: list[Task] = []
        for k, (size, seed) in enumerate(zip(sizes, _seeds(noise), strict=True)):
            if not splits[k].any():
                splits[k] = _padded(tree(z[k, :size], y[k, :size], splits.shape[-1]))
            tasks += self.tasks(k, y[k, :size], splits[k], _generator(seed, z.device))
        z = z.detach().requires_grad_()
        grad = torch.zeros_like(z)
        with torch.enable_grad():
            for loss in self.losses(z, tasks):
                grad += torch.autograd.grad(loss, z)[0]  # one by one: what a loss needs is free before the next
        return grad, splits.to(z.device)

    def tasks(self, client: int, y: Tensor, splits: Tensor, generator: torch.Generator) -> Iterator[Task]:
        """What the nodes of a client with labels y (n,) have to do in a step: predict a part of their examples, drawn
        from both sides, from the others."""
        for node, (rows, left) in enumerate(members(y, splits)):
            target = self._draw_targets(left, generator)
            if target.any():
                draws = draw(self.chains, int((~target).sum()), self.gibbs_steps, generator)
                yield _task(client, node, rows[~target], left[~target], rows[target], left[target], draws)

    def losses(self, z: Tensor, tasks: Sequence[Task]) -> Iterator[Tensor]:
        """The objective, minus a predictive likelihood, is a sum over nodes: of the mean of -log p(side) over what a
        node has to predict. These are its parts, for as many tasks each as are done together; z (clients, b, F)."""
        for task in _stacked(tasks, self.chains, z.device):
            node = self._classifier(_rows(z, task.client, task.old), task.left, task.given)
            sides = self._sides(_rows(z, task.client, task.new), node)
            yield -torch.log(torch.where(task.truth, *sides) + FLOOR).mean(-1).sum()

    def _draw_targets(self, left: Tensor, generator: torch.Generator) -> Tensor:
        """Which examples of a node have to be predicted: a random share of those of each side, rounded down."""
        target = torch.zeros_like(left)
        for side in (left, ~left):
            rows = side.nonzero()[:, 0]
            order = torch.randperm(len(rows), generator=generator, device=generator.device).cpu()
            target[rows[order[: int(self.target_share * len(rows))]]] = True
        return target

    def _classifier(self, z: Tensor, left: Tensor, draws: Draws) -> Node:
        """Learn which examples go left from their features z (..., n, F); omega carries no gradient."""
        kappa = _kappa(left, z)
        return Node(z, kappa, gibbs(self._covariance(z.detach()), kappa, draws))

    def _sides(self, z: Tensor, node: Node) -> tuple[Tensor, Tensor]:
        """Probabilities (..., m) that examples with features z (..., m, F) go left and right at a node."""
        cross = rbf(z, node.z, self.outputscale, self.lengthscale)
        mean, variance = moments(self._covariance(node.z), cross, self.outputscale, node.omega, node.kappa)
        return side_probabilities(mean, variance, self.link)

    def _covariance(self, z: Tensor) -> Tensor:
        """K (..., n, n) = k(z, z) + jitter I."""
        identity = torch.eye(z.shape[-2], dtype=z.dtype, device=z.device)
        return rbf(z, z, self.outputscale, self.lengthscale) + self.jitter * identity

    def end(self, local: Local) -> tuple[State, Tensor]:
        return (), local.phi

    def prepare(self, data: Adaptation) -> Prepared:
        x, y, _ = data.train
        num_classes = data.num_classes or 0  # there are some, since the method classifies
        return Prepared(x, y, torch.bincount(y, minlength=num_classes) > 0, torch.tensor(data.seed))

    @torch.no_grad()
    def adapt(self, model: Model, client: State, received: Tensor, prepared: Prepared) -> Personal:
        """The tree and its classifiers from the client's whole training set, with the shared features."""
        x, y, has, seed = prepared
        z = self.normalised(model, received, x)
        return Personal(received, z, y, has, *together(self._learn, z, y, has, seed))

    def _learn(self, z: Tensor, y: Tensor, has: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Of stacked clients: the splits of their trees, and omega."""
        y, num_classes = y.cpu(), has.shape[-1]
        splits = torch.stack([_padded(tree(own, labels, num_classes)) for own, labels in zip(z, y, strict=True)])
        tasks = []
        for k, seed in enumerate(seeds.tolist()):
            generator = _generator(seed, z.device)
            for node, (rows, left) in enumerate(members(y[k], splits[k])):
                draws = draw(self.test_chains, len(rows), self.gibbs_steps, generator)
                tasks.append(_task(k, node, rows, left, NONE, NONE, draws))
        omega = z.new_zeros(*splits.shape[:2], self.test_chains, z.shape[1])
        for task in _stacked(tasks, self.test_chains, z.device):
            learned = self._classifier(_rows(z, task.client, task.old), task.left, task.given)
            omega[task.client, task.node, :, : task.old.shape[1]] = learned.omega
        return splits.to(z.device), omega

    @torch.no_grad()
    def posterior(self, state: State) -> None:
        """A client's classifiers are more than the weights of the network."""

    def predict(self, model: Model, state: Personal, x: Tensor, noise: Tensor | None) -> Tensor:
        """Log-probabilities (1, n, C): a label's is the product of the probabilities along its path in the tree."""
        z = self.normalised(model, state.phi, x)
        (sides,) = together(self._all_sides, z, state.z, state.y, state.splits, state.omega)
        path = state.splits.flatten(0, 1).to(z.dtype)
        log_probs = sides.clamp_min(FLOOR).log().flatten(0, 1).mT @ path
        return torch.where(state.has, log_probs, math.log(FLOOR))[None]

    def _all_sides(self, new: Tensor, z: Tensor, y: Tensor, splits: Tensor, omega: Tensor) -> tuple[Tensor]:
        """Of stacked clients with new examples (clients, m, F): the probabilities (clients, nodes, 2, m) to go left and
        right at each node; 1 where there is none."""
        clients, m, _ = new.shape
        y, splits = y.cpu(), splits.cpu()
        tasks = [
            _task(k, node, rows, left, torch.arange(m), NONE, omega[k, node, :, : len(rows)])
            for k in range(clients)
            for node, (rows, left) in enumerate(members(y[k], splits[k]))
        ]
        sides = new.new_ones(*splits.shape[:3], m)
        for task in _stacked(tasks, omega.shape[2], z.device):
            node = Node(_rows(z, task.client, task.old), _kappa(task.left, z), task.given)
            both = self._sides(_rows(new, task.client, task.new), node)
            sides[task.client, task.node] = torch.stack(both, dim=1)
        return (sides,)


def _task(client: int, node: int, old: Tensor, left: Tensor, new: Tensor, truth: Tensor, given: Any) -> Task:
    return Task(torch.tensor(client), torch.tensor(node), old, left, new, truth, given)


def _stacked(tasks: Sequence[Task], chains: int, device: torch.device) -> Iterator[Task]:
    """Tasks with equally many examples as one, on the device: as many at a time as fit the memory."""
    for places in alike(tasks):
        n, m = (len(rows) for rows in (tasks[places[0]].old, tasks[places[0]].new))
        size = at_once(chains * n * max(m, n), device)
        for start in range(0, len(places), size):
            yield tree_map(lambda leaf: leaf.to(device), stack([tasks[k] for k in places[start : start + size]]))


def _kappa(left: Tensor, like: Tensor) -> Tensor:
    return left.to(like.dtype) - 0.5


def _rows(z: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
    """The features (G, n, F) of these rows (G, n) of the clients (G,), from z (all clients, b, F)."""
    return z[clients[:, None], rows]


def _padded(splits: Tensor) -> Tensor:
    """Splits with empty ones after them, C - 1 in all: so many nodes a tree of all C labels has."""
    nodes, _, num_classes = splits.shape
    return functional.pad(splits, (0, 0, 0, 0, 0, num_classes - 1 - nodes))


def tree(z: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """How a tree of binary decisions parts the labels y (n,), as splits (nodes, 2, C): which of the C labels go left
    and which go right at each node, the root first. Similar labels, by the means of their features z (n, F), part late.
    Labels and splits are on the host.
    """
    onehot = functional.one_hot(y, num_classes).double()
    means = (onehot.mT.to(z.device) @ z.double()).cpu() / onehot.sum(0)[:, None]
    splits = torch.zeros((0, 2, num_classes), dtype=torch.bool)
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
    each = torch.arange(count)
    if count <= MAX_ENUMERATED:
        numbers = torch.arange(2 ** (count - 1) - 1)
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
    """For every node the rows of y (n,) that reach it, and which of them go left. Empty splits are no nodes."""
    for left, right in splits:
        if left.any():
            rows = (left | right)[y].nonzero()[:, 0]
            yield rows, left[y[rows]]


def _seeds(noise: Tensor) -> list[int]:
    """A seed for each client from its two numbers (clients, 2), the same from double as from single precision."""
    return [key(first, Purpose.TRAINING, second) for first, second in noise.float().view(torch.int32).tolist()]


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
