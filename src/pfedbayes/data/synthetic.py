"""Synthetic data sets: Gaussian blobs, and the regression problem of the paper's Eq. (1)."""

from __future__ import annotations

import math

import numpy as np
import torch

from pfedbayes.data.pool import Pool


def make_blobs(per_class: int, classes: int, features: int, noise: float, seed: int) -> Pool:
    """Return Gaussian blobs: x = m_y + noise * g, m ~ N(0, I); classes alternate, with `per_class` examples each."""
    generator = np.random.default_rng(seed)
    means = generator.standard_normal((classes, features))
    y = np.tile(np.arange(classes), per_class)
    x = means[y] + noise * generator.standard_normal((len(y), features))
    return Pool(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), classes, len(y))


def make_regression(clients: int, examples: int, features: int, noise: float, seed: int) -> Pool:
    """Return data of the paper's Eq. (1): y = f^i(x) + eps, eps ~ N(0, noise^2), in rows i * examples, ... of client i.

    f^i(x) = a^i . tanh(A x + b) with x uniform on [-1, 1]^features. The clients share A and b, and their a^i scatter
    around a common a, so that both shared and personal models have something to learn.
    """
    units, difference = 16, 0.3
    generator = np.random.default_rng(seed)
    slopes = 2 * generator.standard_normal((units, features))
    offsets = generator.standard_normal(units)
    common = generator.standard_normal(units)
    heights = (common + difference * generator.standard_normal((clients, units))) / math.sqrt(units)
    x = generator.uniform(-1, 1, (clients, examples, features))
    f = np.einsum("iu,inu->in", heights, np.tanh(x @ slopes.T + offsets))
    y = f + noise * generator.standard_normal((clients, examples))
    return Pool(
        torch.from_numpy(x.reshape(-1, features).astype(np.float32)),
        torch.from_numpy(y.reshape(-1, 1).astype(np.float32)),
        num_classes=None,
        official_train_count=clients * examples,
    )
