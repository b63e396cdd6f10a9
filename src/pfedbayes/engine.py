"""The federation: client_round, written once for one client, mapped over all clients; rounds; prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards, positions
from pfedbayes.errors import Diverged, UserError
from pfedbayes.methods.base import Adaptation, Method, Shard, State
from pfedbayes.metrics import METRICS, log_average, log_label_prior, scores
from pfedbayes.nets import Batch, Init, Model
from pfedbayes.optim import Adam, Momentum, adam, adam_init, momentum, momentum_init
from pfedbayes.plan import Plan, choose_plan
from pfedbayes.population import HOST, InFile, InMemory, Population, choose_resting
from pfedbayes.streams import Purpose, choose, fill_normal, key, normal
from pfedbayes.trees import concat, fill, finite_rows, leaves, named_leaves, pick, stack, tree_map

Which = Literal["personal", "shared"]
MODELS: tuple[Which, ...] = ("personal", "shared")
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


class Federation:
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
        self.cursors = np.zeros(len(self.seeds) * self.num_clients, dtype=np.int64)
        self._clients_file = clients_file
        self.population = self._settle()

    def _count_labels(self, indices: Tensor) -> Tensor:
        classes = self.shards.num_classes
        return torch.bincount(self.shards.y[indices], minlength=classes) if classes else torch.empty(0)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype if values.is_floating_point() else None)

    def _settle(self) -> Population:
        """An empty population, where the plan wants it or, if it leaves that open, where it fits."""
        template = pick(self._fresh_clients([0]), 0)
        self.client_bytes = sum(leaf.nbytes for leaf in leaves(template))
        self.training_at_once = len(self.seeds) * (self.num_clients if self.train == "all" else self.participants)
        if self.plan.resting is None:
            members = len(self.cursors)
            resting = choose_resting(self.client_bytes, members, self.training_at_once == members, self.device)
            self.plan = replace(self.plan, resting=resting)
        if self.plan.resting == "file":
            return InFile(template, self.device, self._clients_file)
        rest = self.device if self.plan.resting == "device" else HOST
        return InMemory(len(self.cursors), self.device, rest)

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
        states = self.population.get(members, self._fresh_clients)
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

    def _fresh_clients(self, members: Sequence[int]) -> State:
        """The stacked states of clients that are met for the first time."""
        parts = []
        for s, own in groupby(members, lambda member: member // self.num_clients):
            received = self.method.download(self.servers[s], torch.from_numpy(self._client(list(own))))
            parts.append(torch.func.vmap(self.method.enrol)(received))
        # What all have in common is one piece of memory until here.
        return tree_map(torch.Tensor.contiguous, concat(parts))

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

    # Prediction

    def predict(self, which: Which, client: int, x: Tensor, samples: int | None = None, seed_index: int = 0) -> Tensor:
        """Outputs (K, n, ...) of a client's model or the shared one at inputs x (n, ...): one for each of `samples`
        draws of the weights, or the one of the mean network."""
        state = self.personal_state(client, seed_index) if which == "personal" else None
        return self._outputs(which, state, client, self._to_device(x), samples, seed_index)

    def personal_state(self, client: int, seed_index: int = 0, test: Batch | None = None) -> State:
        """The state that a client predicts with; one that has not taken part yet starts from the shared model."""
        member = seed_index * self.num_clients + client
        state = pick(self.population.get([member], self._fresh_clients), 0)
        if not self.method.adapts:
            return state
        train = self.batch_of(self.train_sets[client])
        seed = key(self.seeds[seed_index], Purpose.ADAPTATION, self.round, client)
        data = Adaptation(train, int(self.batch_sizes[client]), self.shards.num_classes, seed, test)
        return self.method.adapt(self.model, state, self._received(client, seed_index), data)

    def _received(self, client: int, seed_index: int) -> State:
        return pick(self.method.download(self.servers[seed_index], torch.tensor([client])), 0)

    def batch_of(self, indices: Tensor) -> Batch:
        """All these examples as one batch."""
        rows = indices.to(self.device)
        weight = torch.ones(len(rows), dtype=self.dtype, device=self.device)
        return Batch(self.x.index_select(0, rows), self.y.index_select(0, rows), weight)

    def _outputs(
        self, which: Which, state: State, client: int, x: Tensor, samples: int | None, seed_index: int
    ) -> Tensor:
        noise = None
        if samples is not None and self.method.stochastic:
            seed = self.seeds[seed_index]
            draw = (
                key(seed, Purpose.PERSONAL_PREDICTION, self.round, client)
                if which == "personal"
                else key(seed, Purpose.SHARED_PREDICTION, self.round)  # one draw for all clients
            )
            noise = normal((samples, self.model.net.num_params), draw, self.dtype, self.device)
        if which == "shared":
            predict = partial(self.method.predict_shared, self.model, self.servers[seed_index])
        else:
            predict = partial(self.method.predict_personal, self.model, state)
        rows = 250 if self.model.net.convolutional else 5000  # bounds the memory of the activations
        return torch.cat([predict(part, noise) for part in torch.split(x, rows)], dim=1)

    def models(self) -> list[Which]:
        """Which of the two models the method has."""
        return [which for which in MODELS if getattr(self.method, which)]

    def evaluate(
        self,
        samples: int = 10,
        split: Literal["test", "validation"] = "test",
        label_prior: bool = False,
        clients: int | None = None,
    ) -> dict[str, Any]:
        """Scores of every model on every client's own data: {model: {estimator: {metric: [seed][client]}}}; with
        `clients` on those of so many clients, see `evaluation_sets`, and NaN for the others.

        Estimators: "one" weight draw, "mc10" (the average of ten draws) and the "mean" network; a method's further
        `views`; and each of them again with the client's label prior.
        """
        metrics = METRICS[self.model.likelihood.task]
        sets = self.evaluation_sets(split, clients)
        result: dict[str, Any] = dict.fromkeys(MODELS)
        for which in self.models():
            table: dict[str, Tensor] = {}
            for s in range(len(self.seeds)):
                for i, indices in enumerate(sets):
                    if len(indices) == 0:
                        continue
                    test = self.batch_of(indices)
                    for name, outputs in self.estimates(which, i, test, samples, s, label_prior).items():
                        scored = scores(self.model.likelihood, outputs, test.y)
                        blank = scored.new_full((len(metrics), len(self.seeds), len(sets)), torch.nan)
                        table.setdefault(name, blank)[:, s, i] = scored
            result[which] = {name: dict(zip(metrics, values.tolist(), strict=True)) for name, values in table.items()}
        return result

    def evaluation_sets(self, split: Literal["test", "validation"], clients: int | None = None) -> list[Tensor]:
        """The examples on which each client is scored: with `clients`, none but for so many that have any, drawn once
        for a seed."""
        sets = list(getattr(self.shards, split))
        able = np.array([i for i, indices in enumerate(sets) if len(indices)], dtype=np.int64)
        if clients is None or clients >= len(able):
            return sets
        # Training draws for rounds 1, 2, ...: round 0 is free.
        drawn = set(able[choose(self.seeds[0], 0, len(able), clients)].tolist())
        return [indices if i in drawn else indices[:0] for i, indices in enumerate(sets)]

    def estimates(
        self, which: Which, client: int, test: Batch, samples: int, seed_index: int = 0, label_prior: bool = False
    ) -> dict[str, Tensor]:
        """Outputs of a model by estimator, see `evaluate`."""
        state = self.personal_state(client, seed_index, test) if which == "personal" else None
        outputs = partial(self._outputs, which, client=client, x=test.x, seed_index=seed_index)
        estimates = {}
        if self.method.stochastic:
            draws = outputs(state, samples=samples)
            estimates = {"one": draws[:1], f"mc{samples}": draws}
        estimates["mean"] = outputs(state, samples=None)
        if which == "personal":
            for name, view in self.method.views(state, self._received(client, seed_index)).items():
                estimates[name] = outputs(view, samples=None)
        if label_prior and self.shards.num_classes:
            prior = log_label_prior(self._count_labels(self.shards.train[client]).to(self.device, self.dtype))
            estimates |= {f"{name}+prior": (log_average(stack) + prior)[None] for name, stack in estimates.items()}
        return estimates

    def headline(self, samples: int) -> str:
        """The estimator whose figures are the method's result."""
        return f"mc{samples}" if self.method.stochastic else "mean"

    # State on disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name."""
        return self._changed() | self.population.tensors()

    def checkpoint(self, clients_file: Path) -> dict[str, Tensor]:
        """As `tensors`, but the states of clients that rest in a file are at `clients_file`, forced to disk, and
        only the table of their rows is given back. Call `population.saved()` once that is written."""
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
        """Continue from `tensors()`, or from `checkpoint(clients_file)`, of a federation with the same settings after
        `round` rounds."""
        template = pick(self._fresh_clients([0]), 0)
        self._refuse_foreign(tensors, template)
        # Fresh copies: memory straight from a file may be aligned otherwise, and kernels round accordingly.
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        members = copies["enrolled"].tolist()
        self.population.close()
        self.population = self._settle()
        if "rows" in copies:
            if not isinstance(self.population, InFile):
                raise UserError("the saved clients rest in a file: set execution.resting=file")
            self.population.restore(members, copies, clients_file)
        elif members:
            self.population.put(members, fill(template, copies, "clients"))
        on_device = {name: copy.to(self.device) for name, copy in copies.items() if name.startswith("server")}
        self.servers = [fill(server, on_device, f"server.{s}") for s, server in enumerate(self.servers)]
        self._server_optimizers = [
            fill(optimizer, on_device, f"server_optimizer.{s}") for s, optimizer in enumerate(self._server_optimizers)
        ]
        self.cursors = copies["cursors"].cpu().numpy()
        self.round = round

    def _refuse_foreign(self, tensors: dict[str, Tensor], client: State) -> None:
        """Refuse a state of another experiment before any of it is taken."""
        known = self._changed() | dict(named_leaves(client, "clients"))
        for name, expected in known.items():
            found = tensors.get(name)
            if found is None:
                if name.startswith("clients") and ("rows" in tensors or not tensors["enrolled"].numel()):
                    continue  # they are in a file of their own, or it was saved before the first round
            elif name == "enrolled" or (name.startswith("server.") and not self.method.averages):
                continue  # its length changes as the run goes on
            elif found.dtype == expected.dtype and found.shape[name.startswith("clients") :] == expected.shape:
                continue
            raise UserError(f"the saved state does not fit this experiment ({name} differs): start a new run")
