import dataclasses

import pytest
import torch
from torch import nn

from federations import federation, make_model, make_shards, trained
from pfedbayes.data import DataConfig, load_shards
from pfedbayes.engine.personalisation import personalise, prior_of
from pfedbayes.engine.plan import Plan
from pfedbayes.errors import UserError
from pfedbayes.maths.intervals import binomial_upper, pac_bayes_kl, sampled_mean_upper
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.nets import Model, Net, mlp
from pfedbayes.trust import certificate
from pfedbayes.trust.certificate import (
    DRAWS_IN_COMMON,
    DRAWS_PER_EXAMPLE,
    _divergence,
    _measure,
    certify,
    certify_newcomer,
)

BLOBS = DataConfig(name="blobs", clients=4, examples=200, labels_per_client=3, classes=4, features=3, certify=0.5)


def blobs(config=BLOBS):
    shards = load_shards(config)
    return dataclasses.replace(shards, x=shards.x.double())


def small_model(outputs=4, **others):
    return Model(
        Net(mlp([3, 6, outputs], "tanh")), **({"likelihood": federation(PFedBayes()).model.likelihood} | others)
    )


@pytest.fixture(scope="module")
def ours():
    return trained(
        PFedBayes(zeta=1.0, eta_personal=0.02, eta_global=0.02), 5, shards=blobs(), model=small_model(), seeds=[1, 2]
    )


@pytest.fixture(scope="module")
def certificates(ours):
    return certify(ours, steps=20)


def test_every_client_of_every_seed_gets_one(ours, certificates):
    assert [(one.seed, one.client) for one in certificates] == [(s, name) for s in (1, 2) for name in ours.shards.names]
    for one, rows in zip(certificates, ours.shards.certify * 2, strict=True):
        assert one.certified.size == one.held_out.size == len(rows) == 80
        assert (one.prior, one.draws, one.delta) == ("personal", DRAWS_PER_EXAMPLE, 0.05)
        assert one.certified.gibbs < one.bound <= 1


def test_the_bound_is_the_formula_of_what_is_reported(certificates):
    for one in certificates:
        # A fifth of delta is for the draws, shared by three candidates; every example has draws of its own.
        gibbs = sampled_mean_upper(one.certified.gibbs, 20 * 80, 0.01 / 3)
        assert one.bound == pytest.approx(pac_bayes_kl(gibbs, one.kl, 80, 0.04))
        assert one.hold_out == pytest.approx(binomial_upper(round(one.held_out.mc * 80), 80, 0.05))
        assert one.vacuous == (one.bound >= 0.75)  # four labels


def test_the_least_bound_is_taken_and_the_prior_itself_is_a_candidate(ours, certificates):
    alone = certify(ours, zetas=())
    for one, plain in zip(certificates, alone, strict=True):
        assert (plain.zeta, plain.kl) == (None, 0)
        assert torch.equal(plain.posterior, ours.personal_state(ours.shards.names.index(one.client), one.seed - 1).q)
        # With candidates the draws have a smaller share of delta each, which costs next to nothing.
        assert one.bound <= plain.bound + 0.01
        assert (one.kl == 0) == (one.zeta is None)


def test_errors_are_shares_of_single_draws_and_of_their_average(ours):
    rows = ours.shards.certify[1]
    x, y = ours.shards.x[rows], ours.shards.y[rows]
    outputs = ours.predict("personal", 1, x, 7, 1, sampling="activations")
    found = _measure(ours, 1, 1, rows, 7)
    assert found.gibbs == pytest.approx(float((outputs.argmax(-1) != y).double().mean()))
    assert found.mc == pytest.approx(float((outputs.softmax(-1).mean(0).argmax(-1) != y).double().mean()))
    assert (found.size, 0 < found.mc < found.gibbs < 1) == (80, True)


def test_newcomers_are_certified_on_all_their_data_from_the_shared_model(ours):
    new = blobs(dataclasses.replace(BLOBS, seed=2, certify=0.0, clients=2))
    for one in certify(ours, new, steps=20):
        assert (one.prior, one.certified.size) == ("shared", 159)
        assert one.bound < 1


def test_a_newcomer_that_has_trained_is_certified_on_all_its_rows(ours):
    new = blobs(dataclasses.replace(BLOBS, seed=2, certify=0.0, validation=0.2, clients=1))
    prior = prior_of(ours, "shared")
    joined = personalise(prior, new, steps=5, zeta=3.0)
    one = certify_newcomer(prior, joined, ours.shards)
    assert (one.client, one.seed, one.prior, one.zeta, one.delta) == ("client 0", 1, "shared", 3.0, 0.05)
    assert (one.certified.size, one.test, one.draws) == (198, None, DRAWS_PER_EXAMPLE)
    assert one.kl == pytest.approx(_divergence(joined, personalise(prior, new, steps=0), 0, 0))
    gibbs = sampled_mean_upper(one.certified.gibbs, 20 * 198, 0.01)
    assert one.bound == pytest.approx(pac_bayes_kl(gibbs, one.kl, 198, 0.04))
    assert torch.equal(one.posterior, joined.personal_state(0).q)
    assert certify_newcomer(prior, joined, None) == one
    # Even one example of the run, and be it among the newcomer's test data, spoils the certificate.
    known = dataclasses.replace(new, train=new.test, test=(new.train[0][:0],), validation=(new.train[0][:0],))
    with pytest.raises(UserError, match=f"{len(new.test[0])} of 198 examples of client 0 are in the training data"):
        certify_newcomer(prior, joined, known)


def test_by_default_two_posteriors_of_100_steps_compete_with_the_prior(ours, monkeypatch):
    trained_with = []

    def noted(prior, shards, steps, zeta=None):
        trained_with.append((steps, zeta))
        return personalise(prior, shards, min(steps, 1), zeta)

    monkeypatch.setattr(certificate, "personalise", noted)
    certify(ours)
    assert trained_with == [(0, None), (100, 10.0), (100, 30.0)]
    assert (DRAWS_PER_EXAMPLE, DRAWS_IN_COMMON) == (20, 1000)


def test_the_bound_holds_on_test_data(ours, certificates):
    assert all(one.test.gibbs <= one.bound for one in certificates)
    assert min(one.bound for one in certificates) < 0.75


@pytest.mark.parametrize("noise_std", [1.0, 0.5])
def test_the_divergence_is_that_of_what_is_drawn_from(noise_std):
    ours = trained(PFedBayes(eta_personal=0.05, noise_std=noise_std), 1, shards=blobs(), model=small_model())
    withheld = dataclasses.replace(ours.shards, train=ours.shards.certify, certify=())
    prior = prior_of(ours, "personal")
    new = personalise(prior, withheld, steps=30, zeta=0.01)
    (q, p) = (
        torch.distributions.Normal(v[0], torch.nn.functional.softplus(v[1]) * noise_std)
        for v in (new.personal_state(2).q, ours.personal_state(2).q)
    )
    expected = float(torch.distributions.kl_divergence(q, p).sum())
    assert expected > 0.1
    assert _divergence(new, personalise(prior, withheld, steps=0), 2, 0) == pytest.approx(expected)


def test_a_run_that_has_seen_everything_is_refused():
    with pytest.raises(UserError, match=r"--set data.certify=0.5"):
        certify(trained(PFedBayes()))


def test_a_newcomer_that_was_there_is_refused(ours):
    known = dataclasses.replace(ours.shards, certify=())
    with pytest.raises(UserError, match="79 of 79 examples of client 0 are in the training data"):
        certify(ours, known)


def test_examples_that_another_client_trained_on_certify_nothing(ours):
    shards = ours.shards
    leaky = dataclasses.replace(shards, certify=(shards.train[1][:5], *shards.certify[1:]))
    with pytest.raises(UserError, match="another client was trained on withheld examples of client 0"):
        certify(trained(PFedBayes(), 1, shards=leaky, model=small_model()))


def test_validation_rows_certify_nothing_either(ours):
    # Validation data choose the round, so the prior has seen them.
    shards, leak = ours.shards, ours.shards.certify[0][:1]
    leaky = dataclasses.replace(shards, validation=(*shards.validation[:-1], leak))
    with pytest.raises(UserError, match="another client was trained on withheld examples of client 0"):
        certify(federation(PFedBayes(), shards=leaky, model=small_model()))
    new = blobs(dataclasses.replace(BLOBS, seed=2, certify=0.0, clients=3))
    own = federation(
        PFedBayes(), shards=dataclasses.replace(new, train=new.test, test=new.validation, validation=new.train)
    )
    with pytest.raises(UserError, match=f"{len(new.train[0])} of {len(new.train[0])} examples of client 0"):
        certify(own, new)


def test_the_draws_of_a_convolutional_network_are_drawn_for_all_examples_at_once():
    # Its weights are drawn, so the errors of one draw on different examples are not independent trials.
    shards = dataclasses.replace(blobs(dataclasses.replace(BLOBS, features=16)), certify=())
    pictures = dataclasses.replace(shards, x=shards.x.view(-1, 1, 4, 4))
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    ours = federation(PFedBayes(), shards=pictures, model=make_model(net), plan=Plan(dtype="float64", over="loop"))
    first = {part: getattr(shards, part)[:1] for part in ("train", "test", "validation", "names")}
    new = dataclasses.replace(pictures, x=pictures.x + 1, **first)
    (one,) = certify(ours, new, zetas=(), draws=50)
    size = len(new.train[0])
    expected = pac_bayes_kl(sampled_mean_upper(one.certified.gibbs, 50, 0.01), 0.0, size, 0.04)
    assert (one.draws, one.kl, one.bound) == (50, 0.0, pytest.approx(expected))
    assert certify(ours, new, zetas=())[0].draws == DRAWS_IN_COMMON


def test_what_cannot_be_certified_is_said(ours):
    with pytest.raises(UserError, match="no distribution over models"):
        certify(trained(FedAvg(), 1, shards=blobs(), model=small_model()))
    shards = dataclasses.replace(make_shards(), y=make_shards().x[:, :1], num_classes=None)
    numbers = federation(PFedBayes(), shards=shards, model=small_model(1, likelihood=Regression(0.1)))
    with pytest.raises(UserError, match="give a run with labels"):
        certify(numbers)
    with pytest.raises(UserError, match="give a run with labels"):
        certify_newcomer(prior_of(numbers, "shared"), numbers, None)
    for delta in (0.0, 1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            certify(ours, delta=delta)
