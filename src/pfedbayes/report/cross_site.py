"""The cross-site matrix as a heat map and in sentences: who is like whom."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from pfedbayes.evaluation.cross_site import CrossSite
from pfedbayes.report import draw, tables
from pfedbayes.report.charts import Figure
from pfedbayes.report.describe import axis_label
from pfedbayes.report.tables import Floats
from pfedbayes.runs.folder import Run

WIDTH = 620
_MOST_NUMBERS = 12  # clients up to which cells have room for numbers
_MOST_SENTENCES = 6
_BETTER, _WORSE = 0, 1  # colours


def lead(run: Run) -> list[str]:
    """Return sentences: whose models suit whose data."""
    matrix = _matrix(run)
    if matrix is None:
        return []
    names, gain = matrix.names, _gains(matrix)
    others = np.nan_to_num(gain[: len(names)], nan=-math.inf)
    np.fill_diagonal(others, -math.inf)
    best = {j: int(i) for j, i in enumerate(np.argmax(others, 0)) if math.isfinite(others[i, j])}
    sentences = _shared(matrix, gain)
    pairs = [(i, j) for j, i in best.items() if best.get(i) == j and i < j]
    told = {client for pair in pairs for client in pair}
    sentences += [
        f"{names[i]} and {names[j]} are alike: among the others’ models, each is served best by the other’s."
        for i, j in pairs
    ]
    for j, i in sorted(best.items(), key=lambda item: -others[item[1], item[0]]):
        if gain[i, j] > 0:
            own, other = (_amount(matrix, k, j) for k in (j, i))
            if own != other:
                sentences.append(
                    f"On {names[j]}’s data, {names[i]}’s model ({other}) does better than {names[j]}’s own ({own})."
                )
            elif j not in told:
                sentences.append(f"On {names[j]}’s data, {names[i]}’s model does as well as {names[j]}’s own ({own}).")
        elif j not in told:
            sentences.append(f"{names[i]}’s model does best on {names[j]}’s data after its own.")
    return sentences[: _MOST_SENTENCES + 1]


def figure(run: Run) -> Figure | None:
    """Draw the matrix: each column compares all models on the data of one client."""
    matrix = _matrix(run)
    if matrix is None:
        return None
    label = axis_label(matrix.metric)
    order = order_clients(matrix)
    title = f"{label} of every model on every client’s data"
    ordered = ", sorted by similarity" if order != sorted(order) else ""
    caption = (
        f"A row is a model, a column the test data of a client{ordered}. Blue cells are better than the client’s own "
        "model on these data, orange cells are worse."
    )
    return Figure(title, _heat_map(title, matrix, order), caption)


def order_clients(matrix: CrossSite) -> list[int]:
    """Return the order in which clients are shown: as they are, or neighbours alike if there are too many to read."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # noqa: PLC0415, takes half as long as torch to import
    from scipy.spatial.distance import pdist  # noqa: PLC0415

    clients = len(matrix.names)
    if clients <= _MOST_NUMBERS:
        return list(range(clients))
    gain = np.nan_to_num(_gains(matrix)[:clients])
    order: list[int] = leaves_list(linkage(pdist(gain), "average", optimal_ordering=True)).tolist()
    return order


def _matrix(run: Run) -> CrossSite | None:
    return run.summary.cross_site if run.summary else None


def _gains(matrix: CrossSite) -> Floats:
    """Return by how much each model is better than the client's own model on these data; NaN if it is unknown."""
    values = tables.numbers(matrix.scores)
    metric = tables.metric(matrix.metric)
    if metric.nominal is not None:
        values = -np.abs(values - metric.nominal)
    elif not metric.larger_is_better:
        values = -values
    gains: Floats = values - np.diagonal(values)
    return gains


def _shared(matrix: CrossSite, gain: Floats) -> list[str]:
    clients = len(matrix.names)
    if len(gain) == clients:
        return []
    better = int((gain[clients] > 0).sum())
    whom = f"{better} of {clients}" if better else f"none of {clients}"
    return [f"On a client’s own test data, the shared model beats the client’s own model for {whom} clients."]


def _amount(matrix: CrossSite, model: int, client: int) -> str:
    value = matrix.scores[model][client]
    return "n/a" if value is None else f"{value:.{min(2, tables.metric(matrix.metric).decimals)}f}"


def _heat_map(title: str, matrix: CrossSite, order: list[int]) -> str:
    names, gain = matrix.names, _gains(matrix)
    rows = [*order, *([len(names)] if len(gain) > len(names) else [])]
    heads = [*names, "shared model"]
    left = draw.CHARACTER * min(22, max(len(head) for head in heads)) + 16
    right = WIDTH - 0.6 * draw.CHARACTER * min(22, max(map(len, names)))  # labels of columns lean to the right
    cell = min(48.0, (right - left) / len(order))
    height = max(min(cell, 26.0), 11.0)
    font = "" if cell >= 20 else ' class="small"'
    top = 14 + 0.8 * draw.CHARACTER * min(22, max(map(len, names)))
    finite = np.abs(gain[np.isfinite(gain) & (gain != 0)])
    strongest = float(np.quantile(finite, 0.9)) if finite.size else 1.0
    parts = []
    for column, j in enumerate(order):
        x = left + cell * (column + 0.5)
        shown = escape(draw.shorten(names[j], 22))
        parts.append(f'<text{font} transform="translate({x + 4:.1f} {top - 6:.1f}) rotate(-55)">{shown}</text>')
    for line, i in enumerate(rows):
        y = top + height * line + (6 if i == len(names) else 0)
        shown = escape(draw.shorten(heads[i], 22))
        parts.append(f'<text{font} x="{left - 6:.0f}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{shown}</text>')
        for column, j in enumerate(order):
            x, value = left + cell * column, gain[i, j]
            known = math.isfinite(value)
            hint = draw.tooltip(f"{heads[i]} on {names[j]} ({matrix.counts[j]:,} examples): {_amount(matrix, i, j)}")
            strength = min(1.0, abs(value) / strongest) if known else 0.0
            colour = _BETTER if known and value > 0 else _WORSE
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" height="{height - 1:.1f}"'
            parts.append(f'<rect class="c{colour}" {box} fill-opacity="{0.75 * strength:.2f}">{hint}</rect>')
            if i == j:
                parts.append(f'<rect class="own" {box}/>')
            if len(names) <= _MOST_NUMBERS:
                middle = f'x="{x + cell / 2 - 0.5:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle"'
                parts.append(f'<text class="name" {middle}>{_amount(matrix, i, j)}</text>')
    description = "; ".join(f"{names[j]}: own model {_amount(matrix, j, j)}" for j in order[:_MOST_NUMBERS])
    return draw.document(title, description, top + height * len(rows) + 10, parts, WIDTH)
