"""pFedGP (Achituve et al. 2021): a shared deep kernel, and per client a tree of Gaussian-process classifiers.

This is the variant that conditions on all training data, without inducing points.

The CPU builds the trees and routes the examples. This gives one `Task` per node and client. Tasks with equal numbers of
examples run as one batch, across clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.constraints import Count, Interval, NonNegative, Positive
from pfedbayes.maths.random import Purpose, key
from pfedbayes.maths.stacked import call_stacked, weighted_mean
from pfedbayes.maths.trees import group_by_shapes, stack, tree_map
from pfedbayes.methods.base import About, Adaptation, Method, Needs, Shard, State
from pfedbayes.methods.pfedgp.label_tree import build_tree, members, pad_splits
from pfedbayes.methods.pfedgp.polya_gamma import Draws, Link, at_once, draw, gibbs, moments, rbf, side_probabilities
from pfedbayes.nets import Batch, Model

FLOOR = 1e-12  # probability of labels that a client does not have
NO_ROWS = torch.empty(0, dtype=torch.int64)


class KernelTraining(NamedTuple):
    """The state of a round."""

    phi: Tensor
    """Parameters (T,) of the feature extractor."""
    momentum: Tensor
    """Momentum of its SGD, (T,)."""
    splits: Tensor
    """The label tree (C - 1, 2, C); empty before the first step."""


class Node(NamedTuple):
    """A binary classifier, or a batch of them."""

    z: Tensor
    """Features of its examples (..., n, F)."""
    kappa: Tensor
    """y - 1/2, (..., n)."""
    omega: Tensor
    """The last omega of the Gibbs chains (..., chains, n)."""


class Task(NamedTuple):
    """The work of one node of a client's tree: learn from the examples `old`, predict the examples `new`."""

    client: Tensor
    node: Tensor
    old: Tensor
    """Rows (n,) of the client's examples to learn from."""
    left: Tensor
    """Which of them go left (n,)."""
    new: Tensor
    """Rows (m,) to predict."""
    truth: Tensor
    """Which of these go left (m,), if known."""
    given: Any
    """The random numbers of the Gibbs chains or, after they have run, the last omega (chains, n)."""


class Prepared(NamedTuple):
    """What a client's personal model is made from."""

    x: Tensor
    y: Tensor
    has: Tensor
    """Which of the C labels the client has (C,)."""
    seed: Tensor


class Personal(NamedTuple):
    """A personal model at prediction time."""

    phi: Tensor
    """Parameters (T,) of the feature extractor."""
    z: Tensor
    """Features of the client's examples (n, F)."""
    y: Tensor
    """Their labels (n,)."""
    has: Tensor
    """Which of the C labels the client has (C,)."""
    splits: Tensor
    """The label tree (C - 1, 2, C)."""
    omega: Tensor
    """The last omega of each node (nodes, chains, n): of the examples that reach it, padded with zeros."""


@dataclass(frozen=True)
class PFedGP(Method):
    """Local SGD starts without momentum in every round. The kernel acts on normalised features."""

    eta: NonNegative[float] = 0.05
    """Learning rate of the local SGD."""
    momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    """Momentum of the local SGD."""
    weight_decay: NonNegative[float] = 0.001
    """Weight decay of the local SGD."""
    clip: Positive[float] = 50.0
    """Largest gradient norm."""
    inner_steps: Count = 1
    """Full-batch steps per round, if training.local_steps is not smaller."""
    features: Count = 84
    """Number of network outputs."""
    outputscale: Positive[float] = 8.0
    """Variance of the kernel."""
    lengthscale: Positive[float] = 1.0
    """Length scale of the kernel."""
    jitter: NonNegative[float] = 0.001
    """Added to the diagonal of covariance matrices."""
    gibbs_steps: Count = 5
    """Steps of each Gibbs chain."""
    chains: Count = 20
    """Gibbs chains in training."""
    test_chains: Count = 30
    """Gibbs chains in prediction."""
    target_share: Annotated[float, Interval(more_than=0, less_than=1)] = 0.5
    """Share of a node's examples that are predicted from the others."""
    link: Link = "mean"
    """Probability of a side: its mean, or the authors' lower bound ("reference"), which favours the right."""

    about = About(
        "pFedGP",
        "Achituve et al., NeurIPS 2021",
        "a shared feature extractor; every client classifies by Gaussian processes on its data",
        personal=True,
        shared=False,
    )

    @property
    def needs(self) -> Needs:
        return Needs(
            keeps_examples=True,
            full_batch=True,
            at_once=5,  # more need memory that has to be allocated anew every round
            labels=True,
            eager=True,
            full_precision=True,
            max_steps=self.inner_steps,
            outputs=self.features,
        )

    def aggregate(self, server: Tensor, uploads: Tensor, sizes: Tensor, clients: Tensor) -> Tensor:
        """Return the mean of the copies of phi, each with weight 1/S."""
        return weighted_mean(uploads, torch.ones_like(sizes))

    def begin(self, client: State, received: Tensor, shard: Shard) -> KernelTraining:
        no_splits = torch.zeros((0, 2, len(shard.labels)), dtype=torch.bool, device=received.device)
        return KernelTraining(received, torch.zeros_like(received), pad_splits(no_splits))

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        """Return the shape of two numbers, whose bits seed the step."""
        return (2,)

    def step(self, model: Model, local: KernelTraining, batches: tuple[Batch, ...], noise: Tensor) -> KernelTraining:
        """g = clip(grad of the objective) + weight_decay phi; m <- momentum m + g; phi <- phi - eta m."""
        (batch,) = batches
        z, pull_back, *_ = torch.func.vjp(lambda phi: self.normalised(model, phi, batch.x), local.phi)
        grad_z, splits = call_stacked(self._gradients, z, batch.y, batch.weight, local.splits, noise)
        (grad,) = pull_back(grad_z)
        grad = grad * (self.clip / grad.norm()).clamp_max(1) + self.weight_decay * local.phi
        momentum = self.momentum * local.momentum + grad
        return KernelTraining(local.phi - self.eta * momentum, momentum, splits)

    def normalised(self, model: Model, phi: Tensor, x: Tensor) -> Tensor:
        """Return z = phi(x) / ||phi(x)||, (n, F)."""
        return functional.normalize(model.outputs(phi, x), dim=-1)

    def _gradients(self, z: Tensor, y: Tensor, weight: Tensor, splits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objectives' gradients in the features z (clients, b, F), and the splits, for stacked clients.

        Clients without splits get them here. Padding comes last in a batch.
        """
        y, splits = y.cpu(), splits.cpu().clone()
        sizes = weight.sum(1).long().tolist()
        tasks: list[Task] = []
        for k, (size, seed) in enumerate(zip(sizes, _seeds(noise), strict=True)):
            if not splits[k].any():
                splits[k] = pad_splits(build_tree(z[k, :size], y[k, :size], splits.shape[-1]))
            tasks += self.tasks(k, y[k, :size], splits[k], _generator(seed, z.device))
        z = z.detach().requires_grad_()
        grad = torch.zeros_like(z)
        with torch.enable_grad():
            for loss in self.losses(z, tasks):
                grad += torch.autograd.grad(loss, z)[0]  # one by one, to free the memory of each loss before the next
        return grad, splits.to(z.device)

    def tasks(self, client: int, y: Tensor, splits: Tensor, generator: torch.Generator) -> Iterator[Task]:
        """Yield the tasks of a client with labels y (n,) in a training step.

        Each node predicts a random part of its examples, drawn from both sides, from the others.
        """
        for node, (rows, left) in enumerate(members(y, splits)):
            target = self._draw_targets(left, generator)
            if target.any():
                draws = draw(self.chains, int((~target).sum()), self.gibbs_steps, generator)
                yield _task(client, node, rows[~target], left[~target], rows[target], left[target], draws)

    def losses(self, z: Tensor, tasks: Sequence[Task]) -> Iterator[Tensor]:
        """Yield the terms of the objective, one per batch of tasks, given features z (clients, b, F).

        The objective is the sum over nodes of the mean of -log p(side) over the examples that the node predicts.
        """
        for task in _stacked(tasks, self.chains, z.device):
            node = self._classifier(_rows(z, task.client, task.old), task.left, task.given)
            sides = self._sides(_rows(z, task.client, task.new), node)
            yield -torch.log(torch.where(task.truth, *sides) + FLOOR).mean(-1).sum()

    def _draw_targets(self, left: Tensor, generator: torch.Generator) -> Tensor:
        """Return which examples of a node are predicted: a random share of each side, rounded down."""
        target = torch.zeros_like(left)
        for side in (left, ~left):
            rows = side.nonzero()[:, 0]
            order = torch.randperm(len(rows), generator=generator, device=generator.device).cpu()
            target[rows[order[: int(self.target_share * len(rows))]]] = True
        return target

    def _classifier(self, z: Tensor, left: Tensor, draws: Draws) -> Node:
        """Fit a classifier of the examples that go left to features z (..., n, F); omega carries no gradient."""
        kappa = _kappa(left, z)
        return Node(z, kappa, gibbs(self._covariance(z.detach()), kappa, draws))

    def _sides(self, z: Tensor, node: Node) -> tuple[Tensor, Tensor]:
        """Return the probabilities (..., m) that examples with features z (..., m, F) go left and right at a node."""
        cross = rbf(z, node.z, self.outputscale, self.lengthscale)
        mean, variance = moments(self._covariance(node.z), cross, self.outputscale, node.omega, node.kappa)
        return side_probabilities(mean, variance, self.link)

    def _covariance(self, z: Tensor) -> Tensor:
        """Return K = k(z, z) + jitter I, (..., n, n)."""
        identity = torch.eye(z.shape[-2], dtype=z.dtype, device=z.device)
        return rbf(z, z, self.outputscale, self.lengthscale) + self.jitter * identity

    def end(self, local: KernelTraining) -> tuple[State, Tensor]:
        return (), local.phi

    def prepare(self, data: Adaptation) -> Prepared:
        x, y, _ = data.train
        num_classes = data.num_classes or 0  # not None: the method only classifies
        return Prepared(x, y, torch.bincount(y, minlength=num_classes) > 0, torch.tensor(data.seed))

    @torch.no_grad()
    def adapt(self, model: Model, client: State, received: Tensor, prepared: Prepared) -> Personal:
        """Fit the tree and its classifiers to the client's whole training set, with the shared features."""
        x, y, has, seed = prepared
        z = self.normalised(model, received, x)
        return Personal(received, z, y, has, *call_stacked(self._learn, z, y, has, seed))

    def _learn(self, z: Tensor, y: Tensor, has: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tree splits and omega for stacked clients."""
        y, num_classes = y.cpu(), has.shape[-1]
        splits = torch.stack(
            [pad_splits(build_tree(features, labels, num_classes)) for features, labels in zip(z, y, strict=True)]
        )
        tasks = []
        for k, seed in enumerate(seeds.tolist()):
            generator = _generator(seed, z.device)
            for node, (rows, left) in enumerate(members(y[k], splits[k])):
                draws = draw(self.test_chains, len(rows), self.gibbs_steps, generator)
                tasks.append(_task(k, node, rows, left, NO_ROWS, NO_ROWS, draws))
        omega = z.new_zeros(*splits.shape[:2], self.test_chains, z.shape[1])
        for task in _stacked(tasks, self.test_chains, z.device):
            learned = self._classifier(_rows(z, task.client, task.old), task.left, task.given)
            omega[task.client, task.node, :, : task.old.shape[1]] = learned.omega
        return splits.to(z.device), omega

    def posterior(self, state: State) -> None:
        """Return None: a client's classifiers are more than the weights of the network."""

    @torch.no_grad()
    def predict(self, model: Model, state: Personal, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return log-probabilities (1, n, C): a label's is the sum of those along its path in the tree."""
        z = self.normalised(model, state.phi, x)
        (sides,) = call_stacked(self._all_sides, z, state.z, state.y, state.splits, state.omega)
        path = state.splits.flatten(0, 1).to(z.dtype)
        log_probs = sides.clamp_min(FLOOR).log().flatten(0, 1).mT @ path
        return torch.where(state.has, log_probs, math.log(FLOOR))[None]

    def _all_sides(self, new: Tensor, z: Tensor, y: Tensor, splits: Tensor, omega: Tensor) -> tuple[Tensor]:
        """Return the probabilities (clients, nodes, 2, m) to go left and right at each node, for stacked clients.

        new: features of the examples (clients, m, F). Missing nodes have probability 1.
        """
        clients, m, _ = new.shape
        y, splits = y.cpu(), splits.cpu()
        tasks = [
            _task(k, node, rows, left, torch.arange(m), NO_ROWS, omega[k, node, :, : len(rows)])
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
    """Yield batches of tasks with equal numbers of examples, on the device; a batch fits into memory."""
    for places in group_by_shapes(tasks):
        n, m = (len(rows) for rows in (tasks[places[0]].old, tasks[places[0]].new))
        size = at_once(chains * n * max(m, n), device)
        for start in range(0, len(places), size):
            yield tree_map(lambda leaf: leaf.to(device), stack([tasks[k] for k in places[start : start + size]]))


def _kappa(left: Tensor, like: Tensor) -> Tensor:
    return left.to(like.dtype) - 0.5


def _rows(z: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
    """Return the features (G, n, F) of rows (G, n) of clients (G,), from z (clients, b, F)."""
    return z[clients[:, None], rows]


def _seeds(noise: Tensor) -> list[int]:
    """Return a seed for each client from its two numbers (clients, 2), the same in double and single precision."""
    return [key(first, Purpose.TRAINING, second) for first, second in noise.float().view(torch.int32).tolist()]


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
