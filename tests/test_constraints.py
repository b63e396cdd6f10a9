import math
from dataclasses import dataclass, replace
from typing import Annotated

import pytest

from pfedbayes.constraints import AtLeastOne, Interval, NonNegative, Positive, check


@dataclass(frozen=True)
class Settings:
    steps: AtLeastOne[int]
    zeta: NonNegative[float] = 10.0
    alpha: Positive[float] = 1.0
    name: str = "any"
    momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    share: Annotated[float, Interval(more_than=0, less_than=1)] = 0.5
    weight: Annotated[float, Interval(at_least=0, at_most=1)] = 0.5
    delta: Annotated[float, Interval(more_than=1)] = 2.0
    size: Annotated[int, Interval(at_least=2)] = 2
    temperature: Annotated[float, Interval(more_than=0, at_most=4)] = 1.0
    patience: AtLeastOne[int] | None = None
    noise: Annotated[float | None, Interval(more_than=0)] = None

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("zeta", -1, "zeta must not be negative, got -1"),
        ("alpha", 0.0, "alpha must be positive, got 0.0"),
        ("steps", 0, "steps must be at least 1, got 0"),
        ("momentum", 1, "momentum must be at least 0 and less than 1, got 1"),
        ("momentum", -0.1, "momentum must be at least 0 and less than 1, got -0.1"),
        ("share", 0, "share must be between 0 and 1, got 0"),
        ("share", 1, "share must be between 0 and 1, got 1"),
        ("weight", 1.5, "weight must be between 0 and 1, got 1.5"),
        ("delta", 1, "delta must be more than 1, got 1"),
        ("size", 1, "size must be at least 2, got 1"),
        ("temperature", 5, "temperature must be more than 0 and at most 4, got 5"),
        ("patience", 0, "patience must be at least 1, got 0"),
        ("noise", 0, "noise must be positive, got 0"),
        ("zeta", math.nan, "zeta must not be negative, got nan"),
    ],
)
def test_a_value_outside_its_interval_is_refused(name, value, message):
    with pytest.raises(ValueError) as error:
        replace(Settings(steps=1), **{name: value})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "value"),
    [("zeta", 0), ("alpha", 1e-9), ("steps", 1), ("momentum", 0), ("weight", 0), ("weight", 1), ("temperature", 4),
     ("zeta", math.inf), ("patience", 1), ("patience", None), ("noise", 0.1), ("noise", None)],
)  # fmt: skip
def test_bounds_belong_to_closed_intervals_and_none_is_accepted(name, value):
    assert getattr(replace(Settings(steps=1), **{name: value}), name) == value


def test_the_first_violated_field_is_named():
    with pytest.raises(ValueError, match=r"^steps must"):
        Settings(steps=0, zeta=-1)


def test_subclasses_check_the_fields_they_inherit():
    @dataclass(frozen=True)
    class More(Settings):
        extra: NonNegative[int] = 0

    with pytest.raises(ValueError, match=r"^zeta must"):
        More(steps=1, zeta=-1)
    with pytest.raises(ValueError, match=r"^extra must"):
        More(steps=1, extra=-1)


def test_no_interval_holds_nan():
    unbounded = Interval()
    assert [value in unbounded for value in (math.nan, 0, math.inf)] == [False, True, True]
