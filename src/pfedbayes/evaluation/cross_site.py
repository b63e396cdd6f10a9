"""Every client's model on every client's test data: who is like whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedbayes.evaluation.estimators import EvaluationSplit, Which
from pfedbayes.evaluation.evaluate import estimates
from pfedbayes.evaluation.models import FederatedModels, headline_estimator

MOST_CLIENTS = 40


@dataclass(frozen=True)
class CrossSite:
    """The scores of all models on the test data of all clients."""

    metric: str
    names: list[str]
    """Names of the clients."""
    counts: list[int]
    """Test examples of each client."""
    scores: list[list[float | None]]
    """Entry [i][j]: client i's model on the data of client j, mean over seeds. If there is a row more than there are
    clients, it is that of the shared model."""


def cross_site(
    federation: FederatedModels,
    samples: int = 10,
    split: EvaluationSplit = "test",
    metric: str = "nll",
    most: int = MOST_CLIENTS,
) -> CrossSite | None:
    """Score all models on all clients' data with the headline estimator; None without two clients with models and data.

    most: with more clients, take those with the largest training sets.
    """
    shards, method = federation.data.shards, federation.method
    sets = getattr(shards, split)
    able = [i for i, rows in enumerate(sets) if len(rows)]
    if not method.about.personal or len(able) < 2:
        return None
    largest = sorted(able, key=lambda i: (-len(shards.train[i]), i))[:most]
    clients = sorted(largest)
    column = federation.model.likelihood.metrics.index(metric)
    estimator = headline_estimator(method, samples)
    lengths = [len(sets[i]) for i in clients]
    rows = torch.cat([sets[i] for i in clients])
    y = federation.data.y[rows.to(federation.data.device)]

    def score(which: Which, client: int, seed: int) -> Tensor:
        """Return the score of a model on each client's data, (clients,)."""
        outputs = estimates(federation, which, client, rows, samples, seed)[estimator]
        parts = zip(torch.split(outputs, lengths, dim=1), torch.split(y, lengths), strict=True)
        return torch.stack([federation.model.likelihood.scores(*part)[column] for part in parts])

    models: list[tuple[Which, int]] = [("personal", i) for i in clients]
    if method.about.shared:
        models.append(("shared", clients[0]))
    seeds = range(len(federation.seeds))
    matrix = torch.stack([torch.stack([score(*model, s) for s in seeds]).mean(0) for model in models]).cpu()
    finite: list[list[float | None]] = [
        [value if ok else None for value, ok in zip(values, known, strict=True)]
        for values, known in zip(matrix.tolist(), matrix.isfinite().tolist(), strict=True)
    ]
    return CrossSite(metric, [shards.names[i] for i in clients], lengths, finite)
