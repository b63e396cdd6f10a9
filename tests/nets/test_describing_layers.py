"""Networks as lists of layers."""

import json

import pytest
import torch
from torch import nn

from pfedbayes.nets import Net, WithNoise, cnn, mlp, vgg
from pfedbayes.nets.layers import describe, rebuild

CASES = {
    "mlp": (mlp([6, 5, 3], "tanh"), (6,)),
    "vgg": (vgg(4, norm="group"), (3, 32, 32)),
    "cnn": (cnn((1, 16, 20), 3), (1, 16, 20)),
    "own": (nn.Sequential(nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 4, bias=False), nn.GELU("tanh"))), (6,)),
    "strided": (
        nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1, 2, groups=2, bias=False), nn.AvgPool2d(2), nn.SiLU(), nn.Flatten()),
        (2, 16, 16),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_made_again_from_text(name):
    module, shape = CASES[name]
    count = sum(weight.numel() for weight in module.parameters())
    again = rebuild(json.loads(json.dumps(describe(module))), count, shape, None)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert torch.equal(Net(module)(theta, x), Net(again)(theta, x))
    assert torch.equal(Net(module).module(theta)(x), module(x))


def test_the_noise_of_a_regression_is_no_layer():
    assert describe(WithNoise(mlp([2, 3, 1]))) == describe(mlp([2, 3, 1]))


def test_other_networks_are_not_described():
    class Own(nn.Module):
        pass

    assert describe(Own()) is None
    assert describe(nn.Sequential(nn.Linear(2, 2), Own())) is None
    assert describe(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")) is None


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (["Own", {}], 0),
        (["Linear", {"in_features": False, "out_features": 2, "bias": True}], 2),
        (["Linear", {"in_features": 0, "out_features": 2, "bias": True}], 2),
        (["Linear", {"in_features": 10**12, "out_features": 10**12, "bias": True}], 6),
        (["LayerNorm", {"normalized_shape": [-1], "eps": 1e-5, "elementwise_affine": True}], 4),
    ],
    ids=str,
)
def test_layers_from_a_stranger_are_refused(layer, count):
    with pytest.raises(ValueError, match=r"is not known|do not make a network|do not have the"):
        rebuild([layer], count, (2,), 2)
