"""Read JSON files that a user names, with one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pfedbayes.errors import UserError

Kinds = Mapping[str, type | UnionType]  # types of the values of an object, by key
NUMBER = int | float


def read_json(path: Path, what: str, check: Callable[[Any], None], remedy: str) -> Any:
    """Return the content of a file. check: raises ValueError if the content is wrong, and may amend it."""
    try:
        content = json.loads(path.read_text())
        check(content)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} does not hold {what} ({error}): {remedy}") from None
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
