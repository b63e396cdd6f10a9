"""Messages: state trees as arrays of raw bytes, and facts as JSON. Everything that arrives is checked."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from pfedbayes.errors import UserError, one_line
from pfedbayes.files.reading import parse_json
from pfedbayes.files.typed import to_json
from pfedbayes.maths.trees import named_leaves, rebuild
from pfedbayes.methods.base import State

PROTOCOL = 2
RAW = "pfedbayes.raw"  # little-endian numbers, so nothing is unpickled
TYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "bool")}
FACTS = "facts"
LARGEST_COUNT = 10**9  # of examples
LONGEST_FACTS = 2**20  # characters
LONGEST_REASON = 300  # characters
NOT_READABLE = "the message holds no facts that pfedbayes can read"


class Refused(UserError):
    """The reason why a message cannot be used. It may quote the message, so it is cut to one short line."""

    def __init__(self, reason: object) -> None:
        super().__init__(one_line(reason, LONGEST_REASON))


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
        raise Refused(f"the arrays are {', '.join(sorted(record)[:9])} instead of {', '.join(sorted(wanted))}")
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


def content(facts: dict[str, Any], **arrays: ArrayRecord) -> RecordDict:
    """Return the content of a message: facts as one JSON text, and arrays."""
    return RecordDict({FACTS: ConfigRecord({FACTS: dump_facts(facts)}), **arrays})


def dump_facts(facts: dict[str, Any]) -> str:
    """Return facts as JSON, with null for numbers that are not finite."""
    return json.dumps(to_json(facts), allow_nan=False)


def facts_of(message: Message) -> dict[str, Any]:
    """Return the facts of a message; refuse a message of another protocol."""
    if message.has_error():
        lines = (message.error.reason or "").strip().splitlines() or ["no reason given"]
        raise Refused(f"Flower reports: {lines[-1]}")
    if not isinstance(message.content, RecordDict):
        raise Refused(NOT_READABLE)
    record = message.content.config_records.get(FACTS)
    return parse_facts(None if record is None else record.get(FACTS))


def parse_facts(text: Any) -> dict[str, Any]:
    """Return facts from their JSON text; refuse those of another protocol."""
    if not isinstance(text, str) or len(text) > LONGEST_FACTS:
        raise Refused(NOT_READABLE)
    try:
        facts = parse_json(text)
    except ValueError as error:
        raise Refused(f"{NOT_READABLE} ({error})") from None
    if not isinstance(facts, dict) or facts.get("protocol") != PROTOCOL:
        raise Refused("the message comes from another version of pfedbayes: install the same version everywhere")
    return facts


def count_of(facts: dict[str, Any], name: str, least: int) -> int:
    """Return a count from the facts; refuse anything else."""
    value = facts.get(name)
    if type(value) is not int or not least <= value <= LARGEST_COUNT:
        raise Refused(f"its {name} is {str(value)[:40]}")
    return value


def num_bytes(message: Message) -> int:
    """Return the bytes of arrays and facts in a message, without what Flower adds."""
    if not message.has_content() or not isinstance(message.content, RecordDict):
        return 0
    arrays = [array.data for record in message.content.array_records.values() for array in record.values()]
    others = [value for record in message.content.config_records.values() for value in record.values()]
    lists = [item for value in others for item in (value if isinstance(value, list) else [value])]
    return sum(len(item) if isinstance(item, bytes | str) else 8 for item in arrays + lists)
