import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from federations import SIZES, TRAINING, federation, make_shards, trained
from pfedbayes.cli.app import app
from pfedbayes.errors import UserError
from pfedbayes.methods import PVI, FedAvg, FedEP, FedPer, Pooled
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.saving import load
from pfedbayes.trust.forgetting import forget, has_factors, without_client

LONG = dataclasses.replace(TRAINING, rounds=6, participants=None)


def test_which_methods_have_factors():
    assert [has_factors(method) for method in (PVI(), FedEP(), FedAvg(), FedPer())] == [True, True, False, False]


def test_the_other_clients_keep_their_rows():
    shards = make_shards()
    rest = without_client(shards, 1)
    assert rest.names == ("site 0", "site 2", "site 3", "site 4")
    assert all(torch.equal(rest.train[k], shards.train[i]) for k, i in enumerate((0, 2, 3, 4)))
    assert rest.certify == ()


def test_the_factor_leaves_and_the_others_stay():
    ours = trained(PVI(eta=0.05), 6, training=LONG)
    factors = [ours.client_states([i])[0] for i in range(len(SIZES))]
    report, left = forget(ours, "site 2", rounds=0)
    server = left.servers[0]
    assert left.round == 6
    assert torch.equal(server.q, ours.servers[0].q - factors[2])
    for k, i in enumerate((0, 1, 3, 4)):
        assert torch.equal(left.client_states([k])[0], factors[i])
    assert report.has_factors
    assert report.distances["factor taken out"] == report.distances["and 0 rounds more"]


def test_further_rounds_train_without_the_client():
    ours = trained(PVI(eta=0.05), 6, training=LONG)
    before = ours.servers[0].q.clone()
    report, left = forget(ours, "site 0", rounds=3)
    assert left.round == 9
    assert left.num_clients == 4
    assert report.rounds == 3
    assert set(report.distances) == {
        "with the client", "factor taken out", "and 3 rounds more", "trained again with another seed",
    }  # fmt: skip
    assert all(0 <= value <= 1 for value in report.distances.values())
    assert report.distances["factor taken out"] > 0
    assert torch.equal(ours.servers[0].q, before)
    assert "exact only at a fixed point of a conjugate model" in " ".join(report.describe())


@pytest.mark.parametrize("method", [FedAvg(eta=0.1), FedPer(eta=0.1)])
def test_other_methods_can_only_train_again(method):
    ours = trained(method, 3, training=LONG)
    report, found = forget(ours, "site 1")
    assert not report.has_factors
    assert report.seconds is None
    assert report.retraining_seconds > 0
    assert found.num_clients == 4
    text = " ".join(report.describe())
    assert "keeps no factor per client" in text
    assert "Training again takes" in text


def test_the_distance_is_that_of_the_models():
    ours = trained(FedAvg(eta=0.1), 3, training=LONG)
    report, retrained = forget(ours, "site 4")
    shards, gaps = retrained.shards, []
    for i, rows in enumerate(shards.test):
        pair = [each.predict("shared", i, shards.x[rows])[0].softmax(-1) for each in (ours, retrained)]
        gaps.append((pair[0] - pair[1]).abs().sum(-1) / 2)
    assert report.distances["with the client"] == pytest.approx(float(torch.cat(gaps).mean()))


def test_what_cannot_be_forgotten_is_refused():
    with pytest.raises(UserError, match="there is no client 'site 9'"):
        forget(federation(FedAvg()), "site 9")
    with pytest.raises(UserError, match="pools the data"):
        forget(federation(Pooled()), "site 1")
    alone = federation(FedAvg(), shards=make_shards((23,), (3,)), training=dataclasses.replace(LONG, participants=None))
    with pytest.raises(UserError, match="is the only client"):
        forget(alone, "site 0")


def test_from_the_command_line(tmp_path):
    settings = ["data.name=blobs", "data.clients=3", "data.examples=40", "net.hidden=[4]", "training.rounds=2"]
    experiment = read_experiment(None, [*settings, "method.name=pvi", "training.local_steps=2"])
    for _ in execute(experiment, tmp_path / "run", [1]):
        pass
    name = load(tmp_path / "run").shards.names[1]
    done = CliRunner().invoke(app, ["forget", str(tmp_path / "run"), "--client", name, "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["method"] == "PVI"
    text = CliRunner().invoke(app, ["forget", str(tmp_path / "run"), "--client", name, "--rounds", "1"]).output
    assert "trained again with another seed" in text
