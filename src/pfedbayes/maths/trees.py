"""State trees: a tensor, or a NamedTuple or tuple of state trees. Nothing else holds state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply a function leaf by leaf to trees of the same structure."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    parts = [tree_map(function, *branches) for branches in zip(tree, *others, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def named_leaves(tree: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree with dotted names, in a fixed order."""
    if isinstance(tree, Tensor):
        yield name, tree
        return
    labels = getattr(tree, "_fields", [str(k) for k in range(len(tree))])
    for label, branch in zip(labels, tree, strict=True):
        yield from named_leaves(branch, f"{name}.{label}")


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for _, leaf in named_leaves(tree, "")]


def rebuild(template: Tree, tensors: Sequence[Tensor]) -> Tree:
    """Return a tree with the structure of the template and these leaves, in the order of `leaves`."""
    rest = iter(tensors)
    return tree_map(lambda _: next(rest), template)


def fill(template: Tree, tensors: dict[str, Tensor], name: str) -> Tree:
    """Return a tree with the structure of the template and the tensors of the names that `named_leaves` gives."""
    return rebuild(template, [tensors[leaf_name] for leaf_name, _ in named_leaves(template, name)])


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack the trees of many clients into one tree with a leading client axis."""
    return tree_map(lambda *parts: torch.stack(parts), *trees)


def concat(trees: Sequence[Tree]) -> Tree:
    """Join stacked trees along the client axis."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), *trees)


def group_by_shapes(trees: Sequence[Tree]) -> list[list[int]]:
    """Group the indices of trees whose tensors have the same shapes, which can be stacked."""
    places: dict[tuple[torch.Size, ...], list[int]] = {}
    for place, tree in enumerate(trees):
        places.setdefault(tuple(leaf.shape for leaf in leaves(tree)), []).append(place)
    return list(places.values())


def pick(tree: Tree, index: Any) -> Tree:
    """Index the client axis of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def misfit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return the name of an expected tensor that is missing or has another shape or dtype, or None."""
    for name, like in expected.items():
        found = tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            return name
    return None


def finite_rows(*trees: Tree) -> Tensor:
    """Return which clients of stacked trees have only finite values: (n,) bool.

    The test is on sums, which read the memory once: a sum is finite only if its terms are.
    """
    flags = [
        leaf.reshape(len(leaf), leaf.shape[1:].numel()).sum(1).isfinite()
        for leaf in leaves(trees)
        if leaf.is_floating_point()
    ]
    return torch.stack(flags).all(0)
