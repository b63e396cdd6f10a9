"""One method with many settings at once: its hyper-parameters are tensors, with the federations as leading axis."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.stacked import broadcast
from pfedbayes.maths.trees import leaves, tree_map
from pfedbayes.methods.base import About, Adaptation, Habits, Method, Needs, Shard, State, adapts
from pfedbayes.nets import Batch, Model, Net


class Tagged(NamedTuple):
    """A state of the method, with the settings that it follows."""

    values: Tensor
    """The values (k,) of the fields that vary."""
    diverged: Tensor
    """1 if a client of this setting has not been finite; its weights are zero since then."""
    state: State


class TaggedUpload(NamedTuple):
    """What a client sends."""

    diverged: Tensor
    upload: State


@dataclass(frozen=True)
class Varied(Method):
    """A method of which some fields vary between federations that train together.

    Each state carries its own values, so all settings share every shape, every batch and one compilation. A setting
    that diverges is marked and does not end the others.

    The fields must be numbers that enter formulas only: a field on which a method branches cannot vary.
    """

    method: Method
    names: tuple[str, ...]
    """The fields that vary."""

    @property
    def about(self) -> About:  # type: ignore[override]
        return self.method.about._replace(averages=False)

    @property
    def habits(self) -> Habits:  # type: ignore[override]
        return self.method.habits

    @property
    def needs(self) -> Needs:
        """Return those of the method. Its fields are tensors, so its functions have to be mapped."""
        return self.method.needs._replace(mapped=True)

    def _with(self, values: Tensor) -> Method:
        """Return the method with these values of its fields, which are not checked: they are tensors."""
        method = copy.copy(self.method)
        vars(method).update(zip(self.names, values.unbind(-1), strict=True))
        return method

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Tagged:
        """Return the first state of the setting that `method` itself has; others start `tagged`."""
        return self.tagged(self.method, self.method.init(theta, num_clients, net))

    def tagged(self, setting: Method, server: State) -> Tagged:
        """Return the first server state of a setting, given that of its method alone."""
        like = leaves(server)[0]
        values = torch.tensor([getattr(setting, name) for name in self.names], dtype=like.dtype, device=like.device)
        return Tagged(values, values.new_zeros(()), server)

    def download(self, server: Tagged, clients: Tensor) -> Tagged:
        values, diverged = broadcast((server.values, server.diverged), len(clients))
        return Tagged(values, diverged, self._with(server.values).download(server.state, clients))

    def aggregate(self, server: Tagged, uploads: TaggedUpload, sizes: Tensor, clients: Tensor) -> Tagged:
        after = self._with(server.values).aggregate(server.state, uploads.upload, sizes, clients)
        return Tagged(server.values, torch.maximum(server.diverged, uploads.diverged.amax()), after)

    # Client

    def enrol(self, received: Tagged) -> Tagged:
        return received._replace(state=self._with(received.values).enrol(received.state))

    def begin(self, client: Tagged, received: Tagged, shard: Shard) -> Tagged:
        return received._replace(state=self._with(received.values).begin(client.state, received.state, shard))

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        return self.method.noise_shape(model, batch_size)

    def step(self, model: Model, local: Tagged, batches: tuple[Batch, ...], noise: Tensor) -> Tagged:
        return local._replace(state=self._with(local.values).step(model, local.state, batches, noise))

    def end(self, local: Tagged) -> tuple[Tagged, TaggedUpload]:
        client, upload = self._with(local.values).end(local.state)
        finite = torch.stack([leaf.isfinite().all() for leaf in leaves((client, upload))]).all()
        diverged = torch.maximum(local.diverged, (~finite).to(local.diverged))
        client, upload = tree_map(lambda leaf: torch.where(finite, leaf, torch.zeros_like(leaf)), (client, upload))
        return Tagged(local.values, diverged, client), TaggedUpload(diverged, upload)

    # Prediction

    def posterior(self, state: Tagged) -> MeanField | None:
        return self._with(state.values).posterior(state.state)

    def predict(self, model: Model, state: Tagged, x: Tensor, noise: Tensor | None) -> Tensor:
        return self._with(state.values).predict(model, state.state, x, noise)


class _VariedAdapting(Varied):
    """A method that adapts models at prediction time."""

    def prepare(self, data: Adaptation) -> State:
        return self.method.prepare(data)

    def adapt(self, model: Model, client: Tagged, received: Tagged, prepared: State) -> Tagged:
        state = self._with(received.values).adapt(model, client.state, received.state, prepared)
        return received._replace(state=state)


def varied(methods: Sequence[Method]) -> Varied:
    """Return the method of all these settings, or raise ValueError if they cannot train together."""
    first, names = methods[0], []
    if first.needs.eager:
        raise ValueError(f"{first.about.title} decides by its hyper-parameters on the host: train settings apart")
    for field in fields(first):
        values = [getattr(method, field.name) for method in methods]
        if all(value == values[0] for value in values):
            continue
        if not all(isinstance(value, float) for value in values):
            raise ValueError(f"{field.name} is {values[0]!r} in one setting and another in others: train them apart")
        if 0 in values and any(values):
            raise ValueError(f"{field.name} is 0 in one setting, which may leave out a term: train it apart")
        names.append(field.name)
    return (_VariedAdapting if adapts(first) else Varied)(first, tuple(names))
