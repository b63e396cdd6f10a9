import dataclasses
import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import (
    TRAINING,
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
from pfedbayes.methods.fedrep import FedRep
from pfedbayes.methods.local import Local

ROUNDING = 1e-12
MODEL = make_model()
BODY = MODEL.net.num_params - MODEL.net.head_size
TURNS = {(1, 1): "hbhbhbhb", (2, 1): "hhbhhbhh", (3, 5): "hhhbbbbb", (1, 3): "hbbbhbbb", (0, 1): "bbbbbbbb"}


def run(method, inputs):
    return client_round(method, MODEL, *inputs)


def longer_round(method):
    """Eight steps of the first client, from a head that is its own."""
    inputs = one_of(stacked_inputs(method), 0)
    return inputs._replace(client=randn(31, seed=5), steps=inputs.steps + inputs.steps[::-1])


def literal_round(inputs, eta, turns):
    body, head = inputs.received[:BODY], inputs.client[BODY:]
    for ((batch,), _), turn in zip(inputs.steps, turns, strict=True):
        part = (head if turn == "h" else body).clone().requires_grad_()
        theta = torch.cat([body, part] if turn == "h" else [part, head])
        (grad,) = torch.autograd.grad(cross_entropy(MODEL.net(theta, batch.x), batch.y), part)
        moved = (part - eta * grad).detach()
        body, head = (body, moved) if turn == "h" else (moved, head)
    return torch.cat([body, head])


@pytest.mark.parametrize(("steps", "turns"), TURNS.items())
def test_a_round_trains_the_head_then_the_body_in_turn(steps, turns):
    method = FedRep(0.3, *steps)
    inputs = longer_round(method)
    client, upload = run(method, inputs)
    assert difference(client, literal_round(inputs, 0.3, turns)) < ROUNDING
    assert same_bits(upload, torch.cat([client[:BODY], inputs.received[BODY:]]))


def test_every_round_begins_with_the_head():
    method = FedRep(0.3, head_steps=3, body_steps=2)
    inputs = longer_round(method)
    client = inputs.client
    for received in (inputs.received, inputs.received + 0.1 * randn(31, seed=6)):
        now = inputs._replace(client=client, received=received)
        client, _ = run(method, now)
        assert difference(client, literal_round(now, 0.3, "hhhbbhhh")) < ROUNDING


def test_one_part_stands_still_while_the_other_has_its_turn():
    method = FedRep(0.3, head_steps=2, body_steps=2)
    inputs = longer_round(method)
    models = [run(method, inputs._replace(steps=inputs.steps[:k]))[0] for k in range(1, 6)]
    still = [
        "b" if same_bits(a[:BODY], b[:BODY]) else "h" if same_bits(a[BODY:], b[BODY:]) else "?"
        for a, b in itertools.pairwise(models)
    ]
    assert still == ["b", "h", "h", "b"]


def test_as_long_as_the_head_has_its_turn_the_server_stays():
    method = FedRep(head_steps=TRAINING.local_steps)
    assert difference(trained(method).servers, federation(method).servers) < ROUNDING


def test_servers_head_stays_the_first_one():
    start, after = federation(FedRep(0.3)).servers[0], trained(FedRep(0.3)).servers[0]
    assert difference(after[BODY:], start[BODY:]) < ROUNDING
    assert difference(after[:BODY], start[:BODY]) > 1e-3


def test_alone_with_a_step_for_each_it_is_block_coordinate_descent():
    training, shards = dataclasses.replace(TRAINING, participants=1), make_shards((23,), (3,))
    result = trained(FedRep(0.3), 1, training=training, shards=shards)
    clients = train_alone(FedRep(0.3), 1, training, shards).clients
    assert difference(result.personal_state(0).theta, clients[0]) < ROUNDING
    joint = trained(Local(0.3), 1, training=training, shards=shards)
    assert difference(clients[0], joint.personal_state(0)) > 1e-3


def test_personal_model_follows_the_server_and_the_last_trained_one_stands_beside_it():
    result, clients = trained(FedRep(0.3)), train_alone(FedRep(0.3), TRAINING.rounds).clients
    test = result.batch_of(result.shards.test[0])
    columns = result.estimates("personal", 0, result.shards.test[0], samples=10)
    assert columns.keys() == {"mean", "local"}
    current = torch.cat([result.servers[0][:BODY], clients[0][BODY:]])
    assert_close(columns["mean"], MODEL.outputs(current, test.x)[None], rtol=1e-10, atol=1e-10)
    assert_close(columns["local"], MODEL.outputs(clients[0], test.x)[None], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("field", "value"), [("eta", -0.1), ("head_steps", -1), ("body_steps", 0)])
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        FedRep(**{field: value})
