"""Functions of stacked clients: tensors or trees of tensors with a leading client axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pfedbayes.maths.trees import Tree, pick, stack, tree_map


def broadcast(tree: Tree, count: int) -> Tree:
    """Return the same tree for `count` clients, without copying memory."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def weighted_mean(stacked: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the first axis of stacked (n, ...), with weights (n,) that need not sum to 1."""
    share = (weights / weights.sum()).to(stacked.dtype)
    mean: Tensor = torch.tensordot(share, stacked, dims=1)
    return mean


def call_stacked(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call a function of stacked clients from code that is written for one client.

    Use it for what vmap cannot map, such as decisions on the host or sizes that differ between clients. Inside vmap the
    function is called once, with the tensors of all clients. The result has no gradient.
    """
    outputs: tuple[Tensor, ...] = _CallStacked.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _CallStacked(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        return pick(function(*stack([tensors])), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        clients = info.batch_size
        stacked = (
            tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        )
        outputs = function(*stacked)
        return outputs, (0,) * len(outputs)
