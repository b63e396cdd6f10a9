"""One malicious node among five cannot stop a federation, move it beyond the robust bound, or take another's place."""

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from grids import CLIENTS, FakeGrid, run_config, serve
from malice import ATTACKS, Replay, answer, tensor_of

from pfedbayes import runs
from pfedbayes.flower.keys import ROSTER, fingerprint
from pfedbayes.flower.messages import facts_of
from pfedbayes.flower.record import kept_name
from pfedbayes.flower.rollback import rollback

ROGUE = 2


def public_key():
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

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
