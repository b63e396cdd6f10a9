"""FedAvg with the simulated backend of pfl on PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.ours import plan_for
from benchmarks.plain import put
from benchmarks.work import Examples, Work

NEVER = 10**9


class Scored(nn.Module):
    """The network with the two functions that pfl requires."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.module(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Pfl:
    def __init__(self, work: Work) -> None:
        plan_for(work, {}).activate()
        shards = work.shards()
        examples = [Examples(work, shards, i) for i in range(work.clients)]
        self._work, self._round = work, 0

        def dataset(client: int) -> Any:
            """Return the batches of a client in the next round as one data set: its epoch is the round."""
            rows = examples[client].order(self._round).flatten()
            return Dataset((examples[client].x[rows], examples[client].y[rows]), user_id=str(client))

        # Minimal reuse: a cohort of all clients holds every client once.
        users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(work.clients))))
        self._backend = SimulatedBackend(training_data=users, val_data=users)
        module = Scored(work.module().to(work.device))
        put(module, work.first_theta())
        self._model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        self._algorithm = FederatedAveraging()
        self._settings = NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.rule().eta,  # type: ignore[attr-defined]
            local_batch_size=work.batch_size,
        )

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round += 1
            # The algorithm continues its count of rounds across calls.
            settings = NNAlgorithmParams(self._round, NEVER, self._work.clients, val_cohort_size=None)
            self._model = self._algorithm.run(
                settings, self._backend, self._model, self._settings, send_metrics_to_platform=False
            )

    def outcome(self) -> Tensor:
        return nn.utils.parameters_to_vector(self._model.pytorch_model.parameters()).detach()


def run(work: Work, options: dict[str, Any], serve: Callable[[Pfl], None]) -> None:
    logging.disable(logging.WARNING)
    serve(Pfl(work))
