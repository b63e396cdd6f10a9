"""The points of the curves that are measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pfedbayes.paper.rate import CHANGES
from pfedbayes.paper.theory import Constants, Setting, chosen_num_params, width_for


@dataclass(frozen=True)
class Unit:
    """One point of a curve."""

    series: str  # the name of the curve
    smoothness: float  # beta, of the functions
    dimension: int  # d, of the inputs
    size: int  # n, examples per client
    zeta: float = 1.0
    budget: float = 15.0  # C_1 of the corollary T = C_1 n^(d/(2 beta + d))
    rounds: int = 400
    eta: float = 0.005  # both learning rates
    exact: bool = False  # targets without noise: the error is bias
    weight_noise: float = 1.0  # 0 with zeta 0: a plain network, whose bias is that of the optimiser

    @cached_property
    def setting(self) -> Setting:
        """The setting of the theory, with the width that the corollary chooses."""
        wanted = Setting(
            size=self.size,
            inputs=self.dimension,
            outputs=1,
            zeta=max(1.0, self.zeta),
            smoothness=self.smoothness,
            constants=Constants(C_1=self.budget),
        )
        width = width_for(chosen_num_params(wanted), self.dimension, 1)
        return dataclasses.replace(wanted, width=width)


def unit_of(record: dict[str, Any]) -> Unit:
    """Return the unit of a record."""
    return Unit(**{field.name: record[field.name] for field in dataclasses.fields(Unit)})


SIZES = (50, 100, 200, 400, 800, 1600, 3200)
FEW_SIZES = (50, 400, 3200)
MAIN = tuple(Unit(f"β = {beta:g}", beta, dimension=1, size=size) for beta in (1.0, 2.0) for size in SIZES)
CHANGED = tuple(
    Unit(name, 1.0, dimension=1, size=size, **change) for name, change in CHANGES.items() for size in FEW_SIZES
)
CHANGED_REPLICATES = 3
