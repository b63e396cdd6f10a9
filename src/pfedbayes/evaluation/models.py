"""The models of a federation: what evaluation reads of them, and the states that clients predict with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.evaluation.estimators import ENSEMBLE, MODELS, Which
from pfedbayes.evaluation.laplace import Laplace
from pfedbayes.evaluation.posthoc import Ensemble
from pfedbayes.maths.random import Purpose, key
from pfedbayes.maths.trees import concat, group_by_shapes, pick, stack
from pfedbayes.methods.base import Adaptation, Method, State, adapts
from pfedbayes.nets import Batch, Model

# Examples that are predicted at once: a CPU is busy with few, a GPU only with many.
ROWS_AT_ONCE = {"cpu": 5000, "cuda": 130_000}


class Execution(Protocol):
    """What evaluation reads of a plan."""

    @property
    def over(self) -> Literal["vmap", "loop"]:
        """Whether clients are computed together or one after another."""

    @property
    def chunk(self) -> int | None:
        """The largest number of clients to compute together."""

    def activate(self) -> None:
        """Set torch's global switches."""


class FederatedModels(Protocol):
    """The models of one federation per seed, as they are now. Member s * num_clients + i is client i of seed s."""

    @property
    def method(self) -> Method: ...

    @property
    def model(self) -> Model:
        """The model as it is trained."""

    @property
    def predictor(self) -> Model:
        """The same model, computed in the way that is fastest for prediction."""

    @property
    def plan(self) -> Execution: ...

    @property
    def data(self) -> ClientData: ...

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the federations that are evaluated."""

    def seed(self, index: int) -> int:
        """Return the seed of a federation, evaluated or not."""

    @property
    def round(self) -> int:
        """The number of rounds trained so far."""

    @property
    def servers(self) -> Sequence[State]:
        """The server's state of each seed."""

    def server_of(self, index: int, client: int) -> State:
        """Return the state of the server of a client: where clients train alone, each has its own."""

    def server_rows(self, index: int, client: int) -> torch.Tensor:
        """Return the pool rows of the training sets of all clients of that server."""

    @property
    def training_at_once(self) -> int:
        """The number of members that train in a round."""

    def client_states(self, members: Sequence[int]) -> State:
        """Return the stacked states of these members; new clients start from what they receive."""

    def download(self, seed_index: int, clients: Sequence[int]) -> State:
        """Return what these clients receive from the server, stacked."""


def available_models(method: Method) -> list[Which]:
    """Return which of the two models the method has."""
    return [which for which in MODELS if getattr(method.about, which)]


def headline_estimator(method: Method, samples: int) -> str:
    """Return the estimator whose scores are the method's result."""
    if isinstance(method, Ensemble):
        return ENSEMBLE
    return f"mc{samples}" if method.about.stochastic else "mean"


def rows_at_once(federation: FederatedModels) -> int:
    """Return how many examples are predicted at once."""
    rows = ROWS_AT_ONCE["cpu" if federation.data.device.type == "cpu" else "cuda"]
    return rows // 20 if federation.model.net.convolutional else rows  # the activations of images are large


def personal_state(federation: FederatedModels, client: int, seed_index: int = 0, test: Batch | None = None) -> State:
    """Return the state that a client predicts with; a client that has not taken part yet uses the shared model."""
    state = pick(federation.client_states([seed_index * federation.data.num_clients + client]), 0)
    if not adapts(federation.method):
        return state
    received = pick(federation.download(seed_index, [client]), 0)
    prepared = _prepare(federation, client, seed_index, test)
    return federation.method.adapt(federation.model, state, received, prepared)


def personal_states(
    federation: FederatedModels, seeds: Sequence[int], clients: Sequence[int], rows: torch.Tensor
) -> State:
    """Return the stacked states that these clients of these seeds predict with; rows (c, n): what they predict."""
    method, data, plan = federation.method, federation.data, federation.plan
    states = federation.client_states([s * data.num_clients + i for s in seeds for i in clients])
    if not adapts(method):
        return states
    received = concat([federation.download(s, clients) for s in seeds])
    tests = [data.batch_of(own) for own in rows]
    members = [(i, s, test) for s in seeds for i, test in zip(clients, tests, strict=True)]
    at_once = 1
    if not method.needs.loop and plan.over == "vmap":
        at_once = plan.chunk or max(1, rows_at_once(federation) // int(data.batch_sizes.max()))
        at_once = min(at_once, method.needs.at_once or at_once)
    parts = []
    for part in slices(len(members), at_once):
        prepared = [_prepare(federation, *each) for each in members[part]]
        parts.append(_adapt(federation, pick(states, part), pick(received, part), prepared))
    return concat(parts)


def _adapt(federation: FederatedModels, states: State, received: State, prepared: Sequence[State]) -> State:
    """Adapt stacked members, together where their prepared data have the same shapes."""
    adapt = partial(federation.method.adapt, federation.model)
    if len(prepared) == 1:
        return stack([adapt(pick(states, 0), pick(received, 0), prepared[0])])
    groups = group_by_shapes(prepared)
    parts = [
        torch.func.vmap(adapt)(pick(states, some), pick(received, some), stack([prepared[k] for k in some]))
        for some in groups
    ]
    order = torch.tensor(list(chain.from_iterable(groups)), device=federation.data.device)
    return pick(concat(parts), order.argsort())


def _prepare(federation: FederatedModels, client: int, seed_index: int, test: Batch | None) -> State:
    """Return what the method adapts a client's model with, drawn anew every round."""
    data = federation.data
    member = seed_index * data.num_clients + client
    train = data.batch_of(data.train_sets[member])
    validation = data.batch_of(data.shards.validation[client])
    seed = key(federation.seed(seed_index), Purpose.ADAPTATION, federation.round, int(data.numbers[client]))
    batch_size = int(data.batch_sizes[member])
    return federation.method.prepare(Adaptation(train, batch_size, data.shards.num_classes, seed, test, validation))


def members_of(federation: FederatedModels, seed_index: int) -> Sequence[int]:
    """Return the federations that predict in place of one: all that are evaluated, if they are an ensemble."""
    together = isinstance(federation.method, Ensemble) and seed_index < len(federation.seeds)
    return range(len(federation.seeds)) if together else [seed_index]


class _Fitted(NamedTuple):
    """A shared model with its posterior: a pass over the data of all clients made it."""

    server: State
    state: State


_FITTED: WeakKeyDictionary[FederatedModels, dict[int, _Fitted]] = WeakKeyDictionary()  # the last one of each seed


def shared_state(federation: FederatedModels, seed_index: int, client: int = 0) -> State:
    """Return the state that the shared model of a client predicts with."""
    server, method, data = federation.server_of(seed_index, client), federation.method, federation.data
    if not isinstance(method, Laplace):
        return server
    of_all = server is federation.servers[seed_index]  # clients that train alone have servers of their own
    fitted = _FITTED.setdefault(federation, {})
    if of_all and seed_index in fitted and fitted[seed_index].server is server:
        return fitted[seed_index].state
    train, validation = federation.server_rows(seed_index, client), torch.cat(tuple(data.shards.validation))
    batches = (map(data.batch_of, torch.split(rows, rows_at_once(federation))) for rows in (train, validation))
    state = method.shared(federation.model, server, *batches)
    if of_all:
        fitted[seed_index] = _Fitted(server, state)
    return state


def further_views(
    federation: FederatedModels, seeds: Sequence[int], clients: Sequence[int], states: State
) -> dict[str, State]:
    """Return the method's further personal models by name, with a leading member axis."""
    received = concat([federation.download(s, clients) for s in seeds])
    views: dict[str, State] = torch.func.vmap(federation.method.views)(states, received)
    return views


def slices(length: int, step: int) -> list[slice]:
    """Split a length into slices of `step`."""
    return [slice(start, start + step) for start in range(0, length, step)]
