import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from federations import (
    SIZES,
    TRAINING,
    difference,
    federation,
    make_model,
    make_shards,
    one_of,
    same_bits,
    stacked_inputs,
    train_alone,
    trained,
)
from pfedbayes.data import positions
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.maths.random import Purpose, key
from pfedbayes.maths.trees import leaves
from pfedbayes.methods import FedAvg
from pfedbayes.methods.local import Local
from pfedbayes.nets import mlp

ROUNDING = 1e-12


def plain_sgd(client, eta, rounds):
    """A client's model after training by itself."""
    module = mlp([3, 4, 3], "tanh").double()
    theta = make_model().net.init(key(TRAINING.seed, Purpose.INIT), "torch").double()
    nn.utils.vector_to_parameters(theta, module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=eta)
    shards, batch_size = make_shards(), min(TRAINING.batch_size, SIZES[client])
    count = rounds * TRAINING.local_steps * batch_size
    order = shards.train[client][positions(TRAINING.seed, client, SIZES[client], 0, count)]
    for batch in order.split(batch_size):
        optimiser.zero_grad()
        functional.cross_entropy(module(shards.x[batch]), shards.y[batch]).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_every_client_is_plain_sgd_on_its_own_data_whoever_is_chosen():
    result = trained(Local(0.3))
    for i in range(len(SIZES)):
        assert difference(result.personal_state(i), plain_sgd(i, 0.3, TRAINING.rounds)) < ROUNDING


def test_alone_it_is_fedavg():
    training, shards = dataclasses.replace(TRAINING, participants=1), make_shards((23,), (3,))
    local, fedavg = (trained(method(0.3), training=training, shards=shards) for method in (Local, FedAvg))
    assert difference(local.personal_state(0), fedavg.servers[0]) < ROUNDING


def test_nothing_comes_from_the_others():
    shards = make_shards()
    flipped = dataclasses.replace(shards, y=shards.y.clone())
    others = torch.cat([rows for i, rows in enumerate(shards.train) if i != 2])
    flipped.y[others] = (flipped.y[others] + 1) % 3
    together, elsewhere = (trained(Local(), shards=data) for data in (shards, flipped))
    assert same_bits(together.personal_state(2), elsewhere.personal_state(2))
    assert not same_bits(together.personal_state(1), elsewhere.personal_state(1))


def test_nothing_is_sent_and_the_server_keeps_the_common_start():
    assert leaves(client_round(Local(), make_model(), *one_of(stacked_inputs(Local()), 0))[1]) == []
    assert same_bits(trained(Local()).servers, federation(Local()).servers)


def test_a_client_that_joins_late_starts_where_the_others_did():
    chosen_only = dataclasses.replace(TRAINING, train="chosen", participants=2)
    result, clients = trained(Local(), 1, training=chosen_only), train_alone(Local(), 1, chosen_only).clients
    for i in range(len(SIZES)):
        assert same_bits(result.personal_state(i), result.servers[0]) == (i not in clients)


def test_there_is_nothing_for_a_server_optimiser_to_follow():
    with pytest.raises(UserError, match="server_optimizer"):
        federation(Local(), dataclasses.replace(TRAINING, server_optimizer="momentum"))


def test_negative_rate_is_refused():
    with pytest.raises(ValueError, match="eta"):
        Local(eta=-0.1)
