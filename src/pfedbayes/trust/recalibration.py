"""Recalibration: a map of predictions, fitted on rows that a model was not trained on, that makes its confidence right.

For labels, log p' = tau log p + bias, normalised: a temperature 1 / tau, and perhaps one bias per class. For numbers,
the predictive distribution is stretched about its mean by the factor c. Each client has its own log tau or log c, with
a Gaussian prior around that of the federation: a client with few rows takes the federation's. Biases belong to the
federation.

Cross-validation chooses between no map, a temperature, and a temperature with biases, and how much clients may differ.
No map wins unless another improves the mean loss of all left-out rows by more than its standard error, or by more than
twice that if the rows were predicted by other models than the final ones, as in folds: these train on fewer rows, so
they need another map.

All this uses a smoothed loss, which adds one pseudo-row to all rows: it is predicted like an average row, and its label
is a wrong one. By Laplace's rule of succession, new rows can be wrong even if no row has been. Otherwise a map would
make an accurate model over-confident.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FOLDS = 5
LEAST_ROWS = 20  # with fewer rows of all clients together there is no map
LIMIT = 2.0  # largest absolute log tau or log c
GRID = torch.linspace(-LIMIT, LIMIT, 81, dtype=torch.float64)
PRIOR = 0.5  # prior standard deviation of the federation's log tau or log c
SPREADS = (0.0, 0.1, 0.3)  # prior standard deviations of a client's around the federation's
BIAS_PRIOR = 0.3  # prior standard deviation of a bias
NEWTON_STEPS = 20
AT_ONCE = 2**22  # logits that are computed in one pass


@dataclass(frozen=True, eq=False)
class Map:
    """The map of one model."""

    log_factor: float = 0.0
    """log tau for labels, log c for numbers."""
    bias: Tensor | None = None
    """Bias (C,) of each class."""

    @property
    def is_raw(self) -> bool:
        """Whether the map changes nothing."""
        return self.log_factor == 0 and self.bias is None

    @property
    def factor(self) -> float:
        """tau for labels, c for numbers."""
        return math.exp(self.log_factor)

    def of_labels(self, log_probs: Tensor) -> Tensor:
        """Return calibrated log-probabilities (..., C)."""
        return log_probs if self.is_raw else sharpened(log_probs, torch.tensor(self.log_factor), self.bias)


RAW = Map()


def sharpened(log_probs: Tensor, log_factor: Tensor, bias: Tensor | None) -> Tensor:
    """Return calibrated log-probabilities (..., C), for factors () or (n, 1) and biases (C,) or (n, C)."""
    logits = log_factor.exp().to(log_probs) * log_probs
    return (logits if bias is None else logits + bias.to(logits)).log_softmax(-1)


@dataclass(frozen=True, eq=False)
class Maps:
    """The maps of all clients for one kind of model."""

    log_factors: Tensor
    """Of each client, then of the federation: (N + 1,), in double precision."""
    bias: Tensor | None = None
    """Bias (C,) of each class, in double precision."""

    def of(self, client: int | None) -> Map:
        """Return the map of a client; that of the federation for none."""
        return Map(float(self.log_factors[-1 if client is None else client]), self.bias)

    @property
    def is_raw(self) -> bool:
        """Whether the maps change nothing."""
        return self.bias is None and not bool(self.log_factors.any())


class Rows(NamedTuple):
    """The losses of one client's rows under any map, and how they are divided for cross-validation."""

    losses: Callable[[Tensor, Tensor | None, float], Tensor]
    """Losses (n, G) for log factors (n, G), biases (n, C) or None, and the share of a pseudo-row in each row."""
    fold: Tensor
    """The fold (n,) of each row, from 0 on."""
    labels: tuple[Tensor, Tensor] | None = None
    """Log-probabilities (n, C) and labels (n,); None for numbers."""


class Fitted(NamedTuple):
    """Maps for new rows, and for the rows that they were fitted on."""

    maps: Maps
    without_fold: list[Maps]
    """The maps that were fitted without each fold: they have not seen its rows."""
    raw_loss: float
    """Mean loss of all rows without a map."""
    loss: float
    """Mean loss of all rows under the maps that have not seen them."""

    def unseen(self, client: int, fold: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log factors (n, 1) and biases (n, C), for rows of these folds (n,), that have not seen these rows."""
        return unseen_maps(self.without_fold, client, fold)


def unseen_maps(without_fold: Sequence[Maps], client: int, fold: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return log factors (n, 1) and biases (n, C) of a client for rows of these folds (n,)."""
    factors = torch.stack([maps.log_factors[client] for maps in without_fold])[fold, None]
    biases = [maps.bias for maps in without_fold if maps.bias is not None]
    return factors, torch.stack(biases)[fold] if biases else None


def label_rows(log_probs: Tensor, y: Tensor, fold: Tensor) -> Rows:
    """Return the rows of a classification.

    The label of the pseudo-row is the most probable one that is not the true label of the row.
    """
    log_probs = log_probs.double().clamp_min(-1e4)

    def losses(log_factors: Tensor, bias: Tensor | None, pseudo: float) -> Tensor:
        parts = []
        at_once = max(1, AT_ONCE // (log_factors.shape[1] * log_probs.shape[1]))
        shift = torch.zeros(len(y), 1) if bias is None else bias
        for x, labels, factors, own in zip(
            *(torch.split(each, at_once) for each in (log_probs, y, log_factors, shift)), strict=True
        ):
            logits = factors.exp()[..., None] * x[:, None]
            logits = logits if bias is None else logits + own[:, None]
            place = labels[:, None, None].expand(*logits.shape[:-1], 1)
            total, true = logits.logsumexp(-1), logits.gather(-1, place).squeeze(-1)
            other = logits.scatter(-1, place, -torch.inf).amax(-1) if pseudo else true
            parts.append((1 + pseudo) * total - true - pseudo * other)
        return torch.cat(parts)

    return Rows(losses, fold, (log_probs, y))


def number_rows(log_density: Callable[[Tensor], Tensor], mean: Tensor, y: Tensor, fold: Tensor) -> Rows:
    """Return the rows of a regression. log_density: of the prediction (G, n) at targets (G, n, d); mean, y: (n, d).

    There is no pseudo-row.
    """

    def losses(log_factors: Tensor, bias: Tensor | None, pseudo: float) -> Tensor:
        wanted = log_factors.to(y).T
        stretched = mean + (y - mean) / wanted.exp()[..., None]
        return (y.shape[-1] * wanted - log_density(stretched)).T.double()

    return Rows(losses, fold)


def fit(clients: Sequence[Rows], margin: float = 1.0) -> Fitted:
    """Return the maps with the smallest loss by cross-validation.

    margin: improve on no map by more than this many standard errors.
    """
    folds = max((int(rows.fold.max()) + 1 for rows in clients if len(rows.fold)), default=0)
    raw = Maps(torch.zeros(len(clients) + 1, dtype=torch.float64))
    pseudo = 1 / max(1, sum(len(rows.fold) for rows in clients))

    def unseen_losses(maps: Sequence[Maps], share: float) -> Tensor:
        parts = [
            rows.losses(*unseen_maps(maps, i, rows.fold), share)[:, 0]
            for i, rows in enumerate(clients)
            if len(rows.fold)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    raw_losses, raw_smoothed = (unseen_losses([raw] * folds, share) for share in (0.0, pseudo))
    without = Fitted(raw, [raw] * folds, float(raw_losses.mean()) if len(raw_losses) else 0.0, 0.0)
    without = without._replace(loss=without.raw_loss)
    if len(raw_losses) < LEAST_ROWS or folds < 2 or not bool(raw_losses.isfinite().all()):
        return without
    best, least = without, float(raw_smoothed.mean())
    for with_bias in (False, True) if all(rows.labels for rows in clients if len(rows.fold)) else (False,):
        biases = [_bias(clients, k) if with_bias else None for k in (*range(folds), -1)]
        sums = (
            [_sums(clients, bias, folds, pseudo) for bias in biases]
            if with_bias
            else [_sums(clients, None, folds, pseudo)] * (folds + 1)
        )
        for spread in SPREADS:
            maps = [_maps(sums[k], k, spread, bias) for k, bias in enumerate(biases)]
            smoothed = unseen_losses(maps[:-1], pseudo)
            gain, mean = raw_smoothed - smoothed, float(smoothed.mean())
            error = float(gain.std()) / math.sqrt(len(gain))
            if mean < least and float(gain.mean()) > margin * error:
                loss = float(unseen_losses(maps[:-1], 0.0).mean())
                if loss < without.raw_loss:
                    best, least = Fitted(maps[-1], maps[:-1], without.raw_loss, loss), mean
    return best


def _sums(clients: Sequence[Rows], bias: Tensor | None, folds: int, pseudo: float) -> Tensor:
    """Return the summed losses (N, folds, G) of each client and fold on the grid."""
    sums = torch.zeros(len(clients), folds, len(GRID), dtype=torch.float64)
    for i, rows in enumerate(clients):
        if len(rows.fold):
            size = len(rows.fold)
            biases = None if bias is None else bias.expand(size, -1)
            sums[i].index_add_(0, rows.fold, rows.losses(GRID.expand(size, -1), biases, pseudo))
    return sums


def _maps(sums: Tensor, fold: int, spread: float, bias: Tensor | None) -> Maps:
    """Return the maps that are fitted without a fold, or on all rows if there is no such fold."""
    kept = torch.arange(sums.shape[1]) != fold
    of_clients = sums[:, kept].sum(1)
    shared = _lowest(of_clients.sum(0) + 0.5 * (GRID / PRIOR).square())
    near = shared.expand(len(sums))
    own = _lowest(of_clients + 0.5 * ((GRID - shared) / spread).square()) if spread else near
    return Maps(torch.cat([own, shared[None]]), bias)


def _lowest(losses: Tensor) -> Tensor:
    """Return where losses (..., G) on the grid are smallest (...), by the parabola through the three lowest points."""
    place = losses.argmin(-1).clamp(1, len(GRID) - 2)
    left, middle, right = (losses.gather(-1, (place + k)[..., None]).squeeze(-1) for k in (-1, 0, 1))
    bend = (left - 2 * middle + right).clamp_min(1e-12)
    step = float(GRID[1] - GRID[0])
    return (GRID[place] + (0.5 * step * (left - right) / bend).clamp(-step, step)).clamp(-LIMIT, LIMIT)


def _bias(clients: Sequence[Rows], fold: int) -> Tensor:
    """Return the biases (C,) that fit the rows of all clients, together with one tau, by Newton's method.

    fold: leave out its rows; -1 leaves out none. The loss is convex in (tau, bias), and its prior makes it strictly so.
    """
    pairs = [(rows.labels, rows.fold) for rows in clients if rows.labels is not None and len(rows.fold)]
    kept = [(log_probs[own != fold], y[own != fold]) for (log_probs, y), own in pairs]
    x, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
    classes = x.shape[1]
    truth = torch.nn.functional.one_hot(y, classes).double()
    precision = torch.tensor([1 / PRIOR**2] + [1 / BIAS_PRIOR**2] * classes, dtype=torch.float64)
    centre = torch.tensor([1.0] + [0.0] * classes, dtype=torch.float64)

    def loss(at: Tensor) -> float:
        logits = at[0] * x + at[1:]
        fit = (logits.logsumexp(-1) - (truth * logits).sum(-1)).sum()
        return float(fit + 0.5 * (precision * (at - centre).square()).sum())

    at = centre.clone()
    for _ in range(NEWTON_STEPS):
        p = (at[0] * x + at[1:]).softmax(-1)
        off = p - truth
        grad = torch.cat([(off * x).sum()[None], off.sum(0)]) + precision * (at - centre)
        cross = (p * (x - (p * x).sum(-1, keepdim=True))).sum(0)
        hessian = torch.diag(precision)
        hessian[0, 0] += (p * x.square()).sum() - (p * x).sum(-1).square().sum()
        hessian[0, 1:] += cross
        hessian[1:, 0] += cross
        hessian[1:, 1:] += torch.diag(p.sum(0)) - p.T @ p
        step, now = torch.linalg.solve(hessian, grad), loss(at)
        while loss(at - step) > now and float(step.abs().max()) > 1e-12:
            step = step / 2
        at = at - step
        if float(step.abs().max()) < 1e-8:
            break
    return at[1:]
