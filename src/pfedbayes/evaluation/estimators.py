"""Names: the two models of a federation, the estimators that predict with them, and how they draw weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Which = Literal["personal", "shared"]
# What predicts: also the model that a client has trained alone, and the personal model gated by the shared one.
Served = Literal["personal", "shared", "alone", "gated"]
EvaluationSplit = Literal["test", "validation"]
Sampling = Literal["weights", "pairs", "activations"]
MODELS: tuple[Which, ...] = ("personal", "shared")
ENSEMBLE = "ensemble"  # the estimator that averages the federations of all seeds


def estimator_names(samples: int) -> tuple[str, ...]:
    """Return the estimators of a method that draws weights: one draw, the average over `samples`, the mean network."""
    return "one", f"mc{samples}", "mean"


class EstimatorSpec(NamedTuple):
    """Which estimators to compute, and how."""

    samples: int
    """The number K of draws that the Monte Carlo estimator averages."""
    estimators: Sequence[str] | None = None
    """Names from `estimator_names`; None for all of them."""
    sampling: Sampling = "weights"
    """Draw "weights", "pairs" of weights with opposite noise, or the "activations" of dense layers (cheaper)."""
    label_prior: bool = False
    """Whether to add each estimator once more, with the client's label prior."""

    @property
    def wanted(self) -> Sequence[str]:
        """The names of the estimators to compute."""
        return self.estimators or estimator_names(self.samples)

    @property
    def draws(self) -> int:
        """The number of draws that these estimators need."""
        one, average, _ = estimator_names(self.samples)
        return self.samples if average in self.wanted else int(one in self.wanted)
