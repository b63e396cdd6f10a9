"""The charts: well-formed drawings with nice ticks, whatever the numbers."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedbayes.report import charts, draw

NASTY = '<b>&"x'
SERIES = {"personal": 0, "shared": 1}


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)  # noqa: S314  (our own output)
    assert root[0].tag == "title"
    assert root[1].tag == "desc"
    return root


def bars(clients: int, value: float = 90.0) -> list[charts.Group]:
    return [charts.Group(f"client-{i}", [value, value - 5], [1.0, 0.0], note="0 1 2") for i in range(clients)]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (93.1, 99.9, [92, 94, 96, 98, 100]),
        (0.013, 0.048, [0.01, 0.02, 0.03, 0.04, 0.05]),
        (97, 97, [0, 20, 40, 60, 80, 100]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1.3, 0.4, [-1.5, -1, -0.5, 0, 0.5]),
    ],
)
def test_ticks_are_round_numbers_that_enclose_the_data(low: float, high: float, ticks: list[float]) -> None:
    assert draw.nice_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_of_any_range(low: float, width: float) -> None:
    high = low + width
    ticks = draw.nice_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9


def test_line_chart_leaves_a_gap_where_a_value_is_missing() -> None:
    line = charts.Series("a", [1, 2, 3, 4], [1.0, math.nan, 3.0, 4.0], [0.1, math.nan, 0.1, 0.1], style=0)
    root = parse(charts.line_chart("t", [line], x_label="round", y_label="y", description="d"))
    assert len(root.findall(".//path[@class='band']")) == 2
    assert len(root.findall(".//circle")) == 3 + 1  # three values and the legend


def test_a_line_without_spread_has_no_band() -> None:
    line = charts.Series("a", [1, 2], [1.0, 2.0], [0.0, 0.0], style=0)
    root = parse(charts.line_chart("t", [line], x_label="round", y_label="y", description="d"))
    assert root.findall(".//path[@class='band']") == []


def test_charts_without_finite_values_say_so() -> None:
    line = charts.Series("a", [1], [math.nan], [0.0], style=0)
    missing = [charts.Group("a", [math.nan, math.nan], [0.0, 0.0])]
    for svg in (
        charts.line_chart("t", [line], x_label="round", y_label="y", description="d"),
        charts.dot_chart("t", SERIES, missing, value_label="y", description="d"),
    ):
        assert "no finite values" in "".join(parse(svg).itertext())
    assert not parse(charts.bar_chart("t", SERIES, missing, value_label="y", description="d")).findall(".//rect/title")


@pytest.mark.parametrize("clients", [1, 10, 20])
def test_labels_of_bars_do_not_overlap(clients: int) -> None:
    root = parse(charts.bar_chart("t", SERIES, bars(clients), value_label="%", description="d", end=100))
    heights = sorted(
        float(text.attrib["y"]) for text in root.findall("text") if (text.text or "").startswith("client-")
    )
    assert len(heights) == clients
    assert all(below - above >= 24 for above, below in pairwise(heights))  # a label of 12 and a note of 10


def test_whiskers_end_where_a_fixed_axis_ends() -> None:
    root = parse(charts.bar_chart("t", SERIES, bars(1, 99.5), value_label="%", description="d", end=100))
    (whisker,) = root.findall(".//path[@class='whisker']")
    end = float(whisker.attrib["d"].partition("H")[2])
    assert end == pytest.approx(charts.WIDTH - 48)


def test_whiskers_are_drawn_whole_where_the_quantity_has_no_limit() -> None:
    groups = [charts.Group("a", [10.0], [5.0])]
    root = parse(charts.bar_chart("t", {"s": 0}, groups, value_label="y", description="d"))
    (bar,) = root.findall(".//rect[@class='c0 bar0'][@rx='1'][title]")
    (whisker,) = root.findall(".//path[@class='whisker']")
    low, high = (float(number) for number in re.findall(r"[MH]([\d.]+)", whisker.attrib["d"]))
    assert high - low == pytest.approx(float(bar.attrib["width"]), abs=0.2)  # 5 to 15, and the bar is from 0 to 10


def test_dots_stand_in_the_order_of_the_first_series() -> None:
    groups = [charts.Group(f"c{i}", [value, 1.0], [0.0, 0.0]) for i, value in enumerate([3.0, math.nan, 1.0, 2.0])]
    root = parse(charts.dot_chart("t", SERIES, groups, value_label="y", description="d"))
    hints = [hint.text or "" for hint in root.findall("g[@class='c0']/title")]
    assert hints == ["c2, personal: 1", "c3, personal: 2", "c0, personal: 3"]


def test_reliability_chart_leaves_out_empty_bins() -> None:
    root = parse(
        charts.reliability_chart("t", [0.2, math.nan, 0.8], [0.1, math.nan, 0.9], [5, 0, 15], style=1, description="d")
    )
    assert len(root.findall("rect")) == 2 * 2  # accuracy and count of two bins
    assert "15 examples: confidence 0.800, accuracy 0.900" in "".join(root.itertext())


def test_user_text_is_escaped() -> None:
    line = charts.Series(NASTY, [1], [1.0], [0.0], style=0)
    groups = [charts.Group(NASTY, [1.0], [0.0], note=NASTY)]
    for svg in (
        charts.line_chart(NASTY, [line], x_label=NASTY, y_label=NASTY, description=NASTY),
        charts.bar_chart(NASTY, {NASTY: 0}, groups, value_label=NASTY, description=NASTY),
        charts.dot_chart(NASTY, {NASTY: 0}, groups, value_label=NASTY, description=NASTY),
        charts.reliability_chart(NASTY, [0.5], [0.5], [1], style=0, description=NASTY),
    ):
        assert parse(svg)[0].text == NASTY
        assert "<b>" not in svg


def powers(label: str = "a", factor: float = 1.0) -> charts.Series:
    sizes = [10.0, 100.0, 1000.0]
    return charts.Series(label, sizes, [factor * 4 / size for size in sizes], [0.01, 0.0, math.nan], 0)


def test_on_logarithmic_axes_a_power_is_a_straight_line() -> None:
    svg = charts.log_chart(NASTY, [powers(NASTY)], x_label="n", y_label="error", description="d")
    root = parse(svg)
    _key, path = (e.attrib["d"] for e in root.iter("path") if e.attrib["class"] == "line")
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in path.removeprefix("M").split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.11)
    assert y1 > y0, "the error falls"
    texts = [element.text for element in root.iter("text")]
    assert {"10", "100", "1,000", "0.002", "0.5"} <= set(texts)


@pytest.mark.parametrize("values", [[math.nan] * 3, [0.0] * 3, [-1.0, 0.0, math.nan]])
def test_logarithmic_axes_need_a_positive_number(values: list[float]) -> None:
    line = charts.Series("a", [1.0, 2.0, 3.0], values, [0.0] * 3, 0)
    assert "no finite values" in charts.log_chart("t", [line], x_label="", y_label="", description="d")


def test_on_logarithmic_axes_one_point_and_a_band_down_to_zero_can_be_drawn() -> None:
    line = charts.Series("a", [5.0], [0.3], [0.4], 0)
    assert "nan" not in charts.log_chart("t", [line, powers()], x_label="", y_label="", description="d")
    parse(charts.log_chart("t", [line], x_label="", y_label="", description="d"))


def test_a_chart_that_stands_alone_brings_its_colours() -> None:
    root = ET.fromstring(charts.standalone(charts.log_chart("t", [powers()], x_label="", y_label="", description="d")))  # noqa: S314
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert ".c0 {" in "".join(root.itertext())
