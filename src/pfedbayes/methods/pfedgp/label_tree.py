"""A binary tree over labels: each inner node sends some labels to the left and the others to the right.

A tree is a tensor of splits (nodes, 2, C): which of the C labels go left and which go right at each node. The root
comes first. Trees live on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

MAX_ENUMERATED = 12  # try all bipartitions of at most this many labels


def build_tree(z: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Return the splits (nodes, 2, C) of a tree over the labels y (n,), which are on the CPU.

    Labels with similar mean features z (n, F) separate late.
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
    """Return which of the points (c, F) lie in the cluster of the first point.

    The two clusters have the least sum of squared distances to their means, among all bipartitions. If there are too
    many of these, among the bipartitions that assign every point to the nearer one of a pair of points.
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
    # Squared distances to the cluster means = those to the common mean - sum over clusters of size * ||mean||^2.
    centred = points - points.mean(0)
    weight = inside.to(points.dtype)
    first, second = ((side @ centred).square().sum(-1) / side.sum(-1) for side in (weight, 1 - weight))
    return inside[(first + second).argmax()]


def pad_splits(splits: Tensor) -> Tensor:
    """Append empty splits up to C - 1, the number of nodes of a tree over all C labels."""
    nodes, _, num_classes = splits.shape
    return functional.pad(splits, (0, 0, 0, 0, 0, num_classes - 1 - nodes))


def members(y: Tensor, splits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each node the rows of y (n,) that reach it and which of them go left. Skip empty splits."""
    for left, right in splits:
        if left.any():
            rows = (left | right)[y].nonzero()[:, 0]
            yield rows, left[y[rows]]
