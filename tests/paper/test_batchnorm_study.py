"""The study of batch normalisation, experiments/batchnorm.py."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pfedbayes.data import Shards

PATH = Path(__file__).parents[2] / "experiments" / "batchnorm.py"


@pytest.fixture(scope="module")
def study():
    return SimpleNamespace(**runpy.run_path(str(PATH)))


def test_pooled_statistics_are_those_of_the_pooled_data(study):
    data = torch.randn(4, 100, 3, generator=torch.Generator().manual_seed(1)) + torch.arange(4)[:, None, None]
    statistics = [{"1.running_mean": own.mean(0), "1.running_var": own.var(0, correction=0)} for own in data]
    joint = study.pooled(statistics)
    torch.testing.assert_close(joint["1.running_mean"], data.flatten(0, 1).mean(0))
    torch.testing.assert_close(joint["1.running_var"], data.flatten(0, 1).var(0, correction=0))


def test_every_client_is_tested_with_its_own_statistics(study):
    images = torch.full((4, 10, 1, 1), 128, dtype=torch.uint8)
    labels = torch.tensor([3, 3, 7, 7])
    shards = Shards.from_arrays(train=[(images, labels)] * 2, test=[(images[:2], labels[:2]), (images[2:], labels[2:])])
    net = nn.Sequential(nn.BatchNorm2d(10), nn.Flatten())

    def prefers(label):  # the lower the running mean of a channel, the higher its output
        return {"0.running_mean": -torch.eye(10)[label], "0.running_var": torch.ones(10)}

    assert study.accuracy(net, shards, [prefers(3), prefers(7)]) == 100
    assert study.accuracy(net, shards, [prefers(3), prefers(3)]) == 50
    assert study.accuracy(net, shards, [prefers(7), prefers(3)]) == 0
