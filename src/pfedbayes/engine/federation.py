"""The federation: client_round, written once for one client, mapped over all clients; rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards, positions_of_many
from pfedbayes.engine.backend.local_training import LocalTraining, Trained, Views, Work
from pfedbayes.engine.backend.programs import CannotCompile, InParts
from pfedbayes.engine.plan import Dtype, Over, Plan, choose_plan, is_long
from pfedbayes.engine.population import HOST, InFile, InMemory, OnHost, Population, choose_resting
from pfedbayes.engine.tensor_files import Rows, rows_at_once
from pfedbayes.errors import Diverged, UserError
from pfedbayes.evaluation.prediction import Prediction
from pfedbayes.maths.optim import Adam, Momentum, adam, adam_init, momentum, momentum_init
from pfedbayes.maths.random import Purpose, choose, key, keys
from pfedbayes.maths.trees import concat, fill, leaves, named_leaves, pick, stack, tree_map
from pfedbayes.memory import to_device
from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Init, Model


@dataclass(frozen=True)
class Training:
    """rounds; local_steps R mini-batch steps of batch_size b per round; participants S averaged per round (all if not
    given); train: "all" N clients train or only the "chosen" S (each method has its own habit, taken if not given);
    evaluate_every so many rounds, at every round of evaluate_window, and after the last; seed of the run.
    flip: every image of a batch is mirrored left to right with probability 1/2; shift: it is moved by up to so many
    pixels up or down and to the left or right, and its edge is repeated where nothing is left.
    server_optimizer: how the server follows the average of the uploads (FedOpt): at once, with "momentum" or by
    "adam"; server_rate and server_momentum are its settings. Widths of Gaussians are averaged at once in any case.
    patience: a run stops when the loss on validation data has not become less for so many rounds, and keeps the best
    round, see `stopping`; never if not given.
    """

    rounds: int = 200
    local_steps: int = 20
    batch_size: int = 100
    participants: int | None = None
    train: Literal["all", "chosen"] | None = None
    evaluate_every: int = 10
    evaluate_window: tuple[int, int] | None = None
    seed: int = 1
    flip: bool = False
    shift: int = 0
    server_optimizer: Literal["none", "momentum", "adam"] = "none"
    server_rate: float = 1.0
    server_momentum: float = 0.9
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.server_rate < 0:
            raise ValueError(f"server_rate must not be negative, got {self.server_rate}")
        if not 0 <= self.server_momentum < 1:
            raise ValueError(f"server_momentum must be at least 0 and less than 1, got {self.server_momentum}")
        for name in ("rounds", "local_steps", "batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("participants", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "shift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.evaluate_window and not 1 <= self.evaluate_window[0] <= self.evaluate_window[1]:
            raise ValueError(
                f"evaluate_window must be [first, last] with 1 <= first <= last, got {self.evaluate_window}"
            )

    @property
    def views(self) -> Views:
        """What becomes of an image in a batch."""
        return Views(self.flip, self.shift)

    def evaluates(self, round: int) -> bool:
        """Whether models are evaluated after this round."""
        in_window = self.evaluate_window is not None and self.evaluate_window[0] <= round <= self.evaluate_window[1]
        return in_window or round % self.evaluate_every == 0 or round == self.rounds


def plan_for(
    model: Model,
    method: Method,
    training: Training,
    num_clients: int,
    num_seeds: int,
    device: str = "auto",
    dtype: Dtype = "float32",
    over: Over | None = None,
) -> Plan:
    """The plan for a whole run."""
    ahead, at_once = _ahead(method, training, num_clients, num_seeds)
    return choose_plan(model, method, device, dtype, ahead, at_once, over)


def _ahead(method: Method, training: Training, num_clients: int, num_seeds: int) -> tuple[int, int]:
    """Local steps of single clients in a whole run, and the clients that train in a round."""
    everybody = (training.train or method.habits.trains) == "all"
    per_seed = 1 if method.needs.pooled_data else num_clients if everybody else training.participants or num_clients
    return training.rounds * training.local_steps * per_seed * num_seeds, per_seed * num_seeds


ServerOptimizer = Adam[Tensor] | Momentum


def participants(model: Model, method: Method, training: Training, num_clients: int) -> int:
    """How many clients are averaged in a round, once method, task and schedule are seen to fit each other."""
    if method.needs.labels and model.likelihood.task != "classification":
        raise UserError(f"{method.about.title} classifies: give labels instead of numbers, or another method")
    if training.server_optimizer != "none" and not method.about.averages:
        raise UserError(f"{method.about.title} does not average uploads: leave training.server_optimizer out")
    count = (not method.needs.pooled_data and training.participants) or num_clients
    if method.needs.all_clients and count < num_clients:
        raise UserError(f"{method.about.title} needs all {num_clients} clients: leave training.participants out")
    if count > num_clients:
        raise UserError(f"training.participants is {count} but there are {num_clients} clients: lower it")
    return count


def first_server(model: Model, method: Method, num_clients: int, seed: int, init: Init | None, like: Tensor) -> State:
    """The server's state before the first round, with the type and on the device of `like`."""
    theta = model.net.init(key(seed, Purpose.INIT), init or method.habits.init)
    return method.init(theta.to(like), num_clients, model.net.shapes)


def first_optimizer(training: Training, method: Method, server: State) -> ServerOptimizer | None:
    """What the server's optimiser remembers before the first round."""
    if training.server_optimizer == "none":
        return None
    followed = server[0] if method.about.gaussian else server
    return adam_init(followed) if training.server_optimizer == "adam" else momentum_init(followed)


def follow(
    training: Training, method: Method, server: Tensor, average: Tensor, state: ServerOptimizer
) -> tuple[Tensor, ServerOptimizer]:
    """FedOpt (Reddi et al. 2021): the step from the server's state to the average is minus its gradient.

    Of Gaussians the means alone: widths with momentum can overshoot, and nothing is learned under too wide a prior.
    """
    if method.about.gaussian:
        means, remembered = _follow(training, server[0], average[0], state)
        return torch.stack([means, average[1]]), remembered
    return _follow(training, server, average, state)


def _follow(
    training: Training, server: Tensor, average: Tensor, state: ServerOptimizer
) -> tuple[Tensor, ServerOptimizer]:
    rate, decay = training.server_rate, training.server_momentum
    if isinstance(state, Adam):
        return adam(server, server - average, state, rate, decay, beta2=0.99, eps=1e-3)
    return momentum(server, server - average, state, rate, decay)


Trio = tuple[State, list[State], list[ServerOptimizer]]  # states of clients, servers and the servers' optimisers
BESIDE_A_GPU = ThreadPoolExecutor(1, thread_name_prefix="batches")
PENDING_ROUNDS = 16  # a GPU works on so many rounds before it is asked whether all went well


class Assignment(NamedTuple):
    """What a round asks of whom: for each seed the clients chosen and those that train; of all members that train the
    rows of the pool (R, batches per step, members, b), with the view of each image, and the names of the noise
    (R, members)."""

    chosen: list[NDArray[np.int64]]
    trained: list[NDArray[np.int64]]
    members: list[int]
    rows: NDArray[np.int64]
    names: NDArray[np.int64]


class Pending(NamedTuple):
    """A round whose outcome is not known yet: who trained, and how far each client had read before."""

    round: int
    members: list[int]
    cursors: NDArray[np.int64]


class Federation(Prediction):
    """Clients, server and data of one experiment, for one or more seeds at once.

    Seeds are a batch dimension: member k = s * num_clients + i is client i of the federation with seed seeds[s].
    clients_file: where clients rest if the plan lets them rest in a file; one without a name if not given.
    """

    def __init__(
        self,
        shards: Shards,
        model: Model,
        method: Method,
        training: Training | None = None,
        seeds: Sequence[int] | None = None,
        init: Init | None = None,
        plan: Plan | None = None,
        clients_file: Path | None = None,
    ) -> None:
        self.shards, self.model, self.method = shards, model, method
        self.training = training or Training()
        self.seeds = tuple(seeds) if seeds is not None else (self.training.seed,)
        self.plan = plan or plan_for(model, method, self.training, len(shards.train), len(self.seeds))
        if self.plan.over == "vmap" and method.needs.loop:
            raise UserError(f"{method.about.title} trains one client after another: set execution.over=loop")
        if self.training.views.count > 1 and shards.x.dim() != 4:
            raise UserError(
                "training.flip and .shift are for images, and one example has the shape"
                f" {tuple(shards.x.shape[1:])}: leave them out"
            )
        shift = self.training.shift
        if shift and any(1 < side <= shift for side in shards.x.shape[2:]):
            height, width = shards.x.shape[2:]
            raise UserError(
                f"training.shift={shift} moves images of {height} x {width} pixels out of sight: choose a smaller one"
            )
        if method.needs.eager and (self.plan.graph or self.plan.compile):
            raise UserError(
                f"{method.about.title} can be neither compiled nor replayed: leave execution.graph and .compile out"
            )
        self.plan.activate()
        self.model = self.plan.fit(model)
        # Libraries are fast at convolutions of one network with many images; a compiler is faster, once it has begun.
        self._plain_predictor = model._replace(half=self.model.half)
        self._fast_predictor = self.model._replace(net=self.model.net.through(InParts))
        self.train_sets = (torch.cat(shards.train),) if method.needs.pooled_data else shards.train
        self.num_clients = len(self.train_sets)
        self.numbers = np.arange(len(shards.names))
        self.participants = participants(model, method, self.training, self.num_clients)
        self.train = self.training.train or method.habits.trains
        self.device, self.dtype = torch.device(self.plan.device), getattr(torch, self.plan.dtype)

        self.x = self._to_device(shards.x)
        self.y = self._to_device(shards.y)
        self.sizes = np.array([len(indices) for indices in self.train_sets])
        if not self.sizes.all():
            empty = shards.names[int(np.argmin(self.sizes))]
            raise UserError(f"client {empty!r} has no training data: leave it out or give it some")
        self.batch_sizes = self.sizes if method.needs.full_batch else self.sizes.clip(max=self.training.batch_size)
        labels = torch.stack([self._count_labels(indices) for indices in self.train_sets])
        real = torch.arange(int(self.batch_sizes.max())) < torch.from_numpy(self.batch_sizes)[:, None]
        self._shard, self._weight = tree_map(
            lambda leaf: leaf.to(self.device).repeat(len(self.seeds), *[1] * (leaf.dim() - 1)),
            (Shard(torch.from_numpy(self.sizes).to(self.dtype), labels), real.to(self.dtype)),
        )
        self._local_training = self._make_local_training()

        self.round = 0
        like = torch.empty((), dtype=self.dtype, device=self.device)
        self.servers: list[State] = [
            first_server(model, method, self.num_clients, seed, init, like) for seed in self.seeds
        ]
        optimizers = [first_optimizer(self.training, method, server) for server in self.servers]
        self._server_optimizers = [optimizer for optimizer in optimizers if optimizer is not None]
        self._ahead: tuple[tuple[int, bytes], Future[Assignment]] | None = None
        self._pending: list[Pending] = []
        self._failed: Tensor | None = None
        self.cursors = np.zeros(len(self.seeds) * self.num_clients, dtype=np.int64)
        self._clients_file = clients_file
        self.population = self._settle()

    @property
    def predictor(self) -> Model:
        """The model as it is computed for prediction. A run that trains compiles it for images: a prediction or two do
        not repay that."""
        fast = self.plan.graph and self.model.net.convolutional and self._local_training.compiled
        return self._fast_predictor if fast else self._plain_predictor

    def _settle(self) -> Population:
        """An empty population, where the plan wants it or, if it leaves that open, where it fits."""
        template = pick(self._fresh_clients([0]), 0)
        self.client_bytes = sum(leaf.nbytes for leaf in leaves(template))
        self.training_at_once = len(self.seeds) * (self.num_clients if self.train == "all" else self.participants)
        if self.plan.resting is None:
            copies = 1 if self.training.patience is None else 3  # the best round's, and while it gives way another's
            at_once = self.training_at_once
            resting = choose_resting(self.client_bytes, len(self.cursors), at_once, copies, self.device)
            self.plan = replace(self.plan, resting=resting)
        if self.plan.resting == "file":
            return InFile(template, self.device, self._clients_file)
        if self.plan.resting == "host" and self.device != HOST:
            return OnHost(len(self.cursors), template, self.device)
        return InMemory(len(self.cursors), self.device)

    # Training

    def _make_local_training(self) -> LocalTraining:
        return LocalTraining(self.method, self.model, self.x, self.y, self.plan, self.training.views)

    def faster_over(self) -> Over | None:
        """Which of vmap and loop takes less time for a local step of a few clients: for convolutions on a CPU, where it
        depends on the network and the machine. None elsewhere, and for short runs. Nothing is trained."""
        ahead, _ = _ahead(self.method, self.training, len(self.shards.train), len(self.seeds))
        open_question = self.device.type == "cpu" and self.model.net.convolutional and not self.method.needs.loop
        if not open_question or not is_long(self.model, ahead):
            return None
        work = self._assign(1)
        few = work.members[:4]
        received = stack([self._received(member % self.num_clients, member // self.num_clients) for member in few])
        shard, weight = self._of_members((self._shard, self._weight), few)
        part = Work(torch.from_numpy(work.rows[:1, :, : len(few)].copy()), weight, work.names[:1, : len(few)])
        seconds: dict[Over, float] = {}
        for over in ("vmap", "loop"):
            plain = Plan(over=over, threads=self.plan.threads, dtype=self.plan.dtype)
            train = LocalTraining(self.method, self.model, self.x, self.y, plain, self.training.views)
            times = []
            for _ in range(3):  # the first one sets things up
                start = time.perf_counter()
                train(self._fresh_clients(few), received, shard, part)
                times.append(time.perf_counter() - start)
            seconds[over] = min(times)
        return min(seconds, key=lambda over: seconds[over])

    def rounds(self, until: int | None = None) -> Iterator[int]:
        """Train up to round `until` (the configured number if not given), yielding after each round."""
        until = self.training.rounds if until is None else until
        while self.round < until:
            self.train_round()
            if self.round == until or self.training.evaluates(self.round):
                self.confirm()
            yield self.round

    def train_round(self) -> None:
        """One round of Algorithm 1: download, local training, upload, aggregation. All or nothing."""
        round = self.round + 1
        (chosen, trained, members, _, _), before, (clients, uploads, finite) = self._local_round(round)
        servers = []
        for s, (server, ids) in enumerate(zip(self.servers, trained, strict=True)):
            own = pick(uploads, slice(s * len(ids), (s + 1) * len(ids)))
            if len(chosen[s]) < len(ids):
                own = pick(own, self._send(np.flatnonzero(np.isin(ids, chosen[s]))))
            sizes = self._of_members(self._shard.size, [s * self.num_clients + int(i) for i in chosen[s]])
            servers.append(self.method.aggregate(server, own, sizes, torch.from_numpy(chosen[s])))
        optimizers = self._server_optimizers
        if optimizers:
            followed = [
                follow(self.training, self.method, *each)
                for each in zip(self.servers, servers, self._server_optimizers, strict=True)
            ]
            servers, optimizers = [list(parts) for parts in zip(*followed, strict=True)]
        if self.plan.graph:
            old = (before, self.servers, self._server_optimizers)
            clients, servers, optimizers = self._if_finite(round, members, finite, (clients, servers, optimizers), old)
        self.population.put(members, clients)  # first, since it may be refused
        self.servers, self._server_optimizers = servers, optimizers
        self.round, self.cursors = round, self._advanced(members)
        if len(self._pending) == PENDING_ROUNDS:
            self.confirm()

    def _local_round(self, round: int) -> tuple[Assignment, State, Trained]:
        """The clients' part of a round: who did what, the states before and after. Nothing is kept yet."""
        self.plan.activate()  # another federation may have set torch's switches otherwise
        work = self._assign(round)
        received = concat([self.download(s, ids) for s, ids in enumerate(work.trained)])
        before = self.population.get(work.members, self._fresh_clients)
        trained = self._train(work.members, work.rows, work.names, before, received)
        if not self.plan.graph and not bool(trained.finite.all()):
            raise self._diverged(round, work.members[int(trained.finite.int().argmin())])
        return work, before, trained

    def _if_finite(self, round: int, members: list[int], finite: Tensor, new: Trio, old: Trio) -> Trio:
        """The new states, or the old ones from the first round on in which a client was not finite.

        The GPU decides by itself and is asked by `confirm` later: to ask it after every round would let it run dry.
        """
        if self._failed is None:
            self._failed = torch.zeros(2, dtype=torch.int64, device=self.device)
        fails = (self._failed[0] == 0) & ~finite.all()
        names = torch.stack([torch.full_like(self._failed[0], round), finite.int().argmin()])
        self._failed = torch.where(fails, names, self._failed)
        self._pending.append(Pending(round, members, self.cursors))
        sound = self._failed[0] == 0
        kept = tree_map(lambda after, before: torch.where(sound, after, before), new, old)
        return kept[0], list(kept[1]), list(kept[2])

    def confirm(self) -> None:
        """Wait for the rounds under way; an error if one of them was not taken, and the state is that before it."""
        self.population.settle()
        pending, self._pending = self._pending, []
        failed, self._failed = self._failed, None
        if failed is None:
            return
        number, row = failed.tolist()
        for round, members, cursors in pending:
            if round == number:
                self.round, self.cursors = round - 1, cursors
                raise self._diverged(round, members[row])

    def _diverged(self, round: int, member: int) -> Diverged:
        s, i = divmod(member, self.num_clients)
        seed = f" (seed {self.seeds[s]})" if len(self.seeds) > 1 else ""
        return Diverged(
            f"round {round}: {self.shards.names[i]}{seed} has become non-finite, so the round was not taken: "
            "lower the learning rate or raise the batch size"
        )

    def _assign(self, round: int) -> Assignment:
        """Who does what in this round; beside a GPU the next round's work is laid out while this one's is done."""
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead[0] == (round, self.cursors.tobytes())
        work = ahead[1].result() if ahead and known else self._lay_out(round, self.cursors)
        if self.device.type == "cuda":
            after = self._advanced(work.members)
            self._ahead = (round + 1, after.tobytes()), BESIDE_A_GPU.submit(self._lay_out, round + 1, after)
        return work

    def _lay_out(self, round: int, cursors: NDArray[np.int64]) -> Assignment:
        """The work of a round for clients that have read so far."""
        chosen = [choose(seed, round, self.num_clients, self.participants) for seed in self.seeds]
        trained = chosen if self.train == "chosen" else [np.arange(self.num_clients)] * len(self.seeds)
        members = [s * self.num_clients + int(i) for s, ids in enumerate(trained) for i in ids]
        seeds = np.repeat(self.seeds, [len(ids) for ids in trained])
        clients, steps = self.numbers[np.concatenate(trained)], np.arange(self.training.local_steps)
        names = keys(seeds, Purpose.TRAINING, round, clients, steps[:, None])
        rows = self._batch_rows(members, cursors)
        views = self.training.views.count
        if views > 1:
            batches, places = np.arange(rows.shape[1])[:, None, None], np.arange(rows.shape[3])
            drawn = keys(
                seeds[:, None], Purpose.VIEW, round, clients[:, None], steps[:, None, None, None], batches, places
            )
            rows = rows * views + drawn % views
        return Assignment(chosen, trained, members, rows, names)

    def _batch_rows(self, members: list[int], cursors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pool rows of the batches from the cursors on: (R, batches per step, members, width).

        A client with fewer examples than the width fills up with its first row, whose weight is then 0.
        """
        steps, per_step, width = (
            self.training.local_steps,
            self.method.needs.batches_per_step,
            int(self.batch_sizes.max()),
        )
        rows = np.empty((steps, per_step, len(members), width), dtype=np.int64)
        seeds, clients = np.divmod(members, self.num_clients)
        for size in np.unique(self.sizes[clients]):  # those with equally many examples together
            alike = np.flatnonzero(self.sizes[clients] == size)
            own = np.stack([self.train_sets[i].numpy() for i in clients[alike]])
            batch = int(self.batch_sizes[clients[alike[0]]])
            names = [(self.seeds[s], int(self.numbers[i])) for s, i in zip(seeds[alike], clients[alike], strict=True)]
            starts = cursors[np.asarray(members)[alike]]
            taken = positions_of_many(names, int(size), starts, steps * per_step * batch)
            batches = np.take_along_axis(own, taken, axis=1).reshape(-1, steps, per_step, batch)
            rows[:, :, alike, batch:] = own[:, :1]
            rows[:, :, alike, :batch] = batches.transpose(1, 2, 0, 3)
        return rows

    def _advanced(self, members: list[int]) -> NDArray[np.int64]:
        """How far each client has read once these members have trained a round."""
        after = self.cursors.copy()
        batches = self.training.local_steps * self.method.needs.batches_per_step
        after[members] += batches * self.batch_sizes[np.remainder(members, self.num_clients)]
        return after

    def _train(
        self, members: list[int], rows: NDArray[np.int64], names: NDArray[np.int64], clients: State, received: State
    ) -> Trained:
        """client_round over these members, in chunks that fit the memory."""
        chunk = self.plan.chunk or len(members)
        parts = []
        try:
            for start in range(0, len(members), chunk):
                part = slice(start, start + chunk)
                shard, weight = self._of_members((self._shard, self._weight), members[part])
                own_names = self._send(names[:, part]) if self.plan.noise == "philox" else names[:, part]
                work = Work(self._send(rows[:, :, part]), weight, own_names)
                trained = self._local_training(pick(clients, part), pick(received, part), shard, work)
                # A replay overwrites what the one before it has returned.
                parts.append(tree_map(torch.clone, trained) if self.plan.graph and chunk < len(members) else trained)
            whole: Trained = concat(parts)
            return whole
        except CannotCompile as reason:
            warnings.warn(f"torch's compiler fails here, so the run goes on without it ({reason})", stacklevel=2)
            self.plan = replace(self.plan, compile=False)
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise UserError(
                    "the GPU's memory does not hold even one client: lower training.batch_size or use --device cpu"
                ) from None
            self.plan = replace(self.plan, chunk=(chunk + 1) // 2)
        self._local_training = self._make_local_training()
        torch.cuda.empty_cache()
        return self._train(members, rows, names, clients, received)

    def _of_members(self, stacked: State, members: list[int]) -> State:
        """Rows of a tree that has one for every member: a view where they lie side by side."""
        first, last = members[0], members[-1]
        side_by_side = last - first == len(members) - 1
        return pick(stacked, slice(first, last + 1) if side_by_side else self._send(np.array(members)))

    def _send(self, values: NDArray[Any]) -> Tensor:
        """To the device, without waiting for it."""
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.device)

    # State on disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name."""
        self.confirm()
        return self._changed() | self.population.tensors()

    def checkpoint(self, clients_file: Path) -> dict[str, Tensor | Rows]:
        """What `Writer.checkpoint` is to write before training goes on: as `tensors`, but the states of clients that
        rest in memory are not copied yet, and those that rest in a file are at `clients_file`, forced to disk, and only
        the table of their rows is given back. Call `population.saved()` once that is written."""
        self.confirm()
        return self._changed() | self.population.checkpoint(clients_file)

    def _changed(self) -> dict[str, Tensor]:
        """What training has changed but for the clients' states."""
        named: dict[str, Tensor] = {
            "cursors": torch.from_numpy(self.cursors),
            "enrolled": torch.tensor(self.population.met, dtype=torch.int64),
        }
        for s, server in enumerate(self.servers):
            named.update(named_leaves(server, f"server.{s}"))
        for s, optimizer in enumerate(self._server_optimizers):
            named.update(named_leaves(optimizer, f"server_optimizer.{s}"))
        # Copies, since training goes on in place.
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}

    def restore(self, tensors: dict[str, Tensor], round: int, clients_file: Path | None = None) -> None:
        """Continue from `tensors()`, or from what was written of `checkpoint(clients_file)`, of a federation with the
        same settings after `round` rounds."""
        template = pick(self._fresh_clients([0]), 0)
        self._refuse_foreign(tensors, template)
        # Fresh copies: memory straight from a file may be aligned otherwise, and kernels round accordingly.
        copies = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("clients")}
        members = copies["enrolled"].tolist()
        self.population.close()
        self.population = self._settle()
        if "rows" in copies:
            if not isinstance(self.population, InFile):
                raise UserError("the saved clients rest in a file: set execution.resting=file")
            self.population.restore(members, copies, clients_file)
        elif members:
            clients, step = fill(template, tensors, "clients"), rows_at_once(self.client_bytes)
            for part in (slice(start, start + step) for start in range(0, len(members), step)):
                self.population.put(members[part], tree_map(torch.clone, pick(clients, part)))
        on_device = {name: copy.to(self.device) for name, copy in copies.items() if name.startswith("server")}
        self.servers = [fill(server, on_device, f"server.{s}") for s, server in enumerate(self.servers)]
        self._server_optimizers = [
            fill(optimizer, on_device, f"server_optimizer.{s}") for s, optimizer in enumerate(self._server_optimizers)
        ]
        self.cursors = copies["cursors"].cpu().numpy()
        self._pending, self._failed = [], None
        self.round = round

    def _refuse_foreign(self, tensors: dict[str, Tensor], client: State) -> None:
        """Refuse a state of another experiment before any of it is taken."""
        known = self._changed() | dict(named_leaves(client, "clients"))
        for name, expected in known.items():
            found = tensors.get(name)
            if found is None:
                if name.startswith("clients") and ("rows" in tensors or not tensors["enrolled"].numel()):
                    continue  # they are in a file of their own, or it was saved before the first round
            elif name == "enrolled" or (name.startswith("server.") and not self.method.about.averages):
                continue  # its length changes as the run goes on
            elif found.dtype == expected.dtype and found.shape[name.startswith("clients") :] == expected.shape:
                continue
            raise UserError(f"the saved state does not fit this experiment ({name} differs): start a new run")
