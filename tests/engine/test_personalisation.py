import dataclasses

import pytest
import torch

from federations import difference, federation, make_model, make_shards, randn, same_bits, trained
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import (
    HierarchicalFromPriors,
    personalise,
    prior_of,
    start_alone,
    weight_of_kl,
)
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import kl, mean_field
from pfedbayes.methods import FedAvg, Hierarchical, PFedBayes
from pfedbayes.methods.base import Shard
from pfedbayes.methods.hierarchical import adam_of_gaussian, annealed
from pfedbayes.nets import Batch


def newcomers(count=2):
    """Clients with data of their own that no other has."""
    shards = make_shards(sizes=(20,) * count, test_sizes=(8,) * count)
    return dataclasses.replace(shards, x=shards.x + 0.1, names=tuple(f"new {k}" for k in range(count)))


def distance(ours, client, s=0):
    moments = [ours.method.posterior(v) for v in (ours.personal_state(client, s).q, ours.servers[s][client])]
    return float(kl(*moments))


def test_without_steps_a_newcomer_has_the_shared_model():
    ours = trained(PFedBayes())
    new = personalise(prior_of(ours, "shared"), newcomers(), steps=0)
    assert torch.equal(new.personal_state(1).q, ours.servers[0])
    x = newcomers().x[:4]
    assert torch.equal(new.predict("personal", 0, x), ours.predict("shared", 0, x))


def test_a_gpu_has_finished_before_a_newcomer_has_its_model(monkeypatch):
    confirmed = []
    monkeypatch.setattr(Federation, "confirm", lambda self: confirmed.append(self.round))
    prior = prior_of(federation(PFedBayes()), "shared")
    for steps in (0, 2):
        personalise(prior, newcomers(), steps)
    assert confirmed == [1]  # without steps nothing was trained


def test_a_newcomer_learns_from_its_own_data_and_leaves_the_shared_model_alone():
    ours = trained(PFedBayes())
    before = ours.servers[0].clone()
    prior = prior_of(ours, "shared")
    new = personalise(prior, newcomers(), steps=60, zeta=1.0)
    assert torch.equal(ours.servers[0], before)
    assert torch.equal(new.servers[0][0], before)
    losses = []
    for one in (personalise(prior, newcomers(), steps=0), new):
        batch = one.batch_of(one.shards.train[0])
        losses.append(float(one.model.nll(one.personal_state(0).q[0], batch)))
    assert losses[1] < losses[0]
    assert not same_bits(new.personal_state(0).q, new.personal_state(1).q)


def test_zeta_holds_the_posterior_near_its_prior():
    prior = prior_of(trained(PFedBayes()), "shared")
    near, far = (personalise(prior, newcomers(), steps=60, zeta=zeta) for zeta in (100.0, 0.1))
    assert 0 < distance(near, 0) < distance(far, 0)


@pytest.mark.parametrize("eta_data", [0.0, 0.1])
def test_it_is_a_round_of_pfedbayes_with_a_fixed_prior_from_the_server(eta_data):
    method = PFedBayes(prior="fixed", eta_global=0.0)
    training = Training(rounds=1, local_steps=7, batch_size=6, seed=3)
    reference = federation(method, training)
    beyond = PFedBayes(eta_data=eta_data, sigma_by_size=eta_data)
    start = federation(beyond, dataclasses.replace(training, local_steps=2))
    ours = personalise(prior_of(start, "shared"), make_shards(), steps=7)
    reference.train_round()
    assert ours.method.eta_data == 0  # a gradient for nothing: the shared model stays where it is
    for client in range(5):
        assert difference(ours.personal_state(client).q, reference.personal_state(client).q) < 1e-12


def test_own_clients_start_from_their_personal_models_in_every_seed():
    ours = trained(PFedBayes(), seeds=[1, 2])
    again = personalise(prior_of(ours, "personal"), make_shards(), steps=0)
    for s in range(2):
        for client in range(5):
            assert torch.equal(again.personal_state(client, s).q, ours.personal_state(client, s).q)
    assert prior_of(ours, "shared").per_client(3)[1].shape == (3, *ours.servers[1].shape)


def test_by_default_it_takes_200_eager_steps_with_the_methods_own_zeta():
    ours = federation(PFedBayes(zeta=3.0), plan=Plan(compile=True, resting="host"))
    prior = prior_of(ours, "shared")
    new = personalise(dataclasses.replace(prior, batch_size=50), newcomers())
    assert (new.training.local_steps, new.training.rounds, new.training.batch_size) == (200, 1, 50)
    assert (new.method.zeta, new.plan.compile, new.plan.resting, new.round) == (3.0, False, "device", 1)
    assert personalise(prior, newcomers(), steps=0).training.local_steps == 1


def with_other_labels(shards, rows):
    y = shards.y.clone()
    y[rows] = (y[rows] + 1) % 3
    return dataclasses.replace(shards, y=y)


@pytest.mark.parametrize("method", [PFedBayes(), Hierarchical()])
def test_folds_train_beside_and_do_not_see_what_they_leave_out(method):
    prior = prior_of(trained(method, seeds=[1, 2]), "shared")
    shards = newcomers()
    first, second = (tuple(rows[half] for rows in shards.train) for half in (slice(0, 10), slice(10, 20)))
    plain = personalise(prior, shards, steps=20)
    ours = personalise(prior, shards, steps=20, left_out=[first, second])
    assert ours.seeds == plain.seeds == (1, 2)
    for s in range(2):
        assert difference(ours.personal_state(1, s).q, plain.personal_state(1, s).q) < 1e-12
    others = personalise(prior, with_other_labels(shards, torch.cat(first)), steps=20, left_out=[first, second])
    assert same_bits(ours.personal_state(1, 2).q, others.personal_state(1, 2).q)
    for index in (0, 1, 3):
        assert not same_bits(ours.personal_state(1, index).q, others.personal_state(1, index).q)
    assert difference(ours.servers[2], ours.servers[0]) == 0  # folds start from the prior of the first seed


@pytest.mark.parametrize("method", [PFedBayes(), Hierarchical()])
def test_who_starts_alone_is_a_federation_of_one(method):
    training = Training(rounds=3, local_steps=2, batch_size=6, seed=3, participants=4, patience=5)
    prior = prior_of(federation(method, dataclasses.replace(training, patience=None)), "shared")
    shards = newcomers(1)
    left = (shards.train[0][:5],)
    alone = start_alone(prior, shards, training, None, [left])
    reference = federation(method, dataclasses.replace(training, participants=None, patience=None), shards=shards)
    for _ in reference.rounds():
        pass
    assert (alone.round, alone.training.patience, alone.participants) == (3, None, 1)
    assert difference(alone.personal_state(0).q, reference.personal_state(0).q) < 1e-12
    other = dataclasses.replace(prior, states=tuple(state + 1 for state in prior.states))
    assert difference(start_alone(other, shards, training, None).personal_state(0).q, alone.personal_state(0).q) < 1e-12
    changed = start_alone(prior, with_other_labels(shards, left[0]), training, None, [left])
    assert same_bits(changed.personal_state(0, 1).q, alone.personal_state(0, 1).q)
    assert not same_bits(changed.personal_state(0).q, alone.personal_state(0).q)
    two = dataclasses.replace(prior, seeds=(*prior.seeds, 99))
    assert list(start_alone(two, shards, training, None).seeds) == list(prior.seeds)
    with pytest.raises(ValueError, match="2 clients are not alone"):
        start_alone(prior, newcomers(2), training, None)


def test_a_step_from_a_fixed_prior_follows_its_gradient():
    method = HierarchicalFromPriors(eta_mean=0.1, eta_rho=0.02, anneal=10, full_batch=True, kl=0.7)
    model, shards = make_model(), make_shards()
    size = model.net.num_params
    prior = torch.stack([randn(size), randn(size, seed=1) - 2])
    client = method.enrol(prior)._replace(q=torch.stack([randn(size, seed=2), randn(size, seed=3) - 2]))
    batch = Batch(shards.x[:6], shards.y[:6], torch.ones(6, dtype=torch.float64))
    shard = Shard(torch.tensor(12.0, dtype=torch.float64), torch.empty(0))  # the batch has half of the rows
    local = method.begin(client, prior, shard)._replace(taken=torch.tensor(3.0, dtype=torch.float64))
    noise = randn(*method.noise_shape(model, 6), seed=4)
    new, upload = method.end(method.step(model, local, (batch,), noise))

    q = client.q.clone().requires_grad_()
    moments = mean_field(q)
    loss = 2 * model.expected_nll(moments.mu, moments.sigma**2, batch, noise) + 0.7 * kl(moments, mean_field(prior))
    (grad,) = torch.autograd.grad(loss, q)
    rates = annealed((0.1, 0.02), local.taken, 10)
    expected, adam = adam_of_gaussian(client.q, grad, client.adam, rates)
    for found in (new.q, new.delta, upload, torch.stack([method.posterior(new).mu, new.q[1]])):
        assert torch.allclose(found, expected, rtol=1e-9)
    assert difference(new.adam, adam) < 1e-9
    assert not new.gradient.any()
    assert method.step(model, local, (batch,), noise).taken == 4


def test_without_steps_nothing_is_divided_by_zero():
    own = HierarchicalFromPriors(0.1, 0.1, 1, True, 1.0)
    prior = prior_of(trained(Hierarchical(), 1), "shared")
    for steps in (0, 1):
        assert personalise(prior, newcomers(), steps, zeta=1.0).method.anneal == own.anneal
    assert personalise(prior, newcomers(), 7, zeta=1.0).method.anneal == 7


def test_the_weight_of_the_kl_term_is_known_of_methods_that_have_one():
    assert weight_of_kl(HierarchicalFromPriors(0.1, 0.1, 1, True, 0.3)) == 0.3
    assert weight_of_kl(PFedBayes(zeta=2.0)) == 2.0
    assert weight_of_kl(FedAvg()) is None


def test_what_cannot_be_personalised_is_said():
    with pytest.raises(UserError, match="no distribution over models"):
        prior_of(trained(FedAvg()), "shared")
    with pytest.raises(UserError, match="start newcomers from the shared model"):
        personalise(prior_of(trained(PFedBayes()), "personal"), newcomers())
