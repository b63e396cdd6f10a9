"""The federation: client_round, written once for one client, mapped over all clients; rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards, positions
from pfedbayes.errors import Diverged, UserError
from pfedbayes.methods.base import Method, Shard, State
from pfedbayes.nets import Batch, Init, Model
from pfedbayes.optim import Adam, Momentum, adam, adam_init, momentum, momentum_init
from pfedbayes.plan import Plan, choose_plan
from pfedbayes.population import Population
from pfedbayes.prediction import Prediction
from pfedbayes.streams import Purpose, choose, fill_normal, key
from pfedbayes.trees import concat, fill, finite_rows, named_leaves, pick, stack

Step = tuple[tuple[Batch, ...], Tensor]
Over = Callable[[Callable[..., Any]], Callable[..., Any]]


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """One client, no client axis."""
    return function


def client_round(
    method: Method,
    model: Model,
    client: State,
    received: State,
    shard: Shard,
    steps: Iterable[Step],
    over: Over = alone,
) -> tuple[State, State]:
    """A client's part of a round, Algorithm 1: R local steps; the client's new state and its upload.

    Written for one client. With `over=torch.func.vmap` the same lines train many at once, every argument then having
    a leading client axis.
    """
    local = over(method.begin)(client, received, shard)
    step = over(partial(method.step, model))
    for batches, noise in steps:
        local = step(local, batches, noise)
    new_client, upload = over(method.end)(local)
    return new_client, upload


@dataclass(frozen=True)
class Training:
    """rounds; local_steps R mini-batch steps of batch_size b per round; participants S averaged per round (all if not
    given); train: "all" N clients train or only the "chosen" S (each method has its own habit, taken if not given);
    evaluate_every so many rounds, at every round of evaluate_window, and after the last; seed of the run.
    server_optimizer: how the server follows the average of the uploads (FedOpt): at once, with "momentum" or by
    "adam"; server_rate and server_momentum are its settings.
    """

    rounds: int = 200
    local_steps: int = 20
    batch_size: int = 100
    participants: int | None = None
    train: Literal["all", "chosen"] | None = None
    evaluate_every: int = 10
    evaluate_window: tuple[int, int] | None = None
    seed: int = 1
    server_optimizer: Literal["none", "momentum", "adam"] = "none"
    server_rate: float = 1.0
    server_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.server_rate < 0:
            raise ValueError(f"server_rate must not be negative, got {self.server_rate}")
        if not 0 <= self.server_momentum < 1:
            raise ValueError(f"server_momentum must be at least 0 and less than 1, got {self.server_momentum}")
        for name in ("rounds", "local_steps", "batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.participants is not None and self.participants < 1:
            raise ValueError(f"participants must be at least 1, got {self.participants}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.evaluate_window and not 1 <= self.evaluate_window[0] <= self.evaluate_window[1]:
            raise ValueError(
                f"evaluate_window must be [first, last] with 1 <= first <= last, got {self.evaluate_window}"
            )

    def evaluates(self, round: int) -> bool:
        """Whether models are evaluated after this round."""
        in_window = self.evaluate_window is not None and self.evaluate_window[0] <= round <= self.evaluate_window[1]
        return in_window or round % self.evaluate_every == 0 or round == self.rounds


class Federation(Prediction):
    """Clients, server and data of one experiment, for one or more seeds at once.

    Seeds are a batch dimension: member k = s * num_clients + i is client i of the federation with seed seeds[s].
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
    ) -> None:
        self.shards, self.model, self.method = shards, model, method
        self.training = training or Training()
        self.seeds = tuple(seeds) if seeds is not None else (self.training.seed,)
        self.plan = plan or choose_plan(model, method)
        if self.plan.over == "vmap" and not method.batched:
            raise UserError(f"{method.title} trains one client after another: set execution.over=loop")
        if method.classifies and model.likelihood.task != "classification":
            raise UserError(f"{method.title} classifies: give labels instead of numbers, or another method")
        if self.training.server_optimizer != "none" and not method.averages:
            raise UserError(f"{method.title} does not average uploads: leave training.server_optimizer out")
        self.plan.activate()
        self.train_sets = (torch.cat(shards.train),) if method.pools else shards.train
        self.num_clients = len(self.train_sets)
        self.participants = (not method.pools and self.training.participants) or self.num_clients
        if method.everybody and self.participants < self.num_clients:
            raise UserError(f"{method.title} needs all {self.num_clients} clients: leave training.participants out")
        if self.participants > self.num_clients:
            raise UserError(
                f"training.participants is {self.participants} but there are {self.num_clients} clients: lower it"
            )
        self.train = self.training.train or method.who_trains
        self.device, self.dtype = torch.device(self.plan.device), getattr(torch, self.plan.dtype)

        self.x = self._to_device(shards.x)
        self.y = self._to_device(shards.y)
        self.sizes = np.array([len(indices) for indices in self.train_sets])
        if not self.sizes.all():
            empty = shards.names[int(np.argmin(self.sizes))]
            raise UserError(f"client {empty!r} has no training data: leave it out or give it some")
        self.batch_sizes = self.sizes if method.full_batch else self.sizes.clip(max=self.training.batch_size)
        self._label_counts = torch.stack([self._count_labels(indices) for indices in self.train_sets])
        self._generator = torch.Generator(self.device)

        self.round = 0
        thetas = [model.net.init(key(seed, Purpose.INIT), init or method.default_init) for seed in self.seeds]
        self.servers: list[State] = [
            method.init(theta.to(self.device, self.dtype), self.num_clients, model.net.shapes) for theta in thetas
        ]
        self._server_optimizers: list[Adam | Momentum] = [
            adam_init(server) if self.training.server_optimizer == "adam" else momentum_init(server)
            for server in self.servers
            if self.training.server_optimizer != "none"
        ]
        self.population = Population()
        self.cursors = np.zeros(len(self.seeds) * self.num_clients, dtype=np.int64)

    # Training

    def rounds(self, until: int | None = None) -> Iterator[int]:
        """Train up to round `until` (the configured number if not given), yielding after each round."""
        while self.round < (self.training.rounds if until is None else until):
            self.train_round()
            yield self.round

    def train_round(self) -> None:
        """One round of Algorithm 1: download, local training, upload, aggregation. All or nothing."""
        round = self.round + 1
        chosen = [choose(seed, round, self.num_clients, self.participants) for seed in self.seeds]
        trained = chosen if self.train == "chosen" else [np.arange(self.num_clients)] * len(self.seeds)
        members = [s * self.num_clients + int(i) for s, ids in enumerate(trained) for i in ids]

        received = concat(
            [
                self.method.download(server, torch.from_numpy(ids))
                for server, ids in zip(self.servers, trained, strict=True)
            ]
        )
        states = self.population.get(members, self._fresh_client)
        clients, uploads = self._train(members, states, received, round)
        self._refuse_nonfinite(members, clients, uploads, round)

        servers = []
        for s, (server, ids) in enumerate(zip(self.servers, trained, strict=True)):
            rows = s * len(ids) + np.flatnonzero(np.isin(ids, chosen[s]))
            sizes = torch.from_numpy(self.sizes[chosen[s]]).to(self.device, self.dtype)
            servers.append(self.method.aggregate(server, pick(uploads, rows), sizes, torch.from_numpy(chosen[s])))
        if self._server_optimizers:
            servers, self._server_optimizers = self._follow(servers)
        self.population.put(members, clients)
        consumed = self.batch_sizes[self._client(members)] * self.training.local_steps * self.method.batches_per_step
        self.cursors[members] += consumed
        self.servers = servers
        self.round = round

    def _follow(self, averages: list[Tensor]) -> tuple[list[State], list[Adam | Momentum]]:
        """FedOpt (Reddi et al. 2021): the step from the server's state to the average is minus its gradient."""
        rate, decay = self.training.server_rate, self.training.server_momentum
        servers: list[State] = []
        optimizers: list[Adam | Momentum] = []
        for server, average, state in zip(self.servers, averages, self._server_optimizers, strict=True):
            new: Adam | Momentum
            if isinstance(state, Adam):
                followed, new = adam(server, server - average, state, rate, decay, beta2=0.99, eps=1e-3)
            else:
                followed, new = momentum(server, server - average, state, rate, decay)
            servers.append(followed)
            optimizers.append(new)
        return servers, optimizers

    def _train(self, members: list[int], clients: State, received: State, round: int) -> tuple[State, State]:
        """client_round over these members, in chunks that fit the memory."""
        chunk = self.plan.chunk or len(members)
        try:
            parts = []
            for start in range(0, len(members), chunk):
                part = slice(start, start + chunk)
                parts.append(self._train_chunk(members[part], pick(clients, part), pick(received, part), round))
            return concat([part[0] for part in parts]), concat([part[1] for part in parts])
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise UserError(
                    "the GPU's memory does not hold even one client: lower training.batch_size or use --device cpu"
                ) from None
        torch.cuda.empty_cache()
        self.plan = replace(self.plan, chunk=(chunk + 1) // 2)
        return self._train(members, clients, received, round)

    def _train_chunk(self, members: list[int], clients: State, received: State, round: int) -> tuple[State, State]:
        ids = self._client(members)
        shard = Shard(
            torch.from_numpy(self.sizes[ids]).to(self.device, self.dtype), self._label_counts[ids].to(self.device)
        )
        train = partial(client_round, self.method, self.model)
        if self.plan.over == "vmap":
            return train(clients, received, shard, self._steps(members, round), over=torch.func.vmap)
        results = []
        for k, member in enumerate(members):
            steps = ((pick(batches, 0), noise[0]) for batches, noise in self._steps([member], round))
            results.append(train(pick(clients, k), pick(received, k), pick(shard, k), steps))
        return stack([client for client, _ in results]), stack([upload for _, upload in results])

    def _client(self, members: Sequence[int]) -> NDArray[np.int64]:
        return np.remainder(members, self.num_clients)

    def _steps(self, members: list[int], round: int) -> Iterator[Step]:
        """Batches and noise of the local steps of these members, each with a leading member axis."""
        per_step = self.method.batches_per_step
        indices, weight = self._batch_indices(members, self.training.local_steps * per_step)
        noise_shape = self.method.noise_shape(self.model.net.num_params)
        for r in range(self.training.local_steps):
            batches = tuple(self._gather(indices[:, k], weight) for k in range(r * per_step, (r + 1) * per_step))
            noise = torch.empty((len(members), *noise_shape), dtype=self.dtype, device=self.device)
            if noise_shape:
                for row, member in zip(noise, members, strict=True):
                    s, i = divmod(member, self.num_clients)
                    fill_normal(row, self._generator, key(self.seeds[s], Purpose.TRAINING, round, i, r))
            yield batches, noise

    def _batch_indices(self, members: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Pool rows (members, count, width) of the next batches, and which columns are real: weight (members, width).

        A client with fewer examples than the width fills up with its first row at weight 0.
        """
        batch_sizes = self.batch_sizes[self._client(members)]
        indices = np.empty((len(members), count, batch_sizes.max()), dtype=np.int64)
        real = np.zeros((len(members), batch_sizes.max()))
        for k, (member, batch) in enumerate(zip(members, batch_sizes, strict=True)):
            s, i = divmod(member, self.num_clients)
            rows = self.train_sets[i].numpy()
            taken = positions(self.seeds[s], i, len(rows), int(self.cursors[member]), count * int(batch))
            indices[k] = rows[0]
            indices[k, :, :batch] = rows[taken].reshape(count, batch)
            real[k, :batch] = 1
        return torch.from_numpy(indices).to(self.device), torch.from_numpy(real).to(self.device, self.dtype)

    def _gather(self, indices: Tensor, weight: Tensor) -> Batch:
        flat = indices.flatten()
        x, y = self.x.index_select(0, flat), self.y.index_select(0, flat)
        return Batch(x.view(*indices.shape, *x.shape[1:]), y.view(*indices.shape, *y.shape[1:]), weight)

    def _refuse_nonfinite(self, members: list[int], clients: State, uploads: State, round: int) -> None:
        if (bad := torch.nonzero(~finite_rows(clients, uploads))).numel():
            s, i = divmod(members[int(bad[0])], self.num_clients)
            seed = f" (seed {self.seeds[s]})" if len(self.seeds) > 1 else ""
            raise Diverged(
                f"round {round}: {self.shards.names[i]}{seed} has become non-finite, so the round was not taken: "
                "lower the learning rate or raise the batch size"
            )

    # State on disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name."""
        named: dict[str, Tensor] = {
            "cursors": torch.from_numpy(self.cursors),
            "enrolled": torch.tensor(list(self.population.row), dtype=torch.int64),
        }
        for s, server in enumerate(self.servers):
            named.update(named_leaves(server, f"server.{s}"))
        for s, optimizer in enumerate(self._server_optimizers):
            named.update(named_leaves(optimizer, f"server_optimizer.{s}"))
        if self.population.states is not None:
            named.update(named_leaves(self.population.states, "clients"))
        # Copies, since training goes on in place.
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}

    def restore(self, tensors: dict[str, Tensor], round: int) -> None:
        """Continue from `tensors()` of a federation with the same settings after `round` rounds."""
        # Fresh copies: memory straight from a file may be aligned otherwise, and kernels round accordingly.
        tensors = {name: tensor.clone().to(self.device) for name, tensor in tensors.items()}
        template = self._fresh_client(0)
        self._refuse_foreign(tensors, template)
        self.servers = [fill(server, tensors, f"server.{s}") for s, server in enumerate(self.servers)]
        self._server_optimizers = [
            fill(optimizer, tensors, f"server_optimizer.{s}") for s, optimizer in enumerate(self._server_optimizers)
        ]
        self.population = Population()
        if members := tensors["enrolled"].tolist():
            self.population.put(members, fill(template, tensors, "clients"))
        self.cursors = tensors["cursors"].cpu().numpy()
        self.round = round

    def _refuse_foreign(self, tensors: dict[str, Tensor], client: State) -> None:
        """Refuse a state of another experiment before any of it is taken."""
        known = self.tensors() | dict(named_leaves(client, "clients"))
        for name, expected in known.items():
            found = tensors.get(name)
            if found is None:
                if name.startswith("clients") and not tensors["enrolled"].numel():
                    continue  # saved before the first round
            elif name == "enrolled" or (name.startswith("server.") and not self.method.averages):
                continue  # its length changes as the run goes on
            elif found.dtype == expected.dtype and found.shape[name.startswith("clients") :] == expected.shape:
                continue
            raise UserError(f"the saved state does not fit this experiment ({name} differs): start a new run")
