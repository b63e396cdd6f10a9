"""The federation that a user trains, evaluates and saves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine import checkpoint
from pfedbayes.engine.backend import timing
from pfedbayes.engine.backend.executor import Executor
from pfedbayes.engine.plan import Over, Plan, is_long, plan_for, run_size
from pfedbayes.engine.population import choose_resting, make_population
from pfedbayes.engine.round import enrolled_clients, fresh_clients, receive_from, train_round
from pfedbayes.engine.rounds import Scores, TrainedRound
from pfedbayes.engine.setup import Copy, make_setup
from pfedbayes.engine.state import first_state
from pfedbayes.engine.training import TrainedClients, Training
from pfedbayes.evaluation import evaluate, predict
from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.evaluation.estimators import EstimatorSpec, EvaluationSplit, Sampling, Which
from pfedbayes.evaluation.evaluate import Block
from pfedbayes.evaluation.models import available_models, headline_estimator, personal_state
from pfedbayes.files.tensors import Rows
from pfedbayes.maths.trees import leaves, pick, stack
from pfedbayes.methods.base import Method, State
from pfedbayes.nets import Batch, Init, Model


class Federation:
    """Clients, server and data of one experiment, for one or more seeds at once.

    `setup` never changes, `state` is replaced by every round, and `population` holds the clients' states.

    clients_file: where clients' states rest if the plan lets them rest in a file; a temporary file if not given.
    copies: federations that train beside those of the seeds, for comparison; no score counts them.
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
        copies: Sequence[Copy] = (),
    ) -> None:
        training = training or Training()
        seeds = tuple(seeds) if seeds is not None else (training.seed,)
        plan = plan or plan_for(model, method, training, len(shards.train), len(seeds) + len(copies))
        self.setup = make_setup(shards, model, method, training, seeds, plan, copies=copies)
        self.state = first_state(self.setup, model, init)
        client = self._new_client()
        self.client_bytes = sum(leaf.nbytes for leaf in leaves(client))
        states = 1 if training.patience is None else 3  # early stopping keeps the best round, at times two of them
        members, at_once = self.setup.num_members, self.training_at_once
        resting = plan.resting or choose_resting(self.client_bytes, members, at_once, states, self.device)
        self.population = make_population(resting, members, client, self.device, clients_file)
        self._executor = Executor(self.setup, replace(plan, resting=resting), model)

    def __repr__(self) -> str:
        """Return a short description."""
        seeds = f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        return (
            f"Federation({self.method.about.title}, {len(self.shards.train)} clients, round {self.round} of "
            f"{self.training.rounds}, {self.model.net.num_params:,} parameters{seeds}, {self.device.type})"
        )

    # What it is built from

    @property
    def method(self) -> Method:
        """The federated method."""
        return self.setup.method

    @property
    def model(self) -> Model:
        """The network and likelihood, as they are trained."""
        return self.setup.model

    @property
    def predictor(self) -> Model:
        """The network and likelihood, as they are computed for prediction."""
        return self._executor.predictor

    @property
    def training(self) -> Training:
        """The configuration of training."""
        return self.setup.training

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that are trained at once."""
        return self.setup.seeds[: self.setup.num_reported]

    def seed(self, index: int) -> int:
        """Return the seed of a federation; copies come after those of `seeds`."""
        return self.setup.seeds[index]

    @property
    def plan(self) -> Plan:
        """How rounds are executed; it changes if the memory or the compiler fails."""
        return self._executor.plan

    @property
    def data(self) -> ClientData:
        """The clients' data on the device."""
        return self.setup.data

    @property
    def shards(self) -> Shards:
        """The clients' data as they were given."""
        return self.data.shards

    @property
    def device(self) -> torch.device:
        """Where rounds are computed."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of floating-point numbers."""
        return self.data.dtype

    @property
    def x(self) -> Tensor:
        """The inputs of all examples, on the device."""
        return self.data.x

    @property
    def y(self) -> Tensor:
        """The targets of all examples, on the device."""
        return self.data.y

    @property
    def train(self) -> TrainedClients:
        """Which clients train in a round."""
        return self.setup.trains

    @property
    def participants(self) -> int:
        """The number S of clients whose uploads are averaged in a round."""
        return self.setup.participants

    @property
    def num_clients(self) -> int:
        """The number N of clients that train; one if the method pools the data."""
        return self.setup.num_clients

    @property
    def training_at_once(self) -> int:
        """The number of clients, over all seeds, that train in a round."""
        return self.setup.training_at_once

    # Where it stands

    @property
    def round(self) -> int:
        """The number of rounds trained so far."""
        return self.state.round

    @property
    def servers(self) -> tuple[State, ...]:
        """The server's state of each seed."""
        return self.state.servers

    @servers.setter
    def servers(self, servers: Sequence[State]) -> None:
        self.state = replace(self.state, servers=tuple(servers))

    def server_of(self, index: int, client: int) -> State:
        """Return the state of the server of a client: where clients train alone, each has its own."""
        return self.servers[index] if index < self.setup.first_alone else pick(self.servers[index], client)

    def server_rows(self, index: int, client: int) -> Tensor:
        """Return the pool rows of the training sets of all clients of that server."""
        start = index * self.num_clients
        if index >= self.setup.first_alone:
            return self.data.train_sets[start + client]
        return torch.cat(tuple(self.data.train_sets[start : start + self.num_clients]))

    def download(self, seed_index: int, clients: Sequence[int] | NDArray[np.int64]) -> State:
        """Return what these clients receive from the server, stacked."""
        return receive_from(self.setup, seed_index, self.servers[seed_index], clients)

    def client_states(self, members: Sequence[int]) -> State:
        """Return the stacked states of these members; new clients start from what they receive."""
        return enrolled_clients(self.setup, self.servers, self.population, members)

    def _fresh_clients(self, members: Sequence[int]) -> State:
        return fresh_clients(self.setup, self.download, members)

    def _new_client(self) -> State:
        return pick(self._fresh_clients([0]), 0)

    # Training

    def rounds(
        self, until: int | None = None, evaluate: EvaluationSplit | None = None, samples: int = 10, show: bool = False
    ) -> Iterator[TrainedRound]:
        """Train up to round `until` (the configured number if not given), and yield after each round.

        evaluate: the data on which models are scored, as often as `training.evaluate_every` says; None for no scores.
        samples: weight draws of a prediction. show: a progress bar, in terminals and notebooks.
        """
        until = self.training.rounds if until is None else until
        records = self._rounds(until, evaluate, samples)
        if not show:
            yield from records
            return
        from rich.progress import track  # noqa: PLC0415  (training needs torch and numpy alone)

        yield from track(records, description=self.method.about.title, total=max(0, until - self.round))

    def _rounds(self, until: int, split: EvaluationSplit | None, samples: int) -> Iterator[TrainedRound]:
        seconds = 0.0
        while self.round < until:
            start = time.perf_counter()
            self.train_round()
            scores: Scores = {}
            if self.round == until or self.training.evaluates(self.round):
                self.confirm()
                scores = {} if split is None else self.evaluate(samples, split)
            seconds += time.perf_counter() - start
            yield TrainedRound(self.round, seconds, scores, self.headline(samples))

    def train_round(self) -> None:
        """Train one round of Algorithm 1; a round that fails changes nothing."""
        self.state = train_round(self.setup, self.state, self.population, self._executor)
        if self._executor.checks.full:
            self.confirm()

    def confirm(self) -> None:
        """Wait for a GPU to finish its rounds. If one of them diverged, go back to the state before it and raise."""
        self.population.wait()
        if failure := self._executor.checks.first_failure(self.state):
            self.state, error = failure
            raise error

    def faster_over(self) -> Over | None:
        """Measure whether "vmap" or "loop" takes less time, for a long run of convolutions on a CPU.

        None elsewhere: there the plan knows. Nothing is trained.
        """
        client_steps, _ = run_size(self.method, self.training, len(self.shards.train), len(self.setup.seeds))
        unknown = self.device.type == "cpu" and self.model.net.convolutional and not self.method.needs.loop
        if not unknown or not is_long(self.model, client_steps):
            return None

        def received(members: list[int]) -> State:
            places = (divmod(member, self.num_clients) for member in members)
            return stack([pick(self.download(s, [i]), 0) for s, i in places])

        return timing.faster_over(self.setup, self.plan, self._fresh_clients, received)

    # Evaluation

    def models(self) -> list[Which]:
        """Return which of the two models the method has."""
        return available_models(self.method)

    def headline(self, samples: int) -> str:
        """Return the estimator whose scores are the method's result."""
        return headline_estimator(self.method, samples)

    def predict(
        self,
        which: Which,
        client: int,
        x: Tensor,
        samples: int | None = None,
        seed_index: int = 0,
        sampling: Sampling = "weights",
    ) -> Tensor:
        """Return outputs (K, n, ...) of a client's model or the shared one at inputs x (n, ...).

        One output per draw of the weights, or that of the mean network if `samples` is None.
        """
        return predict.predict(self, which, client, x, samples, seed_index, sampling)

    def evaluate(
        self,
        samples: int = 10,
        split: EvaluationSplit = "test",
        label_prior: bool = False,
        estimators: Sequence[str] | None = None,
        sampling: Sampling = "weights",
        clients: int | None = None,
    ) -> dict[str, Any]:
        """Score every model on every client's own data: `{model: {estimator: {metric: [seed][client]}}}`.

        See `pfedbayes.evaluation.evaluate.evaluate` for the arguments.
        """
        return evaluate.evaluate(self, samples, split, label_prior, estimators, sampling, clients)

    def estimates(
        self, which: Which, client: int, rows: Tensor, samples: int, seed_index: int = 0, label_prior: bool = False
    ) -> dict[str, Tensor]:
        """Return outputs (K, n, ...) of a model by estimator, for these rows (n,) of the pool."""
        return evaluate.estimates(self, which, client, rows, samples, seed_index, label_prior)

    def blocks(
        self, which: Which, split: EvaluationSplit, spec: EstimatorSpec, clients: int | None = None
    ) -> Iterator[Block]:
        """Predict with a model for all clients that have data, or for `clients` of them, in blocks."""
        return evaluate.predict_blocks(self, which, split, spec, clients)

    def personal_state(self, client: int, seed_index: int = 0, test: Batch | None = None) -> State:
        """Return the state that a client predicts with; a client that has not taken part yet uses the shared model."""
        return personal_state(self, client, seed_index, test)

    def evaluation_sets(self, split: EvaluationSplit, clients: int | None = None) -> list[Tensor]:
        """Return the pool rows on which each client is scored, see `ClientData.evaluation_sets`."""
        return self.data.evaluation_sets(split, self.seeds[0], clients)

    def batch_of(self, rows: Tensor) -> Batch:
        """Return all examples at these pool rows (..., n) as one batch."""
        return self.data.batch_of(rows)

    # State on disk

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that training has changed, by name."""
        self.confirm()
        return checkpoint.named_tensors(self.state, self.population) | self.population.tensors()

    def checkpoint(self, clients_file: Path) -> dict[str, Tensor | Rows]:
        """Return what `Writer.checkpoint` writes. Write it before training continues, then call `population.saved()`.

        As `tensors`, but without copies of states that rest in memory. States that rest in a file are forced to disk at
        `clients_file`, and only the table of their rows is returned.
        """
        self.confirm()
        return checkpoint.named_tensors(self.state, self.population) | self.population.checkpoint(clients_file)

    def restore(self, tensors: dict[str, Tensor], round: int, clients_file: Path | None = None) -> None:
        """Continue from `tensors()` or `checkpoint(clients_file)` of a federation with the same settings."""
        self.state = checkpoint.restore(
            self.setup, self.state, self.population, self._new_client(), tensors, round, clients_file
        )
        self._executor.checks.clear()
