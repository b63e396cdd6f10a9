"""TOML to frozen dataclasses and back. Errors about unknown keys and wrong types name the nearest valid choice."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from pfedbayes.errors import UserError, nearest, one_line
from pfedbayes.files.reading import LARGEST_INTEGER, parse_toml, read_bytes, reading

T = TypeVar("T")
LARGEST_TOML = 2**24  # bytes of a file that a user writes


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
        raise UserError(f"{where} is {_shown(value)}: choose one of {choices}")
    if origin is tuple:
        if isinstance(value, list | tuple) and (len(value) == len(arguments) or arguments[-1] is Ellipsis):
            return tuple(_convert(item, arguments[0], where) for item in value)
        shape = f"{len(arguments)} values" if arguments[-1] is not Ellipsis else "values"
        example = "['a', 'b']" if arguments[0] is str else "[100, 50]"
        raise UserError(f"{where} is {_shown(value)}: give a list of {shape}, e.g. {where}={example}")
    if hint is float and type(value) is int and abs(value) <= LARGEST_INTEGER:
        return float(value)
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
        raise UserError(f"{where} is {_shown(value)}: give {kind}")
    check_plain(value, where)
    return value


def check_plain(value: Any, where: str) -> None:
    """Raise UserError unless TOML and JSON files can hold a value: a text, a number, a list or a table of such values.

    where: its name, such as "net.hidden". A number is finite and no larger than 64 bits allow, and a text is Unicode.
    """
    match value:
        case bool():
            pass
        case int():
            if abs(value) > LARGEST_INTEGER:
                raise UserError(f"{where} is larger than {LARGEST_INTEGER}: give a smaller number")
        case float():
            if not math.isfinite(value):
                raise UserError(f"{where} is {'not a number' if math.isnan(value) else 'infinite'}: give a number")
        case str():
            if "\0" in value or not _is_unicode(value):
                raise UserError(f"{where} is {_shown(value)}, which a config cannot hold: give a text of Unicode")
        case list() | tuple():
            for number, item in enumerate(value):
                check_plain(item, f"{where}[{number}]")
        case Mapping():
            for name, item in value.items():
                check_plain(name, f"a key of {where}")
                check_plain(item, f"{where}.{name}")
        case _:
            raise UserError(f"{where} is {_shown(value)}: give a text, a number, true or false, or a list or table")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """Return a value for a message; the digits of an integer may be too many to print."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "a very large number"
    return one_line(repr(value))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    with reading(path, "give the path of an experiment file in TOML", "is not valid TOML"):
        return parse_toml(read_bytes(path, largest=LARGEST_TOML).decode())


def parse_override(text: str) -> tuple[str, str, Any]:
    """Parse "training.rounds=100" as ("training", "rounds", 100). A value that is not TOML is a text."""
    name, equals, value = text.partition("=")
    section, dot, field = name.strip().partition(".")
    if not (equals and dot and section and field):
        raise UserError(
            f"--set {one_line(repr(text))} is not understood: write section.key=value, e.g. --set training.rounds=100"
        )
    try:
        parsed = parse_toml(f"value = {value}")
    except ValueError:
        return section, field, value.strip()
    return section, field, parsed["value"] if len(parsed) == 1 else value.strip()


def to_toml(sections: Mapping[str, Any]) -> str:
    """Return nested tables of plain values as TOML, without the keys whose value is None."""
    tables = _without_none(sections)
    for section, values in tables.items():
        check_plain(values, section)
    return tomli_w.dumps(tables)


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }
