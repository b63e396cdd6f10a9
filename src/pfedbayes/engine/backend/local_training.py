"""A client's part of a round, for one client or for many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.backend.programs import Compiled, Replayed
from pfedbayes.engine.plan import Plan
from pfedbayes.maths.random import normals, philox_normals
from pfedbayes.maths.trees import finite_rows, pick, stack
from pfedbayes.memory import in_memory
from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Batch, Model

Step = tuple[tuple[Batch, ...], Tensor]  # the batches and the noise of a local step
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
    steps: Iterable[tuple[Any, ...]],
    over: Wrap = as_it_is,
    compiled: Wrap = as_it_is,
) -> tuple[State, State]:
    """A client's part of a round, Algorithm 1: R local steps, or fewer if the method takes no more; the client's new
    state and its upload.

    Written for one client. With `over=torch.func.vmap` the same lines train many at once, every argument then having
    a leading client axis. A compiled step may make batches and noise by itself, and takes what it makes them from.
    """
    local = over(method.begin)(client, received, shard)
    step = compiled(over(partial(method.step, model)))
    for inputs in islice(steps, method.needs.max_steps):
        local = step(local, *inputs)
    new_client, upload = over(method.end)(local)
    return new_client, upload


class Work(NamedTuple):
    """What n stacked clients are to do in a round.

    rows (R, batches per step, n, b): the examples of each batch in the pool, with the view of each, see `Views`; weight
    (n, b): 1 for real ones, 0 for padding; names (R, n): of the noise of each step.
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


@dataclass(frozen=True)
class Views:
    """How an image may be seen in a batch: mirrored or not, if it may flip, and moved by up to `shift` pixels each way,
    where the edge is repeated. Its row in the pool and its view are one number, row * count + view."""

    flip: bool = False
    shift: int = 0

    @property
    def count(self) -> int:
        return (1 + self.flip) * (2 * self.shift + 1) ** 2

    def of(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """These images of the pool x (pool, channels, height, width) as they are seen, and their rows in the pool."""
        own, view = rows // self.count, rows % self.count
        sides, places = 1 + self.flip, 2 * self.shift + 1
        mirrored, moved = view % sides, view // sides
        down, right = moved // places - self.shift, moved % places - self.shift
        channels, height, width = (torch.arange(size, device=x.device) for size in x.shape[1:])
        lines = (height - down[:, None]).clamp(0, len(height) - 1)
        columns = (width - right[:, None]).clamp(0, len(width) - 1)
        columns = torch.where(mirrored[:, None] == 1, len(width) - 1 - columns, columns)
        seen = own[:, None, None, None], channels[:, None, None], lines[:, None, :, None], columns[:, None, None, :]
        return x[seen], own


AS_IT_IS = Views()


class LocalTraining:
    """`client_round` over stacked clients as the plan says, on examples of the pool x, y."""

    def __init__(self, method: Method, model: Model, x: Tensor, y: Tensor, plan: Plan, views: Views = AS_IT_IS) -> None:
        self._method, self._model, self._x, self._y, self._plan, self._views = method, model, x, y, plan, views
        self._noise_shape = method.noise_shape(model.net.num_params)
        self._dtype = getattr(torch, plan.dtype)
        self._step = Compiled(self._advance)
        self._together = Replayed(self._all_at_once) if plan.graph else self._all_at_once

    @property
    def compiled(self) -> bool:
        """Whether it has come to compiling, and that has gone well."""
        return self._step.has_run

    def __call__(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        """What becomes of these clients, stacked; the next call may overwrite it."""
        if self._plan.over == "vmap":
            together: Trained = self._together(clients, received, shard, work)
            return together
        results = []
        for k in range(len(work.weight)):
            width = int(work.weight[k].sum())  # nothing is padded for one client alone
            mine = slice(k, k + 1)
            own = Work(work.rows[:, :, mine, :width].contiguous(), work.weight[mine, :width], work.names[:, mine])
            steps = ((pick(batches, 0), noise[0]) for batches, noise in self._steps(own))
            client, one_received, one_shard = pick((clients, received, shard), k)
            results.append(client_round(self._method, self._model, client, one_received, one_shard, steps))
        return _trained(*stack(results))

    def _all_at_once(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        train = partial(client_round, self._method, self._model, clients, received, shard, over=torch.func.vmap)
        if not self._plan.compile:
            return _trained(*train(steps=self._steps(work)))
        recipes = (
            (self._x, self._y, rows, work.weight, names if isinstance(names, Tensor) else self._noise(names))
            for rows, names in zip(work.rows, work.names, strict=True)
        )
        return _trained(*train(steps=recipes, compiled=lambda _: self._step))

    def _steps(self, work: Work) -> Iterator[Step]:
        for rows, names in zip(work.rows, work.names, strict=True):
            yield self._inputs(self._x, self._y, rows, work.weight, names)

    def _advance(self, local: State, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor, names: Tensor) -> State:
        """A local step with all that leads to it: of stacked clients, from the pool and the names of the noise."""
        step = torch.func.vmap(partial(self._method.step, self._model))
        return step(local, *self._inputs(x, y, rows, weight, names))

    def _inputs(self, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor, names: Tensor | NDArray[np.int64]) -> Step:
        """Batches and noise of one local step, each with a leading client axis."""
        return tuple(self._gather(x, y, one, weight) for one in rows), self._noise(names)

    def _gather(self, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor) -> Batch:
        flat = rows.flatten()
        values, own = self._views.of(x, flat) if self._views.count > 1 else (x.index_select(0, flat), flat)
        targets = y.index_select(0, own)
        return Batch(values.view(*rows.shape, *x.shape[1:]), targets.view(*rows.shape, *y.shape[1:]), weight)

    def _noise(self, names: Tensor | NDArray[np.int64]) -> Tensor:
        """Standard normal noise from the names of the draws; a compiled step is given what torch has drawn before."""
        if isinstance(names, Tensor):
            drawn = names.is_floating_point()
            return names if drawn else in_memory(philox_normals(self._noise_shape, names, self._dtype))
        if not self._noise_shape:
            return torch.empty(len(names), dtype=self._dtype, device=self._x.device)
        return normals(self._noise_shape, names.tolist(), self._dtype, self._x.device)
