import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    difference,
    federation,
    make_model,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    train_alone,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.random import choose
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Shard
from pfedbayes.methods.ditto import Ditto
from pfedbayes.methods.local import Local
from pfedbayes.nets import Batch

ROUNDING = 1e-12


def personal_models(method, **others):
    result = trained(method, **others)
    return torch.stack([result.personal_state(i) for i in range(len(SIZES))])


def test_shared_model_is_that_of_fedavg_to_the_last_bit():
    assert same_bits(trained(Ditto(0.3, eta_personal=0.2, prox=5.0)).servers, trained(FedAvg(0.3)).servers)


def test_without_the_pull_the_personal_model_is_local_training():
    all_train = dataclasses.replace(TRAINING, train="all")
    ditto, local = (
        personal_models(each, training=all_train) for each in (Ditto(eta_personal=0.2, prox=0.0), Local(0.2))
    )
    assert difference(ditto, local) < ROUNDING


def test_personal_rate_zero_keeps_the_personal_model():
    assert same_bits(personal_models(Ditto(eta_personal=0.0))[2], federation(Ditto()).servers[0])


def test_two_rounds_are_those_of_the_paper():
    method = Ditto(0.3, eta_personal=0.2, prox=0.7)
    inputs, net = one_of(stacked_inputs(method), 0), make_model().net
    v = client = inputs.received + 0.1 * randn(31, seed=7)  # not where the shared model is
    for w in (inputs.received, inputs.received + 0.1 * randn(31, seed=8)):
        for (batch,), _ in inputs.steps:
            v = v.detach().requires_grad_()
            objective = cross_entropy(net(v, batch.x), batch.y) + 0.35 * (v - w).square().sum()
            v = (v - 0.2 * torch.autograd.grad(objective, v)[0]).detach()
        client, _ = client_round(method, make_model(), client, w, inputs.shard, inputs.steps)
    assert difference(client, v) < ROUNDING


def test_only_those_who_take_part_train_their_model():
    result, method = federation(Ditto()), Ditto()
    before = [result.personal_state(i).clone() for i in range(len(SIZES))]
    result.train_round()
    met = choose(TRAINING.seed, 1, len(SIZES), TRAINING.participants).tolist()
    after = train_alone(method, 1).clients
    assert after.keys() == set(met)
    assert not any(same_bits(after[i], before[i]) for i in met)
    result.train_round()
    chosen = choose(TRAINING.seed, 2, len(SIZES), TRAINING.participants).tolist()
    silent = set(met) - set(chosen)
    assert silent
    assert all(difference(result.personal_state(i), after[i]) < ROUNDING for i in silent)


class TestQuadraticLoss:
    """Linear regression with unit noise: the mean loss is theta^T A theta / 2 - b^T theta + constant."""

    x, y, w = randn(12, 3, seed=1), randn(12, 1, seed=2), randn(3, seed=3)
    A, b = x.T @ x / 12, (x.T @ y / 12)[:, 0]

    def personal_optimum(self, method, steps):
        model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
        batch = Batch(self.x, self.y, torch.ones(12, dtype=torch.float64))
        shard = Shard(torch.tensor(12.0, dtype=torch.float64), labels=torch.empty(0))
        return client_round(method, model, randn(3, seed=4), self.w, shard, [((batch,), torch.zeros(()))] * steps)[0]

    @pytest.mark.parametrize("prox", [0.0, 0.7, 5.0])
    def test_personal_model_ends_at_the_proximal_point_of_the_received_one(self, prox):
        expected = torch.linalg.solve(self.A + prox * torch.eye(3, dtype=torch.float64), self.b + prox * self.w)
        assert_close(self.personal_optimum(Ditto(eta_personal=0.1, prox=prox), 1500), expected, rtol=1e-9, atol=1e-9)

    def test_a_strong_pull_leaves_the_received_model(self):
        distances = [
            float((self.personal_optimum(Ditto(eta_personal=0.5 / prox, prox=prox), 200) - self.w).norm())
            for prox in (1e3, 1e4, 1e5)
        ]
        for wide, narrow in itertools.pairwise(distances):
            assert narrow == pytest.approx(wide / 10, rel=0.01)


@pytest.mark.parametrize("field", ["eta", "eta_personal", "prox"])
def test_negative_values_are_refused(field):
    with pytest.raises(ValueError, match=field):
        Ditto(**{field: -0.1})
