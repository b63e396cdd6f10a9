"""Constraints on the fields of a dataclass: written in the field's type, checked once.

    @dataclass(frozen=True)
    class Settings:
        rate: NonNegative[float] = 0.01
        steps: AtLeastOne[int] = 20
        patience: AtLeastOne[int] | None = None
        momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9

        def __post_init__(self) -> None:
            check(self)

A constraint on several fields at once is an `if` in `__post_init__`, after `check`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, TypeVar

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """The numbers that a field accepts. NaN lies in no interval."""

    at_least: float | None = None
    """Lower bound that is itself accepted."""
    more_than: float | None = None
    """Lower bound that is not accepted."""
    at_most: float | None = None
    """Upper bound that is itself accepted."""
    less_than: float | None = None
    """Upper bound that is not accepted."""

    def __contains__(self, value: float) -> bool:
        return (
            not (isinstance(value, float) and math.isnan(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )

    def __str__(self) -> str:
        """Complete the sentence "the value must …"."""
        match self:
            case Interval(at_least=0, more_than=None, at_most=None, less_than=None):
                return "not be negative"
            case Interval(at_least=None, more_than=0, at_most=None, less_than=None):
                return "be positive"
            case Interval(at_least=low, more_than=None, at_most=high, less_than=None) if None not in (low, high):
                return f"be between {low} and {high}"
            case Interval(at_least=None, more_than=low, at_most=None, less_than=high) if None not in (low, high):
                return f"be between {low} and {high}"
        bounds = [(field.name.replace("_", " "), getattr(self, field.name)) for field in dataclasses.fields(self)]
        return "be " + " and ".join(f"{name} {bound}" for name, bound in bounds if bound is not None)


NonNegative = Annotated[Number, Interval(at_least=0)]
Positive = Annotated[Number, Interval(more_than=0)]
AtLeastOne = Annotated[Number, Interval(at_least=1)]
# Steps and draws. More than a million of them are a slip of the pen: they would run for days or fill the memory.
Count = Annotated[int, Interval(at_least=1, at_most=10**6)]
CountOrZero = Annotated[int, Interval(at_least=0, at_most=10**6)]
LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, Interval(at_least=0, at_most=LARGEST_SEED)]


def check(instance: Any) -> None:
    """Raise ValueError for the first field of a dataclass whose value violates its constraint.

    The message reads "NAME must be at least 1, got 0". A field that is None has no value to check.
    """
    for name, interval in _constraints(instance.__class__):
        value = getattr(instance, name)
        if value is not None and value not in interval:
            raise ValueError(f"{name} must {interval}, got {value}")


@cache
def _constraints(cls: type) -> tuple[tuple[str, Interval], ...]:
    """Return the constrained fields of a dataclass, in the order of their definition."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    return tuple((name, interval) for name in names for interval in _intervals(hints[name]))


def _intervals(hint: Any) -> Iterator[Interval]:
    """Yield the constraints in a type such as `AtLeastOne[int] | None`."""
    if typing.get_origin(hint) is Annotated:
        yield from (note for note in hint.__metadata__ if isinstance(note, Interval))
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        for choice in typing.get_args(hint):
            yield from _intervals(choice)
