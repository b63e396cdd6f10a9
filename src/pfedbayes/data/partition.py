"""Dealing a pool of examples to clients."""

from __future__ import annotations

import hashlib
import random
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data.batches import permutations
from pfedbayes.data.config import DataConfig, rounded
from pfedbayes.data.shards import Shards, client_names
from pfedbayes.data.sources import Pool, Progress, blobs, load, regression
from pfedbayes.errors import UserError

Rows = NDArray[np.int64]


class Purpose(IntEnum):
    """What a random draw is for. It is part of the key, so no two draws share random numbers.

    0 is left to the batch streams, which are keyed by (seed, client).
    """

    CLASS_ORDER = 1
    POOL_ORDER = 2
    CLIENT_LABELS = 3
    CLIENT_SHARES = 4
    TRAIN_ORDER = 5
    TEST_CUT = 6
    VALIDATION_CUT = 7


def load_shards(config: DataConfig, data_dir: str | None = None, progress: Progress | None = None) -> Shards:
    """The data that a configuration describes, read or made, and dealt to the clients."""
    return partition(_load_pool(config, data_dir, progress), config)


def _load_pool(config: DataConfig, data_dir: str | None, progress: Progress | None) -> Pool:
    examples = config.examples_per_client
    if config.name == "regression":
        assert examples is not None
        return regression(config.num_clients, examples, config.features, config.noise, config.seed)
    if config.name == "blobs":
        if config.by_label:
            holders = np.bincount(client_labels(config, config.classes).reshape(-1)).max()
            per_class = int(holders) * config.per_label[2]
        else:
            assert examples is not None
            per_class = -(-config.num_clients * examples // config.classes)
        return blobs(per_class, config.classes, config.features, config.noise, config.seed)
    return load(config.name, data_dir, progress=progress)
