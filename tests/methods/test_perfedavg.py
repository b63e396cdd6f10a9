import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import (
    SIZES,
    TEST_SIZES,
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
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg
from pfedbayes.methods.perfedavg import PerFedAvg
from pfedbayes.nets import Batch

ROUNDING = 1e-12
VARIANTS = ["first-order", "exact", "hessian-free"]
NET = make_model().net


def loss(theta, batch):
    return cross_entropy(NET(theta, batch.x), batch.y)


def literal_step(w, batches, alpha, eta_outer, first_order):
    """A step on CE(w - alpha grad CE(w; B1); B2), differentiated through the inner step or not."""
    w = w.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(w, batches[0]), w, create_graph=True)
    adapted = w - alpha * (inner.detach() if first_order else inner)
    return (w - eta_outer * torch.autograd.grad(loss(adapted, batches[1]), w)[0]).detach()


def run(method, inputs):
    return client_round(method, make_model(), *inputs)[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_adaptation_it_is_fedavg_on_the_second_batches(variant):
    method = PerFedAvg(alpha=0.0, eta_outer=0.3, variant=variant)
    inputs = stacked_inputs(method)
    second = inputs._replace(steps=[((batches[1],), noise) for batches, noise in inputs.steps])
    ours, fedavg = (
        client_round(each, make_model(), *data, over=torch.func.vmap)[1]
        for each, data in ((method, inputs), (FedAvg(0.3), second))
    )
    assert difference(ours, fedavg) < ROUNDING
    ids, sizes = torch.arange(len(SIZES)), inputs.shard.size
    assert same_bits(*(each.aggregate(None, ours, sizes, ids) for each in (method, FedAvg())))


@pytest.mark.parametrize("variant", VARIANTS)
def test_outer_rate_zero_keeps_the_server(variant):
    method = PerFedAvg(eta_outer=0.0, variant=variant)
    assert difference(trained(method).servers, federation(method).servers) < ROUNDING


def test_first_order_takes_the_gradient_at_the_adapted_model_and_applies_it_to_w():
    method = PerFedAvg(alpha=0.3, eta_outer=0.2)
    inputs = one_of(stacked_inputs(method), 0)
    w = inputs.received
    for batches, _ in inputs.steps:
        w = literal_step(w, batches, 0.3, 0.2, first_order=True)
    assert difference(run(method, inputs), w) < ROUNDING


def test_exact_is_the_gradient_through_the_adapting_step():
    method = PerFedAvg(alpha=0.3, eta_outer=0.2, variant="exact")
    inputs = one_of(stacked_inputs(method), 0)
    # The Hessian of the chain rule is the one of the batch that adapts: B3 = B1.
    steps = [((b1, b2, b1), noise) for (b1, b2, _), noise in inputs.steps]
    w = inputs.received
    for batches, _ in steps:
        w = literal_step(w, batches, 0.3, 0.2, first_order=False)
    ours = run(method, inputs._replace(steps=steps))
    assert difference(ours, w) < ROUNDING
    assert difference(ours, run(PerFedAvg(alpha=0.3, eta_outer=0.2), inputs)) > 1e-3  # the Hessian matters


def test_hessian_free_approaches_exact_with_the_square_of_delta():
    settings = {"alpha": 0.3, "eta_outer": 0.2}
    inputs = one_of(stacked_inputs(PerFedAvg(variant="exact")), 0)
    exact = run(PerFedAvg(**settings, variant="exact"), inputs)
    wide, narrow = (
        difference(run(PerFedAvg(**settings, variant="hessian-free", delta=delta), inputs), exact)
        for delta in (1e-2, 1e-3)
    )
    assert 0 < wide < 1e-4
    assert narrow == pytest.approx(wide / 100, rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
def test_quadratic_loss(variant):
    """Linear regression with unit noise: the mean loss of a batch is theta^T A theta / 2 - b^T theta + constant."""
    alpha, eta_outer, w = 0.3, 0.2, randn(3, seed=9)
    model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
    batches = [Batch(randn(n, 3, seed=n), randn(n, 1, seed=-n), torch.ones(n, dtype=torch.float64)) for n in (5, 8, 6)]
    (A1, b1), (A2, b2), (A3, _) = ((x.T @ x / len(x), (x.T @ y / len(x))[:, 0]) for x, y, _ in batches)
    grad = A2 @ (w - alpha * (A1 @ w - b1)) - b2
    if variant != "first-order":
        grad = grad - alpha * A3 @ grad
    method = PerFedAvg(eta_outer, alpha, variant)
    local = method.step(
        model, method.begin((), w, None), tuple(batches[: method.needs.batches_per_step]), torch.empty(0)
    )
    assert_close(local.theta, w - eta_outer * grad, rtol=1e-9, atol=1e-9)


def personal(result, client=0):
    """The state that a client predicts its own test data with."""
    return result.personal_state(client, test=result.batch_of(result.shards.test[client]))


def labels_seen(result, rows):
    """How many of these examples have a label that the first client's personal model depends on."""
    plain, y = personal(result).theta, result.y
    count = 0
    for row in rows.tolist():
        label = y[row].clone()
        y[row] = (label + 1) % 3
        count += not same_bits(personal(result).theta, plain)
        y[row] = label
    return count


@pytest.mark.parametrize("adapt_on", ["train", "train-full"])
def test_adaptation_never_reads_test_data(adapt_on):
    shards, poisoned = make_shards(), make_shards()
    rows = torch.cat(shards.test)
    poisoned.x[rows], poisoned.y[rows] = torch.nan, (shards.y[rows] + 1) % 3
    states = [personal(trained(PerFedAvg(adapt_on=adapt_on), 2, shards=data)) for data in (shards, poisoned)]
    assert same_bits(*states)


def test_adaptation_is_on_one_batch_or_on_all_of_the_training_data():
    rows = make_shards().train[0]
    assert labels_seen(trained(PerFedAvg(), 1), rows) == TRAINING.batch_size
    assert labels_seen(trained(PerFedAvg(adapt_on="train-full"), 1), rows) == SIZES[0]


@pytest.mark.parametrize("adapt_on", ["train", "train-full"])
def test_personal_model_is_one_step_from_the_server(adapt_on):
    result, client = trained(PerFedAvg(alpha=0.3, adapt_on=adapt_on), 2), 1  # this one has less than a batch
    w = result.servers[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(w, result.batch_of(result.shards.train[client])), w)
    assert difference(personal(result, client).theta, (w - 0.3 * grad).detach()) < ROUNDING


def test_every_round_adapts_on_another_batch_and_every_time_of_asking_on_the_same():
    going = federation(PerFedAvg(eta_outer=0.0))
    first, again = going.personal_state(0), going.personal_state(0)
    going.train_round()
    assert same_bits(first, again)
    assert not same_bits(first, going.personal_state(0))


class TestLeakyEvaluation:
    leaky = PerFedAvg(alpha=0.3, eta_outer=0.2, adapt_on="pfedme-test")
    honest = PerFedAvg(alpha=0.3, eta_outer=0.2)

    def test_takes_two_steps_on_test_data(self):
        one_batch_is_all = dataclasses.replace(TRAINING, batch_size=TEST_SIZES[0])
        result = trained(self.leaky, 2, training=one_batch_is_all)
        test, theta = result.batch_of(result.shards.test[0]), result.servers[0]
        for rate in (0.3, 0.2):
            theta = theta.detach().requires_grad_()
            theta = theta - rate * torch.autograd.grad(loss(theta, test), theta)[0]
        assert difference(personal(result).theta, theta.detach()) < ROUNDING

    def test_sees_two_batches_of_test_labels_and_no_training_label(self):
        result = trained(self.leaky, 1, shards=make_shards(test_sizes=(20, 5, 8, 13, 4)))
        assert labels_seen(result, result.shards.test[0]) == 2 * TRAINING.batch_size
        assert labels_seen(result, result.shards.train[0]) == 0

    def test_honest_figure_stands_beside_it(self):
        leaky, honest = trained(self.leaky, 2), trained(self.honest, 2)
        test = make_shards().test[0]
        columns, alone = (each.estimates("personal", 0, test, samples=10) for each in (leaky, honest))
        assert columns.keys() == {"mean", "honest"}
        assert alone.keys() == {"mean"}
        assert same_bits(columns["honest"], alone["mean"])
        assert not same_bits(columns["mean"], alone["mean"])

    def test_without_targets_there_is_nothing_to_leak(self):
        leaky, honest = (trained(method, 2).personal_state(0) for method in (self.leaky, self.honest))
        assert same_bits(leaky, honest)


@pytest.mark.parametrize(("field", "value"), [("alpha", -0.1), ("eta_outer", -0.1), ("delta", 0.0)])
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        PerFedAvg(**{field: value})
