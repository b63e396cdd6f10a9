import dataclasses

import torch
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    client_states,
    difference,
    federation,
    model_for,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.methods import FedIvon
from pfedbayes.methods.fedivon import Client, Server, Upload

SERVER = Server(randn(6), randn(6, seed=1).exp(), torch.tensor(10.0).double(), torch.tensor(3.0).double())
UPLOADS = Upload(randn(3, 6, seed=2), randn(3, 6, seed=3).exp())
COUNTS, IDS = torch.tensor([5.0, 50.0, 500.0]).double(), torch.arange(3)


def merged(uploads=UPLOADS, sizes=COUNTS, **fields):
    return FedIvon(**fields).aggregate(SERVER, uploads, sizes, IDS[: len(sizes)])


def test_the_server_weights_means_by_precision():
    shares, delta = COUNTS / COUNTS.sum(), 0.3
    for weights, added in (("precision", delta), ("paper", 0.0)):
        after = merged(weights=weights, delta=delta)
        information = [share * (h + added) for share, h in zip(shares, UPLOADS.hessian, strict=True)]
        mean = sum(w * m for w, m in zip(information, UPLOADS.mean, strict=True)) / sum(information)
        assert_close(after.mean, mean)
        assert_close(after.hessian, sum(s * h for s, h in zip(shares, UPLOADS.hessian, strict=True)))
        assert after.size == COUNTS.mean()


def test_limits_of_the_server():
    scaled = UPLOADS._replace(hessian=7 * UPLOADS.hessian)
    assert_close(merged(scaled, weights="paper").mean, merged(weights="paper").mean)
    order = [2, 0, 1]
    permuted = merged(Upload(*(leaf[order] for leaf in UPLOADS)), COUNTS[order])
    assert difference(permuted, merged()) < 1e-12
    one = merged(Upload(*(leaf[:1] for leaf in UPLOADS)), COUNTS[:1])
    assert difference(one[:2], (UPLOADS.mean[0], UPLOADS.hessian[0])) < 1e-12
    equal = UPLOADS._replace(mean=UPLOADS.mean[:1].expand(3, -1))
    assert_close(merged(equal).mean, UPLOADS.mean[0])
    flat = UPLOADS._replace(hessian=torch.ones(3, 6).double())
    assert_close(merged(flat).mean, weighted_mean(UPLOADS.mean, COUNTS))


def test_negative_hessians_are_floored_in_the_published_weights():
    hessian = UPLOADS.hessian.clone()
    hessian[:, 0] = -1e-5
    after = merged(UPLOADS._replace(hessian=hessian), weights="paper")
    assert after.mean.isfinite().all()


def test_widths_count_the_examples_behind_a_gaussian():
    precision = 10 * 3 * (SERVER.hessian + 2e-4)
    assert_close(FedIvon().posterior(SERVER).sigma.pow(-2), precision)
    assert_close(FedIvon(server_ess="client").posterior(SERVER).sigma.pow(-2), precision / 3)


def test_the_hessian_moves_and_the_first_one_does_not_with_beta2_of_one():
    moved, frozen = (trained(FedIvon(beta2=beta2), 2).servers[0].hessian for beta2 in (0.999, 1.0))
    assert (moved - 0.5).abs().min() > 0
    assert_close(frozen, torch.full_like(frozen, 0.5))


def test_a_client_keeps_the_gaussian_that_it_has_sampled():
    method, inputs = FedIvon(), one_of(stacked_inputs(FedIvon()), 0)
    client, upload = client_round(method, model_for(method), *inputs)
    assert same_bits((client.mean, client.hessian), upload)
    assert_close(client.precision, SIZES[0] * (upload.hessian + 2e-4))
    again, _ = client_round(method, model_for(method), client, *inputs[1:])
    assert same_bits(again, client)  # the global version starts at the server


def test_a_personal_prior_pulls_the_client_to_the_server():
    inputs = one_of(stacked_inputs(FedIvon()), 0)
    start = inputs.received.mean

    def distance(zeta):
        method = FedIvon(personal_prior=True, zeta=zeta, eta=0.02 / zeta, beta2=1.0)
        moved, _ = client_round(method, model_for(method), *inputs._replace(steps=inputs.steps * 30))
        return float((moved.mean - start).norm())

    assert distance(30.0) < 0.6 * distance(1.0)


def test_with_a_personal_prior_the_posterior_is_kept():
    method = FedIvon(personal_prior=True)
    inputs = one_of(stacked_inputs(method), 0)
    client = Client(*(leaf + 0.1 for leaf in inputs.client))
    one, other = (client_round(method, model_for(method), each, *inputs[1:])[0] for each in (client, inputs.client))
    assert difference(one.mean, other.mean) > 1e-3
    local = method.begin(client, inputs.received, inputs.shard)
    assert_close(local.delta, inputs.received.hessian + 2e-4)  # the first round: as many examples as the client has


def test_it_learns():
    training = dataclasses.replace(TRAINING, rounds=10, local_steps=20)
    before, after = federation(FedIvon()), trained(FedIvon(eta=0.2), 10, training=training)
    scores = [each.evaluate(samples=4)["personal"]["mc4"]["accuracy"][0] for each in (before, after)]
    assert sum(scores[1]) > sum(scores[0]) + 0.5
    assert len(client_states(after)) == len(SIZES)
