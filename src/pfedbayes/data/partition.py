"""Deal a pool of examples to clients."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pfedbayes.data.config import SYNTHETIC_EXAMPLES, DataConfig
from pfedbayes.data.own.loading import load_own
from pfedbayes.data.pool import Pool
from pfedbayes.data.published import DownloadProgress, load_published
from pfedbayes.data.shards import Shards, client_names
from pfedbayes.data.splits import Rows, SplitPurpose, held_out
from pfedbayes.data.synthetic import make_blobs, make_regression
from pfedbayes.errors import UserError

MIN_EXAMPLES = 2  # of a client: one for training and one for test


def load_shards(
    config: DataConfig, data_dir: str | Path | None = None, progress: DownloadProgress | None = None
) -> Shards:
    """Load or generate the data that a configuration describes, and deal them to the clients."""
    if config.name == "files":
        return load_own(config)
    if config.name == "blobs":
        pool = _enough_blobs(config)
    elif config.name == "regression":
        examples = config.examples or SYNTHETIC_EXAMPLES
        pool = make_regression(config.num_clients, examples, config.features, config.noise, config.seed)
    else:
        pool = load_published(config.name, data_dir or config.dir, progress=progress)
    return partition(pool, config)


def partition(pool: Pool, config: DataConfig) -> Shards:
    """Deal a pool to the clients, by default as in Section 5.1 of the paper.

    No two clients share an example, except with split = "overlap". The training, test and validation data of a client
    are disjoint. Except with split = "shuffle", the result depends only on the images and config.seed, not on the
    order of the pool.
    """
    if pool.num_classes is None:
        # The rows of a regression pool are sorted by client.
        train, test = _split_tests(pool, np.array_split(np.arange(len(pool.x)), config.num_clients), config)
    elif config.labels == "iid":
        train, test = _split_tests(pool, _deal_evenly(pool, config), config)
    elif config.labels == "dirichlet":
        train, test = _split_tests(pool, _deal_dirichlet(pool, config), config)
    elif config.split == "shuffle":
        train, test = _deal_shuffled(pool, client_labels(config, pool.num_classes), config)
    else:
        train, test = _deal_stratified(pool, client_labels(config, pool.num_classes), config)

    train, validation = _split(pool, train, config.validation, SplitPurpose.VALIDATION_CUT, config.seed)
    train, certify = _split(pool, train, config.certify, SplitPurpose.CERTIFY_CUT, config.seed)
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
    """Return the labels of each client, (N, k), for the three rules that deal by label.

    With k = labels_per_client, client i and j = 0 .. k - 1, they are (k i + j) mod classes for "two-block", which for
    5 of 10 labels makes two groups of clients, and (i + j) mod classes for "sliding". For "random" they are the
    labels that the fewest earlier clients hold, with ties broken at random, so that all classes are equally frequent.
    """
    k = config.labels_per_client
    if k > classes:
        raise UserError(f"labels_per_client = {k}, but the data have {classes} classes: set at most {classes}")
    if config.labels == "random":
        return _random_labels(config.num_clients, k, classes, config.seed)
    stride = k if config.labels == "two-block" else 1
    return (stride * np.arange(config.num_clients)[:, None] + np.arange(k)) % classes


def _random_labels(clients: int, k: int, classes: int, seed: int) -> Rows:
    labels = np.empty((clients, k), dtype=np.int64)
    holders = np.zeros(classes, dtype=np.int64)
    for i in range(clients):
        order = SplitPurpose.CLIENT_LABELS.order(seed, classes, i)
        labels[i] = order[np.argsort(holders[order], kind="stable")][:k]
        holders[labels[i]] += 1
    return labels


def _deal_stratified(pool: Pool, labels: Rows, config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Deal one block of each label of a client; its first images are for training, the next for test."""
    train_count, test_count, block = config.per_label
    class_rows = _class_rows(pool, config.seed)
    if config.split == "overlap":
        blocks = [_draw_blocks(class_rows, own, block, config.seed, i) for i, own in enumerate(labels)]
    else:
        blocks = _deal_blocks(class_rows, labels, block)
    train = [np.concatenate([rows[:train_count] for rows in own]) for own in blocks]
    test = [np.concatenate([rows[train_count : train_count + test_count] for rows in own]) for own in blocks]
    return [rows[SplitPurpose.TRAIN_ORDER.order(config.seed, len(rows), i)] for i, rows in enumerate(train)], test


def _deal_shuffled(pool: Pool, labels: Rows, config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Deal blocks in file order; each client's images are shuffled and split regardless of their labels."""
    train_count, test_count, _ = config.per_label
    y = pool.y.numpy()
    in_file_order = [np.flatnonzero(y == label) for label in range(int(labels.max()) + 1)]
    stream = random.Random(config.seed)  # noqa: S311, one stream for all clients, as in the authors' code
    train, test = [], []
    for own in _deal_blocks(in_file_order, labels, train_count + test_count):
        rows = np.concatenate(own).tolist()
        stream.shuffle(rows)
        cut = train_count * labels.shape[1]
        train.append(np.array(rows[:cut], dtype=np.int64))
        test.append(np.array(rows[cut:], dtype=np.int64))
    return train, test


def _deal_blocks(class_rows: list[Rows], labels: Rows, block: int) -> list[list[Rows]]:
    """Return for each client and each of its labels the next `block` rows of that label."""
    for label, holders in enumerate(np.bincount(labels.reshape(-1))):
        if holders * block > len(class_rows[label]):
            raise UserError(
                f"class {label} has {len(class_rows[label])} images, but {holders} clients with {block} each need "
                f"{holders * block}: use fewer clients, or fewer images with train_per_label and test_per_label"
            )
    taken = np.zeros(len(class_rows), dtype=np.int64)
    blocks: list[list[Rows]] = []
    for own_labels in labels:
        blocks.append([class_rows[label][taken[label] : taken[label] + block] for label in own_labels])
        taken[own_labels] += block
    return blocks


def _draw_blocks(class_rows: list[Rows], own_labels: Rows, block: int, seed: int, client: int) -> list[Rows]:
    """Return for each label of a client `block` random rows of that label, which other clients may have too."""
    order = SplitPurpose.OVERLAP.order(seed, max(map(len, class_rows)), client)
    blocks = []
    for label in own_labels:
        rows = class_rows[label]
        if block > len(rows):
            raise UserError(
                f"class {label} has {len(rows)} images, but a client needs {block}: use fewer, with examples or with "
                "train_per_label and test_per_label"
            )
        blocks.append(rows[order[order < len(rows)][:block]])
    return blocks


def _deal_evenly(pool: Pool, config: DataConfig) -> list[Rows]:
    """Deal the same mixture of labels and, up to one, the same number of examples to every client."""
    return np.array_split(_chosen_rows(pool, config), config.num_clients)


def _deal_dirichlet(pool: Pool, config: DataConfig) -> list[Rows]:
    """Deal each class in proportions drawn from Dirichlet(alpha), so that sizes and label mixtures differ.

    A client with fewer than two examples receives some from the client that has most.
    """
    rows = _chosen_rows(pool, config)
    y = pool.y.numpy()[rows]
    generator = np.random.Generator(np.random.Philox(key=(SplitPurpose.CLIENT_SHARES.stream() << 64) | config.seed))
    owned: list[list[int]] = [[] for _ in range(config.num_clients)]
    for label in np.unique(y):
        of_label = rows[y == label]
        shares = generator.dirichlet(np.full(config.num_clients, config.alpha))
        cuts = np.rint(shares.cumsum()[:-1] * len(of_label)).astype(np.int64)
        for own, part in zip(owned, np.split(of_label, cuts), strict=True):
            own.extend(part.tolist())
    while len(poorest := min(owned, key=len)) < MIN_EXAMPLES:
        poorest.append(max(owned, key=len).pop())
    return [np.array(own, dtype=np.int64) for own in owned]


def _chosen_rows(pool: Pool, config: DataConfig) -> Rows:
    """Return the rows to deal, in random order: all, or `examples` per client."""
    clients, examples = config.num_clients, config.examples_per_client
    needed = clients * (examples or MIN_EXAMPLES)
    if needed > len(pool.x):
        raise UserError(
            f"{clients} clients with {examples or MIN_EXAMPLES} examples need {needed}, but there are "
            f"{len(pool.x)}: use fewer clients or fewer examples"
        )
    rows = np.concatenate(_class_rows(pool, config.seed))
    shuffled: Rows = rows[SplitPurpose.POOL_ORDER.order(config.seed, len(rows))]
    return shuffled[:needed] if examples else shuffled


def _class_rows(pool: Pool, seed: int) -> list[Rows]:
    """Return the rows of each class, in an order that depends only on the images and the seed.

    Sorting by a hash of the pixels first makes the split independent of the order of the pool.
    """
    y = pool.y.numpy()
    pixels = pool.x.reshape(len(y), -1).numpy().view(np.uint8)
    by_pixels = np.argsort(np.array([hashlib.blake2b(row, digest_size=16).digest() for row in pixels]), kind="stable")
    class_rows = []
    for label in range(pool.num_classes or 0):
        rows = by_pixels[y[by_pixels] == label]
        class_rows.append(rows[SplitPurpose.CLASS_ORDER.order(seed, len(rows), label)])
    return class_rows


def _split_tests(pool: Pool, owned: list[Rows], config: DataConfig) -> tuple[list[Rows], list[Rows]]:
    """Split each client's rows into training and test rows by test_fraction."""
    return _split(pool, owned, config.test_fraction, SplitPurpose.TEST_CUT, config.seed)


def _split(
    pool: Pool, owned: list[Rows], fraction: float, purpose: SplitPurpose, seed: int
) -> tuple[list[Rows], list[Rows]]:
    """Split each client's rows into those that it keeps and the fraction that is held out, stratified by label."""
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
    """Return exactly as many blobs as the clients need."""
    if config.by_label:
        holders = np.bincount(client_labels(config, config.classes).reshape(-1)).max()
        per_class = int(holders) * config.per_label[2]
    else:
        per_class = -(-config.num_clients * (config.examples or SYNTHETIC_EXAMPLES) // config.classes)
    return make_blobs(per_class, config.classes, config.features, config.noise, config.seed)
