"""Secure aggregation: the server's mean without a single update, also when nodes drop out."""

import pytest
import torch
from flwr.app import Error, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from grids import FakeGrid, run_config, serve

from federations import difference
from pfedbayes import UserError, runs
from pfedbayes.flower.secure import shares
from pfedbayes.flower.settings import from_run_config
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.methods import METHODS
from pfedbayes.methods.pfedbayes import PFedBayes

PRECISION = 1e-5  # four steps of a two-millionth, in each of three rounds, relative to weights of about 1


@pytest.mark.parametrize("method", ["pfedbayes", "fedavg", "pfedme"])
def test_same_mean_as_without_it(tmp_path, method):
    config = run_config(tmp_path, method, federation__secure=True)
    grid = FakeGrid(config)
    seen = []
    grid.meddle = lambda client, message, reply: (seen.append(list(reply.content.array_records.values())), reply)[1]
    masked = serve(grid)
    assert not any(list(record) for records in seen for record in records), "an array has left a node unmasked"
    (tmp_path / "plain").mkdir()
    plain = serve(FakeGrid(run_config(tmp_path / "plain", method)))
    assert 0 < difference(masked.state.servers[0], plain.state.servers[0]) < PRECISION
    one, other = (runs.read_run(tmp_path / name).rounds for name in ("run", "plain/run"))
    assert [record.absent for record in one] == [record.absent for record in other]


def drops_out(tmp_path, stage):
    """A federation in which a node is gone from this stage of the first round on, for that once."""
    config = run_config(tmp_path, federation__secure=True, training__rounds=1)
    del config["training.participants"]
    grid = FakeGrid(config)
    stages = []

    def meddle(client, message, reply):
        if client == 4 and RECORD_KEY_CONFIGS in message.content.config_records:
            stages.append(client)
            if len(stages) == stage:
                return Message(Error(1, "gone"), reply_to=message)
        return reply

    grid.meddle = meddle
    return serve(grid), runs.read_run(tmp_path / "run").journal


def plain_state(tmp_path, nodes):
    (tmp_path / "plain").mkdir()
    config = run_config(tmp_path / "plain", training__rounds=1)
    del config["training.participants"]
    grid = FakeGrid(config)
    grid.nodes = {100 + i: grid.nodes[100 + i] for i in nodes}
    return serve(grid).state.servers[0]


def test_a_node_that_drops_out_is_named_and_the_others_are_averaged(tmp_path):
    server, journal = drops_out(tmp_path, stage=3)
    assert journal[0].uploads == 4
    assert "dropped out of secure aggregation" in journal[0].refused["site 4"]
    assert difference(server.state.servers[0], plain_state(tmp_path, range(4))) < PRECISION


@pytest.mark.parametrize("stage", [1, 2])
def test_a_node_that_drops_out_before_its_keys_are_shared_costs_nothing(tmp_path, stage):
    server, journal = drops_out(tmp_path, stage)
    assert [(line.taken, line.uploads) for line in journal] == [(True, 4), (True, 0)]
    assert difference(server.state.servers[0], plain_state(tmp_path, range(4))) < PRECISION


def test_a_node_that_cannot_answer_says_why(tmp_path):
    config = run_config(tmp_path, federation__secure=True, training__rounds=1, federation__min_replies=4)
    del config["training.participants"]
    grid = FakeGrid(config)
    (tmp_path / "states" / "client-4").mkdir(parents=True)
    (tmp_path / "states" / "client-4" / "round-000009.safetensors").write_bytes(b"")
    server = serve(grid)
    journal = runs.read_run(tmp_path / "run").journal
    assert "is damaged" in journal[0].refused["site 4"]
    assert difference(server.state.servers[0], plain_state(tmp_path, range(4))) < PRECISION


def test_weights_are_those_of_the_methods_own_average():
    sizes = torch.tensor([3.0, 1.0, 2.0]).double()
    clients = torch.arange(3)
    for name, cls in METHODS.items():
        method = cls()
        if not method.about.averages or method.needs.pooled_data:
            continue
        uploads = torch.randn(3, *([2] if method.about.gaussian else []), 5, dtype=torch.float64)
        server = torch.randn_like(uploads[0])
        weights = shares(method, server, sizes)
        assert float(weights.max()) == 1
        mean = weighted_mean(uploads, weights)[None]
        expected = method.aggregate(server, uploads, sizes, clients)
        assert difference(method.aggregate(server, mean, sizes[:1], clients[:1]), expected) < 1e-12, name
    with pytest.raises(UserError, match="does not average"):
        shares(PFedBayes(server="average-sigma"), torch.zeros(2, 5).double(), sizes)


@pytest.mark.parametrize("method", ["bnfed", "heurfedamp"])
def test_methods_that_need_single_models_cannot_have_it(tmp_path, method):
    with pytest.raises(UserError, match="does not average uploads"):
        from_run_config(run_config(tmp_path, method, federation__secure=True))
