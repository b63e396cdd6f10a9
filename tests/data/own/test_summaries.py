"""A client's summary is what leaves its machine; one that cannot be true is refused."""

import dataclasses
import json
import math

import numpy as np
import pytest

from pfedbayes.data import ClientSummary, combine, summarise
from pfedbayes.data.own.columns import Schema
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError


def summary(client="north", **columns):
    columns = {"age": [1.0, 2.0, np.nan], "sex": ["m", "f", "m"], "y": ["u", "v", "u"]} | columns
    return summarise(client, table_of(columns, client, Schema()), "y", np.arange(3))


def changed(place, value):
    fields = json.loads(summary().to_json())
    inner = fields
    *path, last = place
    for key in path:
        inner = inner[key]
    inner[last] = value
    return json.dumps(fields)


AGE, SEX = ("columns", 0), ("columns", 1)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*AGE, "mean"), math.inf),
        ((*AGE, "mean"), math.nan),
        ((*AGE, "mean"), 1e300),
        ((*AGE, "mean"), 10**400),
        ((*AGE, "mean"), "1"),
        ((*AGE, "mean"), None),
        ((*AGE, "squares"), -1.0),
        ((*AGE, "squares"), math.inf),
        ((*AGE, "squares"), 1e80),
        ((*AGE, "count"), -1),
        ((*AGE, "count"), 10**15),
        ((*AGE, "count"), 1.5),
        ((*AGE, "count"), True),
        ((*AGE, "count"), 3),
        ((*AGE, "missing"), -1),
        ((*AGE, "missing"), 10**15),
        ((*AGE, "kind"), "date"),
        ((*AGE, "kind"), None),
        ((*AGE, "kind"), ["number"]),
        ((*AGE, "name"), "sex"),
        ((*AGE, "name"), "y"),
        ((*AGE, "name"), "a\nb"),
        ((*AGE, "name"), "x" * 5000),
        ((*AGE, "whole"), 1),
        ((*SEX, "values"), ["m", "m"]),
        ((*SEX, "values"), []),
        ((*SEX, "values"), [1, 2]),
        ((*SEX, "values"), "mf"),
        ((*SEX, "values"), [str(k) for k in range(101)]),
        ((*SEX, "values"), ["m", "\x1b[31m"]),
        ((*SEX, "mean"), 1.0),
        (("target", "values"), [str(k) for k in range(1001)]),
        (("target", "count"), 10**15),
        (("target",), None),
        (("target",), []),
        (("columns",), None),
        (("columns",), {"a": 1}),
        (("columns", 0), 3),
        (("client",), 3),
        (("client",), "\ud800"),
        (("client",), "a\0b"),
        (("shape",), [0, 3]),
        (("shape",), ["sh", "-c"]),
        (("shape",), []),
        (("image",), "yes"),
        (("image",), True),
    ],
)
def test_a_summary_that_cannot_be_true_is_refused(place, value):
    with pytest.raises(UserError) as caught:
        ClientSummary.from_json(changed(place, value))
    assert "\n" not in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in ("make it again", "rename it", "use at most"))


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", "[" * 100_000, '{"client": "a"}', "\udcff"])
def test_what_is_no_summary_is_refused(text):
    with pytest.raises(UserError, match="a client's summary is damaged"):
        ClientSummary.from_json(text)


def test_a_true_summary_reads_back():
    assert ClientSummary.from_json(summary().to_json()) == summary()


@pytest.mark.parametrize(("field", "value"), [("mean", math.inf), ("count", -5), ("count", 10**15), ("squares", -1.0)])
def test_combine_checks_what_it_is_given(field, value):
    whole = summary("south")
    columns = (dataclasses.replace(whole.columns[0], **{field: value}), *whole.columns[1:])
    with pytest.raises(UserError, match="the summary of 'south' cannot be true"):
        combine([summary(), dataclasses.replace(whole, columns=columns)])


def test_combine_needs_one_summary_per_client():
    with pytest.raises(UserError, match="there are no clients"):
        combine([])
    with pytest.raises(UserError, match="two summaries of 'north'"):
        combine([summary(), summary()])


def test_clients_that_write_a_category_differently_share_it():
    texts = ["1.0", "2.0", "1.0"], ["1", "2", "1"], ["true", "false", "true"], ["True", "False", "TRUE"]
    parts = [summary(f"c{k}", sex=text) for k, text in enumerate(texts)]
    assert combine(parts).inputs[1].categories == ("1", "2", "False", "True")
