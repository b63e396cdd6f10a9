"""Data: published, synthetic and your own data sets, dealt to clients, and the order of batches."""

from pfedbayes.data.batches import positions, positions_of_many
from pfedbayes.data.config import DataConfig
from pfedbayes.data.own.loading import (
    holds_tables,
    load_client,
    read_inputs,
    shards_from_table,
    shards_from_tables,
    summarise_client,
)
from pfedbayes.data.own.preprocessing import Preprocessing, combine
from pfedbayes.data.own.summaries import ClientSummary, summarise
from pfedbayes.data.partition import load_shards, partition
from pfedbayes.data.pool import Pool
from pfedbayes.data.published import Availability, DownloadProgress, available, load_published
from pfedbayes.data.shards import Shards, TaskShape

__all__ = [
    "Availability",
    "ClientSummary",
    "DataConfig",
    "DownloadProgress",
    "Pool",
    "Preprocessing",
    "Shards",
    "TaskShape",
    "available",
    "combine",
    "holds_tables",
    "load_client",
    "load_published",
    "load_shards",
    "partition",
    "positions",
    "positions_of_many",
    "read_inputs",
    "shards_from_table",
    "shards_from_tables",
    "summarise",
    "summarise_client",
]
