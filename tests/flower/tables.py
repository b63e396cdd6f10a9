"""A federation on tables with the default method: four nodes, the network for tables, piecewise-linear inputs."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import torch
from grids import FakeGrid, run_config

from pfedbayes import Shards, shards_from_tables
from pfedbayes.flower import client_app
from pfedbayes.flower.server import serving
from pfedbayes.flower.settings import from_run_config
from pfedbayes.runs.experiment import table_model

SITES = 4


@cache
def table_shards(task: str = "classification") -> Shards:
    """Return the tables of four sites of different sizes, preprocessed together."""
    rng = np.random.default_rng(0)
    tables = {}
    for site, rows in enumerate((40, 56, 48, 64)):
        age, ward = rng.normal(50 + 5 * site, 10, rows), rng.choice(["a", "b", "c"], rows)
        score = age + rng.normal(0, 5, rows)
        outcome = np.where(score > 55, "ill", "well") if task == "classification" else score
        tables[f"site {site}"] = {"age": age, "ward": ward, "outcome": outcome}
        if task == "survival":
            tables[f"site {site}"] |= {"outcome": np.abs(score), "event": ward != "a"}
    return shards_from_tables(tables, "outcome", event="event" if task == "survival" else None)


def own_rows(client: int, clients: int = SITES, task: str = "classification") -> Shards:
    """Return the rows of one client alone."""
    whole = table_shards(task)
    train, test = whole.train[client], whole.test[client]
    rows, none = torch.cat([train, test]), torch.empty(0, dtype=torch.int64)
    return dataclasses.replace(
        whole, x=whole.x[rows], y=whole.y[rows], train=(torch.arange(len(train)),),
        test=(torch.arange(len(train), len(rows)),), validation=(none,), names=(whole.names[client],),
    )  # fmt: skip


def model_of(task: str = "classification"):
    """Return `make_model` for these tables."""
    return lambda method: table_model(table_shards(task).preprocessing, method)


def table_config(folder, **others: Any) -> dict[str, Any]:
    """Return settings in which all four sites take part."""
    config = run_config(folder, "hierarchical", federation__clients=SITES, **others)
    config.setdefault("evaluation.samples", 10)
    del config["training.participants"]
    return config


def table_grid(config: dict[str, Any], task: str = "classification") -> FakeGrid:
    """Return nodes with these tables."""
    grid = FakeGrid(config, SITES)
    grid.app = client_app(lambda client, clients: own_rows(client, clients, task), model_of(task))
    return grid


def serve_tables(grid: FakeGrid, task: str = "classification"):
    """Run the server's part to its end."""
    settings = from_run_config(grid.run_config)
    with serving(grid, settings, model_of(task)(settings.method)) as server:
        server.run()
    return server
