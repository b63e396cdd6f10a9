"""Design matrices for models of scikit-learn and statsmodels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.silos.scores import Floats, Ints
from benchmarks.silos.tables import Split


@dataclass(frozen=True, eq=False)
class Design:
    """The rows of a split as numbers, fitted to training and validation rows."""

    x: Floats
    """Inputs (n, d): standardised numbers with indicators of missing cells, and centred one-hot categories."""
    y: NDArray[Any]
    """Labels (n,) from 0, or standardised numbers (n,)."""
    client: Ints
    """The client of each row (n,)."""
    num_clients: int
    test: NDArray[np.bool_]
    """Which rows are test rows (n,)."""
    num_classes: int
    """0 for a regression."""
    unit: float
    """The number by which the targets of a regression were divided."""

    @property
    def train(self) -> NDArray[np.bool_]:
        """Which rows are training or validation rows (n,)."""
        return ~self.test

    @property
    def x_with_client(self) -> Floats:
        """Inputs with the client as one-hot columns (n, d + N)."""
        return np.concatenate([self.x, np.eye(self.num_clients)[self.client]], axis=1)


def encode(split: Split) -> Design:
    """Encode a split."""
    test = split.test
    columns: list[Floats] = []
    for name in split.frame:
        if name in (split.target, split.client):
            continue
        column = split.frame[name]
        if pd.api.types.is_numeric_dtype(column):
            columns += _numbers(column.to_numpy(float), ~test)
        else:
            columns += _categories(column, ~test)
    names = {name: k for k, name in enumerate(split.clients)}
    client = split.frame[split.client].map(names).to_numpy(np.int64)
    y, classes, unit = _target(split, ~test)
    x = np.stack(columns, 1) if columns else np.zeros((len(test), 0))
    return Design(x, y, client, len(names), test, classes, unit)


def _numbers(values: Floats, train: NDArray[np.bool_]) -> list[Floats]:
    absent = np.isnan(values)
    columns = [absent - absent[train].mean()] if absent.any() else []
    known = values[train & ~absent]
    if len(known) and known.std() > 1e-9:
        columns.append(np.where(absent, 0.0, (values - known.mean()) / known.std()))
    return columns


def _categories(column: Any, train: NDArray[np.bool_]) -> list[Floats]:
    texts = column.astype(object).where(column.notna(), "NA").astype(str).to_numpy()
    levels = sorted(set(texts[train]))
    columns = [(texts == level).astype(float) for level in (levels[1:] if len(levels) == 2 else levels)]
    return [column - column[train].mean() for column in columns]


def _target(split: Split, train: NDArray[np.bool_]) -> tuple[NDArray[Any], int, float]:
    target = split.frame[split.target]
    if split.task == "classification":
        texts = target.astype(str)
        classes = {name: k for k, name in enumerate(sorted(texts.unique()))}
        return texts.map(classes).to_numpy(np.int64), len(classes), 1.0
    values = target.to_numpy(float)
    unit = float(values[train].std()) or 1.0
    return (values - values[train].mean()) / unit, 0, unit
