"""Functions of trees of tensors as programs: compiled, and on a GPU replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pfedbayes.maths.optim import in_pieces
from pfedbayes.maths.trees import leaves, rebuild, tree_map
from pfedbayes.memory import without_collecting
from pfedbayes.nets.net import Function


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
        gc.collect()
        with without_collecting(), torch.cuda.graph(graph):
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
