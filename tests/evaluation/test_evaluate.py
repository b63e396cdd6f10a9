"""Predictions and scores: many members at once are what each is alone."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import (
    EXACT,
    SIZES,
    TRAINING,
    client_states,
    federation,
    make_model,
    make_shards,
    randn,
    trained,
)
from pfedbayes.data import DataConfig, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.evaluation import models
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.metrics import accuracy, log_average
from pfedbayes.maths.random import Purpose, key, normal
from pfedbayes.maths.trees import pick
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.nets import Model, Net, WithNoise, mlp

EQUAL = (6,) * len(SIZES)
MIXED = (6, 9, 6, 6, 9)


class Constant(nn.Module):
    """Always predicts one label, with any theta that training leaves it."""

    def __init__(self, label: int, classes: int = 3) -> None:
        super().__init__()
        self.scores = nn.Parameter(10.0 * nn.functional.one_hot(torch.tensor(label), classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(len(x), -1)


class TestPrediction:
    x = randn(6, 3, seed=9)

    def test_draws_depend_on_seed_round_client_and_model_alone(self):
        ours, again = trained(PFedBayes(), 1), trained(PFedBayes(), 1)
        personal = ours.predict("personal", 1, self.x, samples=3)
        again.predict("shared", 0, self.x, samples=7)
        assert torch.equal(again.predict("personal", 1, self.x, samples=3), personal)

    @pytest.mark.parametrize("which", ["personal", "shared"])
    def test_in_pairs_what_is_linear_in_the_noise_cancels(self, which):
        ours = trained(PFedBayes(), model=make_model(mlp([3, 3])))
        pairs, odd = (ours.predict(which, 1, self.x, samples, sampling="pairs") for samples in (4, 3))
        mean = ours.predict(which, 1, self.x)[0]
        assert_close(pairs[::2] + pairs[1::2], torch.stack([2 * mean, 2 * mean]))
        assert (pairs[0] - pairs[2]).abs().max() > 0.01
        assert torch.equal(odd, pairs[:3])

    def test_every_client_has_its_own_draw_of_its_model_and_all_have_one_of_the_shared(self):
        start = federation(PFedBayes())  # all models are still equal
        personal = [start.predict("personal", i, self.x, samples=1) for i in range(2)]
        shared = [start.predict("shared", i, self.x, samples=1) for i in range(2)]
        assert not torch.equal(*personal)
        assert torch.equal(*shared)
        assert not torch.equal(personal[0], shared[0])

    def test_rounds_have_different_draws(self):
        still = federation(PFedBayes(beta=0.0))
        first = still.predict("shared", 0, self.x, samples=1)
        still.train_round()
        assert not torch.equal(still.predict("shared", 0, self.x, samples=1), first)

    def test_long_inputs_in_parts_are_the_whole(self):
        ours, x = federation(PFedBayes()), randn(12_001, 3, seed=8)
        whole = ours.predict("shared", 0, x, samples=2)
        assert whole.shape == (2, 12_001, 3)
        for rows in (slice(0, 10), slice(4995, 5005), slice(-10, None)):
            assert_close(whole[:, rows], ours.predict("shared", 0, x[rows], samples=2))

    def test_mean_network_is_the_network_of_the_means(self):
        ours = trained(PFedBayes(), 1)
        mean = ours.predict("shared", 0, self.x, samples=None)
        assert_close(mean[0], ours.model.net(ours.servers[0][0], self.x))


class TestEvaluation:
    @pytest.mark.parametrize("label", [0, 1, 2])
    @pytest.mark.parametrize(
        "method", [FedAvg(eta=0.0), PFedBayes(eta_personal=0.0)], ids=lambda method: method.about.title
    )
    def test_constant_predictor_scores_the_share_of_its_class(self, method, label):
        shards = make_shards()
        ours = trained(method, 1, model=make_model(Constant(label)), init="torch")
        shares = [100 * float((shards.y[rows] == label).double().mean()) for rows in shards.test]
        for which in ours.models():
            for estimator, figures in ours.evaluate(samples=2)[which].items():
                assert figures["accuracy"][0] == pytest.approx(shares), estimator

    def test_clients_that_were_never_chosen_are_tested_too(self):
        training = dataclasses.replace(TRAINING, participants=1, train="chosen")
        ours, shards = trained(PFedBayes(eta_personal=0.1), 1, training=training), make_shards()
        ((met, (q, *_)),) = client_states(ours).items()
        figures = ours.evaluate(samples=2)["personal"]["mean"]["accuracy"][0]
        assert len(figures) == len(SIZES)
        for i, rows in enumerate(shards.test):
            theta = q[0] if i == met else ours.servers[0][0]
            log_probs = ours.model.net(theta, shards.x[rows]).log_softmax(-1)
            assert figures[i] == pytest.approx(float(accuracy(log_probs, shards.y[rows])))

    def test_each_client_is_tested_on_its_own_data_by_each_estimator(self):
        ours, shards = trained(PFedBayes(rho0=0.0), 2), make_shards()
        evaluated = ours.evaluate(samples=5)
        for which, i in itertools.product(("personal", "shared"), range(len(SIZES))):
            x, y = shards.x[shards.test[i]], shards.y[shards.test[i]]
            draws, mean = ours.predict(which, i, x, samples=5), ours.predict(which, i, x, samples=None)
            for name, outputs in {"one": draws[:1], "mc5": draws, "mean": mean}.items():
                expected = ours.model.likelihood.scores(outputs, y).tolist()
                assert [values[0][i] for values in evaluated[which][name].values()] == pytest.approx(expected)

    def test_evaluation_changes_nothing(self):
        ours = trained(PFedBayes(), 2, training=dataclasses.replace(TRAINING, train="chosen", participants=1))
        before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
        first, second = ours.evaluate(), ours.evaluate()
        assert first == second
        after = ours.tensors()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_validation_data_are_a_split_of_their_own(self):
        shards = make_shards()
        swapped = dataclasses.replace(shards, test=shards.validation, validation=shards.test)
        on_test = trained(FedAvg(), 1).evaluate(split="test")
        assert trained(FedAvg(), 1, shards=swapped).evaluate(split="validation") == on_test

    def test_label_prior_weighs_the_averaged_prediction_by_the_clients_label_counts(self):
        ours, shards = trained(PFedBayes(), 1), make_shards()
        evaluated = ours.evaluate(samples=3, label_prior=True)["shared"]
        for i, rows in enumerate(shards.test):
            x, y = shards.x[rows], shards.y[rows]
            counts = torch.bincount(shards.y[shards.train[i]], minlength=3) + 0.5  # half an example more of each label
            probs = ours.predict("shared", i, x, samples=3).softmax(-1).mean(0) * counts
            expected = float((probs.argmax(-1) == y).double().mean() * 100)
            assert evaluated["mc3+prior"]["accuracy"][0][i] == pytest.approx(expected)
            nll = -(probs / probs.sum(-1, keepdim=True)).log()[range(len(y)), y].mean()
            assert evaluated["mc3+prior"]["nll"][0][i] == pytest.approx(float(nll))

    def test_clients_without_test_data_have_no_scores_and_spoil_none(self):
        shards = make_shards()
        fewer = dataclasses.replace(shards, test=(shards.validation[0], *shards.test[1:]))
        some, all_scores = (trained(FedAvg(), 1, shards=data).evaluate()["shared"]["mean"] for data in (fewer, shards))
        for name, values in some.items():
            assert values[0][0] != values[0][0]  # not a number
            assert values[0][1:] == all_scores[name][0][1:]

    @pytest.mark.parametrize("noise", [0.5, None])
    def test_regression_is_scored_by_its_own_metrics(self, noise):
        shards = make_shards()
        targets = dataclasses.replace(shards, y=shards.x[:, :2].sin(), num_classes=None)
        module = mlp([3, 4, 2], "tanh")
        model = Model(Net(module if noise else WithNoise(module)), Regression(noise))
        figures = trained(PFedBayes(), 2, shards=targets, model=model).evaluate()["personal"]["mc10"]
        assert set(figures) == set(Regression().metrics)
        assert torch.tensor(figures["nll"]).isfinite().all()


def plan_for(method):
    return EXACT if not method.needs.loop else dataclasses.replace(EXACT, over="loop")


def alone(ours, which, client, seed_index, samples, rows):
    """Outputs by estimator from the method's own functions, for one client of one seed: no blocks, no member axis."""
    method, model, round = ours.method, ours.model, ours.round
    seed, test = ours.seeds[seed_index], ours.batch_of(rows)
    if which == "personal":
        state, name = ours.personal_state(client, seed_index, test), (seed, Purpose.PERSONAL_PREDICTION, round, client)
    else:
        state, name = ours.servers[seed_index], (seed, Purpose.SHARED_PREDICTION, round)
    predict = method.predict
    outputs = {"mean": predict(model, state, test.x, None)}
    if method.about.stochastic:
        noise = normal((samples, model.net.num_params), key(*name), torch.float64, ours.device)
        draws = predict(model, state, test.x, noise)
        outputs |= {"one": draws[:1], f"mc{samples}": draws}
    if which == "personal":
        views = method.views(state, pick(ours.download(seed_index, [client]), 0))
        outputs |= {name: predict(model, view, test.x, None) for name, view in views.items()}
    if ours.shards.num_classes:
        counts = torch.bincount(ours.shards.y[ours.shards.train[client]], minlength=3) + 0.5
        prior = (counts / counts.sum()).log()
        outputs |= {f"{name}+prior": (log_average(drawn) + prior)[None] for name, drawn in outputs.items()}
    return outputs


def assert_each_is_scored_as_if_alone(ours, split="test"):
    evaluated = ours.evaluate(samples=3, split=split, label_prior=True)
    for which, s, (i, rows) in itertools.product(
        ours.models(), range(len(ours.seeds)), enumerate(getattr(ours.shards, split))
    ):
        expected = alone(ours, which, i, s, 3, rows)
        assert evaluated[which].keys() == expected.keys()
        for name, outputs in expected.items():
            found = torch.tensor([values[s][i] for values in evaluated[which][name].values()])
            if len(rows):
                assert_close(found.double(), ours.model.likelihood.scores(outputs, ours.shards.y[rows]).double())
            else:
                assert found.isnan().all()


class TestBlocks:
    """Two seeds; two of five clients take part, so that some are met and others are not."""

    training = dataclasses.replace(TRAINING, participants=2, train="chosen")

    def ours(self, method, test_sizes=MIXED, seeds=(3, 8), **others):
        training = dataclasses.replace(self.training, participants=None) if method.needs.all_clients else self.training
        settings = {"training": training, "seeds": seeds, "plan": plan_for(method)}
        return trained(method, 2, **settings | {"shards": make_shards(test_sizes=test_sizes)} | others)

    @pytest.mark.parametrize("name", METHODS)
    def test_members_together_are_each_alone(self, name):
        assert_each_is_scored_as_if_alone(self.ours(METHODS[name]()))

    @pytest.mark.parametrize(
        ("over", "chunk", "calls"), [("vmap", None, 1), ("vmap", 4, 3), ("vmap", 1, 10), ("loop", None, 10)]
    )
    @pytest.mark.parametrize("method", [METHODS["perfedavg"](adapt_on="pfedme-test"), METHODS["fedavg-ft"]()])
    def test_clients_with_batches_of_one_size_adapt_at_once(self, monkeypatch, method, over, chunk, calls):
        shards = make_shards(sizes=(6, 9, 11, 7, 16), test_sizes=EQUAL)
        plan = dataclasses.replace(EXACT, over=over, chunk=chunk)
        everybody = dataclasses.replace(TRAINING, participants=5)
        ours = self.ours(method, shards=shards, plan=plan, training=everybody)
        counted, adapt = [], type(method).adapt
        monkeypatch.setattr(type(method), "adapt", lambda *given: counted.append(1) or adapt(*given))
        ours.evaluate()
        assert len(counted) == calls
        assert_each_is_scored_as_if_alone(ours)

    def test_clients_with_batches_of_several_sizes_adapt_in_groups(self):
        method = METHODS["perfedavg"](adapt_on="train-full")
        shards = make_shards(sizes=(6, 9, 6, 4, 9), test_sizes=EQUAL)
        assert_each_is_scored_as_if_alone(self.ours(method, shards=shards))

    @pytest.mark.parametrize("sizes", [EQUAL, (6, 0, 6, 1, 9)], ids=["equal", "with an empty one"])
    @pytest.mark.parametrize("over", ["vmap", "loop"])
    def test_whatever_the_sizes_and_the_plan(self, sizes, over):
        assert_each_is_scored_as_if_alone(self.ours(PFedBayes(), sizes, plan=dataclasses.replace(EXACT, over=over)))

    def test_on_validation_data(self):
        shards = make_shards(test_sizes=MIXED)
        shards = dataclasses.replace(shards, test=shards.validation, validation=shards.test)
        assert_each_is_scored_as_if_alone(self.ours(PFedBayes(), shards=shards), "validation")

    @pytest.mark.parametrize("noise", [0.5, None])
    def test_in_regression(self, noise):
        shards = make_shards(test_sizes=MIXED)
        shards = dataclasses.replace(shards, y=shards.x[:, :2].sin(), num_classes=None)
        module = mlp([3, 4, 2], "tanh")
        model = Model(Net(module if noise else WithNoise(module)), Regression(noise))
        assert_each_is_scored_as_if_alone(self.ours(PFedBayes(), shards=shards, model=model))

    @pytest.mark.parametrize("rows", [1, 4, 13, 30])
    @pytest.mark.parametrize("sampling", ["weights", "pairs", "activations"])
    def test_however_few_examples_fit_at_once(self, monkeypatch, rows, sampling):
        ours = self.ours(PFedBayes())
        expected = ours.evaluate(samples=3, sampling=sampling)
        monkeypatch.setitem(models.ROWS_AT_ONCE, "cpu", rows)
        found = ours.evaluate(samples=3, sampling=sampling)
        for which, name in itertools.product(expected, ("one", "mc3", "mean")):
            for metric, values in expected[which][name].items():
                assert_close(torch.tensor(found[which][name][metric]), torch.tensor(values))

    @pytest.mark.parametrize("estimators", [None, ("mean",)])
    def test_examples_that_several_clients_have_are_told_to_each(self, estimators):
        shards = make_shards(test_sizes=(6,) * 5)
        pool = torch.cat(shards.test)
        common = tuple(pool[start : start + 12] for start in (0, 6, 0, 3, 18))  # neither disjoint nor the same
        ours = trained(PFedBayes(), shards=dataclasses.replace(shards, test=common), seeds=(1, 2))
        found = ours.evaluate(3, label_prior=True, estimators=estimators)["shared"]
        for i, rows in enumerate(common):
            alone = ours.estimates("shared", i, rows, 3, seed_index=1, label_prior=True)
            assert set(found) <= set(alone)
            for name, columns in found.items():
                own = ours.model.likelihood.scores(alone[name][None], shards.y[rows][None])[0]
                assert_close(torch.tensor([column[1][i] for column in columns.values()], dtype=own.dtype), own)

    def test_more_clients_and_seeds_of_one_size_take_no_more_calls(self):
        calls = []

        class Counted(nn.Sequential):
            def forward(self, x):
                calls[-1] += 1
                return super().forward(x)

        model = make_model(Counted(nn.Linear(3, 3)))
        for count, seeds in ((2, (1,)), (2, (1, 2)), (7, (1, 2, 3))):
            ours = federation(PFedBayes(), model=model, seeds=seeds, shards=make_shards((6,) * count, (6,) * count),
                              training=Training(rounds=1))  # fmt: skip
            calls.append(0)
            ours.evaluate(samples=2)
        alone, *more = calls
        assert more == [alone] * 2


class TestEstimators:
    @pytest.mark.parametrize("asked", [("mean",), ("one",), ("mc3",), ("mean", "one")])
    def test_those_asked_for_are_what_they_are_among_all(self, asked):
        ours = trained(PFedBayes(), 1)
        everything, some = ours.evaluate(samples=3), ours.evaluate(samples=3, estimators=asked)
        for which in ours.models():
            assert some[which] == {name: everything[which][name] for name in everything[which] if name in asked}

    def test_a_method_without_draws_has_its_network_and_its_views(self):
        ours = trained(METHODS["pfedme"](), 1)
        assert ours.evaluate(estimators=("mc10",)) == ours.evaluate()

    def test_unknown_ones_are_named(self):
        with pytest.raises(UserError, match="no estimator 'mc10': choose among one, mc3, mean"):
            federation(PFedBayes()).evaluate(samples=3, estimators=("mc10",))


class TestActivations:
    def test_predictions_are_what_is_scored(self):
        shards = make_shards(test_sizes=MIXED)
        ours = trained(PFedBayes(rho0=0.0), 1, shards=shards, seeds=(3, 8))
        evaluated = ours.evaluate(samples=3, sampling="activations")
        for which, s, (i, rows) in itertools.product(ours.models(), range(2), enumerate(shards.test)):
            draws = ours.predict(which, i, shards.x[rows], samples=3, seed_index=s, sampling="activations")
            for name, outputs in {"one": draws[:1], "mc3": draws}.items():
                expected = ours.model.likelihood.scores(outputs, shards.y[rows]).tolist()
                assert [values[s][i] for values in evaluated[which][name].values()] == pytest.approx(expected)

    def test_every_client_example_and_draw_has_its_own_noise(self):
        start, x = federation(PFedBayes()), torch.ones(4, 3, dtype=torch.float64)
        for which in start.models():
            draws = [start.predict(which, i, x, samples=5, sampling="activations") for i in range(3)]
            assert len(torch.cat(draws).flatten(0, 1).unique(dim=0)) == 3 * 5 * 4

    def test_moments_are_those_of_weight_draws(self):
        ours = trained(PFedBayes(rho0=-1.0, noise_std=0.7), 1)
        x, many = randn(5, 3, seed=9), 10_000
        for which in ours.models():
            ways = [ours.predict(which, 1, x, many, sampling=sampling) for sampling in ("weights", "activations")]
            (mean, std), (expected, spread) = ((way.mean(0), way.std(0)) for way in ways)
            assert ((mean - expected).abs() / spread).max() < 5 * math.sqrt(2 / many)
            assert (std / spread - 1).abs().max() < 0.05

    def test_the_mean_network_and_methods_without_gaussians_do_not_notice(self):
        ours = trained(PFedBayes(), 1)
        mean = ours.evaluate(samples=3, estimators=("mean",))
        assert ours.evaluate(samples=3, estimators=("mean",), sampling="activations") == mean
        plain = trained(FedAvg(), 1)
        assert plain.evaluate(sampling="activations") == plain.evaluate()

    def test_images_are_classified_as_well(self):
        shards = load_shards(DataConfig(name="mnist", size="small"))
        shards = dataclasses.replace(shards, test=tuple(rows[::32] for rows in shards.test))
        ours = Federation(shards, make_model(mlp([784, 100, 10])), PFedBayes(zeta=1.0), Training())
        for _ in ours.rounds(4):
            pass
        ways = [ours.evaluate(40, estimators=("mc40",), sampling=sampling) for sampling in ("weights", "activations")]
        for which in ours.models():
            by_weights, by_activations = (
                {name: float(torch.tensor(values).mean()) for name, values in way[which]["mc40"].items()}
                for way in ways
            )
            assert by_weights["accuracy"] > 30  # it has learned something
            assert by_activations["accuracy"] == pytest.approx(by_weights["accuracy"], abs=5)
            assert by_activations["nll"] == pytest.approx(by_weights["nll"], rel=0.03)
