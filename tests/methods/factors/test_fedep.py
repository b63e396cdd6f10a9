import torch
from conjugate import (
    SIZES,
    D,
    batch_of,
    federate,
    found,
    model,
    prior_naturals,
    problem,
    shard_of,
    solved_by_tilting,
)
from torch.testing import assert_close

from federations import client_states, difference, randn, trained
from pfedbayes.maths.trees import pick
from pfedbayes.methods import FedEP
from pfedbayes.methods.factors.tilted import begin_fit, fit_step, fitted

DATA = problem()


def test_fixed_point_has_the_exact_mean():
    server, clients = federate(FedEP(), DATA, 200, solved_by_tilting)
    assert_close(found(server).mu, DATA.mean, rtol=0, atol=1e-6)
    assert_close(server.q[1], DATA.precision.diagonal(), rtol=1e-9, atol=0)
    assert_close(server.q, prior_naturals() + sum(clients.values()), rtol=1e-11, atol=1e-11)


def test_factors_are_conserved_by_real_training():
    method = FedEP()
    ours = trained(method, rounds=3)
    prior = method.init(ours.servers[0].q[0], len(SIZES), None).q
    factors = sum(client[0] for client in client_states(ours).values())
    assert difference(ours.servers[0].q, prior + factors) < 1e-12


def test_leaving_is_never_having_joined_where_mean_field_is_exact():
    data, method = problem(orthogonal=True), FedEP(damping=1.0)
    server, clients = federate(method, data, 3, solved_by_tilting)
    never, _ = federate(method, data, 3, solved_by_tilting, lambda round: [0, 1, 3, 4])
    assert difference(method.leave(server, 2, clients[2]).q, never.q) < 1e-10


def test_sgd_finds_the_mode_of_the_tilted_distribution():
    cavity = torch.stack([randn(D, seed=7), randn(D, seed=8).exp()])
    local = begin_fit(torch.zeros(D).double(), cavity, shard_of(DATA, 4).size)
    for _ in range(400):
        local = fit_step(model(), local, batch_of(DATA, 4), randn(len(DATA.x[4])), rate=0.03, decay=0.9)
    mode = torch.linalg.solve(cavity[1].diag() + DATA.a[4], cavity[0] + DATA.b[4])
    assert_close(local.theta, mode, rtol=1e-6, atol=1e-6)


def test_the_fisher_information_is_the_mean_of_squared_gradients_of_examples():
    theta, batch = randn(D, seed=9), batch_of(DATA, 3)
    rows = [pick(batch, slice(k, k + 1)) for k in range(len(batch.weight))]
    exact = torch.stack([model().grad_nll(theta, row).square() for row in rows]).mean(0)
    draws = torch.stack([model().fisher(theta, batch, randn(len(rows), seed=k)) for k in range(400)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact) / error).abs().max() < 4


def test_projections():
    local = begin_fit(randn(D), torch.stack([randn(D), torch.ones(D).double()]), torch.tensor(10.0).double())
    local = local._replace(
        mean=2 * randn(D, seed=3), fisher=4 * torch.ones(D).double(), steps=torch.tensor(2.0).double()
    )
    laplace, identity = fitted(local, "laplace", 3.0, 0.5), fitted(local, "identity", 3.0, 0.5)
    assert_close(laplace[1], torch.full((D,), 1 + 3 * 10 * 2.0).double())
    assert_close(identity[1], torch.full((D,), 1 + 3 * 10 * 0.5).double())
    for each in (laplace, identity):
        assert_close(each[0] / each[1], randn(D, seed=3))
