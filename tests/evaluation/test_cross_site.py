"""The cross-site matrix has on its diagonal what the evaluation says, and elsewhere what the models predict."""

import math

import pytest
import torch

from federations import federation, randn, trained
from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.cross_site import cross_site
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.methods import METHODS, FedAvg, Local, PerFedAvg, PFedBayes
from pfedbayes.nets import Model, Net, mlp


@pytest.mark.parametrize("metric", ["nll", "accuracy"])
def test_the_diagonal_is_the_evaluation_and_the_last_row_the_shared_model(metric):
    ours = trained(PFedBayes(), 2)
    found = cross_site(ours, samples=3, metric=metric)
    known = ours.evaluate(samples=3)
    assert found.names == list(ours.shards.names)
    assert found.counts == [len(rows) for rows in ours.shards.test]
    assert [found.scores[i][i] for i in range(5)] == pytest.approx(known["personal"]["mc3"][metric][0])
    assert found.scores[5] == pytest.approx(known["shared"]["mc3"][metric][0])


def test_an_entry_is_one_client_s_model_on_the_data_of_another():
    ours = trained(PFedBayes(), 2)
    x, y = (pool[ours.shards.test[3]] for pool in (ours.shards.x, ours.shards.y))
    outputs = ours.predict("personal", 1, x, samples=4)
    expected = ours.model.likelihood.scores(outputs, y)[Classification().metrics.index("nll")]
    assert cross_site(ours, samples=4).scores[1][3] == pytest.approx(float(expected))


def test_seeds_are_averaged():
    both = trained(PFedBayes(), 1, seeds=(3, 4))
    found = cross_site(both, samples=2)
    known = both.evaluate(samples=2)["personal"]["mc2"]["nll"]
    assert found.scores[2][2] == pytest.approx((known[0][2] + known[1][2]) / 2)


def test_methods_without_personal_models_have_no_matrix():
    assert cross_site(trained(FedAvg(), 1)) is None
    assert len(cross_site(trained(Local(), 1)).scores) == 5 + METHODS["local"].about.shared


def test_models_that_adapt_are_adapted():
    ours = trained(PerFedAvg(), 1)
    known = ours.evaluate()["personal"]["mean"]["nll"][0]
    assert [cross_site(ours).scores[i][i] for i in range(5)] == pytest.approx(known)


def test_of_many_clients_the_largest_are_taken():
    found = cross_site(trained(PFedBayes(), 1), samples=2, most=3)
    assert found.names == ["site 0", "site 2", "site 4"]
    assert [len(row) for row in found.scores] == [3] * 4


def test_clients_without_test_data_are_left_out():
    data = [(torch.randn(n, 3), torch.arange(n) % 3) for n in (5, 6, 7)]
    empty = (torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    some = federation(PFedBayes(), shards=Shards.from_arrays(data, [data[0], empty, data[2]]))
    assert cross_site(some, samples=2).counts == [5, 7]
    one = federation(PFedBayes(), shards=Shards.from_arrays(data, [data[0], empty, empty]))
    assert cross_site(one, samples=2) is None


def regression(target: float) -> Federation:
    data = [(randn(n, 3, seed=n), randn(n, 1, seed=n + 1)) for n in (5, 6, 7)]
    shards = Shards.from_arrays(data, [(x, y + target) for x, y in data])
    return federation(PFedBayes(), shards=shards, model=Model(Net(mlp([3, 4, 1])), Regression(0.5)))


def test_a_regression_has_a_matrix():
    found = cross_site(regression(0.0), samples=2, metric="rmse")
    assert all(math.isfinite(value) for row in found.scores for value in row)


def test_a_score_that_is_not_finite_is_none():
    assert cross_site(regression(1e200), samples=2).scores == [[None] * 3] * 4
