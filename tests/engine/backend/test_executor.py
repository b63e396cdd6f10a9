"""What the executor does beside a GPU and with a compiler, driven on a CPU: both are replaced by plain calls."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from execution_plans import PHILOX, agree
from federations import CPU, EXACT, TRAINING, federation, make_model, make_shards, randn, same_bits, trained
from pfedbayes.engine.backend import executor, local_training
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.random import normal
from pfedbayes.maths.trees import tree_map
from pfedbayes.methods import FedAvg, Hierarchical, PFedBayes
from pfedbayes.nets import Model, Net, TableNet, vgg


@pytest.mark.parametrize("noise", ["torch", "philox"])
def test_steps_that_build_their_batches_and_noise_are_the_same_steps(monkeypatch, noise):
    steps = []

    def compiled(function):
        return lambda *arguments: steps.append(arguments) or function(*arguments)

    monkeypatch.setattr(local_training, "Compiled", compiled)
    plan = dataclasses.replace(EXACT, noise=noise)
    ours = trained(PFedBayes(), plan=dataclasses.replace(plan, compile=True))
    assert agree(ours, trained(PFedBayes(), plan=plan))
    assert len(steps) == TRAINING.rounds * TRAINING.local_steps
    for _, x, y, _, _, names in steps:
        assert (x.ndim, y.ndim) == (2, 1)
        # A compiled step takes tensors only: the noise that torch has drawn, or the names that it draws by itself.
        assert isinstance(names, Tensor)
        assert names.is_floating_point() == (noise == "torch")


def test_what_a_replay_overwrites_is_copied_before_the_next_chunk(monkeypatch):
    outputs = {}

    def replayed(function):
        """Write every result of these shapes to the memory of the first one, as a CUDA graph does."""

        def call(*arguments):
            result = function(*arguments)
            kept = outputs.setdefault(len(arguments[-1].weight), result)
            tree_map(lambda memory, leaf: memory.copy_(leaf), kept, result)
            return kept

        return call

    plain = federation(PFedBayes(), plan=dataclasses.replace(PHILOX, chunk=2))
    plain.train_round()
    ours = federation(PFedBayes(), plan=dataclasses.replace(PHILOX, chunk=2))
    training = ours._executor._local_training
    training._together = replayed(training._together)
    object.__setattr__(ours._executor.plan, "graph", True)  # a plan for a CPU refuses it
    ours.train_round()
    assert sorted(outputs) == [1, 2]  # chunks of two and, of five clients, the last one
    assert same_bits(tuple(ours.tensors().values()), tuple(plain.tensors().values()))


@pytest.mark.parametrize(("spare", "at_once"), [(0, True), (-1, False)])
def test_few_mini_batches_of_a_round_are_gathered_before_its_first_step(monkeypatch, spare, at_once):
    gather, done = local_training.LocalTraining._gather, []

    class Noted(FedAvg):
        def step(self, model, local, batches, noise):
            done.append("step")
            return super().step(model, local, batches, noise)

    def gathered(self, *arguments):
        done.append("gather")
        return gather(self, *arguments)

    steps, width, features = TRAINING.local_steps, TRAINING.batch_size, 3
    numbers = steps * width * features * TRAINING.participants
    monkeypatch.setattr(local_training, "NUMBERS_OF_A_ROUND", numbers + spare)
    monkeypatch.setattr(local_training.LocalTraining, "_gather", gathered)
    ours = trained(Noted(), 1)
    expected = ["gather"] * steps + ["step"] * steps if at_once else ["gather", "step"] * steps
    assert done == expected
    assert same_bits(ours.servers, trained(FedAvg(), 1).servers)


def test_noise_of_examples_is_that_of_the_clients_own_and_shared_by_its_copies():
    model = Model(Net(TableNet(3, 0, 2, 1)), Regression(0.5))
    training = local_training.LocalTraining(Hierarchical(), model, randn(9, 3), randn(9, 1), EXACT)
    weight = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0]])
    found = training._noise(np.array([7, 8, 7]), weight)
    two, three = (normal((size, 3), seed, torch.float64, CPU) for size, seed in ((2, 7), (3, 8)))
    nothing = torch.zeros(1, 3, dtype=torch.float64)
    assert torch.equal(found, torch.stack([torch.cat([two, nothing]), three, torch.cat([two, nothing])]))


def test_networks_predict_compiled_if_training_is_and_they_have_convolutions():
    shards = dataclasses.replace(make_shards(), x=randn(100, 3, 32, 32))
    for model, others, convolutional in ((make_model(vgg(3)), {"shards": shards}, True), (make_model(), {}, False)):
        ours = federation(FedAvg(), model=model, **others)._executor
        ours._fast_predictor = "fast"
        for graph in (True, False):
            for compiled in (True, False):
                ours.plan = SimpleNamespace(graph=graph)
                ours._local_training = SimpleNamespace(compiled=compiled)
                assert (ours.predictor == "fast") == (convolutional and graph and compiled)


def test_the_compiled_network_takes_batches_of_one_size(monkeypatch):
    monkeypatch.setattr("pfedbayes.engine.backend.executor.FixedSizeBatches", lambda net: lambda theta, x: "compiled")
    ours = federation(FedAvg())._executor
    assert ours._fast_predictor.net(torch.zeros(0), torch.zeros(0)) == "compiled"


def table_federation(plan, **others):
    model = Model(Net(TableNet(3, 0, 2, 1)), Regression(0.5))
    shards = make_shards()
    shards = dataclasses.replace(shards, y=shards.y[:, None].double(), num_classes=None)
    return trained(Hierarchical(), 2, plan=plan, shards=shards, model=model, **others)


def test_threads_that_take_chunks_change_no_bit():
    one, three = (table_federation(dataclasses.replace(EXACT, chunk=1, threads=threads)) for threads in (1, 3))
    assert same_bits(tuple(three.tensors().values()), tuple(one.tensors().values()))
    torch.set_num_threads(1)


def test_threads_compute_by_themselves():
    workers = executor._workers(2)
    assert executor._workers(2) is workers
    assert {workers.submit(torch.get_num_threads).result() for _ in range(8)} == {1}


def test_noise_of_a_round_is_that_of_each_step():
    model = Model(Net(TableNet(3, 0, 2, 1)), Regression(0.5))
    training = local_training.LocalTraining(Hierarchical(), model, randn(9, 3), randn(9, 1), EXACT)
    names, sizes = np.array([[7, 8, 7], [4, 5, 4]]), np.array([2, 3, 1])
    drawn = training.draw(names, sizes)
    weight = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0]])
    assert len(drawn) == 2
    for step, keys in zip(drawn, names, strict=True):
        assert torch.equal(step, training._noise(keys, weight))
    some = drawn.of(torch.tensor([2, 0]), 2)
    for step, whole in zip(some, drawn, strict=True):
        assert torch.equal(step, whole[[2, 0], :2])


def test_much_noise_and_noise_of_weights_is_drawn_step_by_step(monkeypatch):
    model = Model(Net(TableNet(3, 0, 2, 1)), Regression(0.5))
    table = local_training.LocalTraining(Hierarchical(), model, randn(9, 3), randn(9, 1), EXACT)
    names, sizes = np.array([[7, 8]]), np.array([2, 3])
    monkeypatch.setattr(local_training, "NOISE_OF_A_ROUND", 2 * 3 * 3)
    assert table.draw(names, sizes) is not None
    monkeypatch.setattr(local_training, "NOISE_OF_A_ROUND", 2 * 3 * 3 - 1)
    assert table.draw(names, sizes) is None
    weights = local_training.LocalTraining(PFedBayes(), make_model(), randn(9, 3), randn(9, 1), EXACT)
    assert weights.draw(names, sizes) is None
