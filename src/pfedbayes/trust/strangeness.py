"""How strange an input looks to a client, as a share of the client's own held-out rows.

The strangeness of an input is the share of the held-out rows that look less strange: 1 - p for a conformal p-value p
(Vovk et al. 2005). At most 5 % of the client's own new rows have a strangeness of 0.95 or more, whatever the model.

Two scores are combined, see `scores`: how improbable the shared model finds the client's labels, and how far the input
lies from the client's training inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.likelihoods import Likelihood, is_of_labels
from pfedbayes.trust.calibration import DRAWS, Fold

COMPONENTS = 20  # most principal components of a client's inputs
ROWS_PER_COMPONENT = 5  # a component needs so many rows, so that it is no copy of one
FLOOR = 0.01  # least variance of an input, as a share of the mean variance of all inputs
FARTHEST = 1000.0  # nats by which a row can surprise more than the second largest one
FEWEST = 5  # rows of a client whose inputs are described; a mean of fewer would give them away
LARGEST = 1e30  # score
AT_ONCE = 2**22  # numbers compared in one pass


class Inputs(NamedTuple):
    """A Gaussian of a client's inputs: principal components, and one variance in all other directions."""

    mean: Tensor
    """Means (d,)."""
    components: Tensor
    """Orthonormal principal components (q, d)."""
    variances: Tensor
    """Variances (q,) along them."""
    rest: Tensor
    """Variance in all other directions, ()."""


def flat(x: Tensor) -> Tensor:
    """Return inputs (n, ...) as numbers (n, d); bytes become numbers from 0 to 1."""
    return x.flatten(1).float() / (255 if x.dtype == torch.uint8 else 1)


def fit_inputs(x: Tensor, most: int = COMPONENTS) -> Inputs:
    """Fit the Gaussian to training inputs (n, ...): probabilistic principal components (Tipping and Bishop 1999).

    most: components at most. Of fewer than `FEWEST` rows nothing is kept: the Gaussian is a standard normal one.
    """
    numbers = flat(x).double()
    size, width = numbers.shape
    if size < FEWEST:
        return Inputs(torch.zeros(width), torch.zeros(0, width), torch.zeros(0), torch.ones(()))
    mean = numbers.mean(0)
    centred = numbers - mean
    total = float(centred.square().sum() / size)
    count = min(most, size // ROWS_PER_COMPONENT, width)
    # The smaller of the two products of the inputs with themselves has the same spectrum.
    if size < width:
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        components = (centred.T @ vectors / values.clamp_min(1e-12).sqrt()).T
    else:
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        components = vectors.T
    floor = max(FLOOR * total / width, 1e-12)
    variances = (values / size).clamp_min(floor)
    rest = max(floor, (total - float(variances.sum())) / max(1, width - count))
    return Inputs(mean.float(), components.float(), variances.float(), torch.tensor(rest, dtype=torch.float32))


def distances(x: Tensor, inputs: Inputs) -> Tensor:
    """Return the logarithm (n,) of the squared Mahalanobis distance of inputs (n, ...) from the client's."""
    centred = flat(x) - inputs.mean
    along = centred @ inputs.components.T
    left = (centred.square().sum(-1) - along.square().sum(-1)).clamp_min(0) / inputs.rest
    squares = (along.square() / inputs.variances).sum(-1) + left
    return (squares + 1e-12).log()


def model_scores(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return how strange inputs look to a model by its outputs (K, n, ...): a score (n,).

    For labels the energy, -log sum exp of the logits (Liu et al. 2020), mean over draws; for numbers the logarithm of
    how much the predictions of the draws vary.
    """
    if is_of_labels(likelihood):
        scores = -likelihood.logits(outputs).logsumexp(-1).mean(0)
    else:
        scores = (likelihood.point(outputs).var(0, correction=0).sum(-1) + 1e-12).log()
    return scores.nan_to_num(LARGEST, LARGEST, -LARGEST)


class Reference(NamedTuple):
    """What the strangeness of new rows needs of a client."""

    inputs: Inputs
    held_out: Tensor
    """Scores (n, 2) of held-out rows: by the model or by its gate, and the distances."""
    gated: bool = False
    """Whether the first score is the evidence of a gate."""

    def of(self, by_model: Tensor, x: Tensor) -> Tensor:
        """Return the strangeness (m,) of inputs x (m, ...) with scores (m,) by the model."""
        new = torch.stack([by_model, distances(x, self.inputs).to(by_model)], dim=-1)
        return strangeness(self.held_out, new, self.gated)


def strangeness(held_out: Tensor, new: Tensor, gated: bool = False) -> Tensor:
    """Return the strangeness (m,) in [0, 1) of new rows from scores (m, J), given those (n, J) of held-out rows.

    Each score becomes an e-value, a number that is at most 1 on average over the client's own rows, and the mean of the
    e-values ranks the rows (Vovk and Wang 2021). As the held-out rows and the new row enter alike, the p-value of the
    mean is exact, whatever the e-values are. A row that is stranger than all held-out ones gets a number of at least
    n / (n + 1), which tells such rows apart but promises nothing more. Without held-out rows it is NaN.

    gated: the first score is the evidence of a gate, see `_log_e_values`.
    """
    if not len(held_out):
        return torch.full((len(new),), torch.nan)
    known, parts = held_out.double(), torch.split(new.double(), max(1, AT_ONCE // held_out.numel()))
    return torch.cat([_of_rows(known, part, gated) for part in parts]).float()


def _of_rows(held_out: Tensor, new: Tensor, gated: bool) -> Tensor:
    size = len(held_out)
    others, own = (found.logsumexp(-1) for found in _log_e_values(held_out, new, gated))
    less = (others < own[:, None]).sum(-1)
    beyond = (own - others.amax(-1)).clamp(0, FARTHEST)
    return (less + (less == size) * beyond / (1 + beyond)) / (size + 1)


def _log_e_values(held_out: Tensor, new: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """Return log e-values of the n held-out rows (m, n, J), beside each of the new rows, and of these (m, J).

    A p-value becomes the e-value 1 / (2 sqrt(p)). The evidence of a gate is the logarithm of a likelihood ratio of
    other labels and own ones, which is an e-value itself: if the shared model is right, its mean over own rows is 1.
    """
    found = [0.5 * surprise - math.log(2) for surprise in _surprise(held_out, new)]
    if gated:
        for e_values, scores in zip(found, (held_out, new), strict=True):
            e_values[..., 0] = scores[..., 0]
    others, own = found
    return others, own


def _surprise(held_out: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of scores among the n held-out rows and one new row: (m, n, J) of the former, (m, J) of the latter.

    p is the share of the n + 1 rows whose score is at least as large. The score of the largest row says more than its
    rank, so beyond the second largest row -log p goes on along the line from the median to that row.
    """
    size = len(held_out)
    ordered = held_out.sort(0).values.T.contiguous()
    # For each score, how many held-out rows have a score at least as large; a row counts itself.
    as_large = size - torch.searchsorted(ordered, held_out.T.contiguous()).T
    above = size - torch.searchsorted(ordered, new.T.contiguous()).T
    ranks = as_large + (new[:, None] >= held_out)
    middle, second = (_order_statistic(ordered, new, k) for k in (size // 2 + 1, size))
    unit = ((second - middle) / max(1.0, math.log((size + 1) / 4))).clamp_min(1e-6)

    def surprise(rank: Tensor, score: Tensor, second: Tensor, unit: Tensor) -> Tensor:
        return math.log(size + 1) - rank.double().log() + ((score - second) / unit).clamp(0, FARTHEST)

    return surprise(ranks, held_out, second[:, None], unit[:, None]), surprise(above + 1, new, second, unit)


def _order_statistic(ordered: Tensor, new: Tensor, rank: int) -> Tensor:
    """Return the order statistic (m, J) of this rank, from 1, among n sorted scores (J, n) and each of (m, J) more."""
    low = ordered[:, rank - 2] if rank >= 2 else new.new_full(new.shape[1:], -torch.inf)
    high = ordered[:, rank - 1] if rank <= ordered.shape[1] else new.new_full(new.shape[1:], torch.inf)
    return torch.minimum(torch.maximum(new, low), high)


def held_out_scores(federation: Federation, which: Which, folds: Sequence[Fold], samples: int = DRAWS) -> list[Tensor]:
    """Return by client the scores of its held-out rows by a model, fold by fold."""
    found: list[list[Tensor]] = [[] for _ in folds[0][1]]
    for i, own in enumerate(found):
        for index, sets in folds:
            if len(sets[i]):
                outputs = trained_model(federation, which, i, index).outputs(samples)(federation.batch_of(sets[i]).x)
                own.append(model_scores(federation.model.likelihood, outputs).float().cpu())
    return [torch.cat(own) if own else torch.empty(0) for own in found]


def held_out_distances(federation: Federation, folds: Sequence[Fold], most: int = COMPONENTS) -> list[Tensor]:
    """Return by client the distances of its held-out rows from the training rows of their fold."""
    shards = federation.shards
    found: list[list[Tensor]] = [[] for _ in folds[0][1]]
    for i, (own, rows) in enumerate(zip(found, shards.train, strict=True)):
        for _, sets in folds:
            if len(sets[i]):
                inputs = fit_inputs(shards.x[rows[~torch.isin(rows, sets[i])]], most)
                own.append(distances(shards.x[sets[i]], inputs))
    return [torch.cat(own) if own else torch.empty(0) for own in found]
