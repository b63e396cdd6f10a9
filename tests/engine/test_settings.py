"""Settings that train together equal separate runs, and one that diverges does not end the others."""

import dataclasses
from functools import partial

import pytest
import torch

from pfedbayes.engine.plan import Plan
from pfedbayes.engine.settings import diverged, federation_of_settings, keep_settings
from pfedbayes.engine.setup import Copy
from pfedbayes.methods import METHODS, Ditto, FedAvg, HeurFedAMP, Hierarchical, PFedBayes, PFedGP, PFedMe
from pfedbayes.methods.varied import varied
from tests.federations import EXACT, FEW, SIZES, TRAINING, difference, federation, make_shards, model_for

CLIENTS = len(SIZES)
EXTENDED = {"eta_data": 0.01, "sigma_by_size": 0.3, "noise_std": 0.9}


def numbers(method):
    values = {each.name: getattr(method, each.name) for each in dataclasses.fields(method)}
    return [name for name, value in values.items() if isinstance(value, float) and name not in ("beta1", "beta2")]


def settings_of(method, factors=(1.0, 1.1, 0.8)):
    """Return settings of which every number differs."""
    return [
        dataclasses.replace(method, **{name: getattr(method, name) * factor for name in numbers(method)})
        for factor in factors
    ]


def together(methods, training=TRAINING, plan=EXACT, rounds=TRAINING.rounds, **others):
    result = federation_of_settings(make_shards(), model_for(methods[0]), methods, training, plan=plan, **others)
    train(result, rounds)
    return result


def train(federation, until):
    for _ in federation.rounds(until):
        pass


def members(federation, setting):
    return federation.client_states([setting * CLIENTS + i for i in range(CLIENTS)]).state


@pytest.mark.parametrize("training", [TRAINING, FEW], ids=["all", "few"])
@pytest.mark.parametrize("name", [*(name for name in METHODS if name not in ("pfedgp", "bnfed")), "extended"])
def test_settings_at_once_are_the_separate_runs(name, training):
    method = PFedBayes(**EXTENDED) if name == "extended" else METHODS[name]()
    if name == "extended" or not (method.needs.all_clients and training is FEW):
        methods = settings_of(method)
        plan = dataclasses.replace(EXACT, over="loop" if method.needs.loop else "vmap")
        training = dataclasses.replace(training, participants=None) if method.needs.all_clients else training
        if method.needs.tied:
            training = dataclasses.replace(training, train="chosen")
        all_settings = together(methods, training, plan)
        for k, each in enumerate(methods):
            alone = federation(each, training, plan)
            train(alone, TRAINING.rounds)
            assert difference(all_settings.servers[k].state, alone.servers[0]) < 1e-9
            own = alone.client_states(list(range(alone.num_clients)))
            start = k * alone.num_clients
            found = all_settings.client_states([start + i for i in range(alone.num_clients)]).state
            assert difference(found, own) < 1e-9
            assert not diverged(all_settings, k)


def test_folds_of_each_setting_are_the_copies_of_its_run():
    shards, methods = make_shards(), settings_of(Hierarchical(), (1.0, 1.2))
    folds = [tuple(rows[k::2][:3] for rows in shards.train) for k in range(2)]
    found = together(methods, folds=folds)
    for k, each in enumerate(methods):
        alone = federation(each, copies=[Copy(rows) for rows in folds])
        train(alone, TRAINING.rounds)
        for f in range(len(folds)):
            assert difference(found.servers[2 * k + f].state, alone.servers[1 + f]) < 1e-9


def test_a_setting_that_diverges_is_marked_and_does_not_end_the_others():
    methods = [PFedBayes(eta_personal=rate, optimizer="sgd") for rate in (1e-4, 1e30, 2e-4)]
    found = together(methods)
    assert [diverged(found, k) for k in range(3)] == [False, True, False]
    alone = federation(methods[2])
    train(alone, TRAINING.rounds)
    assert difference(members(found, 2), alone.client_states(list(range(CLIENTS)))) < 1e-9


def test_settings_that_are_kept_go_on_as_before():
    methods, shards = settings_of(PFedMe()), make_shards()
    model = model_for(methods[0])
    begin = partial(federation_of_settings, shards, model, methods, FEW, plan=EXACT)
    every, some = begin(), begin()
    train(every, 6)
    train(some, 2)
    narrow = keep_settings(some, [2, 0], model)
    assert narrow.round == 2
    train(narrow, 6)
    for new, old in enumerate([2, 0]):
        assert difference(narrow.servers[new], every.servers[old]) < 1e-12
        assert difference(members(narrow, new), members(every, old)) < 1e-12


def test_settings_that_are_kept_keep_their_folds():
    methods, shards = settings_of(FedAvg()), make_shards()
    model, folds = model_for(methods[0]), [tuple(rows[k::2] for rows in shards.train) for k in range(2)]
    every = federation_of_settings(shards, model, methods, TRAINING, plan=EXACT, folds=folds)
    train(every, 1)
    narrow = keep_settings(every, [1], model, folds)
    for f in range(2):
        assert difference(narrow.servers[f], every.servers[2 + f]) == 0


def test_every_setting_is_scored():
    methods = settings_of(Ditto(eta=0.3, eta_personal=0.3))
    found = together(methods)
    scores = found.evaluate(samples=2)
    for k, each in enumerate(methods):
        alone = federation(each)
        train(alone, TRAINING.rounds)
        expected = alone.evaluate(samples=2)
        for which in ("personal", "shared"):
            assert scores[which]["mean"]["nll"][k] == pytest.approx(expected[which]["mean"]["nll"][0], abs=1e-9)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([PFedGP(), PFedGP(eta=0.1)], "pFedGP decides by its hyper-parameters on the host"),
        ([PFedMe(inner_steps=2), PFedMe(inner_steps=3)], "inner_steps is 2 in one setting and another in others"),
        ([PFedBayes(), PFedBayes(server="barycentre")], "server is 'average'"),
        ([PFedBayes(eta_data=0.1), PFedBayes()], "eta_data is 0 in one setting"),
    ],
)
def test_settings_that_need_other_programs_are_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        varied(methods)


def test_only_federations_of_settings_can_diverge_in_part():
    with pytest.raises(TypeError, match="many settings"):
        diverged(federation(FedAvg()), 0)


def test_one_compilation_serves_all_settings(monkeypatch):
    from pfedbayes.engine.backend import compiled

    count, original = [], compiled.Compiled._compile
    monkeypatch.setattr(compiled.Compiled, "_compile", lambda self, *given: count.append(1) or original(self, *given))
    methods = settings_of(HeurFedAMP())
    plan = dataclasses.replace(EXACT, compile=True)
    found = together(methods, plan=plan)
    assert len(count) == 1
    assert difference(found.servers[1].state, together(methods).servers[1].state) < 1e-9


def test_values_have_the_type_of_the_weights():
    found = together(settings_of(PFedBayes()), plan=Plan(threads=1), rounds=1)
    assert found.servers[0].values.dtype == torch.float32
