"""What nodes, disks and people do to a federation that they should not: one clear line each, and nothing lost."""

import dataclasses
import math
import os

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from grids import FakeGrid, own_data, run_config, serve
from test_faults import LIAR, change_facts, journal

from federations import model_for
from pfedbayes import UserError, runs
from pfedbayes.flower import client_app
from pfedbayes.flower.messages import FACTS, RAW, content, facts_of
from pfedbayes.flower.state import StateFolder
from pfedbayes.report import write


def everybody(tmp_path, method="pfedbayes", **others):
    """Settings of a federation in which all clients are averaged."""
    config = run_config(tmp_path, method, **others)
    del config["training.participants"]
    return config


def lying(grid, change, trains=True):
    """Let one client answer as `change` makes it; trains: where it was asked to train."""

    def meddle(client, message, reply):
        is_meant = client == LIAR and message.metadata.message_type == "train" and facts_of(message)["train"] == trains
        return change(message, reply) if is_meant else reply

    grid.meddle = meddle
    return grid


# What nodes send

SCORES = {
    "no table": "perfect",
    "numbers for metrics": {"personal": {"mc10": 5}},
    "text for figures": {"personal": {"mc10": {"accuracy": "high"}}, "shared": {"mean": {"nll": [[]]}}},
    "unknown columns": {"personal": {"oracle": {"accuracy": [[1.0]]}}, "shared": None},
    "no columns": {"personal": {}, "shared": {}},
    "too large a number": {"personal": {"mc10": {"accuracy": [[10**400]]}}},
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_any_shape_do_not_stop_the_run_or_hide_those_of_others(tmp_path, name):
    config = everybody(tmp_path, training__rounds=1)
    grid = lying(FakeGrid(config), change_facts(scores=SCORES[name]), trains=False)
    grid.nodes = {100 + LIAR: grid.nodes[100 + LIAR]} | grid.nodes  # the liar is heard first
    serve(grid)
    (record,) = runs.read_run(tmp_path / "run").rounds
    (accuracies,) = record.personal["mc10"]["accuracy"]
    assert [i for i, figure in enumerate(accuracies) if figure is None] == [LIAR]
    assert "site 2" in write([tmp_path / "run"], tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "diagram", ["x", {"personal": 3}, {"personal": {"confidence": [1], "accuracy": [1], "count": [1]}}]
)
def test_calibration_of_any_shape_is_left_out(tmp_path, diagram):
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), change_facts(reliability=diagram), trains=False))
    counts = runs.read_run(tmp_path / "run").summary.reliability["personal"].count
    assert sum(counts) == 9 + 5 + 13 + 4  # the test data of the others


def deep(message, reply):
    return Message(RecordDict({FACTS: ConfigRecord({FACTS: "[" * 100_000})}), reply_to=message)


def arrays(**records):
    def change(message, reply):
        own = {name: Array(*array) for name, array in records.items()}
        return Message(content(facts_of(reply), upload=ArrayRecord(own)), reply_to=message)

    return change


ENTRIES = (2, 31)
ZEROS = ("float64", ENTRIES, RAW, bytes(8 * math.prod(ENTRIES)))
ENDLESS = ("float64", ENTRIES, RAW, torch.full(ENTRIES, torch.inf, dtype=torch.float64).numpy().tobytes())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_facts(size=10**30), "its size is 10000"),
        (change_facts(size="many"), "its size is many"),
        (deep, "no facts that pfedbayes can read"),
        (arrays(upload=ZEROS, more=ZEROS), "the arrays are more, upload instead of upload"),
        (arrays(upload=ENDLESS), "not finite"),
        (arrays(upload=("float64", (0,), RAW, b"")), "wrong shape (0,)"),
        (arrays(upload=("int64", ENTRIES, RAW, bytes(496))), "holds int64"),
        (arrays(upload=("complex128", ENTRIES, RAW, bytes(992))), "holds complex128"),
    ],
)
def test_an_odd_answer_is_refused_by_name(tmp_path, change, reason):
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), change))
    first = journal(tmp_path)[0]
    assert (first.taken, first.uploads) == (True, 4)
    assert reason in first.refused["site 2"]


def test_counts_that_cannot_be_are_refused_by_name(tmp_path):
    def negative(message, reply):
        record = reply.content["upload"]
        own = {name: record[name] for name in record}
        (name,) = (name for name in own if own[name].dtype == "int64")
        wrong = torch.full(tuple(own[name].shape), -5).numpy().tobytes()
        own[name] = Array("int64", own[name].shape, RAW, wrong)
        return Message(content(facts_of(reply), upload=ArrayRecord(own)), reply_to=message)

    config = everybody(tmp_path, "bnfed", training__rounds=1, federation__attempts=1)
    with pytest.raises(UserError, match="too few usable uploads"):  # the method cannot do without anybody
        serve(lying(FakeGrid(config), negative))
    assert "has impossible counts: -5" in journal(tmp_path)[0].refused["site 2"]


def test_a_shared_model_that_overflows_is_not_taken(tmp_path):
    rates = {"training__server_optimizer": "momentum", "training__server_rate": 100.0}
    rates |= {f"federation__{name}": 1e308 for name in ("largest", "largest_step", "largest_rho")}
    far = torch.full(ENTRIES, 9e307, dtype=torch.float64).numpy().tobytes()
    with pytest.raises(UserError, match="round 1: the shared model has become non-finite, so the round was not taken"):
        serve(lying(FakeGrid(everybody(tmp_path, **rates)), arrays(upload=("float64", ENTRIES, RAW, far))))
    assert runs.read_checkpoint(tmp_path / "run") is None


def test_nodes_with_one_number_or_one_name_are_told_apart(tmp_path):
    grid = FakeGrid(everybody(tmp_path, training__rounds=2))
    grid.nodes[999] = {"partition-id": 1, "name": "impostor"}
    grid.nodes[103]["name"] = "site 0"
    server = serve(grid)
    assert sorted(member.name for member in server.members) == ["site 0", "site 0 (3)", "site 1", "site 2", "site 4"]
    assert (
        "client 1, which site 1 (node 101) already is: give each SuperNode" in journal(tmp_path)[0].refused["node 999"]
    )
    assert not journal(tmp_path)[1].refused  # once is enough
    assert "node 999" in write([tmp_path / "run"], tmp_path / "page.html").read_text()


# What data a node has


def with_data(tmp_path, change):
    """A federation in which the loader of one client gives something else."""
    grid = FakeGrid(everybody(tmp_path, training__rounds=2, training__evaluate_every=1))
    grid.app = client_app(lambda i, n: change(own_data(i)) if i == LIAR else own_data(i), model_for)
    grid.nodes = {100 + LIAR: grid.nodes[100 + LIAR]} | grid.nodes
    return grid


def test_a_node_without_data_says_so_and_is_done_without(tmp_path):
    serve(with_data(tmp_path, lambda own: dataclasses.replace(own, train=(own.train[0][:0],))))
    first = journal(tmp_path)[0]
    assert first.uploads == 4
    assert "has no training examples: leave the client out or give it some" in first.refused[f"node {100 + LIAR}"]


def test_one_example_is_enough_to_take_part(tmp_path):
    serve(with_data(tmp_path, lambda own: dataclasses.replace(own, train=(own.train[0][:1],))))
    assert [line.uploads for line in journal(tmp_path)] == [5, 5, 0]


def test_a_node_without_test_data_takes_part_unscored(tmp_path):
    serve(with_data(tmp_path, lambda own: dataclasses.replace(own, test=(own.test[0][:0],))))
    assert [line.uploads for line in journal(tmp_path)] == [5, 5, 0]
    for record in runs.read_run(tmp_path / "run").rounds:
        (accuracies,) = record.personal["mc10"]["accuracy"]
        assert [i for i, figure in enumerate(accuracies) if figure is None] == [LIAR]
    write([tmp_path / "run"], tmp_path / "page.html")


# Settings


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"training__patience": 3}, "no early stopping on Flower: leave training.patience out"),
        ({"method__name": "fedavg", "evaluation__posterior": "laplace"}, "leave evaluation.posterior out"),
        ({"training__flip": True}, "training.flip and .shift are for images"),
    ],
)
def test_what_flower_cannot_carry_is_one_line(tmp_path, setting, line):
    config = everybody(tmp_path, federation__attempts=1, **setting)
    with pytest.raises(UserError) as error:
        serve(FakeGrid(config))
    told = journal(tmp_path)[0].refused.values() if (tmp_path / "run").exists() else [str(error.value)]
    assert all(line in reason for reason in told)
    assert told


def test_nodes_can_be_scored_on_validation_data(tmp_path):
    config = everybody(tmp_path, training__rounds=1, evaluation__split="validation")
    grid = FakeGrid(config)

    def renamed(client, clients):
        own = own_data(client)
        return dataclasses.replace(own, validation=own.test, test=own.validation)

    grid.app = client_app(renamed, model_for)
    serve(grid)
    (validated,) = runs.read_run(tmp_path / "run").rounds
    (tmp_path / "other").mkdir()
    serve(FakeGrid(everybody(tmp_path / "other", training__rounds=1)))
    (tested,) = runs.read_run(tmp_path / "other" / "run").rounds
    assert validated.personal == tested.personal


def test_a_relative_state_dir_is_refused(tmp_path):
    grid = FakeGrid(everybody(tmp_path, training__rounds=1))
    grid.nodes[100]["state-dir"] = "states"
    serve(grid)
    assert "state-dir is 'states': give the SuperNode an absolute path" in journal(tmp_path)[0].refused["node 100"]


def test_an_unknown_device_is_one_line(tmp_path):
    grid = FakeGrid(everybody(tmp_path, training__rounds=1))
    grid.nodes[100]["device"] = "abacus"
    serve(grid)
    assert "abacus" in journal(tmp_path)[0].refused["site 0"]


# Disks and kills


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_node_whose_disk_is_full_says_so_and_goes_on_later(tmp_path, monkeypatch):
    config = everybody(tmp_path, training__rounds=2)
    grid = FakeGrid(config)
    write_whole = StateFolder.write

    def write_some(self, generation, keep):
        if self.path.name == "client-2" and generation.round == 2:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full_disk)
                return write_whole(self, generation, keep)
        return write_whole(self, generation, keep)

    monkeypatch.setattr(StateFolder, "write", write_some)
    serve(grid)
    assert "cannot write to" in journal(tmp_path)[1].refused["site 2"]
    assert "No space left on device" in journal(tmp_path)[1].refused["site 2"]
    folder = StateFolder(tmp_path / "states" / "client-2")
    assert folder.rounds() == [1]
    assert [path.name for path in folder.path.iterdir() if path.suffix == ".part"] == []
    monkeypatch.undo()
    serve(FakeGrid(config | {"training.rounds": 3}))
    assert journal(tmp_path)[-2].uploads == 5


def test_a_server_whose_disk_was_full_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    config = everybody(tmp_path)
    with monkeypatch.context() as patch:
        save = runs.Writer.checkpoint

        def checkpoint(self, tensors, round, seconds, best=None):
            if round == 2:
                patch.setattr(os, "fsync", full_disk)
            save(self, tensors, round, seconds, best)

        patch.setattr(runs.Writer, "checkpoint", checkpoint)
        with pytest.raises(UserError, match="No space left on device"):
            serve(FakeGrid(config))
    # What else a full disk leaves: the beginning of a line.
    with (tmp_path / "run" / runs.JOURNAL).open("a") as file:
        file.write('{"round": 2, "att')
    resumed = serve(FakeGrid(config))
    assert [line.round for line in journal(tmp_path)] == [1, 2, 2, 3, 3]
    (tmp_path / "other").mkdir()
    assert torch.equal(resumed.state.servers[0], serve(FakeGrid(everybody(tmp_path / "other"))).state.servers[0])


def test_what_a_kill_leaves_of_a_state_is_cleared_away(tmp_path):
    config = everybody(tmp_path, training__rounds=1)
    serve(FakeGrid(config))
    folder = tmp_path / "states" / "client-1"
    (folder / ".round-000002.safetensors.part").write_bytes(b"half a state")
    (folder / "round-000001 (copy).safetensors").write_bytes(b"a person's own backup")
    serve(FakeGrid(config | {"training.rounds": 3}))
    kept = ["round-000001 (copy).safetensors", *(f"round-00000{i}.safetensors" for i in (1, 2, 3))]
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == kept
    (folder / ".round-000004.safetensors.part").write_bytes(b"half a state")
    StateFolder(folder).leave()
    assert not list(folder.glob("*.part")), "what is left of a personal model has to go too"


def test_a_damaged_state_is_gone_on_from_the_round_before_if_the_node_consents(tmp_path):
    config = everybody(tmp_path, training__rounds=2)
    serve(FakeGrid(config))
    grid = FakeGrid(config | {"training.rounds": 3})
    path = tmp_path / "states" / "client-2" / "round-000002.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    serve(grid)
    assert "is damaged" in journal(tmp_path)[-2].refused["site 2"]
    path.unlink()
    grid.run_config = config | {"training.rounds": 4}
    serve(grid)
    assert "older-state=true" in journal(tmp_path)[-2].refused["site 2"]
    grid.nodes[100 + LIAR]["older-state"] = True
    grid.run_config = config | {"training.rounds": 5}
    serve(grid)
    assert journal(tmp_path)[-2].uploads == 5
    assert StateFolder(path.parent).rounds() == [1, 5]
    path.parent.joinpath("round-000001.safetensors").unlink()
    path.parent.joinpath("round-000005.safetensors").unlink()
    grid.run_config = config | {"training.rounds": 6}
    serve(grid)
    assert "is missing, but" in journal(tmp_path)[-2].refused["site 2"], "older is not nothing at all"


def test_two_servers_do_not_share_a_run_folder(tmp_path):
    first = runs.Writer(tmp_path / "run")
    with pytest.raises(UserError, match="in use by another run: wait for it or give another folder"):
        serve(FakeGrid(run_config(tmp_path)))
    first.close()
    serve(FakeGrid(run_config(tmp_path, training__rounds=1)))
