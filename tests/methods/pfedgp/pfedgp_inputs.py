"""Random examples and covariance matrices for the tests of pFedGP."""

import torch
from torch.nn.functional import normalize

from federations import randn
from pfedbayes.methods.pfedgp.polya_gamma import rbf


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def blobs(counts, features=4, spread=0.1, seed=0):
    """Unit features around one random direction per label, and the labels, in mixed order."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=generator(seed))]
    return normalize(
        randn(len(counts), features, seed=seed + 1)[y] + spread * randn(len(y), features, seed=seed + 2)
    ), y


def covariance(n, seed=0, jitter=1e-3, dtype=torch.float64):
    """Kernel matrix of random points on a sphere, and the points."""
    z = normalize(randn(n, 4, seed=seed), dim=-1).to(dtype)
    return rbf(z, z, 8.0, 1.0) + jitter * torch.eye(n, dtype=dtype), z
