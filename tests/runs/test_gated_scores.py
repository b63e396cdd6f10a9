import dataclasses

import pytest
import torch

from federations import make_shards, trained
from pfedbayes.maths.metrics import accuracy, log_average
from pfedbayes.methods import PFedBayes
from pfedbayes.runs.gated_scores import gated_scores
from pfedbayes.runs.sections import Evaluation
from pfedbayes.trust import gate


def without_a_label(validation):
    """The last client has never seen label 2."""
    shards = make_shards(sizes=(40,) * 5)
    train = [rows[:25] for rows in shards.train]
    train[4] = train[4][shards.y[train[4]] != 2]
    rows = tuple(rows[25:] for rows in shards.train) if validation else shards.validation
    return dataclasses.replace(shards, train=tuple(train), validation=rows)


@pytest.mark.parametrize("validation", [False, True])
def test_scores_are_those_of_the_gated_predictions(validation):
    ours = trained(PFedBayes(zeta=0.1, eta_personal=0.05), 4, shards=without_a_label(validation), seeds=[1, 2])
    found = gated_scores(ours, Evaluation(samples=5), [0, 4])
    assert list(found) == list(ours.model.likelihood.metrics)
    assert [len(of_seed) for of_seed in found["accuracy"]] == [2, 2]
    rows = ours.shards.test[4]
    x, y = ours.shards.x[rows], ours.shards.y[rows]
    both = [log_average(ours.predict(which, 4, x, 5, seed_index=1)) for which in ("personal", "shared")]
    fitted = gate.gates(ours.data)[4]
    if not validation:
        share = gate.share_of_others(gate.parts(*both, fitted).evidence, fitted.usual)
        expected = accuracy(gate.gated(*both, fitted, share), y)
        assert found["accuracy"][1][1] == pytest.approx(float(expected))
    own = log_average(ours.predict("personal", 0, ours.shards.x[ours.shards.test[0]], 5, seed_index=1))
    expected = accuracy(own, ours.shards.y[ours.shards.test[0]])
    assert found["accuracy"][1][0] == pytest.approx(float(expected))  # the first client has all labels


def test_clients_without_test_data_have_no_scores():
    shards = without_a_label(validation=False)
    shards = dataclasses.replace(shards, test=(*shards.test[:4], shards.test[4][:0]))
    found = gated_scores(trained(PFedBayes(), 1, shards=shards), Evaluation(samples=2), range(5))
    assert found["nll"][0][4] is None
    assert all(value is not None for value in found["nll"][0][:4])


def test_there_may_be_nothing_to_gate():
    shards = make_shards(sizes=(60,) * 5)
    assert all(len(torch.unique(shards.y[rows])) == 3 for rows in shards.train)
    assert gated_scores(trained(PFedBayes(), 1, shards=shards), Evaluation(), range(5)) == {}
