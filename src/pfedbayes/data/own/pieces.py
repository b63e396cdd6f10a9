"""Piecewise-linear encoding of numbers, fitted to the quantiles that clients send.

Quantiles of all clients together cut the numbers of a column into bins. The bin [a, b] is the input
2 (clip((x - a) / (b - a), 0, 1) - m), where m is the mean of the ramp over the training rows of all clients. A linear
function of these inputs is a continuous piecewise-linear function of x, constant beyond the outermost edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import LARGEST, Numbers
from pfedbayes.data.own.summaries import ColumnSummary

EQUAL = 1e-12  # edges that differ by less than this share of their magnitude are equal


class Pieces(NamedTuple):
    """The bins of a column; both empty if it has none."""

    edges: tuple[float, ...] = ()
    """Increasing edges of the bins, in the units of the column."""
    centres: tuple[float, ...] = ()
    """Mean of the ramp of each bin over the training rows."""


def fit_pieces(merged: ColumnSummary, columns: Sequence[ColumnSummary], bins: int) -> Pieces:
    """Fit at most `bins` bins to the summaries of one column of numbers.

    merged: the summary over all clients. columns: the summaries of the clients.

    Every quantile of a client counts as the rows it stands for. The pooled quantile function is linear between these
    points and constant beyond them, and the edges are its values at the levels 0, 1/bins, ..., 1. If at most bins + 1
    different numbers occur, they are the edges. A client without quantiles counts as rows at its mean and does not
    move the edges; there are no bins if such clients hold more than half of the cells, or for fewer than 3 edges.
    """
    known = sum(column.count for column in columns if column.quantiles)
    if bins < 2 or 2 * known < merged.count or not known:
        return Pieces()
    numbers, weights, exact = _pool(columns)
    edges = _edges(numbers[exact], weights[exact], bins)
    if len(edges) < 3:
        return Pieces()
    # Missing cells count as the mean.
    numbers, weights = np.append(numbers, merged.mean), np.append(weights, float(merged.missing))
    centres = (weights[:, None] * ramps(numbers, edges)).sum(0) / weights.sum()
    return Pieces(edges, tuple(centres.clip(0, 1).tolist()))


def ramps(numbers: Numbers, edges: Sequence[float]) -> NDArray[np.float64]:
    """Return clip((x - a) / (b - a), 0, 1) of numbers (n,) for every bin [a, b], as (n, bins)."""
    ends = np.array(edges)
    with np.errstate(over="ignore"):  # an infinite ratio is cut off
        ratios: NDArray[np.float64] = (numbers[:, None] - ends[:-1]) / np.diff(ends)
    return ratios.clip(0.0, 1.0)


def require_sound_pieces(pieces: Pieces, most: int) -> None:
    """Raise ValueError unless these can be the bins of a column."""
    edges, centres = pieces
    if not edges and not centres:
        return
    if not 3 <= len(edges) <= most + 1 or len(centres) != len(edges) - 1:
        raise ValueError(f"there are {len(edges)} edges and {len(centres)} centres of bins")
    if not all(abs(edge) <= LARGEST for edge in edges) or bool((np.diff(edges) <= 0).any()):
        raise ValueError("the edges of bins are not increasing numbers")
    if not all(0 <= centre <= 1 for centre in centres):
        raise ValueError("a centre of a bin does not lie between 0 and 1")


def _pool(columns: Sequence[ColumnSummary]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return points (P,) that stand for the numbers of all clients, how many rows each is, and whether it is exact.

    The points are sorted, so they do not depend on the order of the clients.
    """
    points = [column.quantiles or (column.mean,) for column in columns if column.count]
    sizes = [len(own) for own in points]
    counts = np.array([column.count for column in columns if column.count], dtype=np.float64)
    numbers = np.array([number for own in points for number in own])
    weights = np.repeat(counts / sizes, sizes)
    exact = np.repeat([bool(column.quantiles) for column in columns if column.count], sizes)
    order = np.lexsort((exact, weights, numbers))
    return numbers[order], weights[order], exact[order]


def _edges(numbers: NDArray[Any], weights: NDArray[Any], bins: int) -> tuple[float, ...]:
    """Return the edges of bins for sorted numbers (P,), each of which is as many rows as its weight."""
    edges = np.unique(numbers)
    if len(edges) > bins + 1:
        ends = np.cumsum(weights)
        edges = np.interp(np.linspace(0, 1, bins + 1), (ends - weights / 2) / ends[-1], numbers)
    kept = [float(edges[0])]
    for edge in edges[1:].tolist():
        if edge - kept[-1] > EQUAL * max(abs(edge), abs(kept[-1])):
            kept.append(edge)
    return tuple(kept)
