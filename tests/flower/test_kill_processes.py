"""SIGKILL of a node, of the ServerApp and of the SuperLink: a restart finishes the run, and nothing is lost."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from deployment import Deployment
from safetensors.torch import load_file
from test_deployment import CONFIG, by_engine

from federations import difference
from pfedbayes import runs
from pfedbayes.flower.state import StateFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = CONFIG | {"federation__wait": 120.0}


def taken(folder: Path) -> int:
    """The last finished round."""
    path = folder / "run" / runs.JOURNAL
    return max([line.round for line in runs.read_run(folder / "run").journal if line.taken] if path.exists() else [0])


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def kill(pids) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def with_children(deployment: Deployment, parent: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for pid in deployment.living():
        with contextlib.suppress(OSError, IndexError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    found = [parent]
    for pid in found:
        found += [child for child, its in parents.items() if its == pid]
    return found


def test_the_server_app_and_the_superlink_are_killed(tmp_path):
    settings = LONG | {"training__rounds": 4, "federation__min_replies": 3, "federation__timeout": 90.0}
    settings["federation__out"] = str(tmp_path / "run")
    with Deployment(tmp_path, nodes=3) as deployment:
        deployment.superlink()
        deployment.register()
        for i in range(3):
            deployment.supernode(i)
        run = deployment.run(**settings)
        deployment.until(lambda: taken(tmp_path) >= 1, 240, "round 1")
        kill([pid for pid in deployment.living() if "flwr-serverapp" in command_of(pid)])
        run.wait(120)
        assert runs.read_run(tmp_path / "run").summary is None

        run = deployment.run(**settings)
        deployment.until(lambda: taken(tmp_path) >= 2, 240, "round 2")
        kill(with_children(deployment, deployment.links[-1].pid))
        run.wait(120)
        assert runs.read_run(tmp_path / "run").summary is None

        deployment.superlink()
        deployment.keep_nodes()
        run = deployment.run(**settings)
        assert run.wait(400) == 0, deployment.log("run")
    federation, _ = by_engine(tmp_path, {name: v for name, v in settings.items() if "federation__" not in name})
    assert runs.read_run(tmp_path / "run").summary.rounds == 4
    assert difference(load_file(tmp_path / "run" / runs.STATE)["server.0"], federation.servers[0]) < 1e-10
    assert [record.round for record in runs.read_run(tmp_path / "run").rounds] == [1, 2, 3, 4]


def test_a_node_is_killed(tmp_path):
    settings = LONG | {"training__rounds": 7, "federation__min_replies": 2, "federation__timeout": 45.0}
    with Deployment(tmp_path, nodes=3) as deployment:
        deployment.superlink()
        deployment.register()
        nodes = [deployment.supernode(i) for i in range(3)]
        run = deployment.run(federation__out=str(tmp_path / "run"), **settings)
        deployment.until(lambda: taken(tmp_path) >= 1, 240, "round 1")
        kill(with_children(deployment, nodes[2].pid))
        deployment.until(lambda: taken(tmp_path) >= 2, 240, "round 2, without the node")
        while run.poll() is None:
            deployment.keep_nodes()
            time.sleep(5)
        assert run.returncode == 0, deployment.log("run")
    result = runs.read_run(tmp_path / "run")
    assert result.summary.rounds == 7
    refused = [line.round for line in result.journal if "site 2" in line.refused]
    assert refused, "the node was missed"
    uploads = [line.uploads for line in result.journal if line.attempt]
    assert 2 in uploads
    assert uploads[-1] == 3, "the node has come back"
    # The cursor counts the examples that a client has trained on: every round it took part in is in its state.
    folder = StateFolder(tmp_path / "state-2")
    last = folder.read(folder.rounds()[-1])
    rounds = int(last.tensors["cursor"]) / (5 * 100)
    assert last.round == 7
    assert uploads.count(3) <= rounds <= 7
