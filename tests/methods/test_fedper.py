import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    client_steps,
    difference,
    federation,
    make_model,
    make_shards,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    train_alone,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.random import Purpose, choose, key
from pfedbayes.methods.fedper import FedPer
from pfedbayes.methods.local import Local
from pfedbayes.nets import mlp

ROUNDING = 1e-12
MODEL = make_model()
BODY = MODEL.net.num_params - MODEL.net.head_size  # 3 * 4 + 4 of the 31 parameters


def run(method, inputs):
    return client_round(method, MODEL, *inputs)


def modules_with_heads_of_their_own(eta, rounds):
    """The federation as ordinary modules: every round, clients get the mean body and keep their last layer."""
    shards, method = make_shards(), FedPer()
    theta = MODEL.net.init(key(TRAINING.seed, Purpose.INIT), "torch").double()
    modules = [mlp([3, 4, 3], "tanh").double() for _ in SIZES]
    for module in modules:
        nn.utils.vector_to_parameters(theta.clone(), module.parameters())
    body, cursors = theta[:BODY], [0] * len(SIZES)
    for round in range(1, rounds + 1):
        chosen = choose(TRAINING.seed, round, len(SIZES), TRAINING.participants).tolist()
        for i in chosen:
            nn.utils.vector_to_parameters(body.clone(), modules[i][:2].parameters())  # Flatten and the first Linear
            optimiser = torch.optim.SGD(modules[i].parameters(), lr=eta)
            for (batch,), _ in client_steps(shards, MODEL, method, TRAINING, i, round, cursors[i]):
                optimiser.zero_grad()
                cross_entropy(modules[i](batch.x), batch.y).backward()
                optimiser.step()
                cursors[i] += len(batch.y)
        bodies = [SIZES[i] * nn.utils.parameters_to_vector(modules[i][:2].parameters()).detach() for i in chosen]
        body = sum(bodies) / sum(SIZES[i] for i in chosen)
    return body, [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]


def test_it_is_a_federation_of_modules_that_share_all_but_the_last_layer():
    body, models = modules_with_heads_of_their_own(0.3, TRAINING.rounds)
    result = trained(FedPer(0.3))
    assert difference(result.servers[0][:BODY], body) < ROUNDING
    for i, model in enumerate(models):
        personal = result.personal_state(i)
        assert difference(personal.theta, torch.cat([body, model[BODY:]])) < ROUNDING
        assert difference(personal.local, model) < ROUNDING


def test_head_is_the_last_layer():
    assert BODY == 3 * 4 + 4
    assert MODEL.net.head_size == 4 * 3 + 3


def test_nothing_of_the_head_is_sent():
    method = FedPer(0.3)
    inputs = one_of(stacked_inputs(method), 0)
    client, upload = run(method, inputs)
    assert same_bits(upload[BODY:], inputs.received[BODY:])
    assert same_bits(upload[:BODY], client[:BODY])
    assert not same_bits(client[BODY:], inputs.received[BODY:])


def test_servers_head_stays_the_first_one():
    start, after = federation(FedPer(0.3)).servers[0], trained(FedPer(0.3)).servers[0]
    assert difference(after[BODY:], start[BODY:]) < ROUNDING
    assert difference(after[:BODY], start[:BODY]) > 1e-3


def test_local_training_starts_from_the_received_body_and_the_own_head():
    method = FedPer(0.3)
    inputs = one_of(stacked_inputs(method), 0)
    own, joined = randn(31, seed=5), inputs.received.clone()
    joined[BODY:] = own[BODY:]
    client, _ = run(method, inputs._replace(client=own))
    assert same_bits(client, run(Local(0.3), inputs._replace(client=joined))[0])


def test_alone_it_is_local_training():
    training, shards = dataclasses.replace(TRAINING, participants=1), make_shards((23,), (3,))
    fedper, local = (trained(method(0.3), training=training, shards=shards) for method in (FedPer, Local))
    assert difference(fedper.personal_state(0).theta, local.personal_state(0)) < ROUNDING


def test_personal_model_follows_the_server_and_the_last_trained_one_stands_beside_it():
    result, clients = trained(FedPer(0.3)), train_alone(FedPer(0.3), TRAINING.rounds).clients
    test = result.batch_of(result.shards.test[0])
    columns = result.estimates("personal", 0, result.shards.test[0], samples=10)
    assert columns.keys() == {"mean", "local"}
    current = torch.cat([result.servers[0][:BODY], clients[0][BODY:]])
    assert_close(columns["mean"], MODEL.outputs(current, test.x)[None], rtol=1e-10, atol=1e-10)
    assert_close(columns["local"], MODEL.outputs(clients[0], test.x)[None], rtol=1e-10, atol=1e-10)


def test_a_client_not_met_yet_predicts_with_the_servers_body_and_the_first_head():
    alone = dataclasses.replace(TRAINING, participants=1)
    result = trained(FedPer(), 1, training=alone)
    stranger = next(i for i in range(len(SIZES)) if i not in train_alone(FedPer(), 1, alone).clients)
    assert same_bits(result.personal_state(stranger).theta, result.servers[0])


def test_negative_rate_is_refused():
    with pytest.raises(ValueError, match="eta"):
        FedPer(eta=-0.1)
