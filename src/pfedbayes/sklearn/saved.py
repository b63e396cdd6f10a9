"""What a saved estimator adds to its run folder: estimator.json, with a checksum and without code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.files.reading import read_object, reading
from pfedbayes.files.typed import from_json, to_json
from pfedbayes.files.writing import write_file
from pfedbayes.nets.import_path import refuse_untrusted

ESTIMATOR = "estimator.json"
NAMING_CODE = ("method.name", "net.name")  # settings


@dataclass(frozen=True)
class Labels:
    """The labels of a classifier, in their order."""

    values: list[Any]
    kind: Literal["str", "int", "float", "bool", "object"]

    @classmethod
    def of(cls, labels: NDArray[Any]) -> Labels:
        """Return what a file holds of labels (C,)."""
        kinds: dict[str, Any] = {"U": "str", "i": "int", "u": "int", "f": "float", "b": "bool"}
        return cls(labels.tolist(), kinds.get(labels.dtype.kind, "object"))

    @property
    def array(self) -> NDArray[Any]:
        """The labels (C,)."""
        return np.array(self.values, dtype=self.kind)


@dataclass(frozen=True)
class Saved:
    """estimator.json."""

    estimator: str
    """Name of the class."""
    params: dict[str, Any]
    """Its parameters."""
    n_features: int
    """Number of columns of X."""
    names: list[str] | None
    """Names of the columns; None if X was an array."""
    labels: Labels | None
    """None for a regression."""


def write_saved(folder: Path, saved: Saved) -> None:
    """Write estimator.json."""
    try:
        text = dump_json(to_json(saved), indent=1)
    except (TypeError, ValueError) as error:
        raise UserError(f"a parameter or a label cannot be saved ({error}): give plain values") from None
    write_file(folder / ESTIMATOR, text)


def read_saved(folder: Path, estimator: str, params: Iterable[str], trusted: bool) -> Saved:
    """Read estimator.json; refuse one that names code, unless its author is trusted."""
    path = folder / ESTIMATOR
    with reading(path, "give a folder that an estimator has saved"):
        content, _ = read_object(path, follow=False)
        saved = from_json(Saved, content)
        if saved.estimator != estimator:
            raise ValueError(f"it is of a {saved.estimator}, not of a {estimator}")
        settings = saved.params.get("settings") or {}
        if set(saved.params) != set(params) or not isinstance(settings, dict):
            raise ValueError("its parameters are not those of the class")
        if saved.labels and not all(isinstance(label, str | int | float) for label in saved.labels.values):
            raise ValueError("its labels are neither texts nor numbers")
    for name in (saved.params["method"], *map(settings.get, NAMING_CODE)):
        refuse_untrusted(str(name), path, trusted)
    return saved
