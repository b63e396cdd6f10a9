import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from pfedbayes.files.typed import OMIT_NONE, from_json, to_json


@dataclass(frozen=True)
class Inner:
    number: float
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Other:
    kind: Literal["c"]


@dataclass(frozen=True)
class Outer:
    name: str
    one: Inner | Other
    many: dict[str, Inner | None]
    table: list[list[float | None]]
    flag: bool = False
    anything: Any = None
    later: int | None = field(default=None, metadata=OMIT_NONE)


WHOLE = Outer("x", Inner(1.5), {"y": Inner(2.0, "b"), "z": None}, [[1.0, None], []], True, {"free": [1]}, 3)


def test_a_record_reads_back():
    assert from_json(Outer, json.loads(json.dumps(to_json(WHOLE)))) == WHOLE
    assert from_json(Outer, to_json(WHOLE) | {"one": {"kind": "c"}}).one == Other("c")


def test_what_is_not_finite_becomes_null_and_none_may_be_left_out():
    written = to_json(Outer("x", Inner(math.nan), {}, [[math.inf, 1.0]]))
    assert written == {
        "name": "x", "one": {"number": None, "kind": "a"}, "many": {}, "table": [[None, 1.0]], "flag": False,
        "anything": None,
    }  # fmt: skip


def test_whole_numbers_are_numbers_and_unknown_keys_are_ignored():
    inner = from_json(Inner, {"number": 2, "new": 1})
    assert inner == Inner(2.0)
    assert isinstance(inner.number, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3, not a text"),
        ({"flag": 1}, "flag is 1, not true or false"),
        ({"later": 1.5}, "later is 1.5, not a whole number"),
        ({"later": True}, "later is True, not a whole number"),
        ({"one": {}}, "one.number is missing"),
        ({"one": {"number": "1"}}, "one.number is '1', not a number"),
        ({"one": {"number": 1, "kind": "d"}}, "one.kind is 'd', not one of 'a', 'b'"),
        ({"one": None}, "one is None, not an object"),
        ({"many": []}, "many is [], not an object"),
        ({"many": {"y": {"number": None}}}, "many.y.number is None, not a number"),
        ({"table": [[1.0, "2"]]}, "table[0][1] is '2', not a number"),
        ({"table": {}}, "table is {}, not a list"),
        ({"name": ["long"] * 20}, "not a text"),
    ],
)
def test_a_missing_or_wrong_field_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        from_json(Outer, to_json(WHOLE) | change)
    assert len(str(caught.value)) < 80


def test_the_content_itself_has_to_be_an_object():
    with pytest.raises(ValueError, match=r"the content is \[\], not an object"):
        from_json(Outer, [])
