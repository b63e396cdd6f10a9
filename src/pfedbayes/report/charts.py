"""Charts as SVG strings. A value that is not finite is left out; a spread that is not finite counts as 0."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from pfedbayes.report import draw

WIDTH = draw.WIDTH
COLOURS = draw.COLOURS


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]
    """Half-width of the band around each point; 0 for none."""
    style: int
    """Colour and marker."""
    dash: str = ""
    """Dash pattern of SVG."""
    thin: bool = False
    """Draw a thin line without markers."""
    in_legend: bool = True


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and caption."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Group:
    """One label of a bar or dot chart, with a value per series."""

    label: str
    values: Sequence[float]
    spreads: Sequence[float]
    """Half-width of the whisker of each value; 0 for none."""
    note: str = ""
    """A line under the label."""
    strong: bool = False
    """Print the label in bold."""


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, description: str) -> str:
    """Draw lines over a common x axis that starts at 0."""
    legend, top = _line_legend(series)
    left, right, bottom = 54, WIDTH - 14, top + 230
    heights = [
        bound
        for line in series
        for value, spread in zip(line.y, line.spread, strict=True)
        if math.isfinite(value)
        for bound in (value - _finite(spread), value + _finite(spread))
    ]
    if not heights:
        return draw.nothing_to_draw(title)
    y_ticks = draw.nice_ticks(min(heights), max(heights))
    x_end = max(max(line.x) for line in series) or 1
    x_ticks = [tick for tick in draw.nice_ticks(0, x_end) if tick <= x_end and tick == int(tick)]
    across, up = draw.scale(0, x_end, left, right), draw.scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *legend,
        *draw.y_axis(y_ticks, up, left, right),
        *draw.x_axis(x_ticks, across, bottom),
        draw.axis_title(x_label, (left + right) / 2, bottom + 36),
        draw.axis_title(y_label, 13, (top + bottom) / 2, turned=True),
    ]
    # Main lines are drawn last, above the thin ones.
    for line in sorted(series, key=lambda line: not line.thin):
        parts += _line(line, across, up, x_label)
    return draw.document(title, description, bottom + 44, parts)


def log_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, description: str) -> str:
    """Draw lines on two logarithmic axes, where a power of x is a straight line."""
    legend, top = _line_legend(series)
    left, right, bottom = 54, WIDTH - 24, top + 230
    heights = [y for line in series for y in line.y if math.isfinite(y) and y > 0]
    if not heights:
        return draw.nothing_to_draw(title)
    x_ticks = sorted({x for line in series for x in line.x})
    y_ticks = draw.log_ticks(min(heights), max(heights))
    across = draw.log_scale(x_ticks[0], x_ticks[-1], left, right)
    up = draw.log_scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *legend,
        *draw.y_axis(y_ticks, up, left, right, [f"{tick:g}" for tick in y_ticks]),
        *draw.x_axis(x_ticks, across, bottom),
        draw.axis_title(x_label, (left + right) / 2, bottom + 36),
        draw.axis_title(y_label, 13, (top + bottom) / 2, turned=True),
    ]
    for line in sorted(series, key=lambda line: not line.thin):
        parts += _line(line, across, up, "n =")
    return draw.document(title, description, bottom + 44, parts)


def point_chart(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    logarithmic: bool,
    description: str,
) -> str:
    """Draw points, the first of them with a ring around it."""
    if not points:
        return draw.nothing_to_draw(title)
    xs, ys = zip(*points, strict=True)
    left, right, top, bottom = 54, WIDTH - 24, 12, 242
    y_ticks = draw.nice_ticks(min(ys), max(ys))
    x_ticks = draw.log_ticks(min(xs), max(xs)) if logarithmic else draw.nice_ticks(min(xs), max(xs))
    across = (draw.log_scale if logarithmic else draw.scale)(x_ticks[0], x_ticks[-1], left, right)
    up = draw.scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *draw.y_axis(y_ticks, up, left, right),
        *draw.x_axis(x_ticks, across, bottom),
        draw.axis_title(x_label, (left + right) / 2, bottom + 36),
        draw.axis_title(y_label, 13, (top + bottom) / 2, turned=True),
    ]
    for k, (x, y) in enumerate(points):
        hint = draw.tooltip(f"{x_label} {x:.4g}: {y:.4f}")
        dot = draw.marker(0, across(x), up(y), 3)
        ring = "" if k else f'<circle class="line" cx="{across(x):.1f}" cy="{up(y):.1f}" r="7" fill="none"/>'
        parts.append(f'<g class="c0">{dot}{ring}{hint}</g>')
    return draw.document(title, description, bottom + 44, parts)


def bar_chart(
    title: str,
    series: Mapping[str, int],
    groups: Sequence[Group],
    *,
    value_label: str,
    description: str,
    end: float | None = None,
    compact: bool = False,
) -> str:
    """Draw horizontal bars from zero, one per series (a label and its style) and group.

    end: the end of the axis, a hard limit of the quantity at which whiskers stop. Default: beyond all whiskers.
    compact: leave out the legend and the printed values, for small multiples.
    """
    legend, top = ([], 6) if compact else draw.legend([draw.bar_key(*item) for item in series.items()])
    width = 300 if compact else WIDTH
    bar = 6 if compact else 11
    pitch = max(bar * len(series) + (5 if compact else 9), 30 if any(group.note for group in groups) else 0)
    longest = max(max(len(group.label), 0.85 * len(group.note)) for group in groups)
    left, right = min(14 + draw.CHARACTER * longest, 170), width - (14 if compact else 48)
    bars = [bar for group in groups for bar in _bars(series, group) if math.isfinite(bar[2])]
    if end is None:
        lows, highs = ([value + sign * spread for _, _, value, spread in bars] for sign in (-1, 1))
        ticks = draw.nice_ticks(min([0, *lows]), max([0, *highs]), at_most=5)
    else:
        ticks = draw.nice_ticks(min([0, *(value for _, _, value, _ in bars)]), end, at_most=5)
    across, bottom = draw.scale(ticks[0], ticks[-1], left, right), top + pitch * len(groups)
    parts = [
        *legend,
        *(draw.rule(across(tick), top, across(tick), bottom) for tick in ticks),
        *draw.x_axis(ticks, across, bottom),
        draw.axis_title(value_label, (left + right) / 2, bottom + 36),
    ]
    for row, group in enumerate(groups):
        middle = top + pitch * (row + 0.5)
        parts.append(_group_label(group, left - 8, middle))
        y = middle - bar * len(series) / 2 - bar
        for name, style, value, spread in _bars(series, group):
            y += bar
            if not math.isfinite(value):
                continue
            start, length = min(across(0), across(value)), abs(across(value) - across(0))
            hint = draw.tooltip(f"{group.label}, {name}: {_with_spread(value, spread)}")
            shape = f'x="{start:.1f}" y="{y + 0.75:.1f}" width="{length:.1f}" height="{bar - 1.5:.1f}"'
            parts.append(f'<rect class="c{style} bar{style}" {shape} rx="1">{hint}</rect>')
            tip = across(min(value + spread, ticks[-1]))
            if spread:
                low, y_mid = across(max(value - spread, ticks[0])), y + bar / 2
                parts.append(f'<path class="whisker" d="M{low:.1f} {y_mid:.1f}H{tip:.1f}"/>')
            if not compact:
                shown = f"{value:.{draw.decimals(ticks) + 1}f}"
                parts.append(f'<text class="small" x="{tip + 4:.1f}" y="{y + bar - 2:.1f}">{shown}</text>')
    return draw.document(title, description, bottom + 44, parts, width)


def dot_chart(
    title: str,
    series: Mapping[str, int],
    groups: Sequence[Group],
    *,
    value_label: str,
    description: str,
) -> str:
    """Draw dots in the order of the first series, for more groups than there is room to label."""
    values = [value for group in groups for value in group.values if math.isfinite(value)]
    if not values:
        return draw.nothing_to_draw(title)
    legend, top = draw.legend([draw.dot_key(*item) for item in series.items()])
    left, right, bottom = 54, WIDTH - 14, top + 230
    ticks = draw.nice_ticks(min(values), max(values))
    across, up = draw.scale(-1, len(groups), left, right), draw.scale(ticks[0], ticks[-1], bottom, top)
    parts = [*legend, *draw.y_axis(ticks, up, left, right)]
    parts.append(draw.rule(left, bottom, right, bottom, "axis"))
    order = f"{len(groups)} clients, sorted by “{next(iter(series))}”"
    parts.append(draw.axis_title(order, (left + right) / 2, bottom + 20))
    parts.append(draw.axis_title(value_label, 13, (top + bottom) / 2, turned=True))
    ranked = sorted(groups, key=lambda group: (not math.isfinite(group.values[0]), group.values[0]))
    for rank, group in enumerate(ranked):
        for name, style, value, spread in _bars(series, group):
            if math.isfinite(value):
                hint = draw.tooltip(f"{group.label}, {name}: {_with_spread(value, spread)}")
                dot = draw.marker(style, across(rank), up(value), 2.6)
                parts.append(f'<g class="c{style}">{dot}{hint}</g>')
    return draw.document(title, description, bottom + 30, parts)


@dataclass(frozen=True)
class Interval:
    """One row of an interval chart."""

    label: str
    value: float
    low: float
    high: float
    kind: str
    """Name of its series."""


def interval_chart(
    title: str, series: Mapping[str, int], rows: Sequence[Interval], *, value_label: str, description: str
) -> str:
    """Draw a dot and an interval per row, around a line at 0. Very long intervals are cut off."""
    legend, top = draw.legend([draw.dot_key(*item) for item in series.items()])
    ends = sorted(abs(end) for row in rows for end in (row.low, row.high))
    if not ends:
        return draw.nothing_to_draw(title)
    limit = 4 * ends[len(ends) // 2] or math.inf
    cut = [[max(-limit, min(limit, each)) for each in (row.low, row.value, row.high)] for row in rows]
    pitch = 20
    left, right, bottom = min(14 + draw.CHARACTER * max(len(row.label) for row in rows), 170), WIDTH - 14, top
    bottom += pitch * len(rows)
    ticks = draw.nice_ticks(min(0, *(low for low, _, _ in cut)), max(0, *(high for _, _, high in cut)), at_most=5)
    across = draw.scale(ticks[0], ticks[-1], left, right)
    parts = [
        *legend,
        *(draw.rule(across(tick), top, across(tick), bottom, "grid" if tick else "axis") for tick in ticks),
        *draw.x_axis(ticks, across, bottom),
        draw.axis_title(value_label, (left + right) / 2, bottom + 36),
    ]
    for k, (row, (low, value, high)) in enumerate(zip(rows, cut, strict=True)):
        y = top + pitch * (k + 0.5)
        style = series[row.kind]
        hint = draw.tooltip(f"{row.label}: {row.value:.3g} ({row.low:.3g} to {row.high:.3g}), {row.kind}")
        whisker = f'<path class="line" d="M{across(low):.1f} {y:.1f}H{across(high):.1f}"/>'
        label = escape(draw.shorten(row.label, 24))
        parts.append(f'<text x="{left - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        parts.append(f'<g class="c{style}">{whisker}{draw.marker(style, across(value), y, 4)}{hint}</g>')
    return draw.document(title, description, bottom + 44, parts)


def reliability_chart(
    title: str,
    confidence: Sequence[float],
    accuracy: Sequence[float],
    count: Sequence[float],
    *,
    style: int,
    description: str,
) -> str:
    """Draw accuracy against confidence in bins of equal width, above a histogram of the examples in each bin.

    A point stands at the mean confidence of its bin; the gap to the diagonal is the calibration error.
    """
    left, right, top, bottom = 54, WIDTH - 54, 12, 324
    base = bottom + 76
    unit = [0, 0.2, 0.4, 0.6, 0.8, 1]
    across, up = draw.scale(0, 1, left, right), draw.scale(0, 1, bottom, top)
    total, most = sum(count) or 1, max(count) or 1
    rise = draw.scale(0, most / total, base, bottom + 16)
    parts = [
        *draw.y_axis(unit, up, left, right),
        *(draw.rule(across(tick), top, across(tick), bottom) for tick in unit),
        f'<path class="diagonal" d="M{left} {bottom}L{right} {top}"/>',
        *draw.x_axis(unit, across, base),
        draw.axis_title("confidence", (left + right) / 2, base + 36),
        draw.axis_title("accuracy", 13, (top + bottom) / 2, turned=True),
        draw.axis_title("share", 13, (bottom + 16 + base) / 2, turned=True),
        f'<text class="small" x="{left - 6}" y="{bottom + 24}" text-anchor="end">{most / total:.0%}</text>',
    ]
    bins = len(count)
    for i, (mean, right_share, n) in enumerate(zip(confidence, accuracy, count, strict=True)):
        if not n or not math.isfinite(mean) or not math.isfinite(right_share):
            continue
        x, width = across(i / bins) + 1, (right - left) / bins - 2
        hint = draw.tooltip(f"{n:.0f} examples: confidence {mean:.3f}, accuracy {right_share:.3f}")
        for y, floor in ((up(right_share), bottom), (rise(n / total), base)):
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{floor - y:.1f}"'
            parts.append(f'<rect class="c{style} pale" {shape}>{hint}</rect>')
        gap = f'<path class="gap" d="M{across(mean):.1f} {up(mean):.1f}V{up(right_share):.1f}"/>'
        dot = draw.marker(style, across(mean), up(right_share), 4)
        parts.append(f'<g class="c{style}">{gap}{dot}{hint}</g>')
    return draw.document(title, description, base + 44, parts)


def grid(title: str, description: str, panels: Sequence[tuple[str, str]], columns: int) -> str:
    """Arrange charts of one size in rows, each with a line of text above it."""
    box = re.match(r'<svg [^>]*viewBox="0 0 (\d+) (\d+)"', panels[0][1])
    assert box  # noqa: S101  (all charts begin so)
    width, height = int(box[1]), int(box[2]) + 30
    parts = []
    for k, (text, svg) in enumerate(panels):
        x, y = k % columns * width, k // columns * height
        inner = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
        heading = f'<text class="strong" x="{width / 2:.0f}" y="16" text-anchor="middle">{escape(text)}</text>'
        parts.append(f'<g transform="translate({x} {y})">{heading}<g transform="translate(0 22)">{inner}</g></g>')
    return draw.document(title, description, -(-len(panels) // columns) * height, parts, columns * width)


def standalone(svg: str) -> str:
    """Return a chart as a complete SVG file, with the colours of the page."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    start = svg.index(">") + 1
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" class="alone" ', 1)
    return f"{opening}<style>{style}</style>{svg[start:]}\n"


def _line_legend(series: Sequence[Series]) -> tuple[list[str], float]:
    keys = [draw.line_key(line.label, line.style, line.dash, line.thin) for line in series if line.in_legend]
    return draw.legend(keys)


def _group_label(group: Group, x: float, middle: float) -> str:
    shown, note = draw.shorten(group.label, 24), draw.shorten(group.note, 30)
    kind = ' class="strong"' if group.strong else ""
    if not note:
        return f'<text{kind} x="{x:.0f}" y="{middle + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
    return (
        f'<text{kind} x="{x:.0f}" y="{middle - 1:.1f}" text-anchor="end">{escape(shown)}</text>'
        f'<text class="small" x="{x:.0f}" y="{middle + 11:.1f}" text-anchor="end">{escape(note)}</text>'
    )


def _line(line: Series, across: Callable[[float], float], up: Callable[[float], float], x_label: str) -> list[str]:
    parts = []
    points = [(x, y, _finite(spread)) for x, y, spread in zip(line.x, line.y, line.spread, strict=True)]
    for finite, stretch in itertools.groupby(points, lambda point: math.isfinite(point[1])):
        if not finite:
            continue
        piece = list(stretch)
        if any(spread for _, _, spread in piece) and not line.thin:
            upper = [f"{across(x):.1f} {up(y + spread):.1f}" for x, y, spread in piece]
            lower = [f"{across(x):.1f} {up(y - spread):.1f}" for x, y, spread in reversed(piece)]
            parts.append(f'<path class="band" d="M{"L".join(upper + lower)}Z"/>')
        kind = "thin" if line.thin else "line"
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y, _ in piece)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<path class="{kind}" d="M{path}"{dash}>{draw.tooltip(line.label)}</path>')
    if not line.thin:
        # Markers show their values on hover. Two dozen do not hide the line.
        every = math.ceil(len(points) / 24)
        for x, y, spread in points[::-every]:
            if math.isfinite(y):
                hint = draw.tooltip(f"{line.label}, {x_label} {x:g}: {_with_spread(y, spread)}")
                parts.append(f"<g>{draw.marker(line.style, across(x), up(y), 3)}{hint}</g>")
    return [f'<g class="c{line.style % COLOURS}">', *parts, "</g>"]


def _bars(series: Mapping[str, int], group: Group) -> Iterator[tuple[str, int, float, float]]:
    """Yield label, style, value and spread of each series in a group."""
    for (label, style), value, spread in zip(series.items(), group.values, group.spreads, strict=True):
        yield label, style, value, _finite(spread)


def _finite(spread: float) -> float:
    return spread if math.isfinite(spread) else 0.0


def _with_spread(value: float, spread: float) -> str:
    return f"{value:.4g}" + (f" ± {spread:.2g}" if spread else "")
