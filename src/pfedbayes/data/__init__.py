"""Data: published and synthetic sets, dealing them to clients, and the order of batches."""

from pfedbayes.data.batches import positions
from pfedbayes.data.config import DataConfig
from pfedbayes.data.partition import load_shards, partition
from pfedbayes.data.shards import Shards
from pfedbayes.data.sources import Availability, Pool, Progress, available, load

__all__ = [
    "Availability",
    "DataConfig",
    "Pool",
    "Progress",
    "Shards",
    "available",
    "load",
    "load_shards",
    "partition",
    "positions",
]
