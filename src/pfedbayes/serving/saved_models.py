"""The trained models in a run folder, read one at a time and without the run's data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfedbayes import runs
from pfedbayes.engine.personalisation import Prior, as_prior
from pfedbayes.engine.plan import Plan, choose_device
from pfedbayes.engine.population import FilePopulation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Served
from pfedbayes.evaluation.posterior import TrainedModel, draw_seed
from pfedbayes.evaluation.posthoc import Ensemble
from pfedbayes.files.reading import reading
from pfedbayes.files.tensors import TensorFile
from pfedbayes.maths.trees import fill, leaves, misfit, named_leaves, pick, tree_map
from pfedbayes.methods.base import Method, State
from pfedbayes.nets import Model
from pfedbayes.nets.import_path import refuse_untrusted
from pfedbayes.runs.calibration import CalibrationRecord
from pfedbayes.runs.experiment import build_model
from pfedbayes.runs.resume import recorded_plan


@dataclass(frozen=True)
class SavedModels:
    """The models in the checkpoint of a finished run; with early stopping, those of the best round."""

    folder: Path
    """The run folder."""
    method: Method
    model: Model
    """Network and likelihood, as the plan computes them."""
    plan: Plan
    batch_size: int
    seeds: tuple[int, ...]
    num_clients: int
    """The number of clients that trained; one if the method pools the data."""
    rounds: int | None
    """Rounds trained when the run was finished; None in runs of early versions."""

    alone: int | None
    """The federation in which clients trained alone; None if there is none."""

    def trained_model(self, which: Served, client: int) -> TrainedModel:
        """Read a model of the first seed: a client's, the shared one, or the one that the client has trained alone.

        An ensemble has the models of all seeds.
        """
        with self._checkpoint() as checkpoint:
            indices = [self.alone or 0] if which == "alone" else [0]
            if isinstance(self.method, Ensemble):
                indices = list(range(len(self.seeds)))
            first, *others = (self._member(checkpoint, which, client, index) for index in indices)
        return dataclasses.replace(first, others=tuple(others))

    def _member(self, checkpoint: _Checkpoint, which: Served, client: int, index: int) -> TrainedModel:
        own = which != "shared" and self.method.about.personal
        state = self._client(checkpoint, client, index) if own else self._server(checkpoint, index, client)
        seed = draw_seed(self.seeds[0], "shared" if which == "shared" else "personal", checkpoint.round, client)
        if not all(bool(leaf.isfinite().all()) for leaf in leaves(state) if leaf.is_floating_point()):
            raise ValueError("a model in it is not finite")
        return TrainedModel(self.method, self.model, state, seed)

    def shared_prior(self) -> Prior:
        """Read the shared models of all seeds, as a prior for newcomers."""
        with self._checkpoint() as checkpoint:
            servers = tuple(as_prior(self.method, self._server(checkpoint, s)) for s in range(len(self.seeds)))
        return Prior(self.method, self.model, self.plan, self.batch_size, self.seeds, servers)

    @contextmanager
    def _checkpoint(self) -> Iterator[_Checkpoint]:
        path = self.folder / runs.STATE
        if self.rounds is not None and (self.folder / runs.FINISHED).exists():  # the run is being extended
            with runs.open_state(self.folder / runs.FINISHED) as file:
                if file.about["round"] == str(self.rounds):
                    path = self.folder / runs.FINISHED
        with runs.open_state(path) as file:
            if self.rounds is not None and file.about["round"] != str(self.rounds):
                raise UserError(f"{path} is not the state of the finished run: finish it with pfedbayes run --resume")
            yield _Checkpoint(file, path)

    def _server_template(self) -> State:
        theta = torch.zeros(self.model.net.num_params, dtype=getattr(torch, self.plan.dtype))
        return self.method.init(theta, self.num_clients, self.model.net)

    def _server(self, checkpoint: _Checkpoint, s: int, client: int = 0) -> State:
        """Read the server's state of a federation; clients that train alone have one each."""
        template = self._server_template()
        expected = dict(named_leaves(template, f"server.{s}"))
        alone = s == self.alone
        found = {name: checkpoint.row(name, client) if alone else checkpoint.tensor(name) for name in expected}
        if self.method.about.averages:  # other states may change their shape during training
            checkpoint.require_fit(found, expected)
        return self._on_device(fill(template, found, f"server.{s}"))

    def _client(self, checkpoint: _Checkpoint, client: int, s: int) -> State:
        """Read the state of a client of federation s; one that never took part has the state of its first round."""
        template = self._enrol(self._server_template(), client)
        enrolled, member = checkpoint.tensor("enrolled").tolist(), s * self.num_clients + client
        if member not in enrolled:
            return self._enrol(self._server(checkpoint, s, client), client)
        if checkpoint.keeps_clients_apart:
            population = FilePopulation(template, torch.device("cpu"))
            rows = checkpoint.optional(("rows", "witness", "checksums"))
            try:
                population.restore(enrolled, rows, self.folder / runs.CLIENTS)
                state = pick(population.get([member], lambda _: ()), 0)
            finally:
                population.close()
            return self._on_device(state)
        expected = dict(named_leaves(template, "clients"))
        found = {name: checkpoint.row(name, enrolled.index(member)) for name in expected}
        checkpoint.require_fit(found, expected)
        return self._on_device(fill(template, found, "clients"))

    def _enrol(self, server: State, client: int) -> State:
        received = pick(self.method.download(server, torch.tensor([client])), 0)
        return tree_map(torch.Tensor.contiguous, self.method.enrol(received))

    def _on_device(self, state: State) -> State:
        """Copy a state: memory straight from a file may be aligned differently, and kernels round accordingly."""
        return tree_map(lambda leaf: leaf.clone().to(self.plan.device), state)


@dataclass(frozen=True)
class _Checkpoint:
    """An open state file, of which single tensors are read."""

    file: TensorFile
    path: Path

    @property
    def _prefix(self) -> str:
        return runs.BEST if "best_round" in self.file.about else ""

    @property
    def round(self) -> int:
        """The number of rounds after which the state was saved."""
        return int(self.file.about["best_round" if self._prefix else "round"])

    @property
    def keeps_clients_apart(self) -> bool:
        """Whether the states of the clients are in a file of their own."""
        return f"{self._prefix}rows" in self.file.names

    def optional(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read those of these tensors that the file has."""
        return {name: self.tensor(name) for name in names if self._prefix + name in self.file.names}

    def tensor(self, name: str) -> Tensor:
        return self.file.tensor(self._prefix + name)

    def row(self, name: str, row: int) -> Tensor:
        return self.file.row(self._prefix + name, row)

    def require_fit(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        """Refuse tensors of another experiment."""
        if name := misfit(found, expected):
            raise UserError(f"{self.path} does not fit the experiment beside it ({name} differs): start a new run")


def saved_models(
    folder: Path, record: CalibrationRecord, device: str = "auto", trust_module: bool = False
) -> SavedModels:
    """Open the models of a finished run. trust_module: whether the folder may name code."""
    refuse_untrusted(record.net.name, folder, trust_module)
    run = runs.read_run(folder)
    experiment = run.with_method(trust_module)
    method = experiment.federated
    plan = recorded_plan(run).on(choose_device(device))
    plan.activate()
    if record.model is None:
        model = build_model(record.net, record.task_shape, method)
    else:
        with reading(folder / runs.CALIBRATION, "save the federation again"):
            model = record.model.build(tuple(record.preprocessing.shape))
    return SavedModels(
        folder=folder,
        method=method,
        model=plan.fit(model),
        plan=plan,
        batch_size=experiment.training.batch_size,
        seeds=tuple(run.info.seeds),
        num_clients=1 if method.needs.pooled_data else len(record.names),
        rounds=record.rounds,
        alone=record.alone,
    )
