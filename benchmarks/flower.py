"""FedAvg with the simulation engine of Flower: one Ray actor per core, the same loop over batches in every client."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.plain import train_client
from benchmarks.work import Examples, Work, split_theta


@functools.cache  # an actor converts a client's data once
def _examples(work: Work, client: int) -> Examples:
    return Examples(work, _shards(work), client)


@functools.cache
def _shards(work: Work) -> Any:
    torch.set_num_threads(1)  # one actor per core, so that no core has two threads
    return work.shards()


@functools.cache
def _module(work: Work) -> nn.Module:
    return work.module().to(work.device)


def train(work: Work, loader: bool, message: Any, context: Any) -> Any:
    """Train a client: receive the shared model, return the client's model and its number of examples."""
    examples, module = _examples(work, int(context.node_config["partition-id"])), _module(work)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    config = message.content["config"]
    batches = examples.batches(config["rounds-before"] + config["server-round"], loader)
    train_client(module, batches, work.rule().eta)  # type: ignore[attr-defined]
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(examples.y)}),
    }
    return Message(RecordDict(content), reply_to=message)


class Flower:
    """The server loop, inside the ServerApp, which owns the grid."""

    def __init__(self, work: Work, grid: Any, pull_interval: float | None) -> None:
        if pull_interval is not None:  # by default it polls for replies ten times a second
            grid.pull_interval = pull_interval
        self._grid, self._round = grid, 0
        self._arrays = ArrayRecord(split_theta(work.first_theta().cpu(), work.module()))
        self._strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients)

    def train(self, rounds: int) -> None:
        config = ConfigRecord({"rounds-before": self._round})
        result = self._strategy.start(self._grid, self._arrays, rounds, train_config=config)
        self._arrays = result.arrays
        self._round += rounds

    def outcome(self) -> Tensor:
        return torch.cat([part.flatten() for part in self._arrays.to_torch_state_dict().values()])


def run(work: Work, options: dict[str, Any], serve: Callable[[Flower], None]) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0))
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(functools.partial(train, work, options.get("loader", False)))

    def main(grid: Grid, context: Context) -> None:
        serve(Flower(work, grid, options.get("pull_interval")))

    server_app.main()(main)
    resources = {"num_cpus": 1, "num_gpus": 1 / cores if work.device == "cuda" else 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": cores, "include_dashboard": False}}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        os.environ["RAY_TMPDIR"] = folder
        run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=backend)
