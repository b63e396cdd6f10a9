"""Uncertainty that is added to deterministic methods: training stays as it was, and predictions are draws."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.testing import assert_close

from federations import (
    SIZES,
    TEST_SIZES,
    TRAINING,
    difference,
    federation,
    make_model,
    make_shards,
    randn,
    same_bits,
    train_alone,
    trained,
)
from pfedbayes.errors import UserError
from pfedbayes.evaluation.laplace import Laplace, head_weights
from pfedbayes.evaluation.models import personal_state, shared_state
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.evaluation.posthoc import Ensemble, ensemble
from pfedbayes.evaluation.swag import Swag
from pfedbayes.maths.laplace import PRECISIONS, precisions
from pfedbayes.maths.likelihoods import Gaussian, Regression, StudentT
from pfedbayes.maths.metrics import log_average
from pfedbayes.maths.trees import leaves
from pfedbayes.methods import METHODS, FedAvg, FedAvgFT, FedPer, FedRep, KNNPer, PFedMe, Scaffold
from pfedbayes.methods.base import Method
from pfedbayes.nets import TableNet, WithNoise, mlp

DETERMINISTIC = [name for name, cls in METHODS.items() if not cls.about.stochastic and name not in ("pfedgp", "bnfed")]
KEEPS_ITS_MODELS = [name for name in DETERMINISTIC if METHODS[name].prepare is Method.prepare]
STRUCTURES = ("diagonal", "kronecker", "full")


def some_take_part(method):
    return dataclasses.replace(TRAINING, participants=None if method.needs.all_clients else 3)


def inner_states(result):
    """The leaves of the method inside, of servers and clients."""
    server, client = result.servers[0], result.client_states(range(result.num_clients))
    return (server.inner, client.inner) if isinstance(result.method, Swag) else (server, client)


@pytest.mark.parametrize("wrap", [Laplace, Swag, ensemble])
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "pfedme", "scaffold"])
def test_training_is_that_of_the_method_inside_to_the_last_bit(wrap, name):
    method = METHODS[name]()
    plain, ours = (trained(each, training=some_take_part(method)) for each in (method, wrap(method)))
    assert same_bits(inner_states(ours), inner_states(plain))


@pytest.mark.parametrize("name", [name for name in DETERMINISTIC if name != "knnper"])
def test_every_deterministic_method_can_say_how_sure_it_is(name):
    method = METHODS[name]()
    result = trained(Laplace(method), rounds=1, training=some_take_part(method))
    scores = result.evaluate(samples=3)
    for which in result.models():
        assert list(scores[which]) == ["one", "mc3", "mean"]
        assert torch.tensor(scores[which]["mc3"]["nll"]).isfinite().all()
        assert scores[which]["mc3"]["nll"] != scores[which]["mean"]["nll"]
        outputs = result.predict(which, 0, make_shards().x[:5], samples=4)
        assert outputs.shape == (4, 5, 3)
        assert float(outputs.std(0).min()) > 0


@pytest.mark.parametrize("name", KEEPS_ITS_MODELS)
def test_swag_collects_the_models_of_every_round(name):
    method = METHODS[name]()
    training = dataclasses.replace(some_take_part(method), rounds=4, participants=None)
    result = federation(Swag(method, start=1, rank=2), training)
    plain = federation(method, training)
    personal, shared = [], []
    for round, _ in zip(result.rounds(), plain.rounds(), strict=True):
        if round > 1 and method.about.personal:
            personal.append(method.posterior(plain.personal_state(0)).mu)
        if round > 1 and method.about.shared:
            shared.append(method.posterior(plain.servers[0]).mu)
    if personal:
        moments = result.personal_state(0).moments
        assert int(moments.models) == 3
        if name not in ("fedper", "fedrep", "fedrod"):  # these join what they have received, see below
            assert difference(moments.mean, torch.stack(personal).mean(0)) < 1e-10
    if shared:
        moments = result.servers[0].moments
        assert difference(moments.mean, torch.stack(shared).mean(0)) < 1e-10
        assert_close(moments.variance, torch.stack(shared).var(0, correction=0), rtol=0, atol=1e-12)
    for which in result.models():
        assert result.predict(which, 0, make_shards().x[:5], samples=4).shape == (4, 5, 3)
    assert torch.tensor(result.evaluate(samples=3)[result.models()[0]]["mc3"]["nll"]).isfinite().all()


def test_swag_of_a_joined_model_collects_it_with_the_received_body():
    training = dataclasses.replace(TRAINING, participants=None, rounds=2)
    result, plain = federation(Swag(FedPer(0.3), rank=2), training), federation(FedPer(0.3), training)
    joined, received = [], plain.servers[0]
    for _ in zip(result.rounds(), plain.rounds(), strict=True):
        client = plain.client_states([0])[0]
        joined.append(make_model().net.join(received, client))
        received = plain.servers[0]
    assert difference(result.personal_state(0).moments.mean, torch.stack(joined).mean(0)) < 1e-12


def test_swag_before_its_start_predicts_with_the_last_model():
    plain, result = (trained(method) for method in (FedAvg(0.3), Swag(FedAvg(0.3), start=99)))
    x = make_shards().x[:5]
    drawn = result.predict("shared", 0, x, samples=3)
    assert same_bits(drawn, plain.predict("shared", 0, x).expand(3, -1, -1))


def test_swag_survives_a_checkpoint():
    method = Swag(PFedMe(), start=1, rank=2)
    whole, first, second = trained(method), trained(method, rounds=1), federation(method)
    second.restore(first.tensors(), round=1)
    for _ in second.rounds():
        pass
    assert same_bits(leaves(second.servers), leaves(whole.servers))
    alone = train_alone(method, TRAINING.rounds)
    assert difference(whole.servers[0].moments, alone.server.moments) < 1e-9


def loss_of_head(model, theta, batch):
    """The summed loss as a function of the last layer alone."""
    cut = model.net.num_params - model.net.head_size
    return lambda head: model.nll(torch.cat([theta[:cut], head]), batch)


def order(model):
    """Where each entry of the last layer, as theta holds it, is in the rows (C, D) of `head_weights`."""
    numbers = torch.arange(model.net.num_params, dtype=torch.float64)
    return (head_weights(model.net, numbers).flatten() - (model.net.num_params - model.net.head_size)).long()


@pytest.mark.parametrize(
    ("module", "classes"),
    [
        (mlp([3, 4, 3], "tanh"), 3),
        (nn.Linear(3, 3, bias=False), 3),
        (TableNet(2, 1, hidden=4, outputs=1, reference=True), 2),
    ],
)
def test_the_personal_curvature_is_the_hessian_of_the_clients_loss(module, classes):
    model, shards = make_model(module), make_shards(classes=classes)
    result = trained(Laplace(FedRep(0.3), "full"), model=model, shards=shards)
    outputs = result.predict("personal", 2, shards.x[:5], samples=4)
    assert float(outputs.std(0)[:, -1].min()) > 0
    state = personal_state(result, 2)
    batch = result.batch_of(result.shards.train[2])
    place = order(model)
    whole = hessian(loss_of_head(model, state.theta, batch), state.theta[-model.net.head_size :])[place][:, place]
    values, (vectors,) = state.spectrum
    assert difference(vectors @ torch.diag(values.flatten()) @ vectors.T, whole) < 1e-9
    assert same_bits(state.theta, trained(FedRep(0.3), model=model, shards=shards).personal_state(2).theta)


def test_the_first_of_two_classes_keeps_the_logit_zero():
    model, shards = make_model(TableNet(2, 1, hidden=4, outputs=1, reference=True)), make_shards(classes=2)
    shards = dataclasses.replace(
        shards, validation=tuple(rows[:4] for rows in shards.test), test=tuple(rows[4:] for rows in shards.test)
    )
    result = trained(Laplace(FedAvg(0.3), "diagonal", "validation"), model=model, shards=shards)
    outputs = result.predict("shared", 0, shards.x[:5], samples=4)
    assert not outputs[..., 0].any()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_shared_curvature_is_the_sum_over_clients(structure):
    result = trained(Laplace(FedAvg(0.3), structure))
    method, model, server = result.method, result.model, result.servers[0]
    parts = [method.curvature(model, server, result.batch_of(rows)) for rows in result.shards.train]
    summed = [torch.stack(each).sum(0) for each in zip(*map(leaves, parts), strict=True)]
    pooled = leaves(method.curvature(model, server, result.batch_of(torch.cat(result.shards.train))))
    assert difference(tuple(pooled), tuple(summed)) < 1e-12
    expected = method.fit(model, server, summed[0] if len(summed) == 1 else tuple(summed), [])
    found = shared_state(result, 0)
    assert difference(found.spectrum.values, expected.spectrum.values) < 1e-9
    assert float(found.precision) == float(expected.precision)


def test_the_shared_posterior_is_made_once_per_round(monkeypatch):
    result, made = trained(Laplace(FedAvg(0.3)), rounds=1), []
    fit = Laplace.shared
    monkeypatch.setattr(Laplace, "shared", lambda *args: made.append(1) or fit(*args))
    before = shared_state(result, 0)
    result.evaluate(samples=2)
    assert shared_state(result, 0, client=3) is before
    assert len(made) == 1
    result.train_round()
    assert not same_bits(shared_state(result, 0).theta, before.theta)
    assert len(made) == 2


def test_numbers_have_the_curvature_of_their_noise():
    shards = dataclasses.replace(make_shards(), y=randn(sum(SIZES + TEST_SIZES), 1, seed=9), num_classes=None)
    model = make_model(WithNoise(mlp([3, 4, 1], "tanh")), Regression())
    result = trained(Laplace(FedAvg(), "full"), shards=shards, model=model)
    state = shared_state(result, 0)
    theta, batch = state.theta, result.batch_of(torch.cat(result.shards.train))
    whole = hessian(loss_of_head(model, theta, batch), theta[-model.net.head_size :])
    values, (vectors,) = state.spectrum
    assert difference(vectors @ torch.diag(values.flatten()) @ vectors.T, whole) < 1e-9
    outputs = result.predict("shared", 0, shards.x[:5], samples=6)
    assert outputs.shape == (6, 5, 2)
    assert float(outputs[..., 0].std(0).min()) > 0
    assert float(outputs[..., 1].std(0).max()) < 1e-12  # the noise is not drawn


def test_draws_have_the_weights_that_the_posterior_draws():
    result = trained(Laplace(FedAvg(0.3)))
    state, x, noise = shared_state(result, 0), make_shards().x[:5], randn(3, make_model().net.head_size, seed=4)
    outputs = result.method.predict(result.model, state, x, noise)
    assert same_bits(result.method.predict(result.model, state, x, None)[0], result.model.outputs(state.theta, x))
    features = result.model.net.features(state.theta, x)
    shifts = outputs - result.model.outputs(state.theta, x)
    # They are linear in the features and a constant: 5 inputs lie on a plane of these 5 numbers.
    basis = torch.cat([features, torch.ones(5, 1, dtype=torch.float64)], dim=1)
    weights = torch.linalg.solve(basis, shifts)
    other = make_shards().x[5:9]
    more = result.method.predict(result.model, state, other, noise) - result.model.outputs(state.theta, other)
    both = torch.cat([result.model.net.features(state.theta, other), torch.ones(4, 1, dtype=torch.float64)], dim=1)
    assert_close(more, both @ weights, rtol=1e-6, atol=1e-6)


def test_validation_rows_choose_the_precision_with_the_least_loss():
    shards = make_shards()
    shards = dataclasses.replace(
        shards, validation=tuple(rows[:4] for rows in shards.test), test=tuple(rows[4:] for rows in shards.test)
    )
    result = trained(Laplace(FedRep(0.3), "diagonal", "validation"), shards=shards)
    state, batch = personal_state(result, 0), result.batch_of(shards.validation[0])
    drawn = randn(2000, make_model().net.head_size, seed=4)

    def loss(tau):
        outputs = result.method.predict(result.model, state._replace(precision=tau), batch.x, drawn)
        return float(-log_average(outputs)[torch.arange(4), batch.y].sum())

    losses = [loss(tau) for tau in precisions(state.theta)[:: PRECISIONS // 8]]
    assert loss(state.precision) < min(losses) + 0.15
    by_evidence = trained(Laplace(FedRep(0.3), "diagonal"), shards=shards)
    assert float(personal_state(by_evidence, 0).precision) != float(state.precision)
    without = trained(Laplace(FedRep(0.3), "diagonal", "validation"))
    assert float(personal_state(without, 0).precision) == float(personal_state(by_evidence, 0).precision)


def test_likelihoods_without_a_known_hessian_are_refused():
    shards = dataclasses.replace(make_shards(), y=randn(sum(SIZES + TEST_SIZES), 1, seed=9), num_classes=None)
    model = make_model(TableNet(2, 1, hidden=4, outputs=2, constants=2), StudentT())
    with pytest.raises(UserError, match=r"set net.likelihood=gaussian for numbers"):
        trained(Laplace(FedAvg()), rounds=1, shards=shards, model=model).evaluate()
    model = make_model(TableNet(2, 1, hidden=4, outputs=1, constants=1), Gaussian())
    result = trained(Laplace(FedAvg()), rounds=1, shards=shards, model=model)
    outputs = result.predict("shared", 0, shards.x[:5], samples=6)
    assert float(outputs[..., 0].std(0).min()) > 0
    assert float(outputs[..., 1].std(0).max()) < 1e-12


def test_models_that_are_more_than_weights_are_refused():
    with pytest.raises(UserError, match="kNN-Per has models that are more than the weights of a network"):
        trained(Laplace(KNNPer())).evaluate()


@pytest.mark.parametrize("method", [FedAvg(0.3), FedAvgFT(0.3), KNNPer(0.3)])
def test_an_ensemble_averages_the_probabilities_of_all_seeds(method):
    seeds = (3, 8, 5)
    result, plain = trained(ensemble(method), seeds=seeds), trained(method, seeds=seeds)
    scores, members = result.evaluate(), plain.evaluate()
    for which in result.models():
        assert scores[which]["mean"] == members[which]["mean"]
        nll = {way: torch.tensor(scores[which][way]["nll"]).mean(0) for way in ("ensemble", "mean")}
        assert bool((nll["ensemble"] < nll["mean"]).all())  # by Jensen's inequality
        for i, rows in enumerate(result.shards.test):
            x, y = result.shards.x[rows], result.shards.y[rows]
            probabilities = torch.stack(
                [plain.predict(which, i, x, seed_index=s)[0].softmax(-1) for s in range(3)]
            ).mean(0)
            nll = -probabilities[torch.arange(len(rows)), y].log().mean()
            assert [scores[which]["ensemble"]["nll"][s][i] for s in range(3)] == pytest.approx([float(nll)] * 3)
            assert difference(log_average(result.predict(which, i, x, seed_index=1)).exp(), probabilities) < 1e-12
            served = trained_model(result, which, i)
            assert served.weights is None
            assert difference(log_average(served.outputs(7)(x)).exp(), probabilities) < 1e-12


def test_an_ensemble_does_not_depend_on_the_order_and_one_seed_is_the_model():
    x = make_shards().x[:5]
    one, other = (trained(ensemble(FedAvg()), seeds=seeds).predict("shared", 0, x) for seeds in ((3, 8), (8, 3)))
    assert difference(log_average(one), log_average(other)) < 1e-12
    single, plain = trained(ensemble(FedAvg()), seeds=(3,)), trained(FedAvg(), seeds=(3,))
    assert same_bits(single.predict("shared", 0, x), plain.predict("shared", 0, x))
    assert isinstance(single.method, Ensemble)


@pytest.mark.parametrize("method", [Laplace(FedRep()), Laplace(FedAvg()), Swag(FedAvg()), Swag(PFedMe())])
def test_a_served_model_makes_draws(method):
    result = trained(method)
    which = result.models()[0]
    served = trained_model(result, which, 1)
    assert served.weights is None
    outputs = served.outputs(6)(make_shards().x[:5])
    assert outputs.shape == (6, 5, 3)
    assert float(outputs.std(0).min()) > 0
    assert same_bits(outputs, trained_model(result, which, 1).outputs(6)(make_shards().x[:5]))


def test_scores_do_not_depend_on_who_is_scored_together():
    result = trained(Laplace(FedRep(0.3)))
    scores = result.evaluate(samples=5)["personal"]["mc5"]["nll"][0]
    for i, rows in enumerate(result.shards.test):
        outputs = result.predict("personal", i, result.shards.x[rows], samples=5)
        nll = -log_average(outputs)[torch.arange(len(rows)), result.shards.y[rows]].mean()
        assert float(nll) == pytest.approx(scores[i], rel=1e-6)


def test_scaffold_keeps_its_two_tensors_under_swag():
    result = trained(Swag(Scaffold(0.3), rank=2))
    assert result.method.needs.tied
    assert difference(result.servers[0].inner, trained(Scaffold(0.3)).servers[0]) == 0
