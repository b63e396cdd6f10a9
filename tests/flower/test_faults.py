"""A lost, slow or lying node does not stop the round, and is named."""

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from grids import FakeGrid, run_config, serve
from safetensors.torch import load_file

from federations import difference, federation
from pfedbayes import UserError, runs
from pfedbayes.engine.participation import choose
from pfedbayes.engine.round import download
from pfedbayes.flower.messages import FACTS, content, facts_of, from_arrays, to_arrays
from pfedbayes.flower.settings import from_run_config
from pfedbayes.flower.state import StateFolder
from pfedbayes.report import write

LIAR = 2


def change_facts(**changes):
    def change(message, reply):
        arrays = {name: reply.content[name] for name in reply.content if name != FACTS}
        return Message(content(facts_of(reply) | changes, **arrays), reply_to=message)

    return change


def change_upload(function):
    def change(message, reply):
        if "upload" not in reply.content:
            return reply
        shape = reply.content["upload"]["upload"].shape
        upload = from_arrays(reply.content["upload"], torch.empty(shape, dtype=torch.float64), "upload")
        arrays = {"upload": to_arrays(function(upload), "upload", torch.float64)}
        return Message(content(facts_of(reply), **arrays), reply_to=message)

    return change


def put(value):
    def function(upload):
        upload[0, 3] = value
        return upload

    return function


def raw(kind, shape, stype, data):
    def change(message, reply):
        record = ArrayRecord({"upload": Array(kind, shape, stype, data)})
        return Message(content(facts_of(reply), upload=record), reply_to=message)

    return change


def without_arrays(message, reply):
    return Message(content(facts_of(reply)), reply_to=message)


def without_facts(message, reply):
    return Message(type(reply.content)({"other": ConfigRecord({"a": 1})}), reply_to=message)


def crash(message, reply):
    return Message(Error(2, "Traceback\nValueError: no such disk"), reply_to=message)


BAD = {
    "NaN": (change_upload(put(torch.nan)), "not finite"),
    "infinity": (change_upload(put(-torch.inf)), "not finite"),
    "1e30": (change_upload(put(1e30)), "magnitude 1e+30"),
    "wrong shape": (change_upload(lambda upload: upload[:, :-1]), "wrong shape"),
    "wrong method": (change_facts(method="fedavg"), "method 'fedavg' instead of 'pfedbayes'"),
    "wrong round": (change_facts(round=7), "round 7 instead of"),
    "wrong client": (change_facts(client=0), "client 0 instead of 2"),
    "another federation": (change_facts(federation="x"), "federation 'x' instead of"),
    "another version": (change_facts(protocol=99), "another version of pfedbayes"),
    "size of zero": (change_facts(size=0), "its size is 0"),
    "bytes missing": (raw("float64", (2, 31), "pfedbayes.raw", b"1234"), "bytes, which do not fit"),
    "pickle": (raw("float64", (2, 31), "pickle", b"1234"), "holds float64 (pickle)"),
    "whole numbers": (raw("int64", (2, 31), "pfedbayes.raw", b"1234"), "holds int64"),
    "no arrays": (without_arrays, "'upload' are missing"),
    "nothing known": (without_facts, "no facts that pfedbayes can read"),
    "crash": (crash, "Flower reports: ValueError: no such disk"),
    "silence": (lambda message, reply: None, "no reply within 0.5 s"),
}


def journal(folder):
    return runs.read_run(folder / "run").journal


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_is_refused_by_name_and_the_round_completes(tmp_path, name):
    change, reason = BAD[name]
    config = run_config(tmp_path, training__rounds=1)
    del config["training.participants"]
    grid = FakeGrid(config)

    def meddle(client, message, reply):
        is_answer = client == LIAR and message.metadata.message_type == "train" and facts_of(message)["train"]
        return change(message, reply) if is_answer else reply

    grid.meddle = meddle
    server = serve(grid)
    first = journal(tmp_path)[0]
    assert first.taken
    assert first.uploads == 4
    assert list(first.refused) == ["site 2"]
    assert reason in first.refused["site 2"]

    # The others are averaged as if the liar were not there.
    settings = from_run_config(config)
    engine = federation(settings.method, training=settings.training)
    chosen = choose(engine.setup, 1)
    received = download(engine.setup, engine.servers, chosen)
    clients = engine.client_states(chosen.members)
    trained = engine._executor.train(1, chosen, engine.state.cursors, clients, received)
    others = [i for i in range(5) if i != LIAR]
    expected = settings.method.aggregate(
        engine.servers[0], trained.uploads[others], torch.ones(4).double(), torch.tensor(others)
    )
    assert difference(server.state.servers[0], expected) < 1e-10
    assert "site 2" in write([tmp_path / "run"], tmp_path / "page.html").read_text()


def test_too_few_replies_are_asked_for_again_and_then_the_run_stops_whole(tmp_path):
    config = run_config(tmp_path, federation__min_replies=3, federation__attempts=2)
    grid = FakeGrid(config)
    grid.meddle = lambda client, message, reply: None if message.metadata.group_id == "2" and client > 1 else reply
    with pytest.raises(UserError, match=r"round 2 had too few usable uploads 2 times"):
        serve(grid)
    assert [(line.round, line.attempt, line.taken) for line in journal(tmp_path)] == [
        (1, 1, True), (2, 1, False), (2, 2, False),
    ]  # fmt: skip
    grid.meddle = lambda client, message, reply: reply
    interrupted = serve(grid)
    (tmp_path / "other").mkdir()
    whole = serve(FakeGrid(run_config(tmp_path / "other")))
    assert torch.equal(interrupted.state.servers[0], whole.state.servers[0])


def test_a_node_that_is_away_is_done_without_and_comes_back(tmp_path):
    config = run_config(tmp_path, training__rounds=3, training__evaluate_every=1)
    del config["training.participants"]
    grid = FakeGrid(config)
    away = {}

    def meddle(client, message, reply):
        if client == 4 and message.metadata.group_id == "1":
            away.update({102: grid.nodes.pop(102)})
        if client == 4 and message.metadata.group_id == "2":
            grid.nodes[902] = away.pop(102)  # without a key it has another id than before
        return reply

    grid.meddle = meddle
    serve(grid)
    assert [line.uploads for line in journal(tmp_path)] == [5, 4, 5, 0]
    rounds = runs.read_run(tmp_path / "run").rounds
    assert [record.absent for record in rounds] == [[2], [], []]
    assert rounds[0].personal["mean"]["accuracy"][0][2] is None
    page = write([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "NaN" not in page
    assert "nan %" not in page


def test_a_second_node_with_the_same_number_is_refused(tmp_path):
    grid = FakeGrid(run_config(tmp_path, training__rounds=1))
    grid.nodes[999] = {"partition-id": 1, "name": "impostor"}
    server = serve(grid)
    assert [member.name for member in server.members] == [f"site {i}" for i in range(5)]


def test_methods_that_need_everybody_do_not_go_on_without(tmp_path):
    config = run_config(tmp_path, "bnfed", federation__attempts=1)
    del config["training.participants"]
    grid = FakeGrid(config)
    del grid.nodes[103]
    with pytest.raises(UserError, match="round 1 had too few usable uploads"):
        serve(grid)


def test_without_nodes_the_server_says_why(tmp_path):
    grid = FakeGrid(run_config(tmp_path))
    for config in grid.nodes.values():
        config["partition-id"] = 17
    with pytest.raises(UserError, match=r"no node connected within 0 s .*a number from 0 to 4"):
        serve(grid)


def test_a_client_leaves_for_good(tmp_path):
    config = run_config(tmp_path, training__rounds=2)
    del config["training.participants"]
    serve(FakeGrid(config))
    folder = tmp_path / "states" / "client-1"
    assert list(folder.glob("*.safetensors"))

    StateFolder(folder).leave()
    assert not list(folder.glob("*.safetensors"))
    grid = FakeGrid(config | {"training.rounds": 4})
    serve(grid)
    assert [line.uploads for line in journal(tmp_path)] == [5, 5, 0, 4, 4, 0]
    assert grid.asked.count((1, "train")) == 0
    assert runs.read_run(tmp_path / "run").info.federation.left == ["site 1"]
    assert "site 1 left for good" in write([tmp_path / "run"], tmp_path / "page.html").read_text()
    # And it stays away, whatever becomes of its folder.
    (folder / "left.json").unlink()
    grid = FakeGrid(config | {"training.rounds": 5})
    serve(grid)
    assert grid.asked.count((1, "train")) == 0


def test_a_client_that_leaves_during_a_run_is_named(tmp_path):
    config = run_config(tmp_path, training__rounds=3)
    del config["training.participants"]
    grid = FakeGrid(config)

    def meddle(client, message, reply):
        if client == 1 and message.metadata.group_id == "1":
            StateFolder(tmp_path / "states" / "client-1").leave()
        return reply

    grid.meddle = meddle
    serve(grid)
    assert journal(tmp_path)[1].refused == {"site 1": "has left for good"}
    assert [line.uploads for line in journal(tmp_path)] == [5, 4, 4, 0]


def test_arrays_travel_in_fewer_bits(tmp_path):
    sizes = {}
    states = {}
    for wire in ("float32", "bfloat16", "float16"):
        folder = tmp_path / wire
        folder.mkdir()
        serve(FakeGrid(run_config(folder, federation__wire=wire)))
        sizes[wire] = journal(folder)[0].up
        states[wire] = load_file(folder / "run" / runs.STATE)["server.0"]
    assert sizes["bfloat16"] == sizes["float16"] < sizes["float32"]
    assert 0 < difference(states["bfloat16"], states["float32"]) < 0.05
    assert 0 < difference(states["float16"], states["float32"]) < 0.005
