"""Going back to an earlier state: of the server by command, and of the nodes by themselves."""

import json

import pytest
import torch
from grids import FakeGrid, run_config, serve
from test_attacks import everybody
from test_faults import journal

from federations import same_bits
from pfedbayes import UserError, runs
from pfedbayes.flower.record import kept_rounds
from pfedbayes.flower.rollback import rollback
from pfedbayes.flower.state import Generation, StateFolder
from pfedbayes.report import write
from pfedbayes.report.federation import journal_lines


def generation(round, previous, rollbacks=0):
    return Generation(round, previous, {"client": 0}, {"x": torch.tensor([float(round)])}, rollbacks)


def test_a_node_goes_back_to_the_last_state_that_counts(tmp_path):
    folder = StateFolder(tmp_path)
    for round in (1, 2, 3, 4):
        folder.write(generation(round, round - 1), keep=5)
    assert folder.rounds() == [1, 2, 3, 4]
    assert folder.start_of(3, last=2, rollbacks=[2]).round == 2
    assert folder.start_of(9, last=2, rollbacks=[2]).round == 2, "rounds 3 and 4 are of the time that was discarded"
    folder.write(generation(4, 2, rollbacks=1), keep=5)
    assert folder.rounds() == [1, 2, 4]
    assert folder.start_of(5, last=4, rollbacks=[2]).round == 4, "this round 4 is of the time after it"
    assert folder.start_of(5, last=1, rollbacks=[2, 1]).round == 1
    assert folder.start_of(5, last=0, rollbacks=[2, 0]) is None, "nothing is left, so the client begins anew"
    assert folder.rounds() == [1, 2, 4], "nothing is deleted before there is something new"


@pytest.mark.parametrize("rollbacks", [-1, "2", True])
def test_a_state_that_tells_no_number_of_rollbacks_is_refused(tmp_path, rollbacks):
    folder = StateFolder(tmp_path)
    folder.write(generation(1, 0, rollbacks))
    with pytest.raises(UserError, match="it does not say how often the server had gone back"):
        folder.read(1)


def test_a_state_is_not_read_to_see_that_it_counts(tmp_path, monkeypatch):
    folder = StateFolder(tmp_path)
    monkeypatch.setattr(StateFolder, "read", lambda self, round: pytest.fail(f"read the state of round {round}"))
    assert folder._counts(2, [2, 3])
    assert folder._counts(2, [])


def test_as_many_states_as_wanted_are_kept(tmp_path):
    folder = StateFolder(tmp_path)
    for round in range(1, 9):
        folder.write(generation(round, round - 1), keep=3)
    assert folder.rounds() == [6, 7, 8]
    folder.write(generation(7, 6), keep=3)
    assert folder.rounds() == [6, 7]


@pytest.mark.parametrize(("method", "optimizer"), [("pfedbayes", "none"), ("fedavg", "adam"), ("heurfedamp", "none")])
def test_a_federation_goes_on_from_an_earlier_round_to_the_same_bits(tmp_path, method, optimizer):
    options = {"training__server_optimizer": optimizer, "training__evaluate_every": 1}
    config = run_config(tmp_path, method, training__rounds=5, **options)
    grid = FakeGrid(config)
    whole = serve(grid)
    before = runs.read_run(tmp_path / "run")
    assert rollback(tmp_path / "run", 2) == 5
    back = runs.read_run(tmp_path / "run")
    assert back.summary is None
    assert [record.round for record in back.rounds] == [1]  # those of round 2 come with round 3
    again = serve(grid)
    assert same_bits(whole.state.servers[0], again.state.servers[0])
    after = runs.read_run(tmp_path / "run")
    assert [record.personal for record in after.rounds] == [record.personal for record in before.rounds]
    assert after.info.federation.rollbacks == [2]
    assert (
        "The operator went back from round 5 to round 2." in write([tmp_path / "run"], tmp_path / "p.html").read_text()
    )
    assert "the operator went back from round 5 to round 2" in "\n".join(journal_lines(after))


def test_nodes_that_have_kept_nothing_so_old_begin_anew(tmp_path):
    config = everybody(tmp_path, training__rounds=6, federation__keep=5)
    serve(FakeGrid(config))
    for i in (0, 1):
        for round in (2, 3, 4):
            (tmp_path / "states" / f"client-{i}" / f"round-00000{round}.safetensors").unlink()
    rollback(tmp_path / "run", 2)
    server = serve(FakeGrid(config))
    assert server.round == 6
    again = [entry for entry in journal(tmp_path) if entry.attempt][6:]
    assert [entry.uploads for entry in again] == [5] * 4
    assert [entry.began_anew for entry in again] == [["site 0", "site 1"], None, None, None]


def test_one_goes_back_more_than_once(tmp_path):
    config = everybody(tmp_path, training__rounds=4)
    whole = serve(FakeGrid(config))
    for to in (3, 1, 2):
        rollback(tmp_path / "run", to)
        again = serve(FakeGrid(config))
        assert torch.equal(whole.state.servers[0], again.state.servers[0])
    assert again.record.rollbacks == [3, 1, 2]
    assert {member.taken for member in again.members} == {4 + 1 + 3 + 2}


def test_a_client_that_has_left_stays_away(tmp_path):
    config = everybody(tmp_path, training__rounds=3)
    serve(FakeGrid(config))
    StateFolder(tmp_path / "states" / "client-1").leave()
    serve(FakeGrid(config | {"training.rounds": 4}))
    rollback(tmp_path / "run", 2)
    server = serve(FakeGrid(config))
    assert server.members[1].left


def test_the_command_names_the_rounds_to_choose_from(tmp_path, in_process):
    serve(FakeGrid(everybody(tmp_path, training__rounds=7, federation__keep=3)))
    assert kept_rounds(tmp_path / "run") == [5, 6, 7]
    for to in (7, 2, 99):
        done = in_process("federation", "rollback", tmp_path / "run", "--to", to)
        assert done.code == 2
        assert f"has kept no earlier state of round {to}: the rounds to choose from are 5, 6" in done.err
    done = in_process("federation", "rollback", tmp_path / "run", "--to", 5)
    assert done.code == 0, done.err
    assert "went back from round 7 to round 5; start the app again" in done.out
    assert kept_rounds(tmp_path / "run") == [5]
    done = in_process("federation", "rollback", tmp_path / "nowhere", "--to", 5)
    assert done.code == 2
    assert not (tmp_path / "nowhere").exists()


def test_a_running_federation_is_left_alone(tmp_path):
    serve(FakeGrid(everybody(tmp_path)))
    writer = runs.Writer(tmp_path / "run")
    with pytest.raises(UserError, match="in use by another run"):
        rollback(tmp_path / "run", 1)
    writer.close()


def test_a_rollback_that_is_killed_leaves_one_state_or_the_other(tmp_path, monkeypatch):
    config = everybody(tmp_path, training__rounds=4, training__evaluate_every=1)
    whole = serve(FakeGrid(config))
    for moment in ("append", "checkpoint", "truncate_log"):
        with monkeypatch.context() as patch:

            def killed(*_, **__):
                raise KeyboardInterrupt

            patch.setattr(runs.Writer, moment, killed)
            with pytest.raises(KeyboardInterrupt):
                rollback(tmp_path / "run", 2)
        again = serve(FakeGrid(config))
        assert torch.equal(whole.state.servers[0], again.state.servers[0])
    assert [record.round for record in runs.read_run(tmp_path / "run").rounds] == [1, 2, 3, 4]


def unchecked(content):
    return {name: value for name, value in content.items() if name != "checksum"}


def rewrite_checkpoint(run):
    """Write the checkpoint as an earlier version did; its log has another length without checksums."""
    checkpoint = runs.read_checkpoint(run)
    writer = runs.Writer(run)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items() if name != "spent"}
    writer.checkpoint(tensors, checkpoint.round, checkpoint.seconds)
    writer.close()


def test_folders_of_earlier_versions_are_continued(tmp_path):
    config = everybody(tmp_path, training__rounds=2)
    serve(FakeGrid(config))
    # As an earlier version left them: without kept states, keys, rollbacks, and the count of averages.
    run = tmp_path / "run"
    for path in (run / "kept").iterdir():
        path.unlink()
    (run / "kept").rmdir()
    info = json.loads((run / runs.INFO).read_text()) | {"format": 1}
    for name in ("keys", "rollbacks"):
        info["federation"].pop(name, None)
    (run / runs.INFO).write_text(json.dumps(unchecked(info)))
    for name in (runs.JOURNAL, runs.LOG):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        (run / name).write_text("".join(json.dumps(unchecked(line)) + "\n" for line in lines))
    rewrite_checkpoint(run)
    server = serve(FakeGrid(config | {"training.rounds": 3}))
    assert (server.round, server.record.spent) == (3, 3)
    assert [record.round for record in runs.read_run(run).rounds] == [2, 3]
    assert serve(FakeGrid(config | {"training.rounds": 4})).round == 4
    with pytest.raises(UserError, match="has kept no earlier state of round 1: the rounds to choose from are 3"):
        rollback(run, 1)
