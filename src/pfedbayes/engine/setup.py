"""What a federation is built from: checked once, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.backend.local_training import Views
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.training import TrainedClients, Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.maths.random import Purpose, key
from pfedbayes.maths.trees import pick, tree_map
from pfedbayes.memory import to_device
from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.methods.hierarchical import with_schedule
from pfedbayes.nets import Init, Model


class Copy(NamedTuple):
    """A federation with the first seed that trains beside the reported ones, for comparison."""

    left_out: tuple[Tensor, ...] | None = None
    """For each client, the pool rows that it does not train on: a fold of a cross-validation. None for none."""
    alone: bool = False
    """Whether each client is a federation of its own: it receives what its own uploads have made."""

    def describe(self) -> str:
        """Return what it is, to be shown to users."""
        return " ".join(["a fold"] * (self.left_out is not None) + ["of clients alone"] * self.alone)


@dataclass(frozen=True, eq=False)
class Setup:
    """The parts of a federation that stay the same in all rounds.

    Federations are a batch dimension: member s * num_clients + i is client i of federation s, whose seed is seeds[s].
    The first `num_reported` of them are the result of the run. The others are their copies, see `Copy`.
    """

    method: Method
    model: Model
    """The model as the plan computes it."""
    training: Training
    seeds: tuple[int, ...]
    """The seed of each federation."""
    copies: tuple[Copy, ...]
    """The federations behind the first `num_reported` ones."""
    data: ClientData
    participants: int
    """The number S of clients that are averaged in a round."""
    trains: TrainedClients
    """Which clients train in a round."""
    shard: Shard
    """What the method knows of each member's training data, on the device."""
    weight: Tensor
    """1 for the real examples of a member's mini-batch, 0 for padding: (members, b), on the device."""

    @property
    def num_reported(self) -> int:
        """The number of federations that are no copies."""
        return len(self.seeds) - len(self.copies)

    @property
    def first_alone(self) -> int:
        """The index of the first federation whose clients train alone; all later ones do, too."""
        return len(self.seeds) - sum(copy.alone for copy in self.copies)

    @property
    def num_clients(self) -> int:
        """The number N of clients of each federation."""
        return self.data.num_clients

    @property
    def num_members(self) -> int:
        """The number of clients of all federations."""
        return len(self.seeds) * self.num_clients

    @property
    def training_at_once(self) -> int:
        """The number of members that train in a round."""
        return len(self.seeds) * (self.num_clients if self.trains == "all" else self.participants)

    @property
    def views(self) -> Views:
        """The augmentations of images."""
        return Views(self.training.flip, self.training.shift)

    def of_members(self, stacked: State, members: Sequence[int]) -> State:
        """Return the rows of these members, as a view if they are consecutive."""
        first, last = members[0], members[-1]
        consecutive = last - first == len(members) - 1
        return pick(stacked, slice(first, last + 1) if consecutive else self.send(np.array(members)))

    def send(self, values: NDArray[Any]) -> Tensor:
        """Copy values to the device without waiting for it."""
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.data.device)


def make_setup(
    shards: Shards,
    model: Model,
    method: Method,
    training: Training,
    seeds: Sequence[int],
    plan: Plan,
    numbers: Sequence[int] | None = None,
    copies: Sequence[Copy] = (),
) -> Setup:
    """Check that all parts fit each other, and copy the data to the device.

    numbers: the numbers under which clients draw random numbers; 0, 1, … if not given. copies: federations that train
    beside those of the seeds, with the first seed, or that of `training` if there are none.
    """
    method = with_schedule(method, training.rounds * training.local_steps)
    _check_images(shards, training)
    _check_plan(method, plan)
    plan.activate()
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    num_clients = 1 if method.needs.pooled_data else len(shards.train)
    participants = num_participants(model, method, training, num_clients)
    left_out = [*(None for _ in seeds), *(copy.left_out for copy in copies)]
    data = ClientData.load(shards, method, training.batch_size, device, dtype, numbers, left_out)
    labels = torch.stack([data.count_labels(rows) for rows in data.train_sets])
    real = torch.arange(int(data.batch_sizes.max())) < torch.from_numpy(data.batch_sizes)[:, None]
    shard, weight = tree_map(
        lambda leaf: leaf.to(device),
        (Shard(torch.from_numpy(data.sizes).to(dtype), labels), real.to(dtype)),
    )
    trains = training.trained_clients(method)
    if any(before.alone and not after.alone for before, after in pairwise(copies)):
        raise ValueError("copies of clients alone come last")
    every = (*seeds, *((*seeds, training.seed)[0] for _ in copies))
    return Setup(method, plan.fit(model), training, every, tuple(copies), data, participants, trains, shard, weight)


def _check_images(shards: Shards, training: Training) -> None:
    if Views(training.flip, training.shift).count > 1 and shards.x.dim() != 4:
        raise UserError(
            "training.flip and .shift are for images, and one example has the shape"
            f" {tuple(shards.x.shape[1:])}: leave them out"
        )
    if training.shift and any(1 < side <= training.shift for side in shards.x.shape[2:]):
        height, width = shards.x.shape[2:]
        raise UserError(
            f"training.shift={training.shift} moves images of {height} x {width} pixels out of sight: lower it"
        )


def _check_plan(method: Method, plan: Plan) -> None:
    if plan.over == "vmap" and method.needs.loop:
        raise UserError(f"{method.about.title} trains one client after another: set execution.over=loop")
    if method.needs.eager and (plan.graph or plan.compile):
        raise UserError(
            f"{method.about.title} can be neither compiled nor replayed: leave execution.graph and .compile out"
        )


def num_participants(model: Model, method: Method, training: Training, num_clients: int) -> int:
    """Return how many clients are averaged in a round, after checking that method, task and schedule fit each other."""
    title = method.about.title
    if method.needs.labels and model.likelihood.task != "classification":
        raise UserError(f"{title} classifies: give labels instead of numbers, or choose another method")
    if training.server_optimizer != "none" and not method.about.averages:
        raise UserError(f"{title} does not average uploads: leave training.server_optimizer out")
    count = (not method.needs.pooled_data and training.participants) or num_clients
    if method.needs.all_clients and count < num_clients:
        raise UserError(f"{title} needs all {num_clients} clients: leave training.participants out")
    if method.needs.tied and training.trained_clients(method) == "all" and count < num_clients:
        raise UserError(
            f"{title} may only train clients whose uploads are used: set training.train=chosen, or leave"
            " training.participants out"
        )
    if count > num_clients:
        raise UserError(f"training.participants is {count} but there are {num_clients} clients: lower it")
    return count


def first_server(model: Model, method: Method, num_clients: int, seed: int, init: Init | None, like: Tensor) -> State:
    """Return the server's state before the first round, with the type and on the device of `like`."""
    theta = model.net.init(key(seed, Purpose.INIT), init or method.habits.init)
    return method.init(theta.to(like), num_clients, model.net)
