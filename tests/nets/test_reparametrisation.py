import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import randn
from pfedbayes.nets import Net, WithNoise, mlp
from pfedbayes.nets.reparametrisation import Dense, dense_layers, drawn_outputs, num_drawn_weights

MANY = 40_000


class Reused(nn.Module):
    """One dense layer used twice, and one used once, called by the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(3, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return nn.functional.linear(input=self.twice(self.twice(x).tanh()).tanh(), weight=self.once.weight)


class Squared(nn.Module):
    """A dense layer whose weight has another use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) + self.layer.weight.square().sum()


CONVOLUTIONS = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 2))
ALONG_AN_AXIS = nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
MODULES = {
    "mlp": (mlp([3, 4, 2], "tanh"), (3,), (Dense(0, 1, 4), Dense(2, 3, 2)), 0),
    "noise": (WithNoise(mlp([3, 2])), (3,), (Dense(1, 2, 2),), 1),
    "reused": (Reused(), (3,), (Dense(2, -1, 2),), 12),
    "squared": (Squared(), (3,), (), 8),
    "convolutions": (CONVOLUTIONS, (1, 3, 3), (Dense(2, 3, 3), Dense(4, 5, 2)), 10),
    "along an axis": (ALONG_AN_AXIS, (3,), (Dense(2, 3, 2),), 4),
}


@pytest.fixture(params=MODULES)
def case(request):
    module, shape, dense, others = MODULES[request.param]
    return Net(module), randn(4, *shape, seed=1), dense, others


def test_layers_that_can_be_drawn_are_found(case):
    net, x, dense, others = case
    assert dense_layers(net, x[:1], torch.float64) == dense
    assert num_drawn_weights(net, dense) == others


def draw(net, dense, others, mean, deviation, x, count):
    width = sum(layer.units for layer in dense)
    return drawn_outputs(
        net, dense, mean, deviation, x, randn(count, others, seed=4), randn(count, len(x), width, seed=5)
    )


def test_outputs_have_the_distribution_that_drawn_weights_give_them(case):
    net, x, dense, others = case
    many = MANY // 20 if net.convolutional else MANY  # these are drawn in turn
    mean, deviation = randn(net.num_params, seed=2), randn(net.num_params, seed=3).abs()
    found = draw(net, dense, others, mean, deviation, x, many)
    expected = torch.func.vmap(net, in_dims=(0, None))(mean + deviation * randn(many, net.num_params, seed=6), x)
    spread = expected.std(0)
    assert ((found.mean(0) - expected.mean(0)).abs() / spread).max() < 5 * math.sqrt(2 / many)
    # Shares below a level, since the outputs are not Gaussian; their standard error is at most sqrt(0.25 / many).
    for z in (-1.5, -0.5, 0.5, 1.5):
        level = expected.mean(0) + z * spread
        share, expected_share = ((outputs < level).double().mean(0) for outputs in (found, expected))
        assert (share - expected_share).abs().max() < 5 * math.sqrt(0.5 / many)


def test_without_deviation_it_is_the_network_itself(case):
    net, x, dense, others = case
    mean = randn(net.num_params, seed=2)
    outputs = draw(net, dense, others, mean, torch.zeros_like(mean), x, 3)
    assert_close(outputs, net(mean, x).expand(3, *outputs.shape[1:]))


def test_examples_are_drawn_independently():
    net, x = Net(mlp([3, 4, 2], "tanh")), randn(1, 3).expand(2, 3)
    mean, deviation = randn(net.num_params, seed=2), torch.ones(net.num_params, dtype=torch.float64)
    first, second = draw(net, dense_layers(net, x[:1], torch.float64), 0, mean, deviation, x, MANY)[..., 0].T
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / math.sqrt(MANY)
