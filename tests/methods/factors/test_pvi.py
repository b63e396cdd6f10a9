import dataclasses

import pytest
import torch
from conjugate import (
    SIZES,
    D,
    batch_of,
    best_fit,
    federate,
    found,
    model,
    moving,
    prior_naturals,
    problem,
    shard_of,
    simplex,
    solved_by_pvi,
)
from torch.testing import assert_close

from federations import TRAINING, client_states, difference, federation, randn, trained
from pfedbayes.maths.gaussian import MeanField, from_natural, mean_field, natural, rho_of
from pfedbayes.maths.trees import pick
from pfedbayes.methods import PVI, PFedBayes
from pfedbayes.methods.factors.product import centre
from pfedbayes.nets import Batch

DATA = problem()
CLIENTS = range(len(SIZES))


class FullCovariance:
    """The same rules with full covariance matrices: natural parameters (eta, Lambda) as (d, d + 1) matrices."""

    def __init__(self, data, damping=1.0):
        self.data, self.damping = data, damping
        self.prior = torch.cat([torch.zeros(D, 1), torch.eye(D)], 1).double()
        self.q, self.factors = self.prior.clone(), {}

    def likelihood(self, i):
        return torch.cat([self.data.b[i][:, None], self.data.a[i]], 1)

    def round(self, members):
        changes = {}
        for i in members:
            factor = self.factors.get(i, torch.zeros(D, D + 1).double())
            tilted = (self.q - factor) + self.likelihood(i)  # conjugate: the fit is exact
            changes[i] = self.damping * (tilted - self.q)
            self.factors[i] = factor + changes[i]
        self.q = self.q + sum(changes.values())

    def leave(self, i):
        self.q = self.q - self.factors.pop(i)


class TestFullCovariance:
    def test_one_round_is_the_exact_posterior(self):
        exact = FullCovariance(DATA)
        exact.round(CLIENTS)
        assert_close(exact.q[:, 1:], DATA.precision, rtol=1e-12, atol=0)
        mean = torch.linalg.solve(exact.q[:, 1:], exact.q[:, 0])
        assert_close(mean, DATA.mean, rtol=1e-12, atol=1e-12)

    def test_damped_factors_approach_the_exact_ones_geometrically(self):
        damped = FullCovariance(DATA, damping=0.2)
        for _ in range(7):
            damped.round(CLIENTS)
        for i in CLIENTS:
            assert_close(damped.factors[i], (1 - 0.8**7) * damped.likelihood(i), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("leaver", CLIENTS)
    def test_leaving_is_never_having_joined(self, leaver):
        left, never = FullCovariance(DATA), FullCovariance(DATA)
        for _ in range(3):
            left.round(CLIENTS)
            never.round([i for i in CLIENTS if i != leaver])
        left.leave(leaver)
        assert difference(left.q, never.q) < 1e-10

    def test_the_order_of_joining_does_not_matter(self):
        one, other = FullCovariance(DATA), FullCovariance(DATA)
        for i in CLIENTS:
            one.round([i])
        for i in reversed(CLIENTS):
            other.round([i])
        assert difference(one.q, other.q) < 1e-12


@pytest.mark.parametrize(
    ("damping", "chosen"),
    [(None, lambda round: CLIENTS), (0.5, lambda round: CLIENTS), (1.0, lambda round: [round % len(SIZES)])],
    ids=["1/S", "0.5", "in turn"],
)
def test_fixed_point_has_the_exact_mean_and_the_mean_field_variances(damping, chosen):
    q = found(federate(PVI(damping=damping), DATA, 200, solved_by_pvi, chosen)[0])
    assert_close(q.mu, DATA.mean, rtol=0, atol=1e-6)
    assert_close(q.sigma.pow(-2), DATA.precision.diagonal(), rtol=1e-9, atol=0)
    assert (q.sigma.square() < DATA.precision.inverse().diagonal()).all()  # narrower than the truth


def test_moment_matching_has_the_exact_mean_too_and_wider_variances():
    def solve(*arguments):
        return solved_by_pvi(*arguments, moments=True)

    q = found(federate(PVI(), DATA, 200, solve)[0])
    assert_close(q.mu, DATA.mean, rtol=1e-8, atol=1e-8)
    assert (q.sigma.pow(-2) < DATA.precision.diagonal()).all()


def test_factors_are_conserved_under_any_participation():
    def chosen(round):
        return sorted({(3 * round) % 5, (round * round) % 5, (round + 1) % 5})

    server, clients = federate(PVI(damping=0.3), DATA, 23, solved_by_pvi, chosen)
    assert_close(server.q, prior_naturals() + sum(clients.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fields", [{}, {"valid_factors": True}, {"damping": 0.5}])
def test_factors_are_conserved_by_real_training(fields):
    method = PVI(eta=0.05, **fields)
    ours = trained(method, rounds=5, training=dataclasses.replace(TRAINING, rounds=5))
    prior = method.init(ours.servers[0].q[0], len(SIZES), None).q
    factors = sum(client[0] for client in client_states(ours).values())
    assert difference(ours.servers[0].q, prior + factors) < 1e-12


def test_leaving_is_never_having_joined_where_mean_field_is_exact():
    data, method = problem(orthogonal=True), PVI(damping=1.0)
    server, clients = federate(method, data, 3, solved_by_pvi)
    assert_close(found(server).mu, data.mean, rtol=1e-12, atol=1e-12)
    for leaver in CLIENTS:
        never, _ = federate(method, data, 3, solved_by_pvi, lambda round, who=leaver: [i for i in CLIENTS if i != who])
        left = method.leave(server, leaver, clients[leaver])
        assert difference(left.q, never.q) < 1e-10
        assert difference(mean_field(left.start), from_natural(left.q)) < 1e-10


def test_leaving_keeps_a_distribution_if_the_other_factors_do_not_add_up_to_one():
    server, _ = federate(PVI(), DATA, 3, solved_by_pvi)
    wide = server.q.clone()
    wide[1, 0] += 1
    left = PVI().leave(server, 0, wide)
    assert (left.q[1] > 0).all()
    assert left.q[1, 0] == server.q[1, 0]


def test_the_default_damping_makes_the_server_the_mean_of_the_fits():
    method = PVI()
    server, clients = federate(method, DATA, 2, solved_by_pvi)
    received = pick(method.download(server, torch.arange(len(SIZES))), 0)
    assert received.damping == 1 / len(SIZES)
    cavities = [server.q - clients[i] for i in CLIENTS]
    fits = torch.stack([natural(best_fit(cavities[i], DATA.a[i], DATA.b[i])) for i in CLIENTS])
    after, _ = federate(method, DATA, 1, solved_by_pvi, server=server, kept=clients)
    assert_close(after.q, fits.mean(0), rtol=1e-12, atol=1e-12)
    assert (after.q[1] >= fits[:, 1].min(0).values).all()


def test_the_damping_follows_the_number_of_uploads():
    method = PVI()
    server = method.init(randn(D), 10, None)
    assert method.download(server, torch.arange(3)).damping.tolist() == [0.1] * 3
    server = method.aggregate(server, torch.zeros(4, 2, D).double(), torch.ones(4), torch.arange(4))
    server = method.aggregate(server, torch.zeros(2, 2, D).double(), torch.ones(2), torch.arange(2))
    assert method.download(server, torch.arange(3)).damping.tolist() == [0.25] * 3


def test_without_its_factor_a_client_counts_its_data_in_every_round():
    def forgetful(method, data, i, client, received):
        return solved_by_pvi(method, data, i, torch.zeros_like(client), received)

    def precision(solve, rounds):
        return federate(PVI(damping=1.0), DATA, rounds, solve)[0].q[1]

    assert_close(precision(solved_by_pvi, 1), precision(solved_by_pvi, 8), rtol=1e-10, atol=0)
    information = DATA.a.sum(0).diagonal()
    assert_close(precision(forgetful, 8), 1 + 8 * information, rtol=1e-10, atol=0)


def test_the_first_gradient_is_that_of_pfedbayes_with_the_prior():
    prior = MeanField(torch.zeros(D).double(), torch.full((D,), 0.7, dtype=torch.float64))
    q = MeanField(randn(D, seed=3), 0.3 * randn(D, seed=4).exp())
    noise, batch, size = randn(3, D, seed=5), batch_of(DATA, 1), shard_of(DATA, 1).size
    half = Batch(batch.x[:4], batch.y[:4], batch.weight[:4])
    expected = PFedBayes(zeta=1.0, samples=3).grad_omega(model(), q, prior, half, size, noise)
    method = PVI(samples=3, prior_sigma=0.7)
    received = centre(pick(method.download(method.init(q.mu, 1, None), torch.arange(1)), 0))
    actual = method.grad(model(), moving(q), received, torch.zeros(2, D).double(), half, size, noise)
    assert difference(actual, expected) < 1e-12


def test_the_gradient_vanishes_at_the_best_fit_and_exactly_at_q_without_data():
    server, clients = federate(PVI(damping=1.0), DATA, 2, solved_by_pvi)
    method = PVI(samples=D + 1)
    local = method.begin(clients[2], pick(method.download(server, torch.arange(1)), 0), shard_of(DATA, 2))
    best = moving(best_fit(local.old - local.factor, DATA.a[2], DATA.b[2]))
    grad = method.grad(model(), best, local.received, local.factor, batch_of(DATA, 2), local.size, simplex())
    assert max(float(part.abs().max()) for part in grad) < 1e-9
    nothing, size = torch.zeros_like(clients[2]), shard_of(DATA, 2)
    start = method.begin(nothing, pick(method.download(server, torch.arange(1)), 0), size)
    batch = batch_of(DATA, 2)
    silent = method.grad(
        model(), start.q, start.received, start.factor, batch._replace(x=0 * batch.x), size.size, simplex()
    )
    assert not any(part.any() for part in silent)


def test_alone_it_is_variational_inference_with_the_prior():
    method = PVI(eta=0.03, samples=D + 1, damping=1.0)
    received = pick(method.download(method.init(torch.zeros(D).double(), 1, None), torch.arange(1)), 0)
    local = method.begin(method.enrol(received), received, shard_of(DATA, 4))
    for _ in range(300):
        local = method.step(model(), local, (batch_of(DATA, 4),), simplex())
    factor, change = method.end(local)
    assert torch.equal(factor, change)
    best = best_fit(prior_naturals(), DATA.a[4], DATA.b[4])
    assert difference(from_natural(prior_naturals() + factor), best) < 1e-2


def test_clipped_factors_are_distributions():
    ours = trained(PVI(eta=0.05, valid_factors=True), rounds=2)
    for (factor,) in client_states(ours).values():
        assert (factor[1] >= 1e-6).all()
        assert not factor[0][factor[1] <= 1e-6].any()


def test_the_first_round_starts_at_the_network_and_later_ones_at_the_posterior():
    method, theta = PVI(), randn(D)
    first = method.init(theta, 2, None)
    assert first.start[0].equal(theta)
    assert found(first).mu.abs().max() == 0
    after = method.aggregate(first, 0.1 * torch.ones(2, 2, D).double(), torch.ones(2), torch.arange(2))
    assert difference(mean_field(after.start), found(after)) < 1e-12
    q = mean_field(after.start)
    assert torch.equal(rho_of(q.sigma), rho_of(torch.nn.functional.softplus(after.start[1])))


def test_it_learns():
    ours = trained(PVI(eta=0.05), 12, training=dataclasses.replace(TRAINING, rounds=12, local_steps=20))
    before, after = (each.evaluate(samples=8)["shared"]["mc8"] for each in (federation(PVI()), ours))
    accuracy = [sum(each["accuracy"][0]) / len(SIZES) for each in (before, after)]
    assert accuracy[1] > accuracy[0] + 0.1
