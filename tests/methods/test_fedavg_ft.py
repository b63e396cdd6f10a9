import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from federations import SIZES, TRAINING, difference, federation, make_model, make_shards, same_bits, trained
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Adaptation
from pfedbayes.methods.fedavg_ft import FedAvgFT
from pfedbayes.nets import Batch

ROUNDING = 1e-12


def test_shared_model_is_that_of_fedavg_to_the_last_bit():
    tuned = federation(FedAvgFT(0.3, eta_personal=0.2, steps=3))
    for _ in tuned.rounds(3):
        tuned.evaluate()  # fine-tuning leaves no trace
    assert same_bits(tuned.servers, trained(FedAvg(0.3)).servers)


@pytest.mark.parametrize("idle", [{"steps": 0}, {"eta_personal": 0.0}])
def test_without_fine_tuning_the_personal_model_is_the_shared_one(idle):
    result = trained(FedAvgFT(**idle))
    assert all(same_bits(result.personal_state(i), result.servers[0]) for i in range(len(SIZES)))


@pytest.mark.parametrize("client", [1, 3])
def test_fine_tuning_is_sgd_on_the_clients_training_data(client):
    everything = dataclasses.replace(TRAINING, batch_size=SIZES[client])  # so that the order does not matter
    result = trained(FedAvgFT(eta_personal=0.2, steps=4), training=everything)
    net, theta, batch = make_model().net, result.servers[0], result.batch_of(result.shards.train[client])
    for _ in range(4):
        theta = theta.detach().requires_grad_()
        theta = theta - 0.2 * torch.autograd.grad(cross_entropy(net(theta, batch.x), batch.y), theta)[0]
    assert difference(result.personal_state(client), theta.detach()) < ROUNDING


def adaptation(size, batch_size, seed=5):
    rows = torch.arange(size)
    return Adaptation(
        train=Batch(rows[:, None].double(), rows, torch.ones(size, dtype=torch.float64)),
        batch_size=batch_size,
        num_classes=None,
        seed=seed,
        test=None,
        validation=Batch(rows[:0, None].double(), rows[:0], torch.ones(0, dtype=torch.float64)),
    )


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(10, 4, 5), (7, 7, 2), (10, 4, 6), (10, 4, 1)])
def test_batches_go_through_whole_epochs_in_random_order(size, batch_size, steps):
    rows = adaptation(size, batch_size).rows(steps)
    assert rows.shape == (steps, batch_size)
    epochs = rows.flatten().split(size)
    assert all(len(epoch.unique()) == len(epoch) for epoch in epochs)
    assert all(epoch.tolist() != sorted(epoch.tolist()) for epoch in epochs)


def test_order_is_that_of_the_seed():
    first, again, other = (adaptation(10, 4, seed).rows(20) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mini_batches_are_taken_one_after_another():
    # With a tiny learning rate, the steps are linear in it: an epoch of equal mini-batches moves the model as far as
    # the same number of steps on the whole training set.
    training = dataclasses.replace(TRAINING, batch_size=4)
    method, client = FedAvgFT(eta_personal=1e-7, steps=4), 4  # 16 examples, 4 batches
    result = trained(method, training=training)
    batch, w = result.batch_of(result.shards.train[client]), result.servers[0]
    moved = (result.personal_state(client) - w) / 1e-7
    assert difference(moved, -4 * make_model().grad_nll(w, batch) / 16) < 1e-5


def test_fine_tuning_never_reads_test_data():
    shards, poisoned = make_shards(), make_shards()
    rows = torch.cat(shards.test)
    poisoned.x[rows], poisoned.y[rows] = torch.nan, (shards.y[rows] + 1) % 3
    results = [trained(FedAvgFT(), shards=data) for data in (shards, poisoned)]
    states = [result.personal_state(0, test=result.batch_of(result.shards.test[0])) for result in results]
    assert same_bits(*states)


@pytest.mark.parametrize("field", ["eta", "eta_personal", "steps"])
def test_negative_values_are_refused(field):
    with pytest.raises(ValueError, match=field):
        FedAvgFT(**{field: -1})
