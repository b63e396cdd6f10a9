"""Read files and texts from elsewhere. Whatever is wrong with them becomes one line with the cause and the remedy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, NoReturn

from pfedbayes.errors import UserError, one_line
from pfedbayes.files.checksums import FIELD, check_json
from pfedbayes.files.writing import NO_DETOUR

Kinds = Mapping[str, type | UnionType]  # types of the values of an object, by key
NUMBER = int | float
LARGEST_TEXT = 2**30  # bytes of a JSON or TOML file
DEEPEST = 64  # levels of tables and arrays in a TOML file
LARGEST_INTEGER = 2**63 - 1  # as in the TOML standard
TOO_DEEP = "it is nested too deeply"
_PART = r"""(?>[\w-]+|"(?>[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DEEP_KEY = re.compile(rf"(?<![\w-])(?>{_PART}[ \t]*\.[ \t]*){{{DEEPEST}}}")  # a.b.c.…


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError, and nothing else, for any text that cannot be used."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
        if (b"\\u" if isinstance(content, bytes) else "\\u") in content:  # type: ignore[operator]
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except UnicodeError:
        raise ValueError("its text is not valid Unicode") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text. Raise ValueError, and nothing else, for any text that cannot be used."""
    if _DEEP_KEY.search(text):  # the parser takes hours for thousands of parts
        raise ValueError(TOO_DEEP)
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        level = [item for value in level if isinstance(value, dict | list) for item in _items(value)]
        if any(isinstance(item, int) and abs(item) > LARGEST_INTEGER for item in level):
            raise ValueError("it has an integer of more than 64 bits")
    if level:
        raise ValueError(TOO_DEEP)
    return content


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


@contextlib.contextmanager
def reading(path: Path, remedy: str, fault: str = "is damaged") -> Iterator[None]:
    """Turn errors of the file system, and ValueErrors about the content, into a UserError that ends with the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path} ({one_line(error.strerror or error)}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} {fault} ({one_line(error)}): {remedy}") from None


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file to read it; raise OSError for anything else, such as a pipe, without waiting for it.

    follow: whether `path` itself may be a symbolic link.
    """
    flags = os.O_RDONLY | (NO_DETOUR & ~getattr(os, "O_NOFOLLOW", 0) if follow else NO_DETOUR)
    if not follow and path.is_symlink():
        raise OSError(None, "it is a symbolic link")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, follow: bool = True, largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file; raise OSError or ValueError. Call it in `reading`."""
    with open_regular(path, follow) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise ValueError(f"it is larger than {largest / 1e6:,.0f} MB")
        return file.read()


def read_object(path: Path, follow: bool = True) -> tuple[dict[str, Any], bool]:
    """Return a JSON object without its checksum, and whether it had one. Call it in `reading`."""
    return parse_object(read_bytes(path, follow))


def parse_object(content: bytes) -> tuple[dict[str, Any], bool]:
    """Return a JSON object without its checksum, and whether it had one; raise ValueError if it does not match."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    checked = check_json(content)
    return {name: item for name, item in value.items() if name != FIELD}, checked


def read_json(path: Path, what: str, check: Callable[[Any], None], remedy: str) -> Any:
    """Return the content of a file. check: raises ValueError if the content is wrong, and may amend it."""
    with reading(path, remedy, f"does not hold {what}"):
        text = read_bytes(path)
        content = parse_json(text)
        if check_json(text):
            del content[FIELD]
        check(content)
        return content


def require_keys(value: Any, kinds: Kinds, called: str) -> None:
    """Raise ValueError unless the value is an object with these keys and values of these types."""
    if not isinstance(value, dict):
        raise ValueError(f"{called} is no object")
    for key, kind in kinds.items():
        if key not in value:
            raise ValueError(f"{called} has no {key!r}")
        if not isinstance(value[key], kind):
            raise ValueError(f"{key!r} of {called} is not understood")
