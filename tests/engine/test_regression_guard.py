"""Accuracies that a right implementation reaches on MNIST, medium; they take minutes."""

import pytest

from federations import make_model
from pfedbayes.data import DataConfig, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.training import Training
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.nets import mlp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def shards():
    return load_shards(DataConfig(name="mnist", size="medium", split="shuffle"))


def mean_accuracy(federation: Federation, which: str) -> float:
    accuracies = federation.evaluate(samples=10)[which][federation.headline(10)]["accuracy"][0]
    return sum(accuracies) / len(accuracies)


def test_pfedbayes_reaches_the_published_course(shards):
    federation = Federation(shards, make_model(mlp([784, 100, 10])), PFedBayes(), Training(seed=1))
    # Round by round: the least personal and shared accuracy, ten draws. Measured were 93.9 / 84.9 at round 50,
    # 95.5 / 89.7 at 100 and 96.7 / 91.7 and 96.8 / 92.8 at 200.
    floors = {50: (93, 82), 100: (95, 88), 200: (96, 90)}
    for round in federation.rounds(max(floors)):
        if round in floors:
            personal, shared = floors[round]
            assert mean_accuracy(federation, "personal") >= personal
            assert mean_accuracy(federation, "shared") >= shared


def test_fedavg_reaches_the_published_accuracy(shards):
    federation = Federation(shards, make_model(mlp([784, 100, 10])), FedAvg(eta=0.01), Training(seed=1))
    for _ in federation.rounds(800):
        pass
    # Measured were 90.99 with batches of 100 and 91.54 with batches of 20; the paper has 90.66.
    assert 90 <= mean_accuracy(federation, "shared") <= 92
