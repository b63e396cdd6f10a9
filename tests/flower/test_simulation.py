"""Flower's own simulation of four nodes gives the engine's numbers for all methods."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from simulate import CARRIED, config_of, four_of_five
from test_equality import assert_same_scores, by_engine

from federations import difference
from own_method import HALF
from pfedbayes import runs
from pfedbayes.maths.trees import fill

HERE = Path(__file__).parent


@pytest.fixture
def short_folder():
    """Ray has sockets in its folder, whose paths must not be long."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


def assert_a_simulation_equals_the_engine(tmp_path, short_folder, methods, modules=()):
    paths = [HERE, HERE.parent, HERE.parents[1] / "src", *modules]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RAY_TMPDIR": short_folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "simulate.py"), str(tmp_path / "out"), *methods],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for method in methods:
        run = runs.read_run(tmp_path / "out" / method / "run")
        engine, scores = by_engine(config_of(tmp_path / "out", method), four_of_five())
        server = fill(engine.servers[0], runs.read_checkpoint(run.folder).tensors, "server.0")
        assert difference(server, engine.servers[0]) < 1e-10, method
        assert [record.round for record in run.rounds] == list(scores)
        for record in run.rounds:
            assert_same_scores(record, scores[record.round])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulation_of_four_nodes_equals_the_engine_for_all_methods(tmp_path, short_folder):
    assert_a_simulation_equals_the_engine(tmp_path, short_folder, CARRIED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulation_carries_a_method_of_the_users_own(tmp_path, short_folder, monkeypatch):
    (tmp_path / "half_method.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    assert_a_simulation_equals_the_engine(tmp_path, short_folder, ["half_method:Half"], [tmp_path])
