"""Forget a client: take its contribution out, train on, and compare with a federation that never had it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError, nearest
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import Method
from pfedbayes.nets import Init

OTHER_SEED = 2**31  # added to the seed of the second retrained federation


@dataclass(frozen=True)
class Forgotten:
    """What it takes to forget a client, and how much of the client is left.

    Distances are mean differences of predictions from those of a retrained federation, on the other clients' test data:
    total variation of probabilities, or absolute differences of numbers.
    """

    client: str
    method: str
    has_factors: bool
    """Whether the method can take a client's contribution out."""
    rounds: int
    """Rounds that were trained after that."""
    distances: dict[str, float]
    """Distances by what is compared with the retrained federation."""
    seconds: float | None
    """Time to forget by taking the contribution out."""
    retraining_seconds: float
    """Time to train again without the client."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    def describe(self) -> list[str]:
        """Return the result in sentences."""
        lines = [f"Distance from {self.method} trained again without {self.client}:"]
        lines += [f"  {what:<34}{value:.4f}" for what, value in self.distances.items()]
        again = f"Training again takes {self.retraining_seconds:.1f} s."
        if not self.has_factors:
            return [
                *lines,
                f"{self.method} keeps no factor per client, so it cannot take one out. The only way to forget is to "
                "train again.",
                again,
            ]
        return [
            *lines,
            f"Taking the factor out and training {self.rounds} rounds takes {self.seconds:.1f} s. {again}",
            "This is exact only at a fixed point of a conjugate model. Elsewhere the other factors were fitted in the "
            "client's presence, and only training again forgets for certain.",
        ]


def has_factors(method: Method) -> bool:
    """Return whether a method can take a client's contribution out; it follows from overriding `leave`."""
    return type(method).leave is not Method.leave


def without_client(shards: Shards, client: int) -> Shards:
    """Return the shards of the other clients."""
    kept = [i for i in range(len(shards.names)) if i != client]

    def of_others(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(rows[i] for i in kept) if rows else ()

    return dataclasses.replace(
        shards,
        train=of_others(shards.train),
        test=of_others(shards.test),
        validation=of_others(shards.validation),
        names=tuple(shards.names[i] for i in kept),
        certify=of_others(shards.certify),
    )


def forget(
    federation: Federation, client: str, rounds: int = 5, init: Init | None = None
) -> tuple[Forgotten, Federation]:
    """Forget a client of a trained federation; return the report, and the federation without it.

    rounds: to train after the contribution is out. init: how the run initialised its network. The federation is that of
    the first seed. Without factors it is the retrained one.
    """
    names = federation.shards.names
    if client not in names:
        raise UserError(f"there is no client {client!r}: {nearest(client, names)}")
    if federation.num_clients != len(names):
        raise UserError(f"{federation.method.about.title} pools the data, so it has no clients to forget: train again")
    if len(names) < 2:
        raise UserError(f"{client} is the only client: nothing is left without it")
    index, seed = names.index(client), federation.seeds[0]
    others = without_client(federation.shards, index)
    retrained, retraining = _timed(
        _train, _federation(federation, others, (seed, seed + OTHER_SEED), init), federation.round
    )
    distances = {"with the client": _distance(federation, retrained, 0, index)}
    found, seconds = retrained, None
    if has_factors(federation.method):
        left = _federation(federation, others, (seed,), init)
        _take_out(federation, left, index)
        distances["factor taken out"] = _distance(left, retrained, 0, None)
        found, seconds = _timed(_train, left, federation.round + rounds)
        distances[f"and {rounds} rounds more"] = _distance(left, retrained, 0, None)
    distances["trained again with another seed"] = _distance(retrained, retrained, 1, None)
    title = federation.method.about.title
    report = Forgotten(
        client, title, seconds is not None, rounds if seconds is not None else 0, distances, seconds, retraining
    )
    return report, found


def _federation(like: Federation, shards: Shards, seeds: Sequence[int], init: Init | None) -> Federation:
    """Return a federation with the method and the settings of another, at round 0."""
    training = like.training
    count = training.participants
    training = dataclasses.replace(
        training, participants=None if count is None else min(count, len(shards.names)), patience=None
    )
    plan = dataclasses.replace(like.plan, compile=False, resting=None)
    return Federation(shards, like.model, like.method, training, seeds, init, plan)


def _train(federation: Federation, until: int) -> Federation:
    for _ in federation.rounds(until):
        pass
    federation.confirm()
    return federation


def _timed(train: Any, federation: Federation, until: int) -> tuple[Federation, float]:
    start = time.monotonic()
    trained: Federation = train(federation, until)
    return trained, time.monotonic() - start


def _take_out(federation: Federation, left: Federation, client: int) -> None:
    """Give a federation of the other clients their states and the server's without the client's contribution."""
    others = [i for i in range(federation.num_clients) if i != client]
    kept = pick(federation.client_states([client]), 0)
    server = federation.method.leave(federation.servers[0], client, kept)
    left.population.put(range(len(others)), federation.client_states(others))
    left.state = dataclasses.replace(left.state, round=federation.round, servers=(server,))


def _distance(federation: Federation, retrained: Federation, seed: int, client: int | None) -> float:
    """Return the mean difference between the predictions of a federation's models and the retrained ones.

    seed: which federation of the first argument. client: the client that the retrained federation does not have.
    """
    which = federation.models()[-1]  # the shared model if there is one
    shards, gaps = retrained.shards, []
    for i in range(len(shards.names)):
        x = shards.x[shards.test[i] if len(shards.test[i]) else shards.train[i]]
        own = i if client is None or i < client else i + 1
        pair = (federation.predict(which, own, x, None, seed), retrained.predict(which, i, x, None, 0))
        gaps.append(_difference(*pair, classes=shards.num_classes))
    return float(torch.cat(gaps).mean())


def _difference(one: Tensor, other: Tensor, classes: int | None) -> Tensor:
    """Return the difference of each prediction (n,)."""
    if classes is None:
        return (one - other)[0].abs().flatten(1).mean(1)
    return 0.5 * (one[0].softmax(-1) - other[0].softmax(-1)).abs().sum(-1)
