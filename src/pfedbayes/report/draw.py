"""The parts of a chart as SVG strings: scales, axes, markers, legends.

The page sets the colours: an element of class c0 … c7 draws in the colour of that class, so light, dark and printed
pages share one drawing. Shapes and dashes tell series apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH = 420
COLOURS = 8
CHARACTER = 6.4  # mean width of a character at the charts' font size of 12


def nice_ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that enclose low and high, about `at_most` of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0), max(high, 0)  # show a single value against zero
    if low == high:
        high = 1
    least_step = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten that enclose low and high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def decimals(ticks: Sequence[float]) -> int:
    """Return the number of decimals that tells neighbouring ticks apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1
    return max(0, -math.floor(math.log10(step) + 1e-9))


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Format ticks with the decimals that they need."""
    places, largest = decimals(ticks), max(abs(tick) for tick in ticks)
    if places > 4 or largest >= 1e6:
        return [f"{tick:.3g}" for tick in ticks]
    return [f"{tick:,.{places}f}" for tick in ticks]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map from [low, high] to [start, end]."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the logarithmic map from [low, high] to [start, end]; values below `low` are drawn at the start."""
    place = scale(math.log(low), math.log(high), start, end) if high > low else lambda _: (start + end) / 2
    return lambda value: place(math.log(max(value, low)))


def document(title: str, description: str, height: float, parts: Sequence[str], width: float = WIDTH) -> str:
    """Return an SVG element with its title and description for screen readers."""
    return (
        f'<svg role="img" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>" + "".join(parts) + "</svg>"
    )


def nothing_to_draw(title: str) -> str:
    """Return a drawing that says that there is nothing to draw."""
    message = f'<text x="{WIDTH / 2}" y="40" text-anchor="middle">{escape(title)}: no finite values</text>'
    return document(title, "No finite values to draw.", 72, [message])


def tooltip(text: str) -> str:
    """Return the text that shows on hover."""
    return f"<title>{escape(text)}</title>"


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """Draw a straight line."""
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def axis_title(text: str, x: float, y: float, turned: bool = False) -> str:
    """Draw the title of an axis, turned by 90 degrees for a y axis."""
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    return f'<text class="name" x="{x:.0f}" y="{y:.0f}" text-anchor="middle"{turn}>{escape(text)}</text>'


def y_axis(
    ticks: Sequence[float],
    up: Callable[[float], float],
    left: float,
    right: float,
    labels: Sequence[str] | None = None,
) -> list[str]:
    """Draw grid lines with the labels of a y axis."""
    return [
        rule(left, up(tick), right, up(tick))
        + f'<text x="{left - 6:.0f}" y="{up(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        for tick, label in zip(ticks, labels or tick_texts(ticks), strict=True)
    ]


def x_axis(ticks: Sequence[float], across: Callable[[float], float], bottom: float) -> list[str]:
    """Draw an x axis with its labels."""
    return [rule(across(ticks[0]), bottom, across(ticks[-1]), bottom, "axis")] + [
        f'<text x="{across(tick):.1f}" y="{bottom + 17:.0f}" text-anchor="middle">{label}</text>'
        for tick, label in zip(ticks, tick_texts(ticks), strict=True)
    ]


def shorten(text: str, length: int) -> str:
    """Cut a text to a length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def marker(style: int, x: float, y: float, r: float) -> str:
    """Draw one of four shapes: disc, square, triangle, diamond."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>',
        f'<path class="mark" d="M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}Z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}Z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 1.4 * r:.1f}l{1.4 * r:.1f} {1.4 * r:.1f}'
        f'l{-1.4 * r:.1f} {1.4 * r:.1f}l{-1.4 * r:.1f} {-1.4 * r:.1f}Z"/>',
    )
    return shapes[style % len(shapes)]


def line_key(label: str, style: int, dash: str, thin: bool) -> tuple[str, str]:
    """Return the label of a line and its sign in a legend."""
    kind = "thin" if thin else "line"
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    shape = "" if thin else marker(style, 11, -4, 3)
    return label, f'<g class="c{style % COLOURS}"><path class="{kind}" d="M0 -4H22"{dashed}/>{shape}</g>'


def bar_key(label: str, style: int) -> tuple[str, str]:
    """Return the label of a bar and its sign in a legend."""
    return label, f'<rect class="c{style} bar{style}" x="0" y="-9" width="22" height="10" rx="1"/>'


def dot_key(label: str, style: int) -> tuple[str, str]:
    """Return the label of a dot and its sign in a legend."""
    return label, f'<g class="c{style}">{marker(style, 11, -4, 3.4)}</g>'


def legend(keys: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """Arrange (label, drawing) keys in rows; return the SVG and its height."""
    parts, x, y = [], 8.0, 16.0
    for label, sign in keys:
        shown = shorten(label, 52)
        needed = 28 + CHARACTER * len(shown)
        if x > 8 and x + needed > WIDTH:
            x, y = 8.0, y + 18
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{sign}<text x="28" y="0">{escape(shown)}</text></g>')
        x += needed + 14
    return parts, y + 16
