import dataclasses
import math

import pytest
import torch
from torch import nn

from federations import SIZES, difference, federation, make_model, make_shards, randn, same_bits, trained
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.metrics import log_average
from pfedbayes.methods import FedAvg
from pfedbayes.methods.knnper import GRID, KNNPer
from pfedbayes.nets import Batch

LINEAR = make_model(nn.Linear(3, 3))  # its features are its inputs


def personal(method, x, y, model=LINEAR, theta=None):
    theta = randn(model.net.num_params, seed=1) if theta is None else theta
    return method.adapt(model, (), theta, Batch(x, y, torch.ones(len(x), dtype=torch.float64)))


def probabilities(method, x, y, new):
    return method.predict(LINEAR, personal(method, x, y), new, None)[0].exp()


X, Y, NEW = randn(12, 3, seed=2), torch.arange(12) % 3, randn(7, 3, seed=3)


def test_the_shared_model_is_that_of_fedavg_to_the_last_bit():
    assert same_bits(trained(KNNPer(0.3)).servers, trained(FedAvg(0.3)).servers)


def test_weight_zero_predicts_as_fedavg():
    result, shards = trained(KNNPer(mix=0.0)), make_shards()
    for i in range(len(SIZES)):
        x = shards.x[shards.test[i]]
        personal_outputs, shared = (log_average(result.predict(which, i, x)) for which in ("personal", "shared"))
        assert difference(personal_outputs, shared) < 1e-12


def test_with_all_neighbours_and_a_wide_kernel_they_vote_by_class_shares():
    y = torch.tensor([0] * 6 + [1] * 4 + [2] * 2)
    found = probabilities(KNNPer(neighbours=100, scale=1e12, mix=1.0), X, y, NEW)
    assert torch.allclose(found, torch.tensor([6, 4, 2]).double() / 12, rtol=0, atol=1e-9)


def test_the_nearest_neighbour_of_a_training_example_is_itself():
    found = probabilities(KNNPer(neighbours=1, mix=1.0), X, Y, X)
    assert found.argmax(-1).tolist() == Y.tolist()


def test_neighbours_vote_with_their_kernels():
    method = KNNPer(neighbours=3, scale=0.7, mix=0.4)
    found = probabilities(method, X, Y, NEW)
    by_model = LINEAR.net(personal(method, X, Y).theta, NEW).softmax(-1)
    for row, new in enumerate(NEW):
        order = sorted(range(len(X)), key=lambda k: float((X[k] - new).square().sum()))[:3]
        votes = [0.0, 0.0, 0.0]
        for k in order:
            votes[Y[k]] += math.exp(-float((X[k] - new).square().sum()) / (3 * 0.7))
        for c in range(3):
            assert float(found[row, c]) == pytest.approx(0.4 * votes[c] / sum(votes) + 0.6 * float(by_model[row, c]))


def test_rotated_features_give_the_same_votes():
    rotation = torch.linalg.qr(randn(3, 3, seed=5)).Q
    method = KNNPer(mix=1.0)
    assert difference(probabilities(method, X @ rotation, Y, NEW @ rotation), probabilities(method, X, Y, NEW)) < 1e-9


def leave_one_out_weight(method, x, y):
    """The weight of the grid with the least NLL of each example, predicted from the others by plain loops."""
    theta = personal(method, x, y).theta
    losses = []
    for weight in torch.linspace(0, 1, GRID).tolist():
        fixed, loss = dataclasses.replace(method, mix=weight), 0.0
        for k in range(len(x)):
            rest = torch.arange(len(x)) != k
            state = personal(fixed, x[rest], y[rest], theta=theta)
            loss -= float(fixed.predict(LINEAR, state, x[k : k + 1], None)[0, 0, y[k]])
        losses.append(loss)
    return losses.index(min(losses)) / (GRID - 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_weight_is_that_of_leave_one_out_predictions(seed):
    x = randn(15, 3, seed=20 + seed)
    y = ((x[:, 0].abs() > 0.7).long() + (x[:, 1] > 0)).clamp_max(2)  # no linear model knows this
    method = KNNPer(neighbours=4, scale=0.3)
    expected = leave_one_out_weight(method, x, y)
    assert float(personal(method, x, y).weight) == pytest.approx(expected)


def test_an_example_sees_its_duplicate_but_not_itself():
    x, y = randn(8, 3, seed=6), torch.arange(8) % 3
    method = KNNPer(neighbours=1)
    alone, twice = (personal(method, *each).weight for each in ((x, y), (x.repeat(2, 1), y.repeat(2))))
    assert float(twice) == 1.0  # the duplicate knows the label for certain
    assert float(alone) < 1


def test_a_single_example_leaves_the_shared_model():
    state = personal(KNNPer(), X[:1], Y[:1])
    assert float(state.weight) == 0
    assert (
        difference(KNNPer().predict(LINEAR, state, NEW, None)[0], LINEAR.net(state.theta, NEW).log_softmax(-1)) < 1e-12
    )


def test_clients_of_different_sizes_are_scored_as_if_alone():
    result = trained(KNNPer())
    scores = result.evaluate()["personal"]["mean"]["nll"][0]
    for i, rows in enumerate(result.shards.test):
        outputs = result.predict("personal", i, result.shards.x[rows])
        assert float(-log_average(outputs)[torch.arange(len(rows)), result.shards.y[rows]].mean()) == pytest.approx(
            scores[i], rel=1e-9
        )


def test_a_personal_model_is_more_than_weights():
    result = federation(KNNPer())
    assert trained_model(result, "personal", 0).weights is None
    assert trained_model(result, "shared", 0).weights is not None
