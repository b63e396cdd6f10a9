"""Data: published and synthetic sets, dealing them to clients, and the order of batches."""

from pfedbayes.data.batches import positions, positions_of_many
from pfedbayes.data.config import DataConfig
from pfedbayes.data.own.loading import load_client, read_inputs, shards_from_tables, summarise_client
from pfedbayes.data.own.preprocessing import Preprocessing, Summary, combine, summarise
from pfedbayes.data.partition import load_shards, partition
from pfedbayes.data.published import Availability, Pool, Progress, available, load
from pfedbayes.data.shards import Shards

__all__ = [
    "Availability",
    "DataConfig",
    "Pool",
    "Preprocessing",
    "Progress",
    "Shards",
    "Summary",
    "available",
    "combine",
    "load",
    "load_client",
    "load_shards",
    "partition",
    "positions",
    "positions_of_many",
    "read_inputs",
    "shards_from_tables",
    "summarise",
    "summarise_client",
]
