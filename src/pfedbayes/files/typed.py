"""Dataclasses to JSON and back, with every value checked against the type of its field."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from functools import cache
from typing import Any, TypeVar

from pfedbayes.errors import one_line

T = TypeVar("T")
OMIT_NONE = {"omit_none": True}  # metadata of a field that the JSON object leaves out while it is None
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
LARGEST_FLOAT = int(sys.float_info.max)
_NUMBERS = {int, float, type(None)}


def to_json(value: Any) -> Any:
    """Return what `json.dumps` accepts: dataclasses become objects; NaN and infinity become null."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) is not None or not field.metadata.get("omit_none")
        }
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(cls: type[T], value: Any) -> T:
    """Return a dataclass from a JSON object; raise ValueError, which names the field, if one is missing or wrong.

    A field with a default may be missing: an earlier version did not write it. Other keys are ignored.
    """
    found: T = _convert(value, cls, "")
    return found


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _object(value, hint, name)
    if origin in (types.UnionType, typing.Union):
        return _either(value, arguments, name)
    if origin is typing.Literal:
        _require(value in arguments, value, "one of " + ", ".join(repr(choice) for choice in arguments), name)
        return value
    if origin is list:
        _require(isinstance(value, list), value, "a list", name)
        if set(typing.get_args(arguments[0])) == {float, type(None)} and set(map(type, value)) <= _NUMBERS:
            return value  # logs have millions of numbers
        return [_convert(item, arguments[0], f"{name}[{k}]") for k, item in enumerate(value)]
    if origin is tuple:  # of any length
        _require(isinstance(value, list), value, "a list", name)
        if arguments[0] is float and set(map(type, value)) == {float}:
            return tuple(value)  # summaries of wide tables have a million quantiles
        return tuple(_convert(item, arguments[0], f"{name}[{k}]") for k, item in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), value, "an object", name)
        return {key: _convert(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    if hint is float and type(value) is int and abs(value) <= LARGEST_FLOAT:
        return float(value)
    _require(type(value) is hint, value, _KINDS.get(hint, "null"), name)
    return value


def _object(value: Any, cls: Any, name: str) -> Any:
    _require(isinstance(value, dict), value, "an object", name or "the content")
    prefix = f"{name}." if name else ""
    arguments = {}
    for field, hint in _hints(cls):
        if field.name in value:
            arguments[field.name] = _convert(value[field.name], hint, f"{prefix}{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return cls(**arguments)


@cache
def _hints(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _either(value: Any, hints: tuple[Any, ...], name: str) -> Any:
    """Return the value as the first of several types that it fits; null fits None alone."""
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is not type(None):
            try:
                return _convert(value, hint, name)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def _require(holds: bool, value: Any, kind: str, name: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {one_line(repr(value), 40)}, not {kind}")
