import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from federations import SIZES, TRAINING, difference, federation, make_model, make_shards, same_bits, trained
from pfedbayes.data import positions
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import FedAvg
from pfedbayes.methods.pooled import Pooled
from pfedbayes.nets import mlp

ROUNDING = 1e-12


def test_it_is_plain_sgd_on_the_data_of_all_clients():
    shards, eta = make_shards(), 0.3
    module = mlp([3, 4, 3], "tanh").double()
    theta = make_model().net.init(key(TRAINING.seed, Purpose.INIT), "torch").double()
    nn.utils.vector_to_parameters(theta, module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=eta)
    count = TRAINING.rounds * TRAINING.local_steps * TRAINING.batch_size
    order = torch.cat(shards.train)[positions(TRAINING.seed, 0, sum(SIZES), 0, count)]
    for batch in order.split(TRAINING.batch_size):
        optimiser.zero_grad()
        functional.cross_entropy(module(shards.x[batch]), shards.y[batch]).backward()
        optimiser.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert difference(trained(Pooled(eta)).servers[0], expected) < ROUNDING


def test_it_is_fedavg_with_one_client_that_has_everything():
    shards = make_shards()
    one = {name: (torch.cat(getattr(shards, name)),) for name in ("train", "test", "validation")}
    merged = dataclasses.replace(shards, names=("all",), **one)
    training = dataclasses.replace(TRAINING, participants=1)
    pooled = trained(Pooled(0.3), training=training, shards=shards)
    assert same_bits(pooled.servers, trained(FedAvg(0.3), training=training, shards=merged).servers)


def test_participation_does_not_matter():
    few, all_ = (trained(Pooled(), training=dataclasses.replace(TRAINING, participants=n)) for n in (1, len(SIZES)))
    assert same_bits(few.servers, all_.servers)


def test_the_one_model_is_scored_on_every_clients_own_data():
    result = trained(Pooled())
    accuracy = result.evaluate()["shared"]["mean"]["accuracy"][0]
    assert len(accuracy) == len(SIZES)
    for i, rows in enumerate(result.shards.test):
        right = make_model().outputs(result.servers[0], result.x[rows]).argmax(-1) == result.y[rows]
        assert accuracy[i] == pytest.approx(100 * float(right.double().mean()))


def test_rate_zero_changes_nothing():
    assert same_bits(trained(Pooled(eta=0.0)).servers, federation(Pooled()).servers)


def test_negative_rate_is_refused():
    with pytest.raises(ValueError, match="eta"):
        Pooled(eta=-0.1)
