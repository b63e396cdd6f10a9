import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from federations import difference, make_model, make_shards, same_bits, trained
from pfedbayes.data import positions
from pfedbayes.engine.training import Training
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import FedAvg
from pfedbayes.nets import mlp

ROUNDING = 1e-12
FULL_BATCH = Training(local_steps=1, batch_size=1000, seed=3)


def reference_module(seed: int) -> nn.Module:
    """The first model as an ordinary module in float64."""
    module = mlp([3, 4, 3], "tanh").double()
    theta = make_model().net.init(key(seed, Purpose.INIT), "torch").double()
    nn.utils.vector_to_parameters(theta, module.parameters())
    return module


def flat(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_full_batches_and_one_step_are_centralised_gradient_descent_on_the_pooled_mean():
    shards, rounds, eta = make_shards(), 5, 0.5
    module = reference_module(FULL_BATCH.seed)
    optimiser = torch.optim.SGD(module.parameters(), lr=eta)
    pooled = torch.cat(shards.train)  # clients count by their size
    for _ in range(rounds):
        optimiser.zero_grad()
        functional.cross_entropy(module(shards.x[pooled]), shards.y[pooled]).backward()
        optimiser.step()
    ours = trained(FedAvg(eta), rounds, training=FULL_BATCH)
    assert difference(ours.servers[0], flat(module)) < ROUNDING


def test_one_client_is_plain_sgd():
    shards, eta, rounds = make_shards(sizes=(23,), test_sizes=(3,)), 0.3, 3
    training = Training(local_steps=7, batch_size=5, seed=2)
    module = reference_module(training.seed)
    optimiser = torch.optim.SGD(module.parameters(), lr=eta)
    order = shards.train[0][positions(training.seed, 0, 23, 0, rounds * 7 * 5)]
    for batch in order.split(5):
        optimiser.zero_grad()
        functional.cross_entropy(module(shards.x[batch]), shards.y[batch]).backward()
        optimiser.step()
    ours = trained(FedAvg(eta), rounds, training=training, shards=shards)
    assert difference(ours.servers[0], flat(module)) < ROUNDING


def test_rate_zero_changes_nothing():
    before = flat(reference_module(seed=3))
    assert difference(trained(FedAvg(eta=0.0)).servers[0], before) < ROUNDING


def test_order_of_clients_does_not_matter():
    shards, order = make_shards(), [3, 0, 4, 2, 1]
    permuted = dataclasses.replace(
        shards, **{name: tuple(getattr(shards, name)[i] for i in order) for name in ("train", "test", "names")}
    )
    training = dataclasses.replace(FULL_BATCH, local_steps=4)
    servers = [trained(FedAvg(0.5), 3, training=training, shards=data).servers for data in (shards, permuted)]
    assert difference(*servers) < ROUNDING


def test_clients_count_by_their_size():
    uploads, sizes = torch.tensor([[1.0, -2.0], [4.0, 4.0]], dtype=torch.float64), torch.tensor([3.0, 1.0])
    merged = FedAvg().aggregate(torch.zeros(2), uploads, sizes, torch.arange(2))
    assert same_bits(merged, torch.tensor([1.75, -0.5], dtype=torch.float64))  # (3 * 1 + 4) / 4, (3 * -2 + 4) / 4


def test_negative_rate_is_refused():
    with pytest.raises(ValueError, match="eta"):
        FedAvg(eta=-0.1)
