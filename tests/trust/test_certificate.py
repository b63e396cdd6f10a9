import dataclasses
import math

import pytest
import torch
from torch import nn

from federations import federation, make_model, trained
from pfedbayes.data import DataConfig, load_shards
from pfedbayes.engine.personalisation import personalise, prior_of
from pfedbayes.engine.plan import Plan
from pfedbayes.errors import UserError
from pfedbayes.maths.intervals import binomial_upper, kl_inverse, pac_bayes_kl, sampled_mean_upper
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.nets import Model, Net, mlp
from pfedbayes.trust import certificate
from pfedbayes.trust.certificate import (
    DRAWS_IN_COMMON,
    DRAWS_PER_EXAMPLE,
    _divergence,
    _losses,
    _Recipe,
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


def test_the_bound_is_the_formula_of_what_is_reported(ours):
    for one in certify(ours, scales=(1.0, 0.5), steps=20):
        client = ours.shards.names.index(one.client)
        losses = first_losses(ours, one, client)
        # Half of delta is for priors of two widths, half for posteriors that start from them.
        assert (one.objective, one.zeta, one.kl) == (None, None, 0)
        assert one.bound == pytest.approx(binomial_upper(int(losses[0].sum()), 80, 0.05 / 4))
        assert one.hold_out == pytest.approx(binomial_upper(round(one.held_out.mc * 80), 80, 0.05))
        assert one.vacuous == (one.bound >= 0.75)  # four labels


def test_the_bound_of_a_posterior_is_that_of_pac_bayes(ours):
    losses = (torch.rand(200, 80, generator=torch.Generator().manual_seed(0)) < 0.1).double()
    found = certificate._bound(ours, _Recipe(1.0, "elbo", 10.0), losses, 2.5, 0.02, 3)
    # A fifth of delta is for the draws, shared by three candidates; every example has draws of its own.
    gibbs = binomial_upper(int(losses.sum()), 200 * 80, 0.2 * 0.02 / 3)
    assert found == pytest.approx(pac_bayes_kl(gibbs, 2.5, 80, 0.8 * 0.02))


def first_losses(ours, one, client):
    """The losses of the certified prior."""
    prior = certificate._scaled(prior_of(ours, "personal"), one.scale)
    withheld = dataclasses.replace(ours.shards, train=ours.shards.certify, certify=())
    made = personalise(prior, withheld, steps=0)
    return _losses(made, client, one.seed - 1, ours.shards.certify[client], one.draws, 1.0)[0]


def test_the_least_bound_is_taken_and_the_prior_itself_is_a_candidate(ours, certificates):
    alone = certify(ours, objective="elbo", zetas=(), scales=(1.0,))
    for one, plain in zip(certificates, alone, strict=True):
        assert (plain.objective, plain.zeta, plain.kl, plain.scale) == (None, None, 0, 1.0)
        assert torch.equal(plain.posterior, ours.personal_state(ours.shards.names.index(one.client), one.seed - 1).q)
        # With candidates each has a smaller share of delta, and a few draws may choose the second best.
        assert one.bound <= plain.bound + 0.05
        assert (one.kl == 0) == (one.objective is None)


def test_a_narrow_prior_is_certified_as_it_is(ours):
    for one in certify(ours, objective="elbo", zetas=(), scales=(1.0, 0.001)):
        q = ours.personal_state(ours.shards.names.index(one.client), one.seed - 1).q
        widths = torch.nn.functional.softplus(one.posterior[1]) / torch.nn.functional.softplus(q[1])
        assert torch.allclose(widths, torch.full_like(widths, one.scale))
        assert torch.equal(one.posterior[0], q[0])


def test_errors_are_shares_of_single_draws_and_of_their_average(ours):
    rows = ours.shards.certify[1]
    x, y = ours.shards.x[rows], ours.shards.y[rows]
    outputs = ours.predict("personal", 1, x, 7, 1, sampling="activations")
    single, averaged = _losses(ours, 1, 1, rows, 7, 1.0)
    assert torch.equal(single, (outputs.argmax(-1) != y).double())
    assert torch.equal(averaged, (outputs.softmax(-1).mean(0).argmax(-1) != y).double())
    assert (single.shape, averaged.shape) == ((7, 80), (80,))


def test_half_of_a_newcomer_makes_its_prior_and_half_certifies_it(ours):
    new = blobs(dataclasses.replace(BLOBS, seed=2, certify=0.0, clients=2))
    prior, rest = certificate._informed(prior_of(ours, "shared"), new, 20)
    for i, one in enumerate(certify(ours, new, steps=20)[:2]):  # of the first seed
        assert (one.prior, one.certified.size, len(new.train[i])) == ("shared", 80, 159)
        assert one.test.gibbs <= one.bound < 1
        assert set(rest.train[i].tolist()) < set(new.train[i].tolist())
        # The prior has trained on the other half alone.
        half = new.train[i][~torch.isin(new.train[i], rest.train[i])]
        own = dataclasses.replace(new, train=(half,), test=(half[:0],), validation=(half[:0],), names=("a",))
        assert len(half) == 79
        assert prior.states[0][i].shape == personalise(prior_of(ours, "shared"), own, 0).personal_state(0).q.shape
        assert not torch.equal(prior.states[0][i], prior_of(ours, "shared").states[0])


def test_a_newcomer_that_has_trained_is_certified_on_all_its_rows(ours):
    new = blobs(dataclasses.replace(BLOBS, seed=2, certify=0.0, validation=0.2, clients=1))
    prior = prior_of(ours, "shared")
    joined = personalise(prior, new, steps=5, zeta=3.0)
    one = certify_newcomer(prior, joined, ours.shards)
    assert (one.client, one.seed, one.prior, one.zeta, one.delta) == ("client 0", 1, "shared", 3.0, 0.05)
    assert (one.certified.size, one.test, one.draws) == (198, None, DRAWS_PER_EXAMPLE)
    assert one.kl == pytest.approx(_divergence(joined, personalise(prior, new, steps=0), 0, 0))
    gibbs = binomial_upper(round(one.certified.gibbs * 200 * 198), 200 * 198, 0.01)
    assert one.bound == pytest.approx(pac_bayes_kl(gibbs, one.kl, 198, 0.04))
    assert torch.equal(one.posterior, joined.personal_state(0).q)
    assert certify_newcomer(prior, joined, None) == one
    # Even one example of the run, and be it among the newcomer's test data, spoils the certificate.
    known = dataclasses.replace(new, train=new.test, test=(new.train[0][:0],), validation=(new.train[0][:0],))
    with pytest.raises(UserError, match=f"{len(new.test[0])} of 198 examples of client 0 are in the training data"):
        certify_newcomer(prior, joined, known)


def test_what_competes_by_default(ours, monkeypatch):
    made = []

    def noted(prior, shards, steps, zeta=None, method=None):
        made.append((steps, zeta, method and (method.steps, method.delta)))
        return personalise(prior, shards, min(steps, 1), zeta, method=method)

    monkeypatch.setattr(certificate, "personalise", noted)
    certify(ours)
    assert made == [(0, None, None), *[(0, None, None), (100, None, (100, 0.05))] * 3]
    made.clear()
    certify(ours, objective="elbo", scales=(0.3,))
    assert made == [(0, None, None), (0, None, None), (100, 10.0, None), (100, 30.0, None)]
    assert (DRAWS_PER_EXAMPLE, DRAWS_IN_COMMON) == (200, 1000)


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
    (one,) = certify(ours, new, objective="elbo", zetas=(), scales=(1.0,), draws=50)
    size = len(new.train[0]) - len(new.train[0]) // 2
    expected = kl_inverse(sampled_mean_upper(one.certified.gibbs, 50, 0.01), math.log(1 / 0.04) / size)
    assert (one.draws, one.kl, one.bound) == (50, 0.0, pytest.approx(expected))
    assert certify(ours, new, objective="elbo", zetas=(), scales=(1.0,))[0].draws == DRAWS_IN_COMMON


def test_what_cannot_be_certified_is_said(ours):
    with pytest.raises(UserError, match="no distribution over models"):
        certify(trained(FedAvg(), 1, shards=blobs(), model=small_model()))
    for delta in (0.0, 1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            certify(ours, delta=delta)


@pytest.fixture(scope="module")
def numbers():
    """A regression of the first input by the others, with noise."""
    shards = blobs()
    y = 10 + 3 * shards.x[:, :1] + 0.5 * torch.randn(len(shards.x), 1, generator=torch.Generator().manual_seed(1))
    shards = dataclasses.replace(shards, y=y.double(), num_classes=None)
    model = small_model(1, likelihood=Regression(1.0))
    return trained(PFedBayes(zeta=1.0, eta_personal=0.05, eta_global=0.05), 20, shards=shards, model=model)


def test_numbers_are_certified_by_clipped_squared_errors(numbers):
    y = numbers.shards.y[torch.cat(numbers.shards.train)]
    unit = float(y.var())
    for client, one in enumerate(certify(numbers, steps=20)):
        assert one.largest == pytest.approx(4 * unit)
        rows = numbers.shards.test[client]
        outputs = numbers.predict("personal", client, numbers.shards.x[rows], 20, sampling="activations")
        if one.objective is None and one.scale == 1.0:
            errors = ((outputs - numbers.shards.y[rows]).square() / one.largest).clamp(max=1)
            assert one.test.gibbs == pytest.approx(float(errors.mean()), rel=1e-6)
        assert 0 < one.test.gibbs <= one.bound <= 1


def test_the_bound_of_a_prior_of_numbers_is_that_of_chernoff(numbers):
    for one in certify(numbers, zetas=(), scales=(1.0,)):
        gibbs = sampled_mean_upper(one.certified.gibbs, 200 * 80, 0.01)
        assert one.bound == pytest.approx(kl_inverse(gibbs, math.log(1 / 0.04) / 80))
        assert one.hold_out == pytest.approx(kl_inverse(one.held_out.mc, math.log(1 / 0.05) / 80))


def test_a_useless_model_of_numbers_is_vacuous():
    shards = blobs()
    y = torch.randn(len(shards.x), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = dataclasses.replace(shards, y=y, num_classes=None)
    untrained = federation(PFedBayes(), shards=noise, model=small_model(1, likelihood=Regression(1.0)))
    assert all(one.vacuous for one in certify(untrained, zetas=()))


def test_numbers_are_not_trained_for_the_bound(numbers):
    with pytest.raises(UserError, match="class probabilities"):
        certify(numbers, objective="bound")
