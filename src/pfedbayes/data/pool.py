"""A pool: all examples of one data set, before they are dealt to clients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of one data set in file order, those of the training file first."""

    x: Tensor
    """Images (M, C, H, W) as uint8, or features (M, d) as float32."""
    y: Tensor
    """Labels (M,) as int64, or targets (M, 1) as float32."""
    num_classes: int | None
    """Number of classes; None for a regression."""
    official_train_count: int
    """Number of rows from the training file."""
