"""What the models of a federation say and how good it is: many clients and seeds at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.plan import WHOLE_SETS, Plan
from pfedbayes.engine.population import Population
from pfedbayes.errors import UserError
from pfedbayes.maths.metrics import METRICS, log_average, log_label_prior, scores
from pfedbayes.maths.random import Purpose, choose, key, normals
from pfedbayes.maths.trees import alike, concat, pick, stack, tree_map
from pfedbayes.methods.base import Adaptation, Method, State, weights_posterior
from pfedbayes.nets import Batch, Model
from pfedbayes.nets.reparametrisation import Dense, dense_layers, drawn_outputs, num_drawn_weights

Which = Literal["personal", "shared"]
Split = Literal["test", "validation"]
Sampling = Literal["weights", "pairs", "activations"]
MODELS: tuple[Which, ...] = ("personal", "shared")
SCORED_AT_ONCE = 2**23  # outputs, on a CPU: enough to keep it busy, and 32 MB


def estimator_names(samples: int) -> tuple[str, ...]:
    """The ways in which a method that draws weights can predict."""
    return "one", f"mc{samples}", "mean"


class Ways(NamedTuple):
    """How to predict, see `Prediction.evaluate`."""

    samples: int
    estimators: Sequence[str] | None = None
    sampling: Sampling = "weights"
    label_prior: bool = False

    @property
    def wanted(self) -> Sequence[str]:
        """The names of the estimators that are asked for."""
        return self.estimators or estimator_names(self.samples)

    @property
    def draws(self) -> int:
        """How many draws the estimators need."""
        one, average, _ = estimator_names(self.samples)
        return self.samples if average in self.wanted else int(one in self.wanted)


class Group(NamedTuple):
    """Clients with equally many examples (see `_groups`), the rows (clients, n) of the pool where these are, the rows
    that occur, and the place (clients, n) of each among those."""

    clients: list[int]
    rows: Tensor
    different: Tensor
    place: Tensor


class Block(NamedTuple):
    """Predictions for clients (c) of seeds (S): per estimator outputs (S * c, K, n, ...); targets y (S * c, n, ...)."""

    seeds: Sequence[int]
    clients: list[int]
    y: Tensor
    outputs: dict[str, Tensor]


class Prediction:
    """The models of a federation as they are now. Members k = s * num_clients + i are predicted in blocks."""

    shards: Shards
    model: Model
    method: Method
    plan: Plan
    seeds: tuple[int, ...]
    servers: list[State]
    population: Population
    round: int
    train_sets: Sequence[Tensor]
    num_clients: int
    numbers: NDArray[np.int64]  # the names of the clients in random draws
    batch_sizes: NDArray[np.int64]
    training_at_once: int  # members that train in a round
    x: Tensor
    y: Tensor
    device: torch.device
    dtype: torch.dtype

    @property
    def predictor(self) -> Model:
        """The model as it is computed for prediction."""
        return self.model

    def models(self) -> list[Which]:
        """Which of the two models the method has."""
        return [which for which in MODELS if getattr(self.method.about, which)]

    def headline(self, samples: int) -> str:
        """The estimator whose figures are the method's result."""
        return f"mc{samples}" if self.method.about.stochastic else "mean"

    def predict(
        self,
        which: Which,
        client: int,
        x: Tensor,
        samples: int | None = None,
        seed_index: int = 0,
        sampling: Sampling = "weights",
    ) -> Tensor:
        """Outputs (K, n, ...) of a client's model or the shared one at inputs x (n, ...): one for each of `samples`
        draws, or the one of the mean network. sampling: see `evaluate`."""
        self.plan.activate()
        states = stack([self.personal_state(client, seed_index) if which == "personal" else self.servers[seed_index]])
        ways, rows = Ways(samples or 0, sampling=sampling), torch.arange(len(x), device=self.device)[None]
        return self._outputs(which, [seed_index], [client], self._to_device(x), rows, ways, states, samples)[0]

    def evaluate(
        self,
        samples: int = 10,
        split: Split = "test",
        label_prior: bool = False,
        estimators: Sequence[str] | None = None,
        sampling: Sampling = "weights",
        clients: int | None = None,
    ) -> dict[str, Any]:
        """Scores of every model on every client's own data: `{model: {estimator: {metric: [seed][client]}}}`; with
        `clients` on those of so many clients, see `evaluation_sets`, and NaN for the others.

        Estimators: "one" weight draw, "mc10" (the average of ten draws) and the "mean" network, or those of them that
        are asked for; a method's further `views`; and each of them again with the client's label prior. sampling:
        draw the "weights", in "pairs" with opposite noise if wanted, or the "activations" of dense layers, which is
        cheaper (see `reparametrisation`).
        """
        metrics = METRICS[self.model.likelihood.task]
        table: dict[tuple[Which, str], Tensor] = {}
        places: dict[Which, list[int]] = {}
        for which in self.models():
            parts: dict[str, list[Tensor]] = {}
            places[which] = []
            blocks = self.blocks(which, split, Ways(samples, estimators, sampling, label_prior), clients)
            for some in _several(blocks, SCORED_AT_ONCE if self.device.type == "cpu" else 0):
                places[which] += chain.from_iterable(self._members(block.seeds, block.clients) for block in some)
                y = concat([block.y for block in some])
                for name in some[0].outputs:
                    outputs = concat([block.outputs[name] for block in some])
                    parts.setdefault(name, []).append(scores(self.model.likelihood, outputs, y))
            table |= {(which, name): torch.cat(figures) for name, figures in parts.items()}
        result: dict[str, Any] = {which: {} if which in self.models() else None for which in MODELS}
        if not table:
            return result
        fetched = torch.stack(list(table.values())).cpu()  # a GPU is waited for here and nowhere before
        for (which, name), figures in zip(table, fetched, strict=True):
            full = figures.new_full((len(metrics), len(self.seeds) * self.num_evaluated), torch.nan)
            full[:, places[which]] = figures.T
            values = full.view(len(metrics), len(self.seeds), -1).tolist()
            result[which][name] = dict(zip(metrics, values, strict=True))
        return result

    def estimates(
        self, which: Which, client: int, rows: Tensor, samples: int, seed_index: int = 0, label_prior: bool = False
    ) -> dict[str, Tensor]:
        """Outputs (K, n, ...) of a model for these examples of the pool by estimator, see `evaluate`."""
        ways, rows = Ways(samples, label_prior=label_prior), rows[None].to(self.device)
        estimates = self._estimates(which, [seed_index], [client], rows, ways)
        block = self._block([seed_index], [client], self.y[rows], estimates, ways)
        return {name: outputs[0] for name, outputs in block.outputs.items()}

    def blocks(self, which: Which, split: Split, ways: Ways, clients: int | None = None) -> Iterator[Block]:
        """Predictions of a model for all clients that have data, or so many of them, in blocks that fit the memory.

        The number of calls depends on the number of different sizes, and not on the number of clients and seeds,
        as far as they fit.
        """
        known = estimator_names(ways.samples)
        if unknown := [name for name in ways.wanted if name not in known]:
            raise UserError(f"there is no estimator {unknown[0]!r}: choose among {', '.join(known)}")
        for group in self._groups(split, clients):
            seeds_at_once, clients_at_once = self._block_size(which, group.rows.shape[1], ways)
            for some in _slices(len(self.seeds), seeds_at_once):
                seeds = range(len(self.seeds))[some]
                if self._answers_once(which, ways):
                    yield self._block(seeds, group.clients, self.y[group.rows], self._dealt(seeds, group, ways), ways)
                    continue
                for part in _slices(len(group.clients), clients_at_once):
                    ids, rows = group.clients[part], group.rows[part]
                    yield self._block(seeds, ids, self.y[rows], self._estimates(which, seeds, ids, rows, ways), ways)

    def _block(
        self, seeds: Sequence[int], clients: list[int], y: Tensor, estimates: dict[str, Tensor], ways: Ways
    ) -> Block:
        """Estimates of these clients with targets y (c, n, ...), also with their label priors if asked for."""
        if ways.label_prior:
            estimates |= self._with_label_prior(estimates, seeds, clients)
        return Block(seeds, clients, concat([y] * len(seeds)), estimates)

    def _answers_once(self, which: Which, ways: Ways) -> bool:
        """Whether the model says the same of an example whosever it is: the shared one does unless it draws
        activations, of which every client has its own."""
        return which == "shared" and not (
            self.method.about.stochastic and ways.draws and ways.sampling == "activations"
        )

    def _dealt(self, seeds: Sequence[int], group: Group, ways: Ways) -> dict[str, Tensor]:
        """`_estimates` of the shared model for all clients of a group, from one prediction for every example that any
        of them has."""
        once = self._estimates("shared", seeds, [], group.different[None], ways)
        return {name: outputs[:, :, group.place].transpose(1, 2).flatten(0, 1) for name, outputs in once.items()}

    def evaluation_sets(self, split: Split, clients: int | None = None) -> list[Tensor]:
        """The examples on which each client is scored: with `clients`, none but for so many that have any, drawn once
        for a seed."""
        sets = list(getattr(self.shards, split))
        able = np.array([i for i, indices in enumerate(sets) if len(indices)], dtype=np.int64)
        if clients is None or clients >= len(able):
            return sets
        # Training draws for rounds 1, 2, ...: round 0 is free.
        drawn = set(able[choose(self.seeds[0], 0, len(able), clients)].tolist())
        return [indices if i in drawn else indices[:0] for i, indices in enumerate(sets)]

    def _groups(self, split: Split, clients: int | None) -> list[Group]:
        """Which clients are evaluated, by the number of their examples and, where models are made from whole training
        sets, by the sizes of those."""
        if (split, clients) not in self._known_groups:
            by_size: dict[tuple[int, int], list[int]] = {}
            sets = self.evaluation_sets(split, clients)
            whole = self.method.adapts and self.method.needs.full_batch
            for i, rows in enumerate(sets):
                if len(rows):
                    by_size.setdefault((len(rows), int(self.batch_sizes[i]) if whole else 0), []).append(i)
            known = self._known_groups[split, clients] = []
            for ids in by_size.values():
                rows = torch.stack([sets[i] for i in ids])
                different, place = torch.unique(rows, return_inverse=True)
                known.append(Group(ids, *(tensor.to(self.device) for tensor in (rows, different, place))))
        return self._known_groups[split, clients]

    @cached_property
    def _known_groups(self) -> dict[tuple[Split, int | None], list[Group]]:
        return {}

    @property
    def num_evaluated(self) -> int:
        """The number of clients that models are evaluated for; a method that pools the training data has them too."""
        return len(self.shards.names)

    def _members(self, seeds: Sequence[int], clients: Sequence[int]) -> list[int]:
        """Places of these clients of these seeds in a table [seed][client]."""
        return [s * self.num_evaluated + i for s in seeds for i in clients]

    @property
    def _rows_at_once(self) -> int:
        """How many examples are predicted in one go. A CPU is busy with few; a GPU needs many to be."""
        rows = 5000 if self.device.type == "cpu" else 130_000
        return rows // 20 if self.model.net.convolutional else rows  # the activations of images are large

    @property
    def _rows_alone(self) -> int:
        """How many examples one network predicts in one go. A CPU keeps them in its caches while bytes become numbers
        and these outputs; but a model that is made of a whole training set has much to do before the first of them."""
        few = self.device.type == "cpu" and not self.method.needs.full_batch
        return min(self._rows_at_once, 2000) if few else self._rows_at_once

    def _block_size(self, which: Which, size: int, ways: Ways) -> tuple[int, int]:
        """How many seeds and how many clients with `size` examples each are predicted together: no more personal models
        than train at once, since the others may rest elsewhere, and scores are not to depend on where."""
        mapped = self.plan.over == "vmap" and (which == "personal" or self.method.about.averages)
        seeds = max(1, min(self._rows_at_once // size, len(self.seeds))) if mapped else 1
        if which == "personal" and not mapped:
            return 1, 1
        clients = max(1, self._rows_at_once // (size * seeds))
        if which == "personal":
            clients = min(clients, max(1, self.training_at_once // seeds))
        return seeds, clients

    def _estimates(
        self, which: Which, seeds: Sequence[int], clients: list[int], rows: Tensor, ways: Ways
    ) -> dict[str, Tensor]:
        """Outputs (S * c, K, n, ...) by estimator for the examples (c, n) of these clients."""
        self.plan.activate()
        if which == "shared":
            states = stack([self.servers[s] for s in seeds])
        else:
            states = self._personal_states(seeds, clients, rows)
        outputs = partial(self._outputs, which, seeds, clients, self.x, rows, ways)
        one, average, mean = estimator_names(ways.samples)
        estimates = {}
        if self.method.about.stochastic and ways.draws:
            draws = outputs(states, ways.draws)
            estimates = {name: drawn for name, drawn in ((one, draws[:, :1]), (average, draws)) if name in ways.wanted}
        if mean in ways.wanted or not self.method.about.stochastic:
            estimates[mean] = outputs(states, None)
        if which == "personal":
            estimates |= {name: outputs(view, None) for name, view in self._views(seeds, clients, states).items()}
        return estimates

    def _with_label_prior(
        self, estimates: dict[str, Tensor], seeds: Sequence[int], clients: list[int]
    ) -> dict[str, Tensor]:
        """The same estimators with the label prior of each client."""
        if not self.shards.num_classes:
            return {}
        prior = self._label_priors[clients].repeat(len(seeds), 1)[:, None]
        averages = {name: log_average(outputs) for name, outputs in estimates.items()}
        return {f"{name}+prior": (average + prior)[:, None] for name, average in averages.items()}

    def _personal_states(self, seeds: Sequence[int], clients: Sequence[int], rows: Tensor) -> State:
        states = self.population.get([s * self.num_clients + i for s in seeds for i in clients], self._fresh_clients)
        if not self.method.adapts:
            return states
        received = concat([self.download(s, clients) for s in seeds])
        tests = [self.batch_of(own) for own in rows]
        members = [(i, s, test) for s in seeds for i, test in zip(clients, tests, strict=True)]
        at_once = 1
        if not self.method.needs.loop and self.plan.over == "vmap":
            at_once = self.plan.chunk or max(1, self._rows_at_once // int(self.batch_sizes.max()))
            at_once = min(at_once, WHOLE_SETS) if self.method.needs.full_batch else at_once
        parts = [
            self._adapted(pick(states, part), pick(received, part), [self._prepared(*each) for each in members[part]])
            for part in _slices(len(members), at_once)
        ]
        return concat(parts)

    def _adapted(self, states: State, received: State, prepared: Sequence[State]) -> State:
        """Personal models of stacked members, all at once as far as what they adapt with has the same shape."""
        adapt = partial(self.method.adapt, self.model)
        if len(prepared) == 1:
            return stack([adapt(pick(states, 0), pick(received, 0), prepared[0])])
        groups = alike(prepared)
        parts = [
            torch.func.vmap(adapt)(pick(states, some), pick(received, some), stack([prepared[k] for k in some]))
            for some in groups
        ]
        order = torch.tensor(list(chain.from_iterable(groups)), device=self.device)
        return pick(concat(parts), order.argsort())

    def personal_state(self, client: int, seed_index: int = 0, test: Batch | None = None) -> State:
        """The state that a client predicts with; one that has not taken part yet starts from the shared model."""
        member = seed_index * self.num_clients + client
        state = pick(self.population.get([member], self._fresh_clients), 0)
        if not self.method.adapts:
            return state
        prepared = self._prepared(client, seed_index, test)
        return self.method.adapt(self.model, state, self._received(client, seed_index), prepared)

    def _prepared(self, client: int, seed_index: int, test: Batch | None) -> State:
        """What the method adapts a client's model with, drawn anew every round."""
        train = self.batch_of(self.train_sets[client])
        seed = key(self.seeds[seed_index], Purpose.ADAPTATION, self.round, int(self.numbers[client]))
        batch_size = int(self.batch_sizes[client])
        return self.method.prepare(Adaptation(train, batch_size, self.shards.num_classes, seed, test))

    def _fresh_clients(self, members: Sequence[int]) -> State:
        """The stacked states of clients that are met for the first time."""
        parts = []
        for s, own in groupby(members, lambda member: member // self.num_clients):
            received = self.download(s, np.remainder(list(own), self.num_clients))
            parts.append(torch.func.vmap(self.method.enrol)(received))
        # What all have in common is one piece of memory until here.
        return tree_map(torch.Tensor.contiguous, concat(parts))

    def download(self, seed_index: int, clients: Sequence[int] | NDArray[np.int64]) -> State:
        """What these clients receive from the server as it is now, stacked."""
        return self.method.download(self.servers[seed_index], torch.as_tensor(clients))

    def _received(self, client: int, seed_index: int) -> State:
        return pick(self.download(seed_index, [client]), 0)

    def _views(self, seeds: Sequence[int], clients: Sequence[int], states: State) -> dict[str, State]:
        """The method's further personal models, with a leading member axis."""
        received = concat([self.download(s, clients) for s in seeds])
        views: dict[str, State] = torch.func.vmap(self.method.views)(states, received)
        return views

    @cached_property
    def _label_priors(self) -> Tensor:
        counts = torch.stack([self._count_labels(rows) for rows in self.shards.train])
        return log_label_prior(counts.to(self.device, self.dtype))

    def _count_labels(self, indices: Tensor) -> Tensor:
        classes = self.shards.num_classes
        return torch.bincount(self.shards.y[indices], minlength=classes) if classes else torch.empty(0)

    def batch_of(self, indices: Tensor) -> Batch:
        """All these examples (..., n) as one batch."""
        rows = indices.to(self.device)
        weight = torch.ones(rows.shape, dtype=self.dtype, device=self.device)
        return Batch(_taken(self.x, rows), _taken(self.y, rows), weight)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype if values.is_floating_point() else None)

    def _outputs(
        self,
        which: Which,
        seeds: Sequence[int],
        clients: Sequence[int],
        pool: Tensor,
        rows: Tensor,
        ways: Ways,
        states: State,
        draws: int | None,
    ) -> Tensor:
        """Outputs (S * c, K, n, ...) for rows (c, n) of a pool, of states stacked over members, or over seeds if
        shared: the first `draws` of ways.samples, or the mean network."""
        dense: tuple[Dense, ...] = ()
        noise: tuple[Tensor, ...] = ()
        if draws is not None and self.method.about.stochastic:
            if ways.sampling == "activations" and self.method.about.gaussian:
                dense = dense_layers(self.predictor.net, self.model.inputs(pool[:1], self.dtype), self.dtype)
            drawn = self._noise(which, seeds, clients, rows.shape[1], ways, dense)
            noise = tuple(each[:, :draws] for each in drawn)
        own = which == "personal"
        # The shared model has all clients' examples as one long batch, the same for every seed.
        arguments = (states, rows.repeat(len(seeds), 1) if own else rows.flatten(), *noise)
        axes = (0, 0 if own else None, *(0 for _ in noise))
        count = len(seeds) * (len(clients) if own else 1)
        predict = partial(self._one_model, dense)
        # Not every method can be mapped; and libraries are fast at convolutions of one network with many images.
        if count == 1 or self.predictor.net.convolutional:
            each_alone = (
                [pick(each, k) if axis == 0 else each for each, axis in zip(arguments, axes, strict=True)]
                for k in range(count)
            )
            outputs = torch.stack([_in_passes(predict, 1, pool, self._rows_alone, *alone) for alone in each_alone])
        else:
            together = torch.func.vmap(predict, in_dims=axes)
            outputs = _in_passes(together, 2, pool, self._rows_at_once // count or 1, *arguments)
        if own:
            return outputs
        return outputs.view(*outputs.shape[:2], *rows.shape, *outputs.shape[3:]).transpose(1, 2).flatten(0, 1)

    def _one_model(self, dense: tuple[Dense, ...], state: State, x: Tensor, *noise: Tensor) -> Tensor:
        """Outputs (K, n, ...) of one model at x (n, ...); without noise, of its mean network."""
        if dense:
            q = weights_posterior(self.method, state)
            return drawn_outputs(self.predictor.net, dense, q.mu, q.sigma, self.model.inputs(x, self.dtype), *noise)
        return self.method.predict(self.predictor, state, x, noise[0] if noise else None)

    def _noise(
        self,
        which: Which,
        seeds: Sequence[int],
        clients: Sequence[int],
        size: int,
        ways: Ways,
        dense: Sequence[Dense],
    ) -> tuple[Tensor, ...]:
        """Noise (models, K, W) of the weights and, if there are dense layers to be drawn, (models, K, n, U) of them.

        A client's model has draws of its own; those of the shared model's weights are the same for all clients. In
        pairs g, -g what is linear in the noise cancels in the average, and every draw has the distribution it had.
        """
        samples = ways.samples
        purpose = Purpose.PERSONAL_PREDICTION if which == "personal" else Purpose.SHARED_PREDICTION
        names = [(self.seeds[s], int(self.numbers[i])) for s in seeds for i in clients]
        if which == "personal":
            keys = [key(seed, purpose, self.round, i) for seed, i in names]
        else:
            keys = [key(self.seeds[s], purpose, self.round) for s in seeds]
        pairs = ways.sampling == "pairs"
        drawn = (samples + 1) // 2 if pairs else samples
        weights = normals((drawn, num_drawn_weights(self.model.net, dense)), keys, self.dtype, self.device)
        if pairs:
            weights = torch.stack([weights, -weights], dim=2).flatten(1, 2)[:, :samples]
        if not dense:
            return (weights,)
        width = sum(layer.units for layer in dense)
        keys = [key(seed, purpose, self.round, i, 0) for seed, i in names]
        units = normals((samples, size, width), keys, self.dtype, self.device)
        if which == "shared":
            units = units.view(len(seeds), len(clients), *units.shape[1:]).transpose(1, 2).flatten(2, 3)
        return weights, units


def _several(blocks: Iterable[Block], numbers: int) -> Iterator[list[Block]]:
    """Blocks whose clients have equally many examples, as many at a time as have so many outputs, or one: to score few
    outputs, a CPU's threads are woken up more than they work."""
    some: list[Block] = []
    outputs = 0
    for block in blocks:
        own = sum(each.numel() for each in block.outputs.values())
        if some and (outputs + own > numbers or block.y.shape[1] != some[0].y.shape[1]):
            yield some
            some, outputs = [], 0
        some.append(block)
        outputs += own
    if some:
        yield some


def _in_passes(
    predict: Callable[..., Tensor], axis: int, pool: Tensor, at_once: int, state: State, rows: Tensor, *noise: Tensor
) -> Tensor:
    """What `predict` says of rows (..., n) of a pool, of which so many are taken out and predicted at once. In its
    outputs the examples are along this axis."""
    parts = []
    for part in _slices(rows.shape[-1], at_once):
        units = [each[..., part, :] for each in noise[1:]]
        parts.append(predict(state, _taken(pool, rows[..., part]), *noise[:1], *units))
    return torch.cat(parts, dim=axis)


def _taken(pool: Tensor, rows: Tensor) -> Tensor:
    """The examples at these rows of a pool, in the shape of the rows."""
    return pool.index_select(0, rows.flatten()).view(*rows.shape, *pool.shape[1:])


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]
