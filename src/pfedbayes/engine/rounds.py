"""What `Federation.rounds` yields: the number of a round, which knows its time and its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

Scores = Mapping[str, Mapping[str, Mapping[str, list[list[float]]]]]


class TrainedRound(int):
    """The number of a trained round. `dict(record)` has its columns, so that `pandas.DataFrame(records)` is a table.

    Columns: round, seconds, and for every model and metric the mean over clients and seeds, such as personal_nll.
    """

    seconds: float
    """Seconds of training and evaluation since `rounds` was called."""
    scores: Scores
    """Scores as `Federation.evaluate` returns them; empty if this round was not evaluated."""

    def __new__(cls, round: int, seconds: float, scores: Scores, estimator: str) -> Self:
        """Return the record of a round. estimator: whose scores are columns."""
        record = super().__new__(cls, round)
        record.seconds, record.scores = seconds, scores
        record._columns = {"round": int(round), "seconds": seconds} | _means(scores, estimator)
        return record

    _columns: dict[str, float]

    @property
    def round(self) -> int:
        """The number of the round."""
        return int(self)

    def keys(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._columns)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the columns."""
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    def __getitem__(self, name: str) -> float:
        """Return the value of a column."""
        return self._columns[name]

    def __str__(self) -> str:
        """Return the number."""
        return str(int(self))

    def __repr__(self) -> str:
        """Return the columns."""
        shown = (f"{name}={value:.4g}" for name, value in self._columns.items() if name != "round")
        return f"TrainedRound({int(self)}, {', '.join(shown)})"


Mapping.register(TrainedRound)  # pandas takes a list of mappings as rows


def _means(scores: Scores, estimator: str) -> dict[str, float]:
    """Return the mean of each metric of each model over the seeds and the clients for which it is defined."""
    found = {}
    for model, by_estimator in scores.items():
        of_model: Mapping[str, Any] = by_estimator.get(estimator) or next(iter(by_estimator.values()), {})
        for metric, values in of_model.items():
            defined = [value for of_seed in values for value in of_seed if value is not None and math.isfinite(value)]
            found[f"{model}_{metric}"] = sum(defined) / len(defined) if defined else math.nan
    return found
