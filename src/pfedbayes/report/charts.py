"""Charts as SVG strings.

Colours are left to the page: an element of class c0 ... c7 draws in the current colour of that class, so that
light, dark and printed pages share one drawing. Shapes and dashes tell the series apart without colour.
Values that are not finite are left out; spreads that are not count as none.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

WIDTH = 420
COLOURS = 8
_CHARACTER = 6.4  # mean width of a character at the charts' font size of 12


@dataclass(frozen=True)
class Series:
    """One line: y over x, with the half-width of a band around it where the spread is not 0."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]
    style: int  # colour and marker
    dash: str = ""
    thin: bool = False
    in_legend: bool = True


@dataclass(frozen=True)
class Figure:
    """An SVG drawing, what stands above it and what is to be said under it."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Group:
    """One labelled place on a bar or dot chart, with a value and its half-width (0 for none) per series."""

    label: str
    values: Sequence[float]
    spreads: Sequence[float]
    note: str = ""
    strong: bool = False


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, description: str) -> str:
    """Lines over a common x axis that starts at 0."""
    legend, top = _legend([_key(line.label, line.style, line.dash, line.thin) for line in series if line.in_legend])
    left, right, bottom = 54, WIDTH - 14, top + 230
    heights = [
        bound
        for line in series
        for value, spread in zip(line.y, line.spread, strict=True)
        if math.isfinite(value)
        for bound in (value - _finite(spread), value + _finite(spread))
    ]
    if not heights:
        return _nothing_to_draw(title)
    y_ticks = nice_ticks(min(heights), max(heights))
    x_end = max(max(line.x) for line in series) or 1
    x_ticks = [tick for tick in nice_ticks(0, x_end) if tick <= x_end and tick == int(tick)]
    across, up = _scale(0, x_end, left, right), _scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *legend,
        *_y_axis(y_ticks, up, left, right),
        *_x_axis(x_ticks, across, bottom),
        _axis_title(x_label, (left + right) / 2, bottom + 36),
        _axis_title(y_label, 13, (top + bottom) / 2, turned=True),
    ]
    # The lines that matter are drawn last, above the others.
    for line in sorted(series, key=lambda line: not line.thin):
        parts += _line(line, across, up, x_label)
    return _svg(title, description, bottom + 44, parts)


def log_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, description: str) -> str:
    """Lines over positive numbers on two logarithmic axes, where a power of x is a straight line."""
    legend, top = _legend([_key(line.label, line.style, line.dash, line.thin) for line in series])
    left, right, bottom = 54, WIDTH - 24, top + 230
    heights = [y for line in series for y in line.y if math.isfinite(y) and y > 0]
    if not heights:
        return _nothing_to_draw(title)
    x_ticks = sorted({x for line in series for x in line.x})
    y_ticks = _log_ticks(min(heights), max(heights))
    across, up = _log_scale(x_ticks[0], x_ticks[-1], left, right), _log_scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *legend,
        *_y_axis(y_ticks, up, left, right, [f"{tick:g}" for tick in y_ticks]),
        *_x_axis(x_ticks, across, bottom),
        _axis_title(x_label, (left + right) / 2, bottom + 36),
        _axis_title(y_label, 13, (top + bottom) / 2, turned=True),
    ]
    for line in sorted(series, key=lambda line: not line.thin):
        parts += _line(line, across, up, "n =")
    return _svg(title, description, bottom + 44, parts)


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
    """Horizontal bars from zero, one bar per series (a label and its style) and group.

    `end` fixes the end of the axis: a hard limit of the quantity, which whiskers do not cross either. Without one the
    axis holds all whiskers.
    The compact form is for small multiples: no legend, no printed values.
    """
    legend, top = ([], 6) if compact else _legend([_swatch(*item) for item in series.items()])
    width = 300 if compact else WIDTH
    bar = 6 if compact else 11
    pitch = max(bar * len(series) + (5 if compact else 9), 30 if any(group.note for group in groups) else 0)
    longest = max(max(len(group.label), 0.85 * len(group.note)) for group in groups)
    left, right = min(14 + _CHARACTER * longest, 170), width - (14 if compact else 48)
    bars = [bar for group in groups for bar in _bars(series, group) if math.isfinite(bar[2])]
    if end is None:
        lows, highs = ([value + sign * spread for _, _, value, spread in bars] for sign in (-1, 1))
        ticks = nice_ticks(min([0, *lows]), max([0, *highs]), at_most=5)
    else:
        ticks = nice_ticks(min([0, *(value for _, _, value, _ in bars)]), end, at_most=5)
    across, bottom = _scale(ticks[0], ticks[-1], left, right), top + pitch * len(groups)
    parts = [
        *legend,
        *(_rule(across(tick), top, across(tick), bottom) for tick in ticks),
        *_x_axis(ticks, across, bottom),
        _axis_title(value_label, (left + right) / 2, bottom + 36),
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
            hint = _hint(f"{group.label}, {name}: {_with_spread(value, spread)}")
            shape = f'x="{start:.1f}" y="{y + 0.75:.1f}" width="{length:.1f}" height="{bar - 1.5:.1f}"'
            parts.append(f'<rect class="c{style} bar{style}" {shape} rx="1">{hint}</rect>')
            tip = across(min(value + spread, ticks[-1]))
            if spread:
                low, y_mid = across(max(value - spread, ticks[0])), y + bar / 2
                parts.append(f'<path class="whisker" d="M{low:.1f} {y_mid:.1f}H{tip:.1f}"/>')
            if not compact:
                shown = f"{value:.{_decimals(ticks) + 1}f}"
                parts.append(f'<text class="small" x="{tip + 4:.1f}" y="{y + bar - 2:.1f}">{shown}</text>')
    return _svg(title, description, bottom + 44, parts, width)


def dot_chart(
    title: str,
    series: Mapping[str, int],
    groups: Sequence[Group],
    *,
    value_label: str,
    description: str,
) -> str:
    """Dots in the order of the first series, for more groups than there is room to label."""
    values = [value for group in groups for value in group.values if math.isfinite(value)]
    if not values:
        return _nothing_to_draw(title)
    legend, top = _legend([_dot_key(*item) for item in series.items()])
    left, right, bottom = 54, WIDTH - 14, top + 230
    ticks = nice_ticks(min(values), max(values))
    across, up = _scale(-1, len(groups), left, right), _scale(ticks[0], ticks[-1], bottom, top)
    parts = [*legend, *_y_axis(ticks, up, left, right)]
    parts.append(_rule(left, bottom, right, bottom, "axis"))
    order = f"{len(groups)} clients, in the order of “{next(iter(series))}”"
    parts.append(_axis_title(order, (left + right) / 2, bottom + 20))
    parts.append(_axis_title(value_label, 13, (top + bottom) / 2, turned=True))
    ranked = sorted(groups, key=lambda group: (not math.isfinite(group.values[0]), group.values[0]))
    for rank, group in enumerate(ranked):
        for name, style, value, spread in _bars(series, group):
            if math.isfinite(value):
                hint = _hint(f"{group.label}, {name}: {_with_spread(value, spread)}")
                dot = _marker(style, across(rank), up(value), 2.6)
                parts.append(f'<g class="c{style}">{dot}{hint}</g>')
    return _svg(title, description, bottom + 30, parts)


def reliability_chart(
    title: str,
    confidence: Sequence[float],
    accuracy: Sequence[float],
    count: Sequence[float],
    *,
    style: int,
    description: str,
) -> str:
    """Accuracy against confidence in bins of equal width, above a histogram of how many examples fall in each.

    Points stand at the mean confidence of their bin; the gap to the diagonal is the miscalibration.
    """
    left, right, top, bottom = 54, WIDTH - 54, 12, 324
    base = bottom + 76
    unit = [0, 0.2, 0.4, 0.6, 0.8, 1]
    across, up = _scale(0, 1, left, right), _scale(0, 1, bottom, top)
    total, most = sum(count) or 1, max(count) or 1
    rise = _scale(0, most / total, base, bottom + 16)
    parts = [
        *_y_axis(unit, up, left, right),
        *(_rule(across(tick), top, across(tick), bottom) for tick in unit),
        f'<path class="diagonal" d="M{left} {bottom}L{right} {top}"/>',
        *_x_axis(unit, across, base),
        _axis_title("confidence", (left + right) / 2, base + 36),
        _axis_title("accuracy", 13, (top + bottom) / 2, turned=True),
        _axis_title("share", 13, (bottom + 16 + base) / 2, turned=True),
        f'<text class="small" x="{left - 6}" y="{bottom + 24}" text-anchor="end">{most / total:.0%}</text>',
    ]
    bins = len(count)
    for i, (mean, right_share, n) in enumerate(zip(confidence, accuracy, count, strict=True)):
        if not n or not math.isfinite(mean) or not math.isfinite(right_share):
            continue
        x, width = across(i / bins) + 1, (right - left) / bins - 2
        hint = _hint(f"{n:.0f} examples: confidence {mean:.3f}, accuracy {right_share:.3f}")
        for y, floor in ((up(right_share), bottom), (rise(n / total), base)):
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{floor - y:.1f}"'
            parts.append(f'<rect class="c{style} pale" {shape}>{hint}</rect>')
        gap = f'<path class="gap" d="M{across(mean):.1f} {up(mean):.1f}V{up(right_share):.1f}"/>'
        dot = _marker(style, across(mean), up(right_share), 4)
        parts.append(f'<g class="c{style}">{gap}{dot}{hint}</g>')
    return _svg(title, description, base + 44, parts)


def grid(title: str, description: str, panels: Sequence[tuple[str, str]], columns: int) -> str:
    """Charts of one size in rows, each with a line of text above it."""
    box = re.match(r'<svg [^>]*viewBox="0 0 (\d+) (\d+)"', panels[0][1])
    assert box  # noqa: S101  (all charts begin so)
    width, height = int(box[1]), int(box[2]) + 30
    parts = []
    for k, (text, svg) in enumerate(panels):
        x, y = k % columns * width, k // columns * height
        inner = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
        heading = f'<text class="strong" x="{width / 2:.0f}" y="16" text-anchor="middle">{escape(text)}</text>'
        parts.append(f'<g transform="translate({x} {y})">{heading}<g transform="translate(0 22)">{inner}</g></g>')
    return _svg(title, description, -(-len(panels) // columns) * height, parts, columns * width)


def standalone(svg: str) -> str:
    """A chart as a file of its own, with the colours that it has on a page."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    start = svg.index(">") + 1
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" class="alone" ', 1)
    return f"{opening}<style>{style}</style>{svg[start:]}\n"


def nice_ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose low and high, about at_most of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0), max(high, 0)  # a single value is seen against zero
    if low == high:
        high = 1
    least_step = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose low and high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def _decimals(ticks: Sequence[float]) -> int:
    """Decimals that tell neighbouring ticks apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    decimals, largest = _decimals(ticks), max(abs(tick) for tick in ticks)
    if decimals > 4 or largest >= 1e6:
        return [f"{tick:.3g}" for tick in ticks]
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The map from values to places on the page."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """As `_scale`, for logarithms; what is below the axis, zero and less included, lies on its end."""
    place = _scale(math.log(low), math.log(high), start, end) if high > low else lambda _: (start + end) / 2
    return lambda value: place(math.log(max(value, low)))


def _svg(title: str, description: str, height: float, parts: Sequence[str], width: float = WIDTH) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>" + "".join(parts) + "</svg>"
    )


def _nothing_to_draw(title: str) -> str:
    message = f'<text x="{WIDTH / 2}" y="40" text-anchor="middle">{escape(title)}: no finite values</text>'
    return _svg(title, "No finite values to draw.", 72, [message])


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _axis_title(text: str, x: float, y: float, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    return f'<text class="name" x="{x:.0f}" y="{y:.0f}" text-anchor="middle"{turn}>{escape(text)}</text>'


def _y_axis(
    ticks: Sequence[float],
    up: Callable[[float], float],
    left: float,
    right: float,
    labels: Sequence[str] | None = None,
) -> list[str]:
    return [
        _rule(left, up(tick), right, up(tick))
        + f'<text x="{left - 6:.0f}" y="{up(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        for tick, label in zip(ticks, labels or _tick_texts(ticks), strict=True)
    ]


def _x_axis(ticks: Sequence[float], across: Callable[[float], float], bottom: float) -> list[str]:
    return [_rule(across(ticks[0]), bottom, across(ticks[-1]), bottom, "axis")] + [
        f'<text x="{across(tick):.1f}" y="{bottom + 17:.0f}" text-anchor="middle">{label}</text>'
        for tick, label in zip(ticks, _tick_texts(ticks), strict=True)
    ]


def _group_label(group: Group, x: float, middle: float) -> str:
    shown, note = _shorten(group.label, 24), _shorten(group.note, 30)
    kind = ' class="strong"' if group.strong else ""
    if not note:
        return f'<text{kind} x="{x:.0f}" y="{middle + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
    return (
        f'<text{kind} x="{x:.0f}" y="{middle - 1:.1f}" text-anchor="end">{escape(shown)}</text>'
        f'<text class="small" x="{x:.0f}" y="{middle + 11:.1f}" text-anchor="end">{escape(note)}</text>'
    )


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


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
        parts.append(f'<path class="{kind}" d="M{path}"{dash}>{_hint(line.label)}</path>')
    if not line.thin:
        # Markers carry the values on hover; two dozen are enough to read and do not hide the line.
        every = math.ceil(len(points) / 24)
        for x, y, spread in points[::-every]:
            if math.isfinite(y):
                hint = _hint(f"{line.label}, {x_label} {x:g}: {_with_spread(y, spread)}")
                parts.append(f"<g>{_marker(line.style, across(x), up(y), 3)}{hint}</g>")
    return [f'<g class="c{line.style % COLOURS}">', *parts, "</g>"]


def _marker(style: int, x: float, y: float, r: float) -> str:
    """One of four shapes: disc, square, triangle, diamond."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>',
        f'<path class="mark" d="M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}Z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}Z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 1.4 * r:.1f}l{1.4 * r:.1f} {1.4 * r:.1f}'
        f'l{-1.4 * r:.1f} {1.4 * r:.1f}l{-1.4 * r:.1f} {-1.4 * r:.1f}Z"/>',
    )
    return shapes[style % len(shapes)]


def _key(label: str, style: int, dash: str, thin: bool) -> tuple[str, str]:
    kind = "thin" if thin else "line"
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    marker = "" if thin else _marker(style, 11, -4, 3)
    return label, f'<g class="c{style % COLOURS}"><path class="{kind}" d="M0 -4H22"{dashed}/>{marker}</g>'


def _swatch(label: str, style: int) -> tuple[str, str]:
    return label, f'<rect class="c{style} bar{style}" x="0" y="-9" width="22" height="10" rx="1"/>'


def _dot_key(label: str, style: int) -> tuple[str, str]:
    return label, f'<g class="c{style}">{_marker(style, 11, -4, 3.4)}</g>'


def _legend(keys: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """The keys in as many rows as they need, and the height that they take."""
    parts, x, y = [], 8.0, 16.0
    for label, sign in keys:
        shown = _shorten(label, 52)
        needed = 28 + _CHARACTER * len(shown)
        if x > 8 and x + needed > WIDTH:
            x, y = 8.0, y + 18
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{sign}<text x="28" y="0">{escape(shown)}</text></g>')
        x += needed + 14
    return parts, y + 16


def _bars(series: Mapping[str, int], group: Group) -> Iterator[tuple[str, int, float, float]]:
    """Label, style, value and spread of each series in a group."""
    for (label, style), value, spread in zip(series.items(), group.values, group.spreads, strict=True):
        yield label, style, value, _finite(spread)


def _finite(spread: float) -> float:
    return spread if math.isfinite(spread) else 0.0


def _with_spread(value: float, spread: float) -> str:
    return f"{value:.4g}" + (f" ± {spread:.2g}" if spread else "")
