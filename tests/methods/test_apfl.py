import dataclasses

import pytest
import torch
from torch import nn

from federations import (
    SIZES,
    TRAINING,
    difference,
    make_model,
    make_shards,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)  # fmt: skip
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.trees import pick
from pfedbayes.methods import FedAvg
from pfedbayes.methods.apfl import APFL, Client
from pfedbayes.methods.local import Local

ROUNDING = 1e-12
ALL = dataclasses.replace(TRAINING, train="all")


def states(method, **others):
    return trained(method, **others).client_states(range(len(SIZES)))


@pytest.mark.parametrize("method", [APFL(0.3), APFL(0.3, mix="outputs", alpha=0.9)])
def test_shared_model_is_that_of_fedavg_to_the_last_bit(method):
    assert same_bits(trained(method).servers, trained(FedAvg(0.3)).servers)


def test_alpha_zero_predicts_with_the_copy_and_leaves_the_own_model_untouched():
    result = trained(APFL(0.3, alpha=0.0, eta_alpha=0.0), training=ALL)
    client = result.client_states(range(len(SIZES)))
    first = trained(APFL(0.3), rounds=0).servers[0]
    assert all(same_bits(client.v[i], first) for i in range(len(SIZES)))
    assert all(same_bits(result.method.posterior(pick(client, i)).mu, client.w[i]) for i in range(len(SIZES)))
    assert not same_bits(client.w[0], first)


def test_alpha_one_is_local_training_to_the_last_bit():
    ours = trained(APFL(0.3, eta_personal=0.2, alpha=1.0, eta_alpha=0.0), training=ALL)
    alone = trained(Local(0.2), training=ALL)
    for i in range(len(SIZES)):
        own = alone.personal_state(i)
        assert same_bits(ours.personal_state(i).v, own)
        assert same_bits(ours.method.posterior(ours.personal_state(i)).mu, own)


def test_the_own_model_follows_the_gradient_of_the_mixture():
    method = APFL(0.3, eta_personal=0.2, eta_alpha=0.5)
    inputs = one_of(stacked_inputs(method), 0)
    model, received = make_model(), inputs.received
    v, w, alpha = randn(31, seed=7), received, torch.tensor(0.4, dtype=torch.float64)
    start = Client(v, randn(31, seed=8), alpha)
    for k, ((batch,), _) in enumerate(inputs.steps):
        grad = model.grad_loss(alpha * v + (1 - alpha) * w, batch)
        moved = alpha if k else (alpha - 0.5 * (grad @ (v - w))).clamp(0, 1)
        v, w, alpha = v - 0.2 * alpha * grad, w - 0.3 * model.grad_loss(w, batch), moved
    assert 0 < float(alpha) < 1
    assert float(alpha) != 0.4
    client, upload = client_round(method, model, start, received, inputs.shard, inputs.steps)
    assert difference(client, Client(v, w, alpha)) < ROUNDING
    assert same_bits(upload, client.w)


@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_alpha_moves_against_its_derivative_by_finite_differences(mix):
    method = APFL(eta_alpha=0.01, mix=mix)
    inputs, model = one_of(stacked_inputs(method), 0), make_model()
    (batch,), _ = inputs.steps[0]
    client = Client(randn(31, seed=7), inputs.received, torch.tensor(0.4, dtype=torch.float64))

    def loss(alpha):
        outputs = method.predict(model, client._replace(alpha=torch.tensor(alpha, dtype=torch.float64)), batch.x, None)
        return float(model.likelihood.nll(outputs[0], batch.y).mean())

    slope = (loss(0.4 + 1e-5) - loss(0.4 - 1e-5)) / 2e-5
    after, _ = client_round(method, model, client, inputs.received, inputs.shard, inputs.steps)
    assert float(client.alpha - after.alpha) / 0.01 == pytest.approx(slope, rel=1e-6)


def test_of_a_linear_model_both_mixtures_agree():
    shards, model = make_shards(), make_model(nn.Linear(3, 3))
    one, other = (states(APFL(0.3, mix=mix), shards=shards, model=model) for mix in ("parameters", "outputs"))
    assert difference(one, other) < 1e-10


def test_mixed_outputs_are_those_of_two_networks():
    method, model, x = APFL(mix="outputs"), make_model(), randn(5, 3, seed=3)
    client = Client(randn(31, seed=7), randn(31, seed=8), torch.tensor(0.3, dtype=torch.float64))
    outputs = method.predict(model, client, x, None)
    assert difference(outputs[0], 0.3 * model.net(client.v, x) + 0.7 * model.net(client.w, x)) < ROUNDING
    assert method.posterior(client) is None


def test_the_view_mixes_with_the_received_model():
    client = Client(randn(3), randn(3, seed=1), torch.tensor(0.5, dtype=torch.float64))
    view = APFL().views(client, randn(3, seed=2))["server"]
    assert same_bits(APFL().posterior(view).mu, 0.5 * client.v + 0.5 * randn(3, seed=2))


@pytest.mark.parametrize(("field", "value"), [("eta", -1.0), ("alpha", 1.1), ("alpha", -0.1)])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        APFL(**{field: value})
