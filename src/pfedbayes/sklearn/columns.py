"""Arrays and data frames as columns, and columns as the kind of data frame that came in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import canonical

Texts = NDArray[np.object_]


def is_frame(data: Any) -> bool:
    """Return whether data are a data frame, of pandas or polars."""
    return hasattr(data, "columns") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)


def columns_of(data: Any, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the columns of a data frame, or of an array (n, d), by these names."""
    if not is_frame(data):
        return {name: data[:, k] for k, name in enumerate(names)}
    return {name: np.asarray(data[key]) for name, key in zip(names, data.columns, strict=True)}


def categorical(data: Any, names: Sequence[str]) -> list[str]:
    """Return the columns of a data frame whose type says that they hold categories, even if these are numbers."""
    if not is_frame(data):
        return []
    types = (str(data[key].dtype).lower() for key in data.columns)
    return [name for name, kind in zip(names, types, strict=True) if kind.startswith(("categor", "enum"))]


def framed(columns: Mapping[str, NDArray[Any]], like: Any) -> Any:
    """Return columns as a data frame of the same kind, and with the same index; None if `like` is an array."""
    if not is_frame(like):
        return None
    index = {"index": like.index} if hasattr(like, "index") else {}
    return type(like)(dict(columns), **index)


def as_names(values: Iterable[Any]) -> Texts:
    """Return the names (n,) of groups or labels, as a file with these values would spell them; "" if one is missing."""
    listed = np.asarray(values).tolist() if hasattr(values, "dtype") else list(values)
    spelled = {value: "" if value is None else canonical(str(value).strip()) for value in set(listed)}
    return np.array([spelled[value] for value in listed], dtype=object)


def free_name(name: Any, taken: Iterable[str], default: str) -> str:
    """Return a name for a column that no other column has."""
    found = name if isinstance(name, str) and name else default
    while found in set(taken):
        found += "_"
    return found
