"""Search spaces: the hyper-parameters of a method that are tuned, and their ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedbayes.errors import UserError, nearest, one_line
from pfedbayes.methods import Method

LOGARITHMIC = 10.0  # a range of positive numbers is logarithmic if its ends differ by this factor at least


@dataclass(frozen=True)
class Range:
    """The values of one hyper-parameter."""

    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether equal factors, not equal differences, are equally likely."""
        return self.low > 0 and self.high / self.low >= LOGARITHMIC

    def at(self, share: float) -> float:
        """Return the value at a share of the range."""
        if self.logarithmic:
            return math.exp((1 - share) * math.log(self.low) + share * math.log(self.high))
        return (1 - share) * self.low + share * self.high

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


Space = Mapping[str, Range]

_RATE = Range(1e-3, 1.0)
# By the name of the method.
SPACES: dict[str, Space] = {
    "pfedbayes": {
        "zeta": Range(1e-2, 10.0), "rho0": Range(-4.0, -1.0), "eta_personal": Range(1e-4, 1e-2),
        "eta_global": Range(1e-4, 1e-2),
    },
    "hierarchical": {
        "spread": Range(0.05, 1.0), "confidence": Range(1.0, 30.0), "eta_mean": Range(0.01, 0.2),
        "eta_rho": Range(0.01, 0.2), "kl_shared": Range(0.1, 1.0), "kl_personal": Range(0.1, 1.0),
    },
    "pvi": {
        "eta": Range(1e-4, 1e-2), "prior_sigma": Range(0.05, 1.0), "rho0": Range(-4.0, -1.0), "zeta": Range(0.1, 10.0),
    },
    "fedep": {"eta": _RATE, "prior_sigma": Range(0.05, 1.0), "scale": Range(0.1, 100.0)},
    "fedsep": {"eta": _RATE, "prior_sigma": Range(0.05, 1.0), "scale": Range(0.1, 100.0)},
    "fedivon": {"eta": Range(0.01, 1.0), "hessian": Range(0.05, 5.0), "delta": Range(1e-5, 1e-2)},
    "pfedvem": {"eta": _RATE, "eta_head": _RATE, "rho0": Range(-4.0, 0.6), "zeta": Range(0.1, 10.0)},
    "fedpa": {"eta": _RATE, "shrinkage": Range(1e-3, 1.0)},
    "fola": {"eta": _RATE, "prior_weight": Range(1e-3, 10.0)},
    "fedbe": {"eta": _RATE, "scale": Range(0.1, 3.0)},
    "fedpop": {"eta": _RATE, "eta_head": Range(1e-3, 0.1), "sigma0": Range(0.03, 1.0)},
    "fedavg": {"eta": _RATE},
    "fedavg-ft": {"eta": _RATE, "eta_personal": _RATE},
    "fedprox": {"eta": _RATE, "prox": Range(1e-3, 1.0)},
    "perfedavg": {"eta_outer": _RATE, "alpha": Range(1e-3, 0.1)},
    "pfedme": {"eta_personal": _RATE, "eta": _RATE, "prox": Range(1.0, 30.0), "beta": Range(0.5, 2.0)},
    "heurfedamp": {"eta": _RATE, "self_weight": Range(0.1, 0.9), "sharpness": Range(1.0, 100.0)},
    "ditto": {"eta": _RATE, "eta_personal": _RATE, "prox": Range(0.01, 10.0)},
    "fedper": {"eta": _RATE},
    "fedrep": {"eta": _RATE},
    "scaffold": {"eta": _RATE, "eta_global": Range(0.5, 2.0)},
    "apfl": {"eta": _RATE, "eta_personal": _RATE},
    "fedbabu": {"eta": _RATE, "eta_personal": _RATE},
    "fedrod": {"eta": _RATE, "eta_personal": _RATE},
    "knnper": {"eta": _RATE, "scale": Range(0.1, 10.0)},
    "fedala": {"eta": _RATE, "eta_mixing": Range(0.1, 10.0)},
    "local": {"eta": _RATE},
    "pooled": {"eta": _RATE},
}  # fmt: skip


def parse_range(text: str) -> tuple[str, Range]:
    """Parse "method.zeta=0.01..10"."""
    name, _, values = text.partition("=")
    low, _, high = values.partition("..")
    section, _, key = name.strip().partition(".")
    with contextlib.suppress(ValueError):
        found = Range(float(low), float(high))
        if section == "method" and key and -math.inf < found.low < found.high < math.inf:
            return key, found
    raise UserError(f"--space {one_line(repr(text))} is not understood: write method.NAME=LOW..HIGH")


def space_of(name: str, method: Method, ranges: Sequence[str] = ()) -> dict[str, Range]:
    """Return the space of a method: the given ranges, or those of `SPACES` if there are none."""
    chosen = dict(map(parse_range, ranges)) or dict(SPACES.get(name, {}))
    if not chosen:
        raise UserError(f"{method.about.title} has no search space: give one with --space method.NAME=LOW..HIGH")
    tunable = [field.name for field in dataclasses.fields(method) if isinstance(getattr(method, field.name), float)]
    for key, values in chosen.items():
        if key not in tunable:
            raise UserError(f"method.{key} cannot be tuned: {nearest(key, tunable)}")
        for end in (values.low, values.high):
            try:
                dataclasses.replace(method, **{key: end})
            except ValueError as error:
                raise UserError(f"--space method.{key}={values}: {error}") from None
    return chosen


def draw(method: Method, space: Space, count: int, seed: int) -> list[Method]:
    """Return `count` settings: the method as it is, then points that fill the space evenly (a scrambled Sobol set)."""
    engine = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    points: Tensor = engine.draw(count - 1, dtype=torch.float64)
    values = [{name: space[name].at(u) for name, u in zip(space, point.tolist(), strict=True)} for point in points]
    return [method, *(dataclasses.replace(method, **each) for each in values)]
