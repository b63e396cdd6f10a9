"""SWAG (Maddox et al. 2019) in a federation: the models after the last rounds, of each client and of the server.

One model is collected per round. The paper collects one per epoch, at a constant learning rate, from 75 % of training
on, and keeps 20 differences; the number 20 rests on memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import CountOrZero
from pfedbayes.evaluation.posthoc import PostHoc
from pfedbayes.maths.stacked import broadcast
from pfedbayes.maths.swag import Moments, collected, draws, no_moments
from pfedbayes.methods.base import About, Shard, State, adapts
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state."""

    inner: State
    moments: Moments
    rounds: Tensor
    """Number of rounds so far."""


class Received(NamedTuple):
    """What a client receives."""

    inner: State
    rounds: Tensor


class Client(NamedTuple):
    """What a client keeps."""

    inner: State
    moments: Moments | tuple[()]
    """Those of its personal model, if it has one."""


class Local(NamedTuple):
    """The state of a round."""

    inner: State
    moments: Moments | tuple[()]
    received: Received
    theta: Tensor | tuple[()]
    """The personal model after the last step, if there is one."""


@dataclass(frozen=True)
class Swag(PostHoc):
    """A method that remembers the moments of its models. A model is collected after every round from `start` on."""

    start: CountOrZero = 0
    """Number of rounds before the first model is collected."""
    rank: CountOrZero = 10
    """Number M of differences that are kept; 0 for a diagonal covariance."""

    @property
    def about(self) -> About:  # type: ignore[override]
        inner = self.method.about
        return inner._replace(title=f"{inner.title}, SWAG", stochastic=True, averages=False, mean_only=False)

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        inner = self.method.init(theta, num_clients, net)
        rounds = torch.zeros((), dtype=torch.int64, device=theta.device)
        return Server(inner, no_moments(theta, self.rank), rounds)

    def download(self, server: Server, clients: Tensor) -> Received:
        return Received(self.method.download(server.inner, clients), broadcast(server.rounds, len(clients)))

    def aggregate(self, server: Server, uploads: State, sizes: Tensor, clients: Tensor) -> Server:
        """Aggregate, and collect the shared model."""
        inner, moments = self.method.aggregate(server.inner, uploads, sizes, clients), server.moments
        if self.method.about.shared:
            moments = collected(moments, self.weights_of(inner), server.rounds >= self.start)
        return Server(inner, moments, server.rounds + 1)

    # Client

    def enrol(self, received: Received) -> Client:
        inner = self.method.enrol(received.inner)
        return Client(inner, no_moments(self.weights_of(received.inner), self.rank) if self._personal else ())

    def begin(self, client: Client, received: Received, shard: Shard) -> Local:
        inner = self.method.begin(client.inner, received.inner, shard)
        return Local(inner, client.moments, received, client.moments.mean if client.moments else ())

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        inner = self.method.step(model, local.inner, batches, noise)
        return local._replace(inner=inner, theta=self._theta(model, inner, local) if self._personal else local.theta)

    def end(self, local: Local) -> tuple[Client, State]:
        """Collect the personal model."""
        client, upload = self.method.end(local.inner)
        moments = local.moments
        if moments and isinstance(local.theta, Tensor):
            moments = collected(moments, local.theta, local.received.rounds >= self.start)
        return Client(client, moments), upload

    @property
    def _personal(self) -> bool:
        return self.method.about.personal

    def _theta(self, model: Model, inner: State, local: Local) -> Tensor:
        """Return the weights of the personal model, if the round ended here."""
        client, _ = self.method.end(inner)
        if adapts(self.method):  # these methods need nothing but the received model for it
            client = self.method.adapt(model, client, local.received.inner, ())
        return self.weights_of(client)

    # Prediction

    def posterior(self, state: Client | Server) -> None:
        """Return None: weights that share columns of differences are not independent."""

    def drawn(self, net: Net) -> int:
        return net.num_params + self.rank

    def predict(self, model: Model, state: Client | Server, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return outputs (K, n, ...): of the mean, or of K draws (noise (K, T + M))."""
        moments = state.moments
        assert moments  # noqa: S101, only models that exist predict
        thetas = moments.mean[None] if noise is None else draws(moments, noise)
        return model.stacked_outputs(thetas, x)
