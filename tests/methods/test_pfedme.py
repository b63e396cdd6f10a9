import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import (
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
from pfedbayes.methods.pfedme import PFedMe
from pfedbayes.nets import Batch

ROUNDING = 1e-12
ONE_STEP = dataclasses.replace(TRAINING, local_steps=1, train="all")


def run(method, inputs):
    return client_round(method, make_model(), *inputs)


def test_one_step_of_everything_is_fedavg():
    # theta = w - eta_p grad, so that w moves by eta lambda eta_p grad.
    method = PFedMe(eta_personal=0.05, eta=0.2, prox=3.0, inner_steps=1, weight_decay=0.0)
    ours = trained(method, training=ONE_STEP)
    assert difference(ours.servers, trained(FedAvg(0.05 * 0.2 * 3.0), training=ONE_STEP).servers) < ROUNDING


def test_a_round_is_that_of_the_paper():
    method = PFedMe(eta_personal=0.1, eta=0.05, prox=2.0, inner_steps=3, weight_decay=0.1)
    inputs = one_of(stacked_inputs(method), 0)
    net, w = make_model().net, inputs.received
    theta = w
    for (batch,), _ in inputs.steps:
        for _ in range(3):
            theta = theta.detach().requires_grad_()
            envelope = cross_entropy(net(theta, batch.x), batch.y) + (theta - w).square().sum()  # lambda / 2 = 1
            (grad,) = torch.autograd.grad(envelope + 0.05 * theta.square().sum(), theta)
            theta = (theta - 0.1 * grad).detach()
        w = w - 0.05 * 2.0 * (w - theta)
    client, upload = run(method, inputs)
    assert difference(client.theta, theta) < ROUNDING
    assert difference(client.w, w) < ROUNDING
    assert same_bits(client.w, upload)


@pytest.mark.parametrize("still", [{"eta": 0.0}, {"beta": 0.0}, {"prox": 0.0}])
def test_the_server_stays(still):
    method = PFedMe(**still)
    assert difference(trained(method).servers, federation(method).servers) < ROUNDING


def test_without_the_tie_theta_is_local_sgd_from_w():
    method = PFedMe(eta_personal=0.1, prox=0.0, weight_decay=0.0, inner_steps=2)
    inputs = one_of(stacked_inputs(method), 0)
    twice = [step for step in inputs.steps for _ in range(2)]
    sgd = client_round(FedAvg(0.1), make_model(), (), inputs.received, inputs.shard, twice)[1]
    assert difference(run(method, inputs)[0].theta, sgd) < ROUNDING


def test_every_round_starts_at_the_received_model():
    method = PFedMe()
    inputs = one_of(stacked_inputs(method), 0)
    elsewhere = inputs._replace(client=method.enrol(inputs.received + 1))
    assert same_bits(run(method, inputs), run(method, elsewhere))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("prox", [0.7, 5.0])
def test_many_inner_steps_end_at_the_proximal_point(prox, weight_decay):
    # Linear regression with unit noise: the mean loss is theta^T A theta / 2 - b^T theta + constant.
    x, y, w = randn(12, 3, seed=1), randn(12, 1, seed=2), randn(3, seed=3)
    A, b, eye = x.T @ x / 12, (x.T @ y / 12)[:, 0], torch.eye(3, dtype=torch.float64)
    model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
    batch = Batch(x, y, torch.ones(12, dtype=torch.float64))
    method = PFedMe(0.1, 0.01, prox, inner_steps=1500, weight_decay=weight_decay)
    shard = Shard(torch.tensor(12.0, dtype=torch.float64), labels=torch.empty(0))
    client, upload = client_round(method, model, method.enrol(w), w, shard, [((batch,), torch.zeros(()))])
    expected = torch.linalg.solve(A + (prox + weight_decay) * eye, b + prox * w)
    assert_close(client.theta, expected, rtol=1e-9, atol=1e-9)
    # The step on w is one of gradient descent on the Moreau envelope, whose gradient is lambda (w - theta).
    assert_close(upload, w - 0.01 * prox * (w - expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("over", [None, torch.func.vmap])
def test_personal_model_does_not_share_its_memory_with_w(over):
    method = PFedMe()
    inputs = stacked_inputs(method)
    if over is None:
        client, upload = run(method, one_of(inputs, 0))
    else:
        client, upload = client_round(method, make_model(), *inputs, over=over)
    memory = client.theta.untyped_storage().data_ptr()
    assert memory != client.w.untyped_storage().data_ptr()
    assert memory != upload.untyped_storage().data_ptr()
    assert not same_bits(client.theta, client.w)


def test_theta_is_the_personal_model_and_w_a_column_beside_it():
    result = trained(PFedMe())
    clients = train_alone(PFedMe(), TRAINING.rounds).clients
    for i in (0, 3):
        test = result.batch_of(result.shards.test[i])
        columns = result.estimates("personal", i, result.shards.test[i], samples=10)
        assert columns.keys() == {"mean", "local"}
        for name, theta in (("mean", clients[i].theta), ("local", clients[i].w)):
            assert_close(columns[name], make_model().outputs(theta, test.x)[None], rtol=1e-10, atol=1e-10)
        assert not same_bits(columns["mean"], columns["local"])


def test_server_mixes_in_the_mean_of_the_chosen_weighted_by_size():
    uploads, server = torch.tensor([[1.0, -2.0], [4.0, 4.0]], dtype=torch.float64), randn(2)
    mixed = PFedMe(beta=0.4).aggregate(server, uploads, torch.tensor([3.0, 1.0]), torch.arange(2))
    mean = torch.tensor([1.75, -0.5], dtype=torch.float64)  # (3 * 1 + 4) / 4, (3 * -2 + 4) / 4
    assert_close(mixed, 0.6 * server + 0.4 * mean, rtol=ROUNDING, atol=ROUNDING)


def test_all_train_and_only_the_chosen_count():
    method = PFedMe()
    alone = train_alone(method, 1)
    assert len(alone.uploads) > TRAINING.participants
    chosen = choose(TRAINING.seed, 1, len(alone.uploads), TRAINING.participants).tolist()
    sizes = {i: len(rows) for i, rows in enumerate(federation(method).shards.train)}
    mean = sum(sizes[i] * alone.uploads[i] for i in chosen) / sum(sizes[i] for i in chosen)
    assert difference(trained(method, 1).servers[0], mean) < ROUNDING


@pytest.mark.parametrize("field", ["eta_personal", "eta", "prox", "weight_decay", "beta", "inner_steps"])
def test_values_without_sense_are_refused(field):
    with pytest.raises(ValueError, match=field):
        PFedMe(**{field: -1})
