"""A client's part of a round, for one client or for many at once: mapped, compiled, replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Batch, Function, Model
from pfedbayes.optim import in_pieces
from pfedbayes.plan import Plan
from pfedbayes.streams import normals, philox_normals
from pfedbayes.trees import finite_rows, in_memory, leaves, pick, rebuild, stack, tree_map

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
    for inputs in islice(steps, method.most_steps):
        local = step(local, *inputs)
    new_client, upload = over(method.end)(local)
    return new_client, upload


class Compiled:
    """A function of trees of tensors, compiled once for each set of shapes that it meets.

    It is traced first: what the compiler sees are tensor operations and none of the Python that led to them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    @property
    def has_run(self) -> bool:
        """Whether anything has been compiled yet."""
        return bool(self._programs)

    def __call__(self, *arguments: Any) -> Any:
        flat = [leaf.contiguous() for leaf in leaves(arguments)]
        flat = flat if _on_cpu(flat) else _distinct(flat)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in flat)
        if shapes not in self._programs:
            self._programs[shapes] = self._compile(arguments, flat)
        program, template = self._programs[shapes]
        return rebuild(template, program(*flat))

    def _compile(self, arguments: Any, flat: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
        # Here, since a node of a federation starts often.
        from torch._inductor import compile as compile_graph  # noqa: PLC0415
        from torch._inductor import config as inductor  # noqa: PLC0415
        from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

        # Its compiling processes would end after a minute without work, and those that replace them have been seen to
        # wait for ever for a lock.
        inductor.quiesce_async_compile_pool = False

        result = None

        def of_leaves(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            result = self._function(*rebuild(arguments, list(tensors)))
            traced_leaves = leaves(result)
            result = tree_map(lambda _: torch.empty(0), result)  # the shape of the tree is all that is kept
            return traced_leaves

        examples: list[Any] = [leaf.clone() for leaf in flat]  # a program may write to its arguments
        with in_pieces():
            traced = make_fx(of_leaves)(*examples)
        try:
            with warnings.catch_warnings(action="ignore"):  # of torch, about itself
                if _on_cpu(flat):  # torch.compile looks at the arguments of every call, for long
                    _by_layers(traced.graph)
                    traced.recompile()
                    program = compile_graph(traced, examples)
                else:
                    program = torch.compile(traced, fullgraph=True, dynamic=False)
                program(*examples)  # compiles, if that is yet to be done
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotCompile(str(error).strip().partition("\n")[0]) from error
        return program, result


def _by_layers(graph: torch.fx.Graph) -> None:
    """Arithmetic with the gradient of a network, which is one vector, is done before it is put together.

    What was f(cat(layers), vector) becomes cat(f(layer, its part of the vector)): else the compiler would write the
    gradients of the layers to memory twice.
    """
    aten = torch.ops.aten
    arithmetic = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
    joined: set[torch.fx.Node] = set()  # vectors whose layers have not been written to since
    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.target, "_schema", None) and node.target._schema.is_mutable:
            joined.clear()
        if node.target is aten.cat.default and len({each.meta["val"].dtype for each in node.all_input_nodes}) == 1:
            joined.add(node)
        vectors = [each for each in node.all_input_nodes if each in joined and len(each.users) == 1]
        if node.target not in arithmetic or len(vectors) != 1:
            continue
        (vector,) = vectors
        layers, axis = (*vector.args, 0)[:2]
        shape = vector.meta["val"].shape
        same = node.meta["val"].shape == shape and node.meta["val"].dtype == vector.meta["val"].dtype
        if axis % len(shape) != len(shape) - 1 or not same:
            continue
        ends = list(accumulate(layer.meta["val"].shape[-1] for layer in layers))
        results = []
        with graph.inserting_before(node):
            for layer, start, end in zip(layers, [0, *ends[:-1]], ends, strict=True):
                own = [layer if each is vector else _cut(each, start, end, shape[-1]) for each in node.args]
                results.append(graph.call_function(node.target, tuple(own), node.kwargs))
                results[-1].meta["val"] = layer.meta["val"]
            whole = graph.call_function(aten.cat.default, (results, axis))
        whole.meta["val"] = node.meta["val"]
        joined.add(whole)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        graph.erase_node(vector)


def _cut(argument: Any, start: int, end: int, size: int) -> Any:
    """This part of an argument whose last axis has so many entries; others as they are."""
    if not isinstance(argument, torch.fx.Node) or argument.meta["val"].shape[-1:] != (size,):
        return argument
    axis = argument.meta["val"].dim() - 1
    return argument.graph.call_function(torch.ops.aten.slice.Tensor, (argument, axis, start, end))


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that were there before: for one given twice torch.compile would do so anew."""
    distinct: dict[int, Tensor] = {}
    for tensor in tensors:
        own = tensor.clone() if id(tensor) in distinct else tensor
        distinct[id(own)] = own
    return list(distinct.values())


class CannotCompile(Exception):
    """Torch's compiler has failed; the first line of its reason."""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A recording that is thrown away while another is being made would spoil it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
        with _no_garbage_collection(), torch.cuda.graph(graph):
            outputs = self._function(*inputs)
        return inputs, outputs, graph


class InParts:
    """A network on a GPU, compiled and replayed for `rows` inputs at a time: a last part is filled up."""

    def __init__(self, network: Function, rows: int = 500) -> None:
        self._program, self._rows = Replayed(Compiled(network)), rows

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        outputs = []
        for part in torch.split(x, self._rows):
            missing = part.new_zeros(self._rows - len(part), *x.shape[1:])
            full = torch.cat([part, missing]) if len(missing) else part
            outputs.append(self._program(theta, full)[: len(part)].clone())  # the next replay overwrites it
        return torch.cat(outputs)


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
