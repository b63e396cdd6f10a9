"""A client's part of a round, for one client or for many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.backend.compiled import Compiled
from pfedbayes.engine.backend.replayed import Replayed
from pfedbayes.engine.plan import Plan
from pfedbayes.maths.random import normals, philox_normals, ragged_normals
from pfedbayes.maths.trees import finite_rows, pick, stack
from pfedbayes.memory import in_memory
from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Batch, Model

NUMBERS_OF_A_ROUND = 2**22  # of all mini-batches of a round, if they are gathered at once
NOISE_OF_A_ROUND = 2**24  # normal numbers of a round, if they are drawn at once

Step = tuple[tuple[Batch, ...], Tensor]  # the batches and the noise of a local step
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged."""
    return function


def client_round(
    method: Method,
    model: Model,
    client: State,
    received: State,
    shard: Shard,
    steps: Iterable[tuple[Any, ...]],
    over: Wrap = unchanged,
    compiled: Wrap = unchanged,
) -> tuple[State, State]:
    """Return a client's new state and its upload after R local steps (Algorithm 1), or fewer if the method limits them.

    Written for one client. With `over=torch.func.vmap` the same lines train many at once, and every argument has a
    leading client axis; a method whose functions accept such an axis needs no `over`. A step wrapped by `compiled` may
    build its batches and noise itself; `steps` then yields what it builds them from.
    """
    local = over(method.begin)(client, received, shard)
    step = compiled(over(partial(method.step, model)))
    for inputs in islice(steps, method.needs.max_steps):
        local = step(local, *inputs)
    new_client, upload = over(method.end)(local)
    return new_client, upload


@dataclass(frozen=True)
class Drawn:
    """The noise of stacked clients for each step of a round. Copies of a client share it."""

    steps: Sequence[Tensor]
    """For each step, the noise (clients, b, ...) of the different clients."""
    place: Tensor
    """The place of each stacked client among them (n,)."""

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Tensor]:
        return (step[self.place] for step in self.steps)

    def of(self, rows: Tensor, width: int) -> Drawn:
        """Return the noise of these rows of the stacked clients, for batches of this width."""
        return Drawn([step[:, :width] for step in self.steps], self.place[rows])


class Work(NamedTuple):
    """The batches and noise of n stacked clients in a round."""

    rows: Tensor
    """Pool rows of each batch, combined with the view of each example (see `Views`): (R, batches per step, n, b).

    (1, ...) if all steps have the same batches.
    """
    weight: Tensor
    """1 for real examples, 0 for padding: (n, b)."""
    names: Tensor | NDArray[np.int64] | Drawn
    """Keys of the noise of each step (R, n), or the noise itself."""


class Trained(NamedTuple):
    """Stacked clients after a round."""

    clients: State
    """Their new states."""
    uploads: State
    """What they send to the server."""
    finite: Tensor
    """Which of them are free of NaN and infinity: (n,)."""


def _trained(clients: State, uploads: State) -> Trained:
    return Trained(clients, uploads, finite_rows(clients, uploads))


@dataclass(frozen=True)
class Views:
    """The augmentations of an image: an optional mirror image, and shifts that repeat the edge.

    A pool row and a view are stored as one number, row * count + view.
    """

    flip: bool = False
    """Whether images may be mirrored left to right."""
    shift: int = 0
    """The largest shift in pixels, in each direction."""

    @property
    def count(self) -> int:
        """The number of different views of an image."""
        return (1 + self.flip) * (2 * self.shift + 1) ** 2

    def apply(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return augmented images of the pool x (pool, channels, height, width), and their rows in the pool."""
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


NO_AUGMENTATION = Views()


class LocalTraining:
    """`client_round` for stacked clients, executed as the plan says, on examples of the pool x, y."""

    def __init__(
        self, method: Method, model: Model, x: Tensor, y: Tensor, plan: Plan, views: Views = NO_AUGMENTATION
    ) -> None:
        self._method, self._model, self._x, self._y, self._plan, self._views = method, model, x, y, plan, views
        self._own_noise = method.noise_shape(model, 1) != method.noise_shape(model, 2)  # for each example of a batch
        self._dtype = getattr(torch, plan.dtype)
        self._over: Wrap = torch.func.vmap if method.needs.mapped else unchanged
        self._step = Compiled(self._advance)
        self._together = Replayed(self._all_at_once) if plan.graph else self._all_at_once

    @property
    def compiled(self) -> bool:
        """Whether steps have been compiled successfully."""
        return self._step.has_run

    def __call__(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        """Train these stacked clients for a round. The next call may overwrite the result."""
        if self._plan.over == "vmap":
            together: Trained = self._together(clients, received, shard, work)
            return together
        results = []
        for k in range(len(work.weight)):
            width = int(work.weight[k].sum())  # a single client needs no padding
            mine = slice(k, k + 1)
            names = work.names
            own_names = names.of(torch.tensor([k]), width) if isinstance(names, Drawn) else names[:, mine]
            own = Work(work.rows[:, :, mine, :width].contiguous(), work.weight[mine, :width], own_names)
            steps = ((pick(batches, 0), noise[0]) for batches, noise in self._steps(own))
            client, one_received, one_shard = pick((clients, received, shard), k)
            results.append(client_round(self._method, self._model, client, one_received, one_shard, steps))
        return _trained(*stack(results))

    def _all_at_once(self, clients: State, received: State, shard: Shard, work: Work) -> Trained:
        alone = partial(client_round, self._method, self._model)
        small = work.rows.numel() * self._x[0].numel() <= NUMBERS_OF_A_ROUND
        if self._method.needs.mapped and small and not self._plan.compile:
            # Small networks take longer to map than to compute, so all steps are mapped at once.
            return _trained(*torch.func.vmap(alone)(clients, received, shard, list(self._steps(work))))
        train = partial(alone, clients, received, shard, over=self._over)
        if not self._plan.compile:
            return _trained(*train(steps=self._steps(work)))
        recipes = (
            (
                self._x,
                self._y,
                rows,
                work.weight,
                names if isinstance(names, Tensor) else self._noise(names, work.weight),
            )
            for rows, names in zip(_each_step(work), work.names, strict=True)
        )
        return _trained(*train(steps=recipes, compiled=lambda _: self._step))

    def _steps(self, work: Work) -> Iterator[Step]:
        batches: tuple[Batch, ...] = ()
        for rows, names in zip(_each_step(work), work.names, strict=True):
            if len(work.rows) > 1 or not batches:
                batches = tuple(self._gather(self._x, self._y, one, work.weight) for one in rows)
            yield batches, self._noise(names, work.weight)

    def _advance(self, local: State, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor, names: Tensor) -> State:
        """Take a local step of stacked clients, building batches from the pool and noise from its keys."""
        step = self._over(partial(self._method.step, self._model))
        return step(local, tuple(self._gather(x, y, one, weight) for one in rows), self._noise(names, weight))

    def _gather(self, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor) -> Batch:
        flat = rows.flatten()
        values, own = self._views.apply(x, flat) if self._views.count > 1 else (x.index_select(0, flat), flat)
        targets = y.index_select(0, own)
        return Batch(values.view(*rows.shape, *x.shape[1:]), targets.view(*rows.shape, *y.shape[1:]), weight)

    def draw(self, names: NDArray[np.int64], sizes: NDArray[np.int64]) -> Drawn | None:
        """Return the noise of a round for keys (R, n) and batches of these sizes (n,); None to draw it step by step.

        A client draws for its own examples, whatever other clients need. Copies of it, which have the same key, share
        the draws.
        """
        shape = self._method.noise_shape(self._model, int(sizes.max()))
        _, first, place = np.unique(names[0], return_index=True, return_inverse=True)
        if not self._own_noise or not 0 < len(names) * len(first) * math.prod(shape) <= NOISE_OF_A_ROUND:
            return None
        most = np.zeros(len(first), dtype=np.int64)
        np.maximum.at(most, place, sizes)
        drawn = [
            ragged_normals(shape, step[first].tolist(), most.tolist(), self._dtype, self._x.device) for step in names
        ]
        return Drawn(drawn, torch.from_numpy(place).to(self._x.device))

    def _noise(self, names: Tensor | NDArray[np.int64], weight: Tensor) -> Tensor:
        """Return standard normal noise for these keys; floating-point `names` are noise that torch has drawn.

        weight: that of the examples of each batch (n, b).
        """
        shape = self._method.noise_shape(self._model, weight.shape[1])
        if isinstance(names, Tensor):
            drawn = names.is_floating_point()
            return names if drawn else in_memory(philox_normals(shape, names, self._dtype))
        if not shape:
            return torch.empty(len(names), dtype=self._dtype, device=self._x.device)
        if not self._own_noise:
            return normals(shape, names.tolist(), self._dtype, self._x.device)
        # A client draws for its own examples, whatever other clients need. Copies of it share the draws.
        different, place = np.unique(names, return_inverse=True)
        sizes = np.zeros(len(different), dtype=np.int64)
        np.maximum.at(sizes, place, weight.sum(1).long().numpy(force=True))
        noise = ragged_normals(shape, different.tolist(), sizes.tolist(), self._dtype, self._x.device)
        return noise[torch.from_numpy(place).to(noise.device)]


def _each_step(work: Work) -> Tensor:
    """Return the pool rows of every step (R, batches per step, n, b)."""
    return work.rows.expand(len(work.names), *work.rows.shape[1:])
