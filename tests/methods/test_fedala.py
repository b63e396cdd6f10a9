import dataclasses

import pytest
import torch

from federations import (
    SIZES,
    TRAINING,
    difference,
    make_model,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)  # fmt: skip
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.trees import leaves
from pfedbayes.methods import FedAvg
from pfedbayes.methods.fedala import Client, FedALA

ROUNDING = 1e-12
NET = make_model().net
CUT = NET.num_params - NET.head_size
ONE = torch.tensor(1)


def run(method, client, steps=None):
    inputs = one_of(stacked_inputs(method), 0)
    client = client(inputs.received)
    return client_round(method, make_model(), client, inputs.received, inputs.shard, inputs.steps[:steps]), inputs


def met(mixing):
    """A client that has taken part before, with these mixing weights in its head."""
    ones = torch.ones(31, dtype=torch.float64)
    return lambda received: Client(randn(31, seed=4), NET.join(ones, mixing * ones), ONE)


def test_without_mixing_steps_it_is_fedavg_to_the_last_bit():
    ours, theirs = (trained(method) for method in (FedALA(0.3, mix_steps=0), FedAvg(0.3)))
    assert same_bits(ours.servers, theirs.servers)


def test_a_first_round_is_one_of_fedavg():
    ours, theirs = (trained(method, rounds=1) for method in (FedALA(0.3), FedAvg(0.3)))
    assert same_bits(ours.servers, theirs.servers)


def test_with_weights_of_zero_the_head_stays_the_clients_own():
    (client, upload), inputs = run(FedALA(0.0, mix_steps=0), met(0.0))
    assert same_bits(client.theta, NET.join(inputs.received, randn(31, seed=4)))
    assert same_bits(upload, client.theta)


def test_mixing_weights_follow_the_chain_rule():
    method, half = FedALA(0.3, eta_mixing=0.02, mix_steps=1), met(0.5)
    (client, _), inputs = run(method, half, steps=1)
    (batch,), _ = inputs.steps[0]
    old, w = randn(31, seed=4), inputs.received
    mixing = torch.full((31,), 0.5, dtype=torch.float64, requires_grad=True)
    theta = NET.join(w, old + mixing * (w - old))
    (grad,) = torch.autograd.grad(make_model().nll(theta, batch) / batch.size, mixing)
    expected = (0.5 - 0.02 * grad[CUT:]).clamp(0, 1)
    assert difference(client.mixing[CUT:], expected) < ROUNDING
    assert bool((client.mixing[:CUT] == 1).all())
    assert difference(client.theta, NET.join(w, old + client.mixing * (w - old))) < ROUNDING


@pytest.mark.parametrize("rate", [1.0, 100.0])
def test_mixing_weights_stay_between_zero_and_one_and_move(rate):
    training = dataclasses.replace(TRAINING, rounds=6)
    result = trained(FedALA(0.3, eta_mixing=rate), rounds=6, training=training)
    mixing = result.client_states(range(len(SIZES))).mixing
    assert bool(((mixing >= 0) & (mixing <= 1)).all())
    assert float(mixing[:, CUT:].min()) < 1


def test_after_the_mixing_steps_all_layers_learn():
    (mixed, _), _ = run(FedALA(0.3, mix_steps=2), met(0.5), steps=2)
    (after, _), inputs = run(FedALA(0.3, mix_steps=2), met(0.5), steps=3)
    (batch,), _ = inputs.steps[2]
    assert same_bits(after.mixing, mixed.mixing)
    assert difference(after.theta, mixed.theta - 0.3 * make_model().grad_loss(mixed.theta, batch)) < ROUNDING


def test_the_personal_model_is_the_clients_after_training():
    result = trained(FedALA())
    state = result.personal_state(0)
    assert same_bits(result.method.posterior(state).mu, state.theta)
    assert all(leaf.isfinite().all() for leaf in leaves(state))
