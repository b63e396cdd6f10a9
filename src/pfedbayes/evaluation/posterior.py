"""The posterior over the weights of one trained model. Serving, certificates and export use it.

A trained model is a method's state, either a client's or the server's. It becomes a function from inputs to outputs
whose random draws are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.models import FederatedModels, members_of, personal_state, shared_state
from pfedbayes.evaluation.posthoc import num_drawn
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.random import Purpose, key, normal
from pfedbayes.maths.trees import leaves, tree_map
from pfedbayes.memory import host_memory, refuse_too_large
from pfedbayes.methods.base import Method, State, weights_posterior
from pfedbayes.nets import Model

OutputFunction = Callable[[Tensor], Tensor]
"""Maps inputs (n, ...) to outputs (K, n, ...), one per weight draw."""
ROWS_AT_ONCE = 5000


@dataclass(frozen=True, eq=False)
class Weights:
    """Independent Gaussians over the weights of a network, or the weights of a single network."""

    model: Model
    """Network and likelihood."""
    mean: Tensor
    """Means (T,)."""
    deviation: Tensor | None
    """Standard deviations (T,); None for a single network."""
    seed: int
    """Seed of the weight draws, which are made on the CPU."""

    def outputs(self, samples: int) -> OutputFunction:
        """Return the output function for `samples` weight draws; for a single network, K is 1."""
        thetas = self.mean[None]
        if self.deviation is not None:
            refuse_too_large(samples * self.mean.nbytes, host_memory(), "a prediction", "the number of samples")
            noise = normal((samples, len(self.mean)), self.seed, self.mean.dtype, torch.device("cpu"))
            thetas = self.mean + self.deviation * noise.to(self.mean.device)
        return partial(_in_passes, partial(self.model.stacked_outputs, thetas), self.model, thetas)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A client's model or the shared one after training."""

    method: Method
    model: Model
    """Network and likelihood, as the execution plan computes them."""
    state: State
    """The state that the method predicts with."""
    seed: int
    """Seed of the weight draws."""
    others: tuple[TrainedModel, ...] = ()
    """The other members of an ensemble."""

    @property
    def weights(self) -> Weights | None:
        """The posterior over the weights; None if the model is more than a Gaussian or the weights of a network."""
        q, about = self.method.posterior(self.state), self.method.about
        if q is None or self.others or (about.stochastic and not about.gaussian):
            return None
        return Weights(self.model, q.mu, q.sigma, self.seed) if about.gaussian else Weights(self.model, q.mu, None, 0)

    def outputs(self, samples: int) -> OutputFunction:
        """Return the output function, with `samples` weight draws if the method has a distribution over weights."""
        if self.others:
            members = [member.outputs(samples) for member in (replace(self, others=()), *self.others)]
            return lambda x: torch.cat([outputs(x) for outputs in members])
        weights = self.weights
        if weights is not None:
            return weights.outputs(samples)
        like = next(leaf for leaf in leaves(self.state) if leaf.is_floating_point())
        noise = None
        if self.method.about.stochastic:
            shape = samples, num_drawn(self.method, self.model.net)
            noise = normal(shape, self.seed, like.dtype, torch.device("cpu")).to(like.device)
        predict = partial(self.method.predict, self.model, self.state, noise=noise)
        return partial(_in_passes, predict, self.model, like)


def _in_passes(predict: OutputFunction, model: Model, like: Tensor, x: Tensor) -> Tensor:
    """Return the outputs (K, n, ...) of x (n, ...), a few thousand rows at a time, in the data type of `like`."""
    rows = ROWS_AT_ONCE // 20 if model.net.convolutional else ROWS_AT_ONCE
    x = x.to(like.device, like.dtype if x.is_floating_point() else None)
    with torch.no_grad():
        return torch.cat([predict(part) for part in torch.split(x, rows)], dim=1)


def draw_seed(seed: int, which: Which, round: int, client: int) -> int:
    """Return the seed of a model's weight draws after a round; all clients share those of the shared model."""
    if which == "personal":
        return key(seed, Purpose.PERSONAL_PREDICTION, round, client)
    return key(seed, Purpose.SHARED_PREDICTION, round)


def trained_model(federation: FederatedModels, which: Which, client: int, seed_index: int = 0) -> TrainedModel:
    """Return a client's model, or the shared one, of a federation that is in memory."""

    def member(s: int) -> TrainedModel:
        state = personal_state(federation, client, s) if which == "personal" else shared_state(federation, s, client)
        seed = draw_seed(federation.seed(s), which, federation.round, client)
        return TrainedModel(federation.method, federation.model, state, seed)

    first, *others = (member(s) for s in members_of(federation, seed_index))
    return replace(first, others=tuple(others))


def personal_posterior(
    federation: FederatedModels, client: int, seed_index: int = 0, dtype: torch.dtype | None = None
) -> MeanField:
    """Return the posterior of a client's model, computed in `dtype` if given."""
    state = personal_state(federation, client, seed_index)
    return weights_posterior(federation.method, tree_map(lambda leaf: leaf.to(dtype or leaf.dtype), state))
