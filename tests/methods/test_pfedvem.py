import dataclasses

import torch
from torch import nn
from torch.testing import assert_close

from federations import (
    TRAINING,
    difference,
    federation,
    make_model,
    make_shards,
    model_for,
    one_of,
    randn,
    stacked_inputs,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.gaussian import rho_of, sigma
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import PFedVEM
from pfedbayes.methods.base import Shard
from pfedbayes.methods.pfedvem import Client, Server, Upload
from pfedbayes.nets import Batch

H = 15
RECEIVED = Server(randn(16), randn(H, seed=1))
CLIENT = Client(randn(16, seed=2), randn(H, seed=3), randn(H, seed=4))
SHARD = Shard(torch.tensor(20.0).double(), torch.empty(0))


def spread(client, received=RECEIVED):
    return PFedVEM().begin(client, received, SHARD).prior.sigma[0]


def test_the_spread_and_the_mean_maximise_the_expected_log_prior():
    clients = [CLIENT._replace(mean=randn(H, seed=10 + k), rho=randn(H, seed=20 + k)) for k in range(3)]

    def objective(head, spreads):
        terms = [
            H * rho.log() + (sigma(each.rho).square().sum() + (each.mean - head).square().sum()) / (2 * rho**2)
            for each, rho in zip(clients, spreads, strict=True)
        ]
        return -sum(terms)

    spreads = torch.stack([spread(each) for each in clients])
    best = objective(RECEIVED.head, spreads)
    for k in range(3):
        for factor in (0.99, 1.01):
            other = spreads.clone()
            other[k] *= factor
            assert objective(RECEIVED.head, other) < best
    uploads = Upload(torch.zeros(3, 16).double(), torch.stack([each.mean for each in clients]), spreads.pow(-2))
    head = PFedVEM().aggregate(RECEIVED, uploads, torch.ones(3), torch.arange(3)).head
    best = objective(head, spreads)
    for k in range(20):
        assert objective(head + 0.01 * randn(H, seed=k), spreads) < best


def test_limits_of_the_server():
    uploads = Upload(randn(3, 16, seed=5), randn(3, H, seed=6), torch.full((3,), 4.0).double())
    sizes = torch.tensor([1.0, 2.0, 5.0]).double()
    after = PFedVEM().aggregate(RECEIVED, uploads, sizes, torch.arange(3))
    assert_close(after.head, uploads.head.mean(0))
    assert_close(after.body, (sizes / 8) @ uploads.body)
    mixed = PFedVEM(beta=0.25).aggregate(RECEIVED, uploads, sizes, torch.arange(3))
    assert_close(mixed.head, 0.75 * after.head + 0.25 * RECEIVED.head)
    sure = uploads._replace(confidence=torch.tensor([1.0, 1e9, 1.0]).double())
    assert_close(PFedVEM().aggregate(RECEIVED, sure, sizes, torch.arange(3)).head, uploads.head[1], rtol=0, atol=1e-6)


def test_the_spread_does_not_depend_on_the_order_of_weights():
    order = torch.randperm(H, generator=torch.Generator().manual_seed(1))
    turned = CLIENT._replace(mean=CLIENT.mean[order], rho=CLIENT.rho[order])
    assert_close(spread(turned, RECEIVED._replace(head=RECEIVED.head[order])), spread(CLIENT))


def test_few_data_leave_wide_heads_and_less_weight():
    ours = trained(PFedVEM(eta_head=0.1), 10, shards=make_shards((200, 2), (5, 5)), training=WITH_FEW)
    many, few = (ours.personal_state(i) for i in range(2))
    assert sigma(few.rho).mean() > sigma(many.rho).mean()
    assert spread(few, ours.servers[0]) > spread(many, ours.servers[0])


WITH_FEW = dataclasses.replace(TRAINING, participants=2, rounds=10, local_steps=20)


def test_turns_move_the_head_first_and_then_the_body():
    method = PFedVEM(head_steps=2, body_steps=1)
    inputs = one_of(stacked_inputs(method), 0)
    local = method.begin(inputs.client, inputs.received, inputs.shard)
    for k, (batches, noise) in enumerate(inputs.steps):
        after = method.step(model_for(method), local, batches, noise)
        moved = [not torch.equal(a, b) for a, b in zip(after.q, local.q, strict=True)]
        assert moved == ([True, False, False] if k == 2 else [False, True, True])
        local = after


def test_a_small_fixed_spread_ties_the_head_to_the_mean():
    narrow = CLIENT._replace(mean=RECEIVED.head, rho=rho_of(torch.full((H,), 1e-3).double()))
    method, inputs = PFedVEM(eta_head=1e-5), one_of(stacked_inputs(PFedVEM()), 0)
    received = inputs.received._replace(head=RECEIVED.head)

    def distance(client):
        moved, _ = client_round(method, model_for(method), client, received, inputs.shard, inputs.steps * 10)
        return (moved.mean - RECEIVED.head).norm()

    assert distance(narrow) < distance(CLIENT._replace(mean=RECEIVED.head))


def test_with_a_linear_head_the_optimum_is_the_ridge_posterior():
    model, x, spread = make_model(nn.Linear(3, 1, bias=False), Regression(0.5)), randn(12, 3, seed=7), 0.8
    y = x @ randn(3, 1, seed=8) + 0.5 * randn(12, 1, seed=9)
    batch, w = Batch(x, y, torch.ones(12).double()), randn(3, seed=10)
    precision = x.T @ x / 0.25 + torch.eye(3).double() / spread**2
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / 0.25 + w / spread**2)
    simplex = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()  # mean 0, covariance I
    method = PFedVEM(samples=4, eta_head=0.05, momentum=0.0, body_steps=1)
    at = Client(torch.empty(0).double(), mean, rho_of(precision.diagonal().rsqrt()))
    local = method.begin(at, Server(torch.empty(0).double(), w), Shard(torch.tensor(12.0).double(), torch.empty(0)))
    local = local._replace(prior=local.prior._replace(sigma=torch.full((3,), spread).double()))
    assert_close(method.step(model, local, (batch,), simplex).q, at, rtol=1e-6, atol=1e-6)


def test_the_shared_model_is_one_network_and_personal_heads_have_widths():
    ours = trained(PFedVEM(), 2)
    assert not ours.method.posterior(ours.servers[0]).sigma.any()
    q = ours.method.posterior(ours.personal_state(1))
    assert not q.sigma[:16].any()
    assert (q.sigma[16:] > 0).all()


def test_it_learns():
    training = dataclasses.replace(TRAINING, rounds=10, local_steps=20)
    before, after = federation(PFedVEM()), trained(PFedVEM(eta=0.1, eta_head=0.1, rho0=-2.0), 10, training=training)
    scores = [each.evaluate(samples=4)["personal"]["mean"]["accuracy"][0] for each in (before, after)]
    assert sum(scores[1]) > sum(scores[0]) + 0.5
    assert difference(before.servers, after.servers) > 0
