"""Uncertainty of deterministic methods, added after training: methods around another method.

Training is that of the method inside, to the last bit.

- `Laplace`: a Gaussian over the last layer, from the curvature of the loss on the training data.
- `Swag`: a Gaussian over all weights, from the models after the last rounds.
- `Ensemble`: the average prediction of the federations of several seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.methods.base import About, Adaptation, Habits, Limits, Method, Needs, Shard, State, adapts
from pfedbayes.nets import Batch, Model, Net


@dataclass(frozen=True)
class PostHoc(Method):
    """A method around another one, which does everything."""

    method: Method
    """The method inside."""

    @property
    def about(self) -> About:  # type: ignore[override]
        return self.method.about

    @property
    def habits(self) -> Habits:  # type: ignore[override]
        return self.method.habits

    @property
    def needs(self) -> Needs:
        return self.method.needs

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> State:
        return self.method.init(theta, num_clients, net)

    def download(self, server: State, clients: Tensor) -> State:
        return self.method.download(server, clients)

    def aggregate(self, server: State, uploads: State, sizes: Tensor, clients: Tensor) -> State:
        return self.method.aggregate(server, uploads, sizes, clients)

    def leave(self, server: State, client: int, kept: State) -> State:
        return self.method.leave(server, client, kept)

    def check_upload(self, server: State, upload: State, limits: Limits) -> str | None:
        return self.method.check_upload(server, upload, limits)

    # Client

    def enrol(self, received: State) -> State:
        return self.method.enrol(received)

    def begin(self, client: State, received: State, shard: Shard) -> State:
        return self.method.begin(client, received, shard)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return self.method.noise_shape(model, batch_size)

    def step(self, model: Model, local: State, batches: tuple[Batch, ...], noise: Tensor) -> State:
        return self.method.step(model, local, batches, noise)

    def end(self, local: State) -> tuple[State, State]:
        return self.method.end(local)

    # Prediction

    def drawn(self, net: Net) -> int:
        """Return how many standard normal numbers a draw of a model takes in `predict`."""
        return net.num_params

    def posterior(self, state: State) -> MeanField | None:
        return self.method.posterior(state)

    def predict(self, model: Model, state: State, x: Tensor, noise: Tensor | None) -> Tensor:
        return self.method.predict(model, state, x, noise)

    def weights_of(self, state: State) -> Tensor:
        """Return the weights theta (T,) of a model of the method inside."""
        q = self.method.posterior(state)
        if q is None:
            raise UserError(
                f"{self.method.about.title} has models that are more than the weights of a network: set "
                "evaluation.posterior=ensemble, or leave it out"
            )
        return q.mu


@dataclass(frozen=True)
class Ensemble(PostHoc):
    """The federations of all seeds predict together. The evaluation averages their probabilities for each client."""

    @property
    def about(self) -> About:  # type: ignore[override]
        return self.method.about._replace(title=f"{self.method.about.title}, ensemble")

    def views(self, client: State, received: State) -> dict[str, State]:
        return self.method.views(client, received)


class _AdaptingEnsemble(Ensemble):
    """An ensemble of a method that adapts models at prediction time."""

    def prepare(self, data: Adaptation) -> State:
        return self.method.prepare(data)

    def adapt(self, model: Model, client: State, received: State, prepared: State) -> State:
        return self.method.adapt(model, client, received, prepared)


def ensemble(method: Method) -> Ensemble:
    """Return the ensemble of a method."""
    return (_AdaptingEnsemble if adapts(method) else Ensemble)(method)


def num_drawn(method: Method, net: Net) -> int:
    """Return how many standard normal numbers a draw of a model takes in `predict`: T but for some posteriors."""
    return method.drawn(net) if isinstance(method, PostHoc) else net.num_params
