"""A client's part of a round, for one client or for many at once: mapped, compiled, replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Batch, Model
from pfedbayes.plan import Plan
from pfedbayes.streams import normals, philox_normals
from pfedbayes.trees import finite_rows, leaves, pick, rebuild, stack, tree_map

Step = tuple[tuple[Batch, ...], Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return function


def client_round(
    method: Method,
    model: Model,
    client: State,
    received: State,
    shard: Shard,
    steps: Iterable[Step],
    over: Wrap = as_it_is,
    compiled: Wrap = as_it_is,
) -> tuple[State, State]:
    """A client's part of a round, Algorithm 1: R local steps; the client's new state and its upload.

    Written for one client. With `over=torch.func.vmap` the same lines train many at once, every argument then having
    a leading client axis.
    """
    local = over(method.begin)(client, received, shard)
    step = compiled(over(partial(method.step, model)))
    for batches, noise in steps:
        local = step(local, batches, noise)
    new_client, upload = over(method.end)(local)
    return new_client, upload


class Compiled:
    """A function of trees of tensors, compiled once for each set of shapes that it meets.

    It is traced first: what the compiler sees are tensor operations and none of the Python that led to them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        flat = [leaf.contiguous() for leaf in leaves(arguments)]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in flat)
        if shapes not in self._programs:
            self._programs[shapes] = self._compile(arguments, flat)
        program, template = self._programs[shapes]
        return rebuild(template, program(*flat))

    def _compile(self, arguments: Any, flat: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
        result = None

        def of_leaves(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            result = self._function(*rebuild(arguments, list(tensors)))
            return leaves(result)

        traced = make_fx(of_leaves)(*flat)
        # The plan has decided on TF32; the compiler need not recommend it.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        return torch.compile(traced, fullgraph=True, dynamic=False), result


class Replayed:
    """A function of trees of tensors on a GPU, recorded once for each set of shapes and replayed as one launch.

    What it returns is overwritten by the next call.
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
            self._function(*inputs)  # compiles, and lets libraries set themselves up, which cannot be recorded
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._function(*inputs)
        return inputs, outputs, graph


class Work(NamedTuple):
    """What stacked clients are to do in a round.

    rows (n, R * batches per step, b): the examples of each batch in the pool; weight (n, b): 1 for real ones, 0 for
    padding; names (n, R): of the noise of each step.
    """

    rows: Tensor
    weight: Tensor
    names: Tensor | NDArray[np.int64]


class Trained(NamedTuple):
    """Stacked clients after a round: their new states, their uploads, and which of them are finite throughout."""

    clients: State
    uploads: State
    finite: Tensor


def _trained(clients: State, uploads: State) -> Trained:
    return Trained(clients, uploads, finite_rows(clients, uploads))


class LocalTraining:
    """`client_round` over stacked clients as the plan says, on examples of the pool x, y."""

    def __init__(self, method: Method, model: Model, x: Tensor, y: Tensor, plan: Plan) -> None:
        self._method, self._model, self._x, self._y, self._plan = method, model, x, y, plan
        self._dtype = getattr(torch, plan.dtype)
        self._noise_shape = method.noise_shape(model.net.num_params)
        draw: Callable[..., Tensor] = partial(philox_normals, self._noise_shape, dtype=self._dtype)
        self._draw = Compiled(draw) if plan.compile else draw
        self._step = Compiled(torch.func.vmap(partial(method.step, model))) if plan.compile else None
        self._together = Replayed(self._all_at_once) if plan.graph else self._all_at_once

    def __call__(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        """What becomes of these clients, stacked; the next call may overwrite it."""
        if self._plan.over == "vmap":
            together: Trained = self._together(clients, received, shard, work)
            return together
        train = partial(client_round, self._method, self._model)
        results = []
        for k in range(len(work.names)):
            width = int(work.weight[k].sum())  # nothing is padded for one client alone
            own = Work(work.rows[k : k + 1, :, :width], work.weight[k : k + 1, :width], work.names[k : k + 1])
            steps = ((pick(batches, 0), noise[0]) for batches, noise in self._steps(own))
            results.append(train(pick(clients, k), pick(received, k), pick(shard, k), steps))
        return _trained(*stack(results))

    def _all_at_once(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        compiled = as_it_is if self._step is None else lambda _: self._step
        steps = self._steps(work)
        train = partial(client_round, self._method, self._model, over=torch.func.vmap, compiled=compiled)
        return _trained(*train(clients, received, shard, steps))

    def _steps(self, work: Work) -> Iterator[Step]:
        """Batches and noise of the local steps, each with a leading client axis."""
        rows, weight, names = work
        per_step = self._method.batches_per_step
        for r in range(names.shape[1]):
            batches = tuple(self._gather(rows[:, k], weight) for k in range(r * per_step, (r + 1) * per_step))
            yield batches, self._noise(names[:, r])

    def _gather(self, rows: Tensor, weight: Tensor) -> Batch:
        flat = rows.flatten()
        x, y = self._x.index_select(0, flat), self._y.index_select(0, flat)
        return Batch(x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:]), weight)

    def _noise(self, names: Tensor | NDArray[np.int64]) -> Tensor:
        if not self._noise_shape:
            return torch.empty(len(names), dtype=self._dtype, device=self._x.device)
        if isinstance(names, Tensor):
            return self._draw(names)
        return normals(self._noise_shape, names, self._dtype, self._x.device)
