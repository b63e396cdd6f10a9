"""Functions of tensor trees, replayed as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pfedbayes.engine.backend.compiled import Compiled
from pfedbayes.maths.trees import leaves, tree_map
from pfedbayes.memory import without_collecting
from pfedbayes.nets.net import Function


class Replayed:
    """A function of tensor trees on a GPU, recorded as a CUDA graph for each set of shapes and replayed as one launch.

    The next call overwrites what a call returns.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._recordings: dict[Any, tuple[Any, Any, torch.cuda.CUDAGraph]] = {}

    def __call__(self, *arguments: Any) -> Any:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves(arguments))
        if shapes not in self._recordings:
            self._recordings[shapes] = self._record(arguments)
        inputs, outputs, graph = self._recordings[shapes]
        torch._foreach_copy_(leaves(inputs), leaves(arguments))
        graph.replay()
        return outputs

    def _record(self, arguments: Any) -> tuple[Any, Any, torch.cuda.CUDAGraph]:
        inputs = tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), arguments)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._function(*inputs)  # compiling and initialising libraries cannot be recorded
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with without_collecting(), torch.cuda.graph(graph):
            outputs = self._function(*inputs)
        return inputs, outputs, graph


class FixedSizeBatches:
    """A network on a GPU, compiled and replayed for batches of `rows` inputs; the last batch is padded with zeros."""

    def __init__(self, network: Function, rows: int = 500) -> None:
        self._program, self._rows = Replayed(Compiled(network)), rows

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        outputs = []
        for part in torch.split(x, self._rows):
            missing = part.new_zeros(self._rows - len(part), *x.shape[1:])
            full = torch.cat([part, missing]) if len(missing) else part
            outputs.append(self._program(theta, full)[: len(part)].clone())  # the next replay overwrites the output
        return torch.cat(outputs)
