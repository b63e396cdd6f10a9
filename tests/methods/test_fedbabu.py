import dataclasses

import pytest
import torch

from federations import SIZES, TRAINING, federation, make_model, same_bits, trained
from pfedbayes.methods.fedavg_ft import FedAvgFT
from pfedbayes.methods.fedbabu import FedBABU
from pfedbayes.methods.fedper import BodyAndHead, FedPer

NET = make_model().net
CUT = NET.num_params - NET.head_size


class HeadlessFedPer(FedPer):
    """FedPer with a learning rate of 0 for the head."""

    aggregate = FedBABU.aggregate

    def step(self, model, local, batches, noise):
        after = super().step(model, local, batches, noise)
        return BodyAndHead(after.w, model.net.join(after.theta, local.theta))


class HeadlessFedAvgFT(FedAvgFT):
    """FedAvg with fine-tuning, which does not train the head before that."""

    aggregate = FedBABU.aggregate

    def step(self, model, local, batches, noise):
        after = super().step(model, local, batches, noise)
        return after._replace(theta=model.net.join(after.theta, local.theta))


def test_the_head_never_changes_and_the_body_does():
    first, last = federation(FedBABU(0.3)).servers[0], trained(FedBABU(0.3)).servers[0]
    assert same_bits(last[CUT:], first[CUT:])
    assert not same_bits(last[:CUT], first[:CUT])


def test_rate_zero_changes_nothing():
    assert same_bits(trained(FedBABU(0.0)).servers, federation(FedBABU()).servers)


def test_it_is_fedper_with_a_head_that_does_not_learn():
    assert same_bits(trained(FedBABU(0.3)).servers[0], trained(HeadlessFedPer(0.3)).servers[0])


def test_it_is_fedavg_with_fine_tuning_and_a_frozen_head():
    ours, theirs = trained(FedBABU(0.3, 0.2, 3)), trained(HeadlessFedAvgFT(0.3, 0.2, 3))
    assert same_bits(ours.servers, theirs.servers)
    assert all(same_bits(ours.personal_state(i), theirs.personal_state(i)) for i in range(len(SIZES)))


def test_without_fine_tuning_the_personal_model_is_the_shared_one():
    result = trained(FedBABU(tune_steps=0))
    assert all(same_bits(result.personal_state(i), result.servers[0]) for i in range(len(SIZES)))


@pytest.mark.parametrize(("tune", "body", "head"), [("all", True, True), ("head", False, True), ("body", True, False)])
def test_fine_tuning_changes_the_parts_that_it_names(tune, body, head):
    result = trained(FedBABU(tune=tune))
    own, w = result.personal_state(0), result.servers[0]
    assert [not same_bits(own[:CUT], w[:CUT]), not same_bits(own[CUT:], w[CUT:])] == [body, head]


def test_fine_tuning_takes_full_batches_down_the_gradient():
    everything = dataclasses.replace(TRAINING, batch_size=SIZES[3])
    result = trained(FedBABU(eta_personal=0.2, tune_steps=1, tune="head"), training=everything)
    w, batch = result.servers[0], result.batch_of(result.shards.train[3])
    expected = NET.join(w, w - 0.2 * make_model().grad_loss(w, batch))
    assert torch.allclose(result.personal_state(3), expected, rtol=0, atol=1e-12)
