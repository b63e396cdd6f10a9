"""Messages: state trees as arrays of raw bytes, and facts as JSON. Everything that arrives is checked."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.maths.trees import named_leaves, rebuild
from pfedbayes.methods.base import State

PROTOCOL = 1
RAW = "pfedbayes.raw"  # little-endian numbers, so nothing is unpickled
TYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "bool")}
FACTS = "facts"
LARGEST_COUNT = 10**12  # of examples


class Refused(UserError):
    """The reason why a message cannot be used."""


def to_arrays(tree: State, name: str, wire: torch.dtype) -> ArrayRecord:
    """Return the tensors of a tree by name; floating-point numbers are sent as `wire`."""
    return ArrayRecord({leaf: _to_array(tensor, wire) for leaf, tensor in named_leaves(tree, name)})


def _to_array(tensor: Tensor, wire: torch.dtype) -> Array:
    sent = tensor.detach().to("cpu", wire if tensor.is_floating_point() else None).contiguous()
    kind = str(sent.dtype).removeprefix("torch.")
    return Array(kind, tuple(sent.shape), RAW, sent.reshape(-1).view(torch.uint8).numpy().tobytes())


def from_arrays(record: Any, template: State, name: str, shapes: bool = True) -> State:
    """Return the tree of a record; refuse other names, number types or (with `shapes`) shapes than the template's."""
    wanted = dict(named_leaves(template, name))
    if not isinstance(record, ArrayRecord):
        raise Refused(f"the arrays {name!r} are missing")
    if set(record) != set(wanted):
        raise Refused(f"the arrays are {', '.join(sorted(record))} instead of {', '.join(sorted(wanted))}")
    return rebuild(template, [_from_array(leaf, record[leaf], like, shapes) for leaf, like in wanted.items()])


def _from_array(name: str, array: Array, like: Tensor, shapes: bool) -> Tensor:
    kind = TYPES.get(array.dtype)
    if array.stype != RAW or kind is None or kind.is_floating_point != like.is_floating_point():
        raise Refused(f"{name} holds {array.dtype} ({array.stype})")
    if shapes and tuple(array.shape) != tuple(like.shape):
        raise Refused(f"{name} has the wrong shape {tuple(array.shape)} instead of {tuple(like.shape)}")
    if len(array.data) != math.prod(array.shape) * kind.itemsize:
        raise Refused(f"{name} has {len(array.data)} bytes, which do not fit its shape {tuple(array.shape)}")
    if not array.data:
        return like.new_empty(tuple(array.shape))
    flat = torch.frombuffer(bytearray(array.data), dtype=kind)
    return flat.to(like).reshape(tuple(array.shape))


def refuse_wild(tree: State, largest: float) -> None:
    """Refuse numbers that are not finite or larger than `largest`, and impossible counts."""
    for name, tensor in named_leaves(tree, "upload"):
        if not tensor.is_floating_point():
            if not bool(((tensor >= 0) & (tensor <= LARGEST_COUNT)).all()):
                raise Refused(f"{name} has impossible counts: {int(tensor.min())} to {int(tensor.max())}")
        elif tensor.numel():
            if not bool(tensor.isfinite().all()):
                raise Refused(f"{name} is not finite")
            if (found := float(tensor.abs().max())) > largest:
                raise Refused(
                    f"{name} has an entry of magnitude {found:.3g}, more than federation.largest = {largest:g}"
                )


def content(facts: dict[str, Any], **arrays: ArrayRecord) -> RecordDict:
    """Return the content of a message: facts as one JSON text, and arrays."""
    return RecordDict({FACTS: ConfigRecord({FACTS: json.dumps(facts)}), **arrays})


def facts_of(message: Message) -> dict[str, Any]:
    """Return the facts of a message; refuse a message of another protocol."""
    if message.has_error():
        raise Refused(f"Flower reports: {(message.error.reason or 'no reason given').strip().splitlines()[-1]}")
    try:
        facts = json.loads(message.content[FACTS][FACTS])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Refused("the message holds no facts that pfedbayes can read") from None
    if not isinstance(facts, dict) or facts.get("protocol") != PROTOCOL:
        raise Refused("the message comes from another version of pfedbayes: install the same version everywhere")
    return facts


def num_bytes(message: Message) -> int:
    """Return the bytes of arrays and facts in a message, without what Flower adds."""
    if not message.has_content():
        return 0
    arrays = [array.data for record in message.content.array_records.values() for array in record.values()]
    others = [value for record in message.content.config_records.values() for value in record.values()]
    lists = [item for value in others for item in (value if isinstance(value, list) else [value])]
    return sum(len(item) if isinstance(item, bytes | str) else 8 for item in arrays + lists)
