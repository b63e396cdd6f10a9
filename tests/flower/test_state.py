"""Nothing that a client has learnt is lost, and nothing is taken for a fresh start that is none."""

import dataclasses
import fcntl
import shutil
import stat
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from grids import FakeGrid, own_data, run_config, serve
from safetensors.torch import save_file

from federations import model_for, same_bits
from pfedbayes import UserError, load, runs
from pfedbayes.files.tensors import tensor_bytes
from pfedbayes.flower import client_app, load_node
from pfedbayes.flower.messages import facts_of
from pfedbayes.flower.settings import Settings
from pfedbayes.flower.state import ABOUT, Generation, StateFolder
from pfedbayes.report import write


def generation(round, previous, value=0.0):
    return Generation(round, previous, {"client": 0}, {"x": torch.tensor([value])})


def test_the_last_two_generations_are_kept(tmp_path):
    folder = StateFolder(tmp_path)
    for round in (1, 2, 5):
        folder.write(generation(round, (folder.rounds() or [0])[-1], float(round)))
    assert folder.rounds() == [2, 5]
    assert folder.read(5) == generation(5, 2, 5.0)
    assert folder.start_of(6, last=5).round == 5
    assert folder.start_of(5, last=2).round == 2
    assert folder.start_of(4, last=2).round == 2
    with pytest.raises(UserError, match=r"round 2 was asked for, but .* knows nothing before round 2"):
        folder.start_of(2, last=0)
    with pytest.raises(UserError, match="is of round 5, but the server has an upload of round 6"):
        folder.start_of(7, last=6)


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, [4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_as_many_generations_are_kept_as_asked_for_and_at_least_two(tmp_path, keep, kept):
    folder = StateFolder(tmp_path)
    for round in range(1, 6):
        folder.write(generation(round, round - 1), keep)
    assert folder.rounds() == kept


def test_a_state_counts_unless_the_server_went_back_to_before_it(tmp_path):
    folder = StateFolder(tmp_path)
    for round in (2, 4):
        folder.write(generation(round, round - 2))
    assert folder.start_of(5, last=4).round == 4
    assert folder.start_of(5, last=4, rollbacks=[4]).round == 4
    assert folder.start_of(5, last=2, rollbacks=[3]).round == 2
    assert folder.start_of(5, last=2, rollbacks=[2, 4]).round == 2
    assert folder.start_of(5, last=2, rollbacks=[1]) is None  # nothing is left: the client begins anew
    folder.write(generation(3, 2)._replace(rollbacks=1))  # after the first time that the server went back
    assert folder.rounds() == [2, 3]
    assert folder.start_of(5, last=3, rollbacks=[2]).round == 3
    assert folder.start_of(5, last=3, rollbacks=[2, 3]).round == 3
    assert folder.start_of(5, last=2, rollbacks=[2, 2]).round == 2


def test_an_empty_folder_is_a_start_only_for_a_client_that_is_new(tmp_path):
    folder = StateFolder(tmp_path)
    assert folder.start_of(3, last=0) is None
    for last in (1, 2):
        with pytest.raises(UserError, match=f"is missing, but the server has an upload of round {last}"):
            folder.start_of(3, last)
    folder.write(generation(3, 0))
    assert folder.start_of(3, last=0) is None  # the first round, asked for again


def test_tensors_that_share_memory_are_kept_too(tmp_path):
    shared = torch.arange(3.0)
    StateFolder(tmp_path).write(Generation(1, 0, {}, {"a": shared, "b": shared[1:]}))
    assert StateFolder(tmp_path).read(1).tensors["b"].tolist() == [1.0, 2.0]


def test_a_damaged_state_is_an_error(tmp_path):
    folder = StateFolder(tmp_path)
    folder.write(generation(1, 0))
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"round-000001.safetensors is damaged"):
        folder.start_of(2, last=1)


def test_a_link_is_not_followed_to_a_state(tmp_path):
    elsewhere, folder = StateFolder(tmp_path / "elsewhere"), StateFolder(tmp_path / "own")
    for each in (elsewhere, folder):
        each.path.mkdir()
    elsewhere.write(generation(1, 0))
    (folder.path / "round-000001.safetensors").symlink_to(elsewhere.path / "round-000001.safetensors")
    with pytest.raises(UserError, match=r"round-000001\.safetensors"):
        folder.read(1)


@pytest.mark.parametrize("about", ["[]", "{}", '{"previous": "1"}', '{"previous": null}'])
def test_a_state_that_does_not_say_which_round_it_follows_is_an_error(tmp_path, about):
    folder = StateFolder(tmp_path)
    (tmp_path / "round-000003.safetensors").write_bytes(tensor_bytes({"x": torch.zeros(1)}, {ABOUT: about}))
    with pytest.raises(UserError, match="it does not say which round it follows"):
        folder.read(3)


def test_only_states_of_earlier_versions_have_no_checksum(tmp_path, monkeypatch):
    noted, folder = [], StateFolder(tmp_path)
    monkeypatch.setattr("pfedbayes.flower.state.note_unchecked", noted.append)
    folder.write(generation(1, 0))
    assert folder.read(1) == generation(1, 0)
    assert noted == []
    about = {ABOUT: '{"previous": 0, "client": 0}'}
    save_file({"x": torch.zeros(1)}, tmp_path / "round-000002.safetensors", about)
    assert folder.read(2) == generation(2, 0)
    assert noted == [str(tmp_path)]
    save_file({"x": torch.zeros(1)}, tmp_path / "round-000003.safetensors", about | {"format": str(runs.FORMAT)})
    with pytest.raises(UserError, match="its checksum is missing"):
        folder.read(3)


def test_a_folder_is_for_its_user_alone_and_knows_its_rollbacks(tmp_path):
    folder = StateFolder(tmp_path / "states")
    with folder.locked():
        folder.write(generation(1, 0))
        folder.write(generation(2, 1)._replace(rollbacks=3))
    assert [folder.read(round).rollbacks for round in (1, 2)] == [0, 3]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    folder.leave()
    assert folder.left
    assert folder.rounds() == []
    assert stat.S_IMODE((folder.path / "left.json").stat().st_mode) == 0o600


def test_one_message_is_handled_at_a_time(tmp_path):
    folder = StateFolder(tmp_path / "states" / "client-0")
    for _ in range(2):  # the lock is released at the end
        with folder.locked(), (folder.path / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_only_files_of_rounds_are_states(tmp_path):
    folder = StateFolder(tmp_path)
    for name in ("round-000010.safetensors", "round-000002.safetensors", "round-x.safetensors", "other.safetensors"):
        (tmp_path / name).touch()
    assert folder.rounds() == [2, 10]
    (tmp_path / ".round-000004.safetensors.part").touch()
    folder.write(generation(11, 10))
    assert sorted(path.name for path in tmp_path.iterdir() if "round-0" in path.name) == [
        "round-000010.safetensors", "round-000011.safetensors",
    ]  # fmt: skip


def refusals(grid):
    with pytest.raises(UserError):
        serve(grid)
    return next(iter(runs.read_run(Path(grid.run_config["federation.out"])).journal[-1].refused.values()))


def stopped(tmp_path, **others):
    """A federation that stands after two rounds, and wants all five clients."""
    config = run_config(tmp_path, training__rounds=2, federation__attempts=1, **others)
    del config["training.participants"]
    serve(FakeGrid(config))
    return config | {"training.rounds": 3, "federation.min_replies": 5}


def test_another_federation_does_not_take_over_a_state(tmp_path):
    config = stopped(tmp_path)
    shutil.rmtree(tmp_path / "run")  # the server starts anew, the nodes do not
    assert "was made with federation = " in refusals(FakeGrid(config))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method.zeta": 3.0}, "was made with method.zeta = 10.0 and is now 3.0"),
        ({"training.local_steps": 9}, "was made with training.local_steps = 4 and is now 9"),
        ({"federation.dtype": "float32"}, 'was made with federation.dtype = "float64" and is now "float32"'),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, reason):
    config = stopped(tmp_path) | change
    with pytest.raises(UserError, match=reason):
        serve(FakeGrid(config))
    # Nor do the nodes, should the server have lost its memory of it.
    shutil.rmtree(tmp_path / "run")
    assert reason in refusals(FakeGrid(config))


def test_a_federation_from_before_an_option_existed_goes_on_with_its_default(tmp_path, monkeypatch):
    identity = Settings.identity

    def without(self):
        return {name: value for name, value in identity(self).items() if name != "training.server_momentum"}

    with monkeypatch.context() as earlier:
        earlier.setattr(Settings, "identity", without)
        earlier.setattr(Settings, "completed", lambda self, before: dict(before))
        config = stopped(tmp_path)
    with pytest.raises(UserError, match=r"was made with training\.server_momentum = 0\.9 and is now 0\.5"):
        serve(FakeGrid(config | {"training.server_momentum": 0.5}))
    assert serve(FakeGrid(config)).round == 3


def test_a_checkpoint_that_does_not_fit_is_refused_before_anybody_trains(tmp_path, monkeypatch):
    config = stopped(tmp_path)
    read = runs.read_checkpoint

    def of_another_shape(folder):
        checkpoint = read(folder)
        checkpoint.tensors["server.0"] = torch.zeros(3, 2)
        return checkpoint

    monkeypatch.setattr(runs, "read_checkpoint", of_another_shape)
    with pytest.raises(UserError, match=r"\(server\.0 differs\): set federation\.out to another folder"):
        serve(FakeGrid(config))


def test_a_lost_state_is_not_replaced_by_a_fresh_one(tmp_path):
    config = stopped(tmp_path)
    shutil.rmtree(tmp_path / "states" / "client-3")
    assert "is missing, but the server has an upload of round 2" in refusals(FakeGrid(config))


def test_other_data_need_a_word(tmp_path):
    config = stopped(tmp_path)
    grid = FakeGrid(config)
    grid.nodes[100]["partition-id"], grid.nodes[101]["partition-id"] = 1, 0
    states = tmp_path / "states"
    states.joinpath("client-0").rename(states / "swap")
    states.joinpath("client-1").rename(states / "client-0")
    states.joinpath("swap").rename(states / "client-1")
    assert "was made with client = 1 and is now 0" in refusals(grid)


def test_new_data_are_taken_when_the_node_says_so(tmp_path):
    config = stopped(tmp_path)
    grid = FakeGrid(config)

    def less(client, clients):
        shards = own_data(client)
        return dataclasses.replace(shards, train=(shards.train[0][1:],)) if client == 0 else shards

    grid.app = client_app(less, model_for)
    assert "train_size = 23 and is now 22" in refusals(grid)
    grid.nodes[100]["new-data"] = True
    serve(grid)


def test_a_round_asked_for_twice_is_answered_the_same(tmp_path):
    grid = FakeGrid(run_config(tmp_path))
    answers = {}

    def meddle(client, message, reply):
        facts = facts_of(message)
        if message.metadata.message_type == "train" and facts["train"]:
            again = grid.app(message, context(grid, client))
            once = reply.content.get("upload"), facts_of(reply)
            answers[client, facts["round"]] = once == (again.content.get("upload"), facts_of(again))
        return reply

    grid.meddle = meddle
    asked_twice = serve(grid)
    assert len(answers) == 15
    assert all(answers.values())
    (tmp_path / "other").mkdir()
    once = serve(FakeGrid(run_config(tmp_path / "other")))
    assert torch.equal(asked_twice.state.servers[0], once.state.servers[0])


def context(grid, client):
    return Context(1, 100 + client, grid.nodes[100 + client], RecordDict(), grid.run_config)


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        *(("pfedbayes", moment) for moment in ("round 1", "round 2", "round 3", "end")),
        ("bnfed", "round 3"),
        ("heurfedamp", "round 3"),
    ],
)
def test_a_server_killed_at_any_moment_goes_on_to_the_same_bits(tmp_path, moment, method):
    class Killed(Exception):
        pass

    config = run_config(tmp_path, method, training__evaluate_every=1)
    if method == "bnfed":
        del config["training.participants"]
    grid = FakeGrid(config)

    def meddle(client, message, reply):
        facts = facts_of(message)
        now = "end" if facts.get("finish") else f"round {facts.get('round')}"
        if now == moment and client == 3:
            raise Killed
        return reply

    grid.meddle = meddle
    with pytest.raises(Killed):
        serve(grid)
    grid.meddle = lambda client, message, reply: reply
    resumed = serve(grid)
    (tmp_path / "other").mkdir()
    other = FakeGrid(
        config | {name: value for name, value in run_config(tmp_path / "other").items() if "/" in str(value)}
    )
    whole = serve(other)
    assert same_bits(resumed.state.servers[0], whole.state.servers[0])
    killed, left_alone = (runs.read_run(tmp_path / name).rounds for name in ("run", "other/run"))
    assert [without_time(record) for record in killed] == [without_time(record) for record in left_alone]
    for i in range(5):
        one, two = (StateFolder(tmp_path / name / f"client-{i}") for name in ("states", "other/states"))
        assert one.rounds() == two.rounds()
        for round in one.rounds()[-1:]:
            first, second = one.read(round).tensors, two.read(round).tensors
            assert first.keys() == second.keys()
            assert all(first[name].equal(second[name]) for name in first)


def without_time(record):
    return dataclasses.replace(record, seconds=0.0)


def test_a_finished_run_can_be_made_longer_and_reported(tmp_path):
    config = run_config(tmp_path, training__evaluate_every=1)
    grid = FakeGrid(config)
    serve(grid)
    asked = len(grid.asked)
    serve(grid)  # nothing is left to do
    assert len(grid.asked) == asked
    grid.run_config = config | {"training.rounds": 4}
    serve(grid)
    run = runs.read_run(tmp_path / "run")
    assert [record.round for record in run.rounds] == [1, 2, 3, 4]
    assert run.experiment.training.rounds == 4
    page = write([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "pFedBayes on the data of 5 nodes" in page
    assert "Reliability" in page


def test_what_is_no_run_on_flower_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds other files \(thesis.tex"):
        serve(FakeGrid(run_config(tmp_path)))


def test_a_node_predicts_with_what_it_has_learnt(tmp_path):
    serve(FakeGrid(run_config(tmp_path)))
    node = load_node(tmp_path / "states" / "client-2", own_data(2), model_for)
    outputs = node.predict("personal", 0, node.data.x[:4], samples=10)
    assert outputs.shape == (10, 4, 3)
    assert node.predict("shared", 0, node.data.x[:4]).shape == (1, 4, 3)
    with pytest.raises(UserError, match="holds no state"):
        load_node(tmp_path, own_data(2), model_for)
    with pytest.raises(UserError, match="made on Flower"):
        load(tmp_path / "run")


def test_a_tied_client_goes_back_to_the_last_round_that_the_server_has_used(tmp_path):
    folder = StateFolder(tmp_path)
    for round in (2, 4):
        folder.write(generation(round, round - 2))
    assert folder.start_of(5, last=2).round == 4
    assert folder.start_of(5, last=2, tied=True).round == 2
    assert folder.start_of(5, last=4, tied=True).round == 4
