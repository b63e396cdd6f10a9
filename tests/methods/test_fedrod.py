import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from federations import (
    SIZES,
    TRAINING,
    difference,
    federation,
    make_model,
    make_shards,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)  # fmt: skip
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Shard
from pfedbayes.methods.fedrod import FedRoD

ROUNDING = 1e-12
NET = make_model().net
CUT = NET.num_params - NET.head_size


def with_counts(inputs, counts):
    labels = torch.tensor(counts, dtype=torch.int64)
    return inputs._replace(shard=Shard(inputs.shard.size, labels.expand(*inputs.shard.labels.shape)))


def rounds(method, counts, client=None):
    inputs = with_counts(one_of(stacked_inputs(method), 0), counts)
    client = inputs.client if client is None else client
    return client_round(method, make_model(), client, inputs.received, inputs.shard, inputs.steps)


def test_with_equal_counts_the_shared_model_is_that_of_fedavg_to_the_last_bit():
    inputs = one_of(stacked_inputs(FedAvg()), 0)
    expected = client_round(FedAvg(0.3), make_model(), (), inputs.received, inputs.shard, inputs.steps)[1]
    assert same_bits(rounds(FedRoD(0.3), [7, 7, 7])[1], expected)


def test_scaling_all_counts_changes_nothing():
    assert same_bits(rounds(FedRoD(0.3), [2, 7, 1]), rounds(FedRoD(0.3), [6, 21, 3]))
    assert not same_bits(rounds(FedRoD(0.3), [2, 7, 1])[1], rounds(FedRoD(0.3), [2, 6, 1])[1])


def test_a_step_is_that_of_a_network_with_two_heads():
    method = FedRoD(0.3, eta_personal=0.2)
    inputs = with_counts(one_of(stacked_inputs(method), 0), [2, 7, 1])
    (batch,), _ = inputs.steps[0]
    own = NET.join(torch.zeros(31, dtype=torch.float64), randn(31, seed=4))
    head, theta = client_round(method, make_model(), own, inputs.received, inputs.shard, inputs.steps[:1])

    start = inputs.received.clone().requires_grad_()
    features = NET.features(start, batch.x)
    logits = NET(start, batch.x)
    counts = torch.tensor([2.0, 7.0, 1.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(cross_entropy(logits + counts.log(), batch.y), start)
    assert difference(theta, (start - 0.3 * grad).detach()) < ROUNDING

    weight, bias = (part.clone().requires_grad_() for part in (own[CUT:-3].view(3, 4), own[-3:]))
    own_logits = logits.detach() + features.detach() @ weight.T + bias
    grads = torch.autograd.grad(cross_entropy(own_logits, batch.y), (weight, bias))
    expected = own[CUT:] - 0.2 * torch.cat([grad.flatten() for grad in grads])
    assert difference(head[CUT:], expected) < ROUNDING
    assert not head[:CUT].any()


def test_a_head_that_does_not_learn_leaves_the_shared_model():
    result = trained(FedRoD(eta_personal=0.0))
    assert all(same_bits(result.personal_state(i), result.servers[0]) for i in range(len(SIZES)))


def test_the_personal_model_adds_both_heads():
    result = trained(FedRoD(), training=dataclasses.replace(TRAINING, train="all"))
    own = result.client_states(range(len(SIZES)))
    assert float(own[:, CUT:].abs().amax(1).min()) > 0
    assert all(same_bits(result.personal_state(i), result.servers[0] + own[i]) for i in range(len(SIZES)))


def test_a_copied_head_starts_as_the_generic_one():
    result = federation(FedRoD(start="copy"))
    w = result.servers[0]
    assert same_bits(result.personal_state(0), NET.join(w, 2 * w))
    still = trained(FedRoD(0.3, eta_personal=0.0, start="copy"), training=dataclasses.replace(TRAINING, train="all"))
    assert same_bits(still.client_states([0])[0], NET.join(torch.zeros_like(w), w))


def test_labels_that_a_client_lacks_get_no_gradient():
    shards = make_shards()
    shards.y[shards.train[0]] = shards.y[shards.train[0]].clamp_max(1)
    inputs = one_of(stacked_inputs(FedRoD(0.3), shards=shards), 0)
    assert inputs.shard.labels[2] == 0
    _, theta = client_round(FedRoD(0.3), make_model(), inputs.client, inputs.received, inputs.shard, inputs.steps)
    assert same_bits(theta[-1], inputs.received[-1])
    assert not same_bits(theta[-2], inputs.received[-2])


def test_numbers_are_refused():
    with pytest.raises(UserError, match="FedRoD classifies"):
        federation(FedRoD(), model=make_model(likelihood=Regression(1.0)))
