"""What is measured: the points of the curves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pfedbayes.paper.rate import CHANGES
from pfedbayes.paper.theory import Constants, Setting, chosen_num_params, width_for


@dataclass(frozen=True)
class Unit:
    """One point of a curve: `size` examples per client of functions of this smoothness, and how they are trained on.

    budget is the C_1 of the corollary T = C_1 n^(d/(2 beta + d)). exact: targets without noise, so that the error is
    bias alone. weight_noise: 0 with zeta 0 is a network and no posterior, so that the bias is the optimiser's alone.
    """

    series: str
    smoothness: float
    dimension: int
    size: int
    zeta: float = 1.0
    budget: float = 15.0
    rounds: int = 400
    eta: float = 0.005
    exact: bool = False
    weight_noise: float = 1.0

    @cached_property
    def setting(self) -> Setting:
        """The unit in the words of the theory, with the width that the corollary chooses."""
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
    """The unit that a record was measured for."""
    return Unit(**{field.name: record[field.name] for field in dataclasses.fields(Unit)})


SIZES = (50, 100, 200, 400, 800, 1600, 3200)
FEW_SIZES = (50, 400, 3200)
MAIN = tuple(Unit(f"β = {beta:g}", beta, dimension=1, size=size) for beta in (1.0, 2.0) for size in SIZES)
CHANGED = tuple(
    Unit(name, 1.0, dimension=1, size=size, **change) for name, change in CHANGES.items() for size in FEW_SIZES
)
CHANGED_REPLICATES = 3
