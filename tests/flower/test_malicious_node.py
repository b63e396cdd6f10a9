"""One malicious node among five cannot stop a federation, move it beyond the robust bound, or take another's place."""

import shutil
from pathlib import Path

import malice
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from deployment import Deployment
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from grids import CLIENTS, FakeGrid, run_config, serve
from malice import ATTACKS, Replay, answer, tensor_of

from pfedbayes import runs
from pfedbayes.flower.keys import ROSTER, fingerprint
from pfedbayes.flower.messages import facts_of
from pfedbayes.flower.record import kept_name
from pfedbayes.flower.rollback import rollback

ROGUE = 2


def public_key():
    return public_key_to_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())


def guarded(tmp_path, method="pfedbayes", **others):
    """A federation of five nodes with keys, a roster of them, and default guards."""
    config = run_config(tmp_path, method, federation__roster=str(tmp_path / "roster.toml"), **others)
    del config["training.participants"], config["federation.robust"]
    grid = FakeGrid(config)
    grid.keys = {node: public_key() for node in grid.nodes}
    write_roster(tmp_path, grid)
    return grid


def write_roster(tmp_path, grid, **extra):
    """Write the roster of the nodes that there are; extra: lines by client."""
    text = ROSTER
    for node, config in sorted(grid.nodes.items()):
        number = config["partition-id"]
        key = fingerprint(grid.keys[node])
        text += f'[[client]]\nnumber = {number}\nkey = "{key}"\n' + extra.get(f"client_{number}", "")
    (tmp_path / "roster.toml").write_text(text)


def state_after(tmp_path, round):
    return runs.read_checkpoint(tmp_path / "run", kept_name(round)).tensors["server.0"]


@pytest.mark.parametrize("method", ["pfedbayes", "fedavg"])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_neither_stops_the_run_nor_moves_it_beyond_the_robust_bound(tmp_path, name, method):
    if method == "fedavg" and name.startswith("poison"):
        pytest.skip("has no standard deviations to poison")
    Replay.first = None
    grid = guarded(tmp_path, method)
    lengths = {}  # of honest updates, by round

    def meddle(client, message, reply):
        if client == ROGUE and message.metadata.message_type == "train":
            return answer(name, message, reply)
        if "upload" in reply.content:
            update = tensor_of(reply.content["upload"], "upload") - tensor_of(message.content["received"], "received")
            lengths.setdefault(facts_of(reply)["round"], []).append(float(update.norm()))
        return reply

    grid.meddle = meddle
    server = serve(grid)
    result = runs.read_run(tmp_path / "run")
    taken = [entry for entry in result.journal if entry.attempt]
    assert [(entry.taken, entry.robust) for entry in taken] == [(True, "median-norm")] * 3
    honest = [f"site {i}" for i in range(CLIENTS) if i != ROGUE]
    assert all(set(honest) <= set(entry.used) for entry in taken)
    assert not any(member.left for member in server.members)
    assert [member.node for member in server.members] == [100 + i for i in range(CLIENTS)]
    states = [torch.zeros(0), *(state_after(tmp_path, round) for round in (1, 2, 3))]
    for round in (2, 3):
        assert float((states[round] - states[round - 1]).norm()) <= max(lengths[round]) * (1 + 1e-9)
    assert (tmp_path / "run" / runs.JOURNAL).stat().st_size < 20_000


def test_after_a_rollback_the_honest_nodes_go_on(tmp_path):
    grid = guarded(tmp_path, training__rounds=4, federation__robust="none", training__evaluate_every=1)
    grid.meddle = lambda client, message, reply: (
        answer("poison within bounds", message, reply)
        if client == ROGUE and message.metadata.group_id in ("3", "4") and message.metadata.message_type == "train"
        else reply
    )
    poisoned = serve(grid).state.servers[0]
    assert rollback(tmp_path / "run", 2) == 4
    grid.meddle = lambda client, message, reply: reply
    resumed = serve(grid)
    (tmp_path / "other").mkdir()
    other = guarded(tmp_path / "other", training__rounds=4, federation__robust="none", training__evaluate_every=1)
    whole = serve(other)
    assert torch.equal(resumed.state.servers[0], whole.state.servers[0])
    assert not torch.equal(resumed.state.servers[0], poisoned)
    run, clean = (runs.read_run(tmp_path / name) for name in ("run", "other/run"))
    assert [record.personal for record in run.rounds] == [record.personal for record in clean.rounds]


# On loopback. Every node runs this app, and notes the length of its updates; one of them attacks in every round.
APP = """
import os
from pathlib import Path

from flwr.clientapp import ClientApp

from federation.malice import ATTACKS, answer, tensor_of
from federation.task import load_data, make_model
from pfedbayes.flower import client_app
from pfedbayes.flower.messages import facts_of

honest = client_app(load_data, make_model)
app = ClientApp()


def handle(message, context):
    reply = honest(message, context)
    if message.metadata.message_type != "train" or "upload" not in reply.content:
        return reply
    round = facts_of(message)["round"]
    if context.node_config["partition-id"] == 2:
        return answer(list(ATTACKS)[(round - 1) % len(ATTACKS)], message, reply)
    update = tensor_of(reply.content["upload"], "upload") - tensor_of(message.content["received"], "received")
    with Path(context.node_config["state-dir"]).with_suffix(".lengths").open("a") as file:
        file.write(f"{round} {float(update.norm())}\\n")
    return reply


app.query()(handle)
app.train()(handle)
"""


def lengths_of(tmp_path, round):
    """The lengths of honest updates in a round."""
    lines = [line.split() for path in tmp_path.glob("state-*.lengths") for line in path.read_text().splitlines()]
    return [float(length) for number, length in lines if int(number) == round]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_same_on_loopback_with_certificates_and_keys(tmp_path):
    rounds = len(ATTACKS)
    settings = {
        "method__zeta": 1.0, "training__rounds": rounds, "training__local_steps": 3, "training__evaluate_every": 100,
        "federation__out": str(tmp_path / "run"), "federation__keep": 50, "federation__wait": 120.0,
        "federation__min_replies": 4,
    }  # fmt: skip
    with Deployment(tmp_path, nodes=5) as deployment:
        code = tmp_path / "app" / "federation"
        (code / "client_app.py").write_text(APP)
        shutil.copy(Path(malice.__file__), code / "malice.py")
        deployment.superlink()
        deployment.register(keys=6)
        for i in range(5):
            deployment.supernode(i)
        # A node with a key that Flower knows, and that is not in the roster, claims the number of another one.
        deployment.supernode(0, 5, "impostor")
        run = deployment.run(**settings)
        assert run.wait(1500) == 0, deployment.log("run")

        result = runs.read_run(tmp_path / "run")
        taken = [entry for entry in result.journal if entry.attempt]
        assert [(entry.round, entry.taken, entry.robust) for entry in taken] == [
            (round, True, "median-norm") for round in range(1, rounds + 1)
        ]
        honest = {f"site {i}" for i in range(5) if i != ROGUE}
        assert all(honest <= set(entry.used) for entry in taken)
        assert result.info.federation.left == []
        assert sum("is not in the roster" in reason for entry in taken for reason in entry.refused.values()) == 1
        for round in range(2, rounds + 1):
            moved = state_after(tmp_path, round) - state_after(tmp_path, round - 1)
            assert float(moved.norm()) <= max(lengths_of(tmp_path, round)) * (1 + 1e-4)

        assert rollback(tmp_path / "run", 2) == rounds
        run = deployment.run(**settings | {"training__rounds": 4})
        assert run.wait(600) == 0, deployment.log("run")
        after = runs.read_run(tmp_path / "run")
        assert after.summary.rounds == 4
        assert all(honest <= set(entry.used) for entry in after.journal[len(result.journal) + 1 :] if entry.attempt)
    assert not deployment.living()
