"""Dealing a pool of examples to clients."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data.config import SYNTHETIC_EXAMPLES, DataConfig
from pfedbayes.data.own.loading import load_own
from pfedbayes.data.published import Pool, Progress, blobs, load, regression
from pfedbayes.data.shards import Shards, client_names
from pfedbayes.data.splits import Purpose, Rows, held_out
from pfedbayes.errors import UserError

FEWEST_EXAMPLES = 2  # of a client: one to train on and one to test on


def load_shards(config: DataConfig, data_dir: str | Path | None = None, progress: Progress | None = None) -> Shards:
    """The data that a configuration describes: read or made, and dealt to the clients."""
    if config.name == "files":
        return load_own(config)
    if config.name == "blobs":
        pool = _enough_blobs(config)
    elif config.name == "regression":
        examples = config.examples or SYNTHETIC_EXAMPLES
        pool = regression(config.num_clients, examples, config.features, config.noise, config.seed)
    else:
        pool = load(config.name, data_dir or config.dir, progress=progress)
    return partition(pool, config)


def partition(pool: Pool, config: DataConfig) -> Shards:
    """Deal a pool to the clients, as in Section 5.1 of the paper or otherwise.

    No example goes to two clients, except with split = "overlap", or to two of a client's train, test and validation.

    Except with split = "shuffle", who gets which image depends on the images and config.seed alone, not on the
    order of the pool.
    """
    if pool.num_classes is None:
        # The rows of a regression pool lie client by client.
        train, test = _cut_tests(pool, np.array_split(np.arange(len(pool.x)), config.num_clients), config)
    elif config.labels == "iid":
        train, test = _cut_tests(pool, _deal_evenly(pool, config), config)
    elif config.labels == "dirichlet":
        train, test = _cut_tests(pool, _deal_dirichlet(pool, config), config)
    elif config.split == "shuffle":
        train, test = _deal_shuffled(pool, client_labels(config, pool.num_classes), config)
    else:
        train, test = _deal_stratified(pool, client_labels(config, pool.num_classes), config)

    train, validation = _cut(pool, train, config.validation, Purpose.VALIDATION_CUT, config.seed)
    train, certify = _cut(pool, train, config.certify, Purpose.CERTIFY_CUT, config.seed)
    return Shards(
        x=pool.x,
        y=pool.y,
        train=_tensors(train),
        test=_tensors(test),
        validation=_tensors(validation),
        names=client_names(config.num_clients),
        num_classes=pool.num_classes,
        certify=_tensors(certify) if config.certify else (),
    )


def client_labels(config: DataConfig, classes: int) -> Rows:
    """The labels of each client, (N, k), for the three rules that deal by label. With k = labels_per_client:

    two-block (k i + j) mod classes, which for 5 of 10 labels makes two kinds of client; sliding (i + j) mod
    classes; random those that the fewest clients before it hold, drawn among equals, so that no class is in
    greater demand than the others. Here i is the client and j = 0 .. k - 1.
    """
    k = config.labels_per_client
    if k > classes:
        raise UserError(f"labels_per_client = {k}, but the data have {classes} classes: choose at most {classes}")
    if config.labels == "random":
        return _random_labels(config.num_clients, k, classes, config.seed)
    stride = k if config.labels == "two-block" else 1
    return (stride * np.arange(config.num_clients)[:, None] + np.arange(k)) % classes


def _random_labels(clients: int, k: int, classes: int, seed: int) -> Rows:
    labels = np.empty((clients, k), dtype=np.int64)
    holders = np.zeros(classes, dtype=np.int64)
    for i in range(clients):
        order = Purpose.CLIENT_LABELS.order(seed, classes, i)
        labels[i] = order[np.argsort(holders[order], kind="stable")][:k]
        holders[labels[i]] += 1
    return labels


def _deal_stratified(pool: Pool, labels: Rows, config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Exact counts: a block of every label of a client, its head for training and the next images for testing."""
    train_count, test_count, block = config.per_label
    class_rows = _class_rows(pool, config.seed)
    if config.split == "overlap":
        blocks = [_draw_blocks(class_rows, own, block, config.seed, i) for i, own in enumerate(labels)]
    else:
        blocks = _deal_blocks(class_rows, labels, block)
    train = [np.concatenate([rows[:train_count] for rows in own]) for own in blocks]
    test = [np.concatenate([rows[train_count : train_count + test_count] for rows in own]) for own in blocks]
    return [rows[Purpose.TRAIN_ORDER.order(config.seed, len(rows), i)] for i, rows in enumerate(train)], test


def _deal_shuffled(pool: Pool, labels: Rows, config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Blocks in file order; each client's images are shuffled and cut regardless of their labels."""
    train_count, test_count, _ = config.per_label
    y = pool.y.numpy()
    in_file_order = [np.flatnonzero(y == label) for label in range(int(labels.max()) + 1)]
    stream = random.Random(config.seed)  # noqa: S311, one stream for all clients, as the authors' code has it
    train, test = [], []
    for own in _deal_blocks(in_file_order, labels, train_count + test_count):
        rows = np.concatenate(own).tolist()
        stream.shuffle(rows)
        cut = train_count * labels.shape[1]
        train.append(np.array(rows[:cut], dtype=np.int64))
        test.append(np.array(rows[cut:], dtype=np.int64))
    return train, test


def _deal_blocks(class_rows: list[Rows], labels: Rows, block: int) -> list[list[Rows]]:
    """For each client and each of its labels the next `block` rows of that label."""
    for label, holders in enumerate(np.bincount(labels.reshape(-1))):
        if holders * block > len(class_rows[label]):
            raise UserError(
                f"class {label} has {len(class_rows[label])} images, and {holders} clients with {block} each need "
                f"{holders * block}: take fewer clients, or fewer images with train_per_label and test_per_label"
            )
    taken = np.zeros(len(class_rows), dtype=np.int64)
    blocks: list[list[Rows]] = []
    for own_labels in labels:
        blocks.append([class_rows[label][taken[label] : taken[label] + block] for label in own_labels])
        taken[own_labels] += block
    return blocks


def _draw_blocks(class_rows: list[Rows], own_labels: Rows, block: int, seed: int, client: int) -> list[Rows]:
    """For each label of a client `block` rows out of all of that label, whoever else may have them."""
    order = Purpose.OVERLAP.order(seed, max(map(len, class_rows)), client)
    blocks = []
    for label in own_labels:
        rows = class_rows[label]
        if block > len(rows):
            raise UserError(
                f"class {label} has {len(rows)} images, and a client needs {block}: take fewer, with examples or with "
                "train_per_label and test_per_label"
            )
        blocks.append(rows[order[order < len(rows)][:block]])
    return blocks


def _deal_evenly(pool: Pool, config: DataConfig) -> list[Rows]:
    """Everyone the same mixture, and the same number up to one."""
    return np.array_split(_chosen_rows(pool, config), config.num_clients)


def _deal_dirichlet(pool: Pool, config: DataConfig) -> list[Rows]:
    """Each class is cut among the clients in proportions from Dirichlet(alpha), so sizes and mixtures differ.

    A client left with fewer than two examples is given some by the client that has most.
    """
    rows = _chosen_rows(pool, config)
    y = pool.y.numpy()[rows]
    generator = np.random.Generator(np.random.Philox(key=(Purpose.CLIENT_SHARES.stream() << 64) | config.seed))
    owned: list[list[int]] = [[] for _ in range(config.num_clients)]
    for label in np.unique(y):
        of_label = rows[y == label]
        shares = generator.dirichlet(np.full(config.num_clients, config.alpha))
        cuts = np.rint(shares.cumsum()[:-1] * len(of_label)).astype(np.int64)
        for own, part in zip(owned, np.split(of_label, cuts), strict=True):
            own.extend(part.tolist())
    while len(poorest := min(owned, key=len)) < FEWEST_EXAMPLES:
        poorest.append(max(owned, key=len).pop())
    return [np.array(own, dtype=np.int64) for own in owned]


def _chosen_rows(pool: Pool, config: DataConfig) -> Rows:
    """The rows to deal, in random order: all, or as many as `examples` per client asks for."""
    clients, examples = config.num_clients, config.examples_per_client
    needed = clients * (examples or FEWEST_EXAMPLES)
    if needed > len(pool.x):
        raise UserError(
            f"{clients} clients with {examples or FEWEST_EXAMPLES} examples need {needed}, and there are "
            f"{len(pool.x)}: take fewer clients or fewer examples"
        )
    rows = np.concatenate(_class_rows(pool, config.seed))
    shuffled: Rows = rows[Purpose.POOL_ORDER.order(config.seed, len(rows))]
    return shuffled[:needed] if examples else shuffled


def _class_rows(pool: Pool, seed: int) -> list[Rows]:
    """The rows of each class, in an order that depends on the images and the seed alone.

    Sorting by a hash of the pixels first makes the split independent of the order of the pool.
    """
    y = pool.y.numpy()
    pixels = pool.x.reshape(len(y), -1).numpy().view(np.uint8)
    by_pixels = np.argsort(np.array([hashlib.blake2b(row, digest_size=16).digest() for row in pixels]), kind="stable")
    class_rows = []
    for label in range(pool.num_classes or 0):
        rows = by_pixels[y[by_pixels] == label]
        class_rows.append(rows[Purpose.CLASS_ORDER.order(seed, len(rows), label)])
    return class_rows


def _cut_tests(pool: Pool, owned: list[Rows], config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Each client's rows cut into train and test by test_fraction."""
    return _cut(pool, owned, config.test_fraction, Purpose.TEST_CUT, config.seed)


def _cut(pool: Pool, owned: list[Rows], fraction: float, purpose: Purpose, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Each client's rows cut into those that it keeps and the fraction that is held out, label by label."""
    y = None if pool.num_classes is None else pool.y.numpy()
    masks = [
        held_out(None if y is None else y[rows], len(rows), fraction, purpose.stream(i), seed)
        for i, rows in enumerate(owned)
    ]
    return (
        [rows[~held] for rows, held in zip(owned, masks, strict=True)],
        [rows[held] for rows, held in zip(owned, masks, strict=True)],
    )


def _tensors(rows: list[Rows]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(own) for own in rows)


def _enough_blobs(config: DataConfig) -> Pool:
    """Just as many blobs as the clients will be dealt."""
    if config.by_label:
        holders = np.bincount(client_labels(config, config.classes).reshape(-1)).max()
        per_class = int(holders) * config.per_label[2]
    else:
        per_class = -(-config.num_clients * (config.examples or SYNTHETIC_EXAMPLES) // config.classes)
    return blobs(per_class, config.classes, config.features, config.noise, config.seed)
