"""The intervals of time on which hazards are constant, fitted to the clients' summaries."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pfedbayes.data.own.pieces import fit_pieces
from pfedbayes.data.own.summaries import ColumnSummary

MAX_INTERVALS = 4
EVENTS_PER_INTERVAL = 20  # at least


def fit_intervals(merged: ColumnSummary, columns: Sequence[ColumnSummary]) -> tuple[float, ...]:
    """Return the ends of intervals with about equally many events each, from summaries of the times of events.

    The last end is about the latest event, and the hazard beyond is not to be trusted. Where most events are of clients
    without quantiles, the ends are those of an exponential distribution with the mean of the times.
    """
    count = min(MAX_INTERVALS, max(1, merged.count // EVENTS_PER_INTERVAL))
    edges = tuple(edge for edge in fit_pieces(merged, columns, max(count, 2)).edges[1:] if edge > 0)
    if not edges:
        mean = merged.mean or 1.0
        edges = (*(-mean * math.log1p(-k / count) for k in range(1, count)), 3 * mean)
    return edges if count > 1 else edges[-1:]


def require_sound_intervals(edges: Sequence[float]) -> None:
    """Raise ValueError unless these can be the ends of intervals."""
    if not 1 <= len(edges) <= MAX_INTERVALS or not all(a < b for a, b in zip((0, *edges), edges, strict=False)):
        raise ValueError("the ends of the intervals of time do not increase")
    if not edges[-1] < math.inf:
        raise ValueError("the last interval of time has no end")
