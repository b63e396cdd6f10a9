"""kNN-Per (Marfoq et al. 2022): FedAvg's predictions, mixed with those of the client's nearest training examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.constraints import Count, Interval, NonNegative, Positive
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Adaptation, LocalModel, Method, Needs, State
from pfedbayes.nets import Batch, Model

GRID = 11  # weights between 0 and 1 that are tried


class Personal(NamedTuple):
    """A personal model at prediction time."""

    theta: Tensor
    """The shared model."""
    z: Tensor
    """Features of the client's training examples (n, F)."""
    y: Tensor
    """Their labels (n,)."""
    weight: Tensor
    """The weight lambda of the neighbours."""


@dataclass(frozen=True)
class KNNPer(Method):
    """p = lambda p_knn + (1 - lambda) p_w. Neighbours vote with weights exp(-d^2 / (F scale)).

    d is the distance of their features, the F inputs of the last layer. The authors' script chooses lambda on test data
    and mixes logits with probabilities; here lambda comes from leave-one-out predictions of the training examples, and
    probabilities are mixed. The shared model has seen these examples, so lambda tends to be small.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of FedAvg's local SGD steps."""
    neighbours: Count = 10
    """Number k of neighbours. The default rests on memory of the paper."""
    scale: Positive[float] = 1.0
    """Scale of squared distances."""
    mix: Annotated[float, Interval(at_least=0, at_most=1)] | None = None
    """The weight lambda of the neighbours; None to choose it for each client."""

    about = About(
        "kNN-Per",
        "Marfoq et al., ICML 2022",
        "one shared model as FedAvg does, beside which a client asks its own nearest examples",
        personal=True,
    )

    @property
    def needs(self) -> Needs:
        return Needs(labels=True, keeps_examples=True)

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return LocalModel(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta))

    def prepare(self, data: Adaptation) -> Batch:
        """Return the client's whole training set."""
        return data.train

    def adapt(self, model: Model, client: State, received: Tensor, prepared: Batch) -> Personal:
        """Remember the features of the training set, and choose lambda by leave-one-out predictions of it."""
        z, logits = self._features(model, received, prepared.x)
        if self.mix is not None or len(z) < 2:
            return Personal(received, z, prepared.y, z.new_zeros(()) + (self.mix or 0.0))
        distances = _squared_distances(z, z)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        by_neighbours = self._vote(distances.masked_fill(itself, math.inf), prepared.y, logits.shape[-1], len(z) - 1)
        weights = torch.linspace(0, 1, GRID, dtype=z.dtype, device=z.device)
        of_truth = functional.one_hot(prepared.y, logits.shape[-1]).bool()
        log_probs = _mixed(weights[:, None, None], by_neighbours, logits)
        nll = -torch.where(of_truth, log_probs, 0.0).sum((1, 2))
        return Personal(received, z, prepared.y, weights[nll.argmin()])

    def posterior(self, state: Personal | Tensor) -> MeanField | None:
        """Return None for a personal model: the remembered examples are more than the weights of the network."""
        return super().posterior(state) if isinstance(state, Tensor) else None

    def predict(self, model: Model, state: Personal | Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return log-probabilities (1, n, C) of a personal model, logits (1, n, C) of the shared one."""
        if isinstance(state, Tensor):
            return model.outputs(state, x)[None]
        z, logits = self._features(model, state.theta, x)
        by_neighbours = self._vote(_squared_distances(z, state.z), state.y, logits.shape[-1], len(state.z))
        return _mixed(state.weight, by_neighbours, logits)[None]

    def _features(self, model: Model, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, F) and logits (n, C) of the shared model."""
        z = model.net.features(theta, model.inputs(x, theta.dtype))
        return z, model.outputs(theta, x)

    def _vote(self, distances: Tensor, y: Tensor, num_classes: int, others: int) -> Tensor:
        """Return p_knn (n, C) from squared distances (n, m) to examples with labels y (m,), of which `others` count."""
        nearest, place = distances.topk(min(self.neighbours, others), largest=False)
        votes = (-nearest / self.scale).softmax(-1)
        return (votes[..., None] * functional.one_hot(y[place], num_classes)).sum(-2)


def _squared_distances(z: Tensor, others: Tensor) -> Tensor:
    """Return squared distances (n, m) divided by the number F of features."""
    gaps = z.square().sum(-1)[:, None] + others.square().sum(-1) - 2 * z @ others.mT
    return gaps.clamp_min(0) / z.shape[-1]


def _mixed(weight: Tensor, by_neighbours: Tensor, logits: Tensor) -> Tensor:
    """Return log(weight p_knn + (1 - weight) p_w)."""
    mixed = weight * by_neighbours + (1 - weight) * logits.softmax(-1)
    return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
