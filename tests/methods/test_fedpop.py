import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import (
    TRAINING,
    federation,
    make_model,
    model_for,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedPop
from pfedbayes.methods.base import Shard
from pfedbayes.methods.fedpop import Server, Upload
from pfedbayes.nets import Batch

NO_BODY = torch.empty(0).double()


def langevin(chains, steps, **fields):
    """Run chains on a linear model without a body; return their ends, and its mean and precision matrix."""
    x, mu, variance = randn(15, 2, seed=1) @ torch.tensor([[1.0, 0.7], [0.0, 0.5]]).double(), randn(2, seed=2), 0.5
    y = x @ randn(2, 1, seed=3) + 0.5 * randn(15, 1, seed=4)
    precision = x.T @ x / 0.25 + torch.eye(2).double() / variance
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / 0.25 + mu / variance)
    method = FedPop(burn_in=0, samples=1, **fields)
    received = Server(NO_BODY, mu, torch.tensor(variance).double())
    model, batch = make_model(nn.Linear(2, 1, bias=False), Regression(0.5)), Batch(x, y, torch.ones(15).double())
    shard = Shard(torch.tensor(15.0).double(), torch.empty(0))

    def run(noise):
        return client_round(method, model, method.enrol(received), received, shard, [((batch,), g) for g in noise])[0]

    return torch.func.vmap(run)(randn(chains, steps, 2, seed=5)).head, mean, precision


def test_chains_have_the_stationary_distribution_of_unadjusted_langevin_dynamics():
    gamma = 0.05 / 15
    ends, mean, precision = langevin(3000, 150, eta_head=0.05)
    # On a quadratic with curvature a the variance is 1 / (a (1 - gamma a / 2)).
    expected = (precision - gamma / 2 * precision @ precision).inverse()
    error = (expected.diagonal() / len(ends)).sqrt()
    assert ((ends.mean(0) - mean) / error).abs().max() < 4
    found = torch.cov(ends.T)
    assert (found / expected - 1).diagonal().abs().max() < 0.1
    assert found[0, 1] == pytest.approx(float(expected[0, 1]), rel=0.15)


def test_without_noise_the_chain_ends_at_the_mode():
    ends, mean, _ = langevin(1, 400, eta_head=0.1, noise_std=0.0)
    assert_close(ends[0], mean, rtol=1e-6, atol=1e-6)


def test_a_narrow_prior_makes_all_heads_equal():
    method = FedPop(eta_head=1e-11, learn_spread=False, sigma0=1e-6)
    inputs = one_of(stacked_inputs(method), 0)
    client, _ = client_round(method, model_for(method), *inputs)
    assert (client.head - inputs.received.head).abs().max() < 2e-5


def test_the_server_learns_mean_and_spread():
    uploads = Upload(randn(3, 5, seed=1), randn(3, 4, seed=2), randn(3, 4, seed=3).exp())
    server = Server(randn(5), randn(4), torch.tensor(9.0).double())
    after = FedPop().aggregate(server, uploads, torch.tensor([1.0, 1.0, 2.0]).double(), torch.arange(3))
    mean = uploads.mean.mean(0)
    assert_close(after.head, mean)
    assert_close(after.variance, (uploads.variance + (uploads.mean - mean).square()).mean())
    assert_close(after.body, (uploads.body[0] + uploads.body[1] + 2 * uploads.body[2]) / 4)
    fixed = FedPop(learn_spread=False).aggregate(server, uploads, torch.ones(3), torch.arange(3))
    assert fixed.variance == 9


def test_samples_are_the_last_ones_and_moments_those_after_burn_in():
    method = FedPop(burn_in=1, samples=2)
    inputs = one_of(stacked_inputs(method), 0)
    local, heads = method.begin(inputs.client, inputs.received, inputs.shard), []
    for batches, noise in inputs.steps:
        local = method.step(model_for(method), local, batches, noise)
        heads.append(local.client.head)
    client, upload = method.end(local)
    assert same_bits(client.samples, torch.stack(heads[-2:]))
    later = torch.stack(heads[1:])
    assert_close(upload.mean, later.mean(0))
    assert_close(upload.variance, later.var(0, correction=0))
    _, short = client_round(FedPop(burn_in=99), model_for(method), *inputs)
    assert_close(short.mean, heads[-1])
    assert not short.variance.any()


def test_predictions_use_one_sample_each():
    ours = trained(FedPop(burn_in=0, samples=3, eta_head=0.05))
    client, x = ours.personal_state(0), randn(4, 3)
    drawn = ours.predict("personal", 0, x, 5)
    networks = torch.stack([torch.cat([client.body, head]) for head in client.samples])
    expected = ours.model.stacked_outputs(networks, x)
    assert_close(drawn, expected[[0, 1, 2, 0, 1]])
    q = ours.method.posterior(client)
    assert_close(q.mu, networks.mean(0))
    assert_close(q.sigma, networks.std(0, correction=0))


def test_a_new_client_predicts_with_the_prior():
    server = federation(FedPop(sigma0=0.3)).servers[0]
    q = FedPop().posterior(server)
    assert_close(q.sigma, torch.cat([torch.zeros(16), torch.full((15,), 0.3)]).double())


def test_it_learns():
    training = dataclasses.replace(TRAINING, rounds=10, local_steps=20)
    before, after = federation(FedPop()), trained(FedPop(eta=0.1, eta_head=0.05), 10, training=training)
    scores = [each.evaluate(samples=4)["personal"]["mc4"]["accuracy"][0] for each in (before, after)]
    assert sum(scores[1]) > sum(scores[0]) + 0.5
