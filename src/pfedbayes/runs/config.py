"""TOML to frozen dataclasses and back. Errors about unknown keys and wrong types name the nearest valid choice."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pfedbayes.errors import UserError, nearest

T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, Any], section: str) -> T:
    """Build a dataclass from the values of a config section; a missing key keeps its default."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.init]
    for name in values:
        if name not in names:
            raise UserError(f"unknown key {section}.{name}: {nearest(name, names)}")
    converted = {name: _convert(value, hints[name], f"{section}.{name}") for name, value in values.items()}
    try:
        return cls(**converted)
    except ValueError as error:
        raise UserError(f"[{section}] {error}") from None


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Return a value converted to the type of its field; raise UserError if it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(value, inner, where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        choices = ", ".join(json.dumps(choice) for choice in arguments)
        raise UserError(f"{where} is {value!r}: choose one of {choices}")
    if origin is tuple:
        if isinstance(value, list | tuple) and (len(value) == len(arguments) or arguments[-1] is Ellipsis):
            return tuple(_convert(item, arguments[0], where) for item in value)
        shape = f"{len(arguments)} values" if arguments[-1] is not Ellipsis else "values"
        example = "['a', 'b']" if arguments[0] is str else "[100, 50]"
        raise UserError(f"{where} is {value!r}: give a list of {shape}, e.g. {where}={example}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
        raise UserError(f"{where} is {value!r}: give {kind}")
    if hint is float and math.isnan(value):
        raise UserError(f"{where} is not a number: give one")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the path of an experiment file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML ({error}): correct it") from None


def parse_override(text: str) -> tuple[str, str, Any]:
    """Parse "training.rounds=100" as ("training", "rounds", 100). A value that is not TOML is a text."""
    name, equals, value = text.partition("=")
    section, dot, field = name.strip().partition(".")
    if not (equals and dot and section and field):
        raise UserError(f"--set {text!r} is not understood: write section.key=value, e.g. --set training.rounds=100")
    try:
        return section, field, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, field, value.strip()


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of plain values as TOML, without the keys whose value is None."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [
            f"[{section}]",
            *(f"{name} = {_literal(v)}" for name, v in values.items() if v is not None),
            "",
        ]
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back to the same number; inf and 1e-05 are valid TOML
    return json.dumps(value, ensure_ascii=False)
