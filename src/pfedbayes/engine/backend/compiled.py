"""Functions of tensor trees, compiled by torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pfedbayes.maths.optim import without_fused_adam
from pfedbayes.maths.trees import leaves, rebuild, tree_map


class Compiled:
    """A function of tensor trees, compiled once for each set of argument shapes.

    It is traced first, so the compiler sees tensor operations and no Python.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    @property
    def has_run(self) -> bool:
        """Whether the function has been compiled for any shapes yet."""
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
        # Imported lazily: Flower starts a new process for every message.
        from torch._inductor import compile as compile_graph  # noqa: PLC0415
        from torch._inductor import config as inductor  # noqa: PLC0415
        from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

        # Otherwise idle compiler processes end after a minute, and their successors can wait for a lock forever.
        inductor.quiesce_async_compile_pool = False

        result = None

        def of_leaves(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            result = self._function(*rebuild(arguments, list(tensors)))
            traced_leaves = leaves(result)
            result = tree_map(lambda _: torch.empty(0), result)  # keep only the structure of the tree
            return traced_leaves

        examples: list[Any] = [leaf.clone() for leaf in flat]  # a program may write to its arguments
        with without_fused_adam():
            traced = make_fx(of_leaves)(*examples)
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns about its own internals
                if _on_cpu(flat):  # torch.compile checks the arguments of every call, which takes long
                    _split_by_layer(traced.graph)
                    traced.recompile()
                    program = compile_graph(traced, examples)
                else:
                    program = torch.compile(traced, fullgraph=True, dynamic=False)
                program(*examples)  # torch.compile compiles at the first call
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotCompile(str(error).strip().partition("\n")[0]) from error
        return program, result


def _split_by_layer(graph: torch.fx.Graph) -> None:
    """Apply arithmetic to the gradient of each layer before the gradients are concatenated.

    f(cat(layers), vector) becomes cat(f(layer, its part of the vector)). Otherwise the compiler writes the gradients of
    the layers to memory twice.
    """
    aten = torch.ops.aten
    arithmetic = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
    joined: set[torch.fx.Node] = set()  # concatenations whose layers have not been overwritten since
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
    """Slice an argument whose last axis has `size` entries; return other arguments unchanged."""
    if not isinstance(argument, torch.fx.Node) or argument.meta["val"].shape[-1:] != (size,):
        return argument
    axis = argument.meta["val"].dim() - 1
    return argument.graph.call_function(torch.ops.aten.slice.Tensor, (argument, axis, start, end))


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Replace repeated tensors by copies: torch.compile would recompile for a tensor that is passed twice."""
    distinct: dict[int, Tensor] = {}
    for tensor in tensors:
        own = tensor.clone() if id(tensor) in distinct else tensor
        distinct[id(own)] = own
    return list(distinct.values())


class CannotCompile(Exception):
    """Torch's compiler has failed; holds the first line of its message."""
