import dataclasses
import itertools

import pytest
import torch
from pfedbayes_gaussians import new_client, random_v, run
from torch import nn
from torch.nn.functional import softplus
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    difference,
    federation,
    first_server,
    make_model,
    make_shards,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    train_alone,
    trained,
)
from pfedbayes.data import Shards
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.engine.training import Training
from pfedbayes.maths.gaussian import barycentre, gaussian, mean_field, rho_of, sample, sigma
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.metrics import log_average, nll
from pfedbayes.maths.random import choose
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.methods.base import Shard
from pfedbayes.nets import Batch

ROUNDING = 1e-12


class TestServer:
    server, uploads = random_v(6, seed=20), torch.stack([random_v(6, seed=21 + 2 * k) for k in range(3)])
    sizes, ids = torch.tensor([5.0, 50.0, 500.0], dtype=torch.float64), torch.arange(3)

    def aggregate(self, **fields):
        return PFedBayes(**fields).aggregate(self.server, self.uploads, self.sizes, self.ids)

    @pytest.mark.parametrize("beta", [1.0, 0.3, 2.0])
    def test_average_takes_mu_and_rho_of_each_client_alike_and_mixes_by_beta(self, beta):
        mean = (self.uploads[0] + self.uploads[1] + self.uploads[2]) / 3
        assert_close(self.aggregate(beta=beta), (1 - beta) * self.server + beta * mean)

    def test_average_sigma(self):
        mu, rho = self.uploads.unbind(1)
        merged = self.aggregate(server="average-sigma")
        assert_close(merged[0], mu.mean(0))
        assert_close(softplus(merged[1]), softplus(rho).mean(0))

    def test_barycentre_is_lemma_a2(self):
        assert_close(self.aggregate(server="barycentre"), barycentre(self.uploads, torch.ones(3, dtype=torch.float64)))

    def test_the_hyper_prior_makes_it_a_posterior_mode(self):
        s0, nu = 0.7, 3.0
        merged = mean_field(self.aggregate(server="hyper-prior", hyper_sigma=s0, hyper_weight=nu))
        clients = [mean_field(v) for v in self.uploads]

        def loss(mean, variance):
            """The negative log of likelihood times hyper-prior, where every weight has its own mean and variance."""
            terms = [variance.log() / 2 + (q.sigma**2 + (q.mu - mean) ** 2) / (2 * variance) for q in clients]
            return sum(terms) + nu * (variance.log() / 2 + s0**2 / (2 * variance))

        best = loss(merged.mu, merged.sigma.square())
        for shift, factor in [(0.01, 1.0), (-0.01, 1.0), (0.0, 1.02), (0.0, 0.98)]:
            assert (loss(merged.mu + shift, merged.sigma.square() * factor) > best).all()

    def test_lemma_a2_is_the_limit_of_the_hyper_prior(self):
        lemma = self.aggregate(server="barycentre")
        assert same_bits(self.aggregate(server="hyper-prior", hyper_weight=0.0), lemma)
        assert_close(self.aggregate(server="hyper-prior", hyper_weight=1e-9), lemma, rtol=1e-7, atol=1e-7)
        strong = self.aggregate(server="hyper-prior", hyper_weight=1e12, hyper_sigma=0.3)
        assert_close(mean_field(strong).sigma, torch.full((6,), 0.3).double())

    def test_the_hyper_prior_keeps_equal_and_certain_clients_from_collapsing(self):
        certain = torch.stack([self.uploads[0][0], torch.full((6,), -30.0).double()]).expand(3, 2, 6)
        for server, expected in (
            ("barycentre", 0.0),
            ("hyper-prior", (4 / 7) ** 0.5 * float(sigma(torch.tensor(-2.5)))),
        ):
            merged = PFedBayes(server=server).aggregate(self.server, certain, self.sizes, self.ids)
            assert_close(sigma(merged[1]), torch.full((6,), expected).double(), rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("server", ["average", "average-sigma", "barycentre"])
    def test_beta_zero_keeps_the_server_to_the_last_bit(self, server):
        assert same_bits(self.aggregate(beta=0.0, server=server), self.server)

    @pytest.mark.parametrize("server", ["average", "average-sigma", "barycentre"])
    def test_one_client_becomes_the_server(self, server):
        method, upload = PFedBayes(server=server), self.uploads[:1]
        merged = method.aggregate(self.server, upload, self.sizes[:1], self.ids[:1])
        assert_close(merged, upload[0], rtol=ROUNDING, atol=ROUNDING)

    @pytest.mark.parametrize("server", ["average", "average-sigma", "barycentre", "hyper-prior"])
    def test_order_of_clients_does_not_matter(self, server):
        method, order = PFedBayes(server=server), [2, 0, 1]
        args = [self.uploads, self.sizes, self.ids]
        permuted = method.aggregate(self.server, *(arg[order] for arg in args))
        assert difference(permuted, method.aggregate(self.server, *args)) < ROUNDING


def test_alone_in_the_federation_the_client_makes_the_server():
    training, shards = dataclasses.replace(TRAINING, participants=1), make_shards((23,), (3,))
    ours = trained(PFedBayes(), training=training, shards=shards)
    alone = train_alone(PFedBayes(), TRAINING.rounds, training, shards)
    assert difference(ours.servers[0], alone.uploads[0]) < ROUNDING


def test_all_train_and_the_server_is_the_plain_mean_of_the_chosen():
    method = PFedBayes(beta=0.4)
    ours, before = trained(method, rounds=2), trained(method, rounds=1).servers[0]
    uploads = train_alone(method, 2).uploads
    assert len(uploads) == len(SIZES)
    chosen = choose(TRAINING.seed, 2, len(SIZES), TRAINING.participants).tolist()
    mean = sum(uploads[i] for i in chosen) / len(chosen)
    assert difference(ours.servers[0], 0.6 * before + 0.4 * mean) < ROUNDING


def test_beta_zero_keeps_the_server_over_rounds():
    start = federation(PFedBayes()).servers
    assert same_bits(trained(PFedBayes(beta=0.0)).servers, start)


def test_global_rate_zero_keeps_the_server_and_its_predictions():
    start, after = federation(PFedBayes()), trained(PFedBayes(eta_global=0.0))
    assert difference(after.servers, start.servers) < ROUNDING
    x = randn(5, 3)
    assert_close(after.predict("shared", 0, x, None), start.predict("shared", 0, x, None))


def test_first_personal_step_does_not_depend_on_zeta():
    one_step = dataclasses.replace(TRAINING, local_steps=1)
    clients = [train_alone(PFedBayes(zeta=zeta), 1, one_step).clients for zeta in (0.0, 1.0, 10.0, 1e4)]
    for others in clients[1:]:
        assert all(same_bits(others[i].q, clients[0][i].q) for i in clients[0])
    more = [train_alone(PFedBayes(zeta=zeta), 1).clients for zeta in (0.0, 10.0)]
    assert not same_bits(more[0][0].q, more[1][0].q)  # the second does


def test_without_kl_a_client_never_sees_the_shared_model():
    method = PFedBayes(zeta=0.0)
    shards = make_shards()
    flipped = dataclasses.replace(shards, y=shards.y.clone())
    others = torch.cat([rows for i, rows in enumerate(shards.train) if i != 2])
    flipped.y[others] = (flipped.y[others] + 1) % 3
    together, elsewhere = (trained(method, shards=data) for data in (shards, flipped))
    assert not same_bits(together.servers, elsewhere.servers)
    assert same_bits(*(result.tensors()["clients.q"][2] for result in (together, elsewhere)))


def test_with_kl_it_does():
    method = PFedBayes()
    inputs = one_of(stacked_inputs(method), 2)
    moved = inputs._replace(received=inputs.received + 0.01)
    assert not same_bits(run(method, inputs)[0].q, run(method, moved)[0].q)


def test_without_kl_and_noise_it_is_adam_on_the_loss_of_the_means():
    method = PFedBayes(zeta=0.0, noise_std=0.0)
    inputs = one_of(stacked_inputs(method), 0)
    net, start = make_model().net, inputs.received

    def torch_adam(scale):
        mu = start[0].clone().requires_grad_()
        optimiser = torch.optim.Adam([mu], lr=method.eta_personal)
        for (batch,), _ in inputs.steps:
            optimiser.zero_grad()
            (scale * nn.functional.cross_entropy(net(mu, batch.x), batch.y)).backward()
            optimiser.step()
        return mu.detach()

    q = run(method, inputs)[0].q
    assert difference(q[0], torch_adam(scale=SIZES[0])) < ROUNDING  # (n/b) times the sum is n times the mean
    assert_close(q[0], torch_adam(scale=1.0), rtol=0, atol=1e-7)  # the factor matters to Adam's epsilon alone
    assert same_bits(q[1], start[1])


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_noise_std_scales_the_noise(scale):
    inputs = one_of(stacked_inputs(PFedBayes()), 0)
    louder = inputs._replace(steps=type(inputs.steps)((batches, scale * noise) for batches, noise in inputs.steps))
    found, expected = (run(PFedBayes(noise_std=s), each)[0].q for s, each in ((scale, inputs), (1.0, louder)))
    assert same_bits(found, expected)


@pytest.mark.parametrize("samples", [1, 3])
def test_taught_by_data_without_noise_the_shared_means_are_those_of_fedavg(samples):
    training = dataclasses.replace(TRAINING, participants=4)
    settings = {"training": training, "shards": make_shards((12,) * 4, (3,) * 4), "init": "kaiming"}
    method = PFedBayes(eta_data=0.1, noise_std=0.0, samples=samples)
    ours, fedavg = trained(method, **settings), trained(FedAvg(eta=0.1), **settings)
    start = federation(FedAvg(), **settings).servers[0]
    assert difference(fedavg.servers[0], start) > 1e-3
    assert difference(ours.servers[0][0], fedavg.servers[0]) < ROUNDING


def test_scaling_the_objective_leaves_the_iterates_alone():
    plain, scaled = PFedBayes(zeta=2.0), PFedBayes(zeta=200.0)
    inputs = one_of(stacked_inputs(plain), 0)
    weighted = inputs._replace(shard=inputs.shard._replace(size=100 * inputs.shard.size))
    assert_close(run(scaled, weighted)[0].q, run(plain, inputs)[0].q, rtol=0, atol=1e-7)


def test_minimising_the_kl_over_the_localized_global_model_alone_ends_at_q():
    method = PFedBayes(eta_personal=0.0, eta_global=0.1, optimizer="sgd", rho0=0.5)
    inputs = one_of(stacked_inputs(method), 0)
    q = random_v(31, seed=30, rho=0.5)
    inputs = inputs._replace(client=new_client(q), steps=inputs.steps * 300)
    client, upload = run(method, inputs)
    assert same_bits(client.q, q)
    assert_close(upload, q, rtol=1e-9, atol=1e-9)


def test_a_large_zeta_ties_the_client_to_its_prior():
    def distance(zeta):
        # The rate keeps rate * zeta / sigma^2 fixed, so that plain gradient descent converges for every zeta.
        method = PFedBayes(zeta, 0.5, eta_personal=0.02 / zeta, eta_global=0.0, prior="fixed", optimizer="sgd")
        inputs = one_of(stacked_inputs(method), 0)
        client, _ = run(method, inputs._replace(steps=inputs.steps * 50))
        return float((client.q - inputs.received).norm())

    distances = [distance(zeta) for zeta in (1e2, 1e3, 1e4, 1e5)]
    for wide, narrow in itertools.pairwise(distances):
        assert narrow == pytest.approx(wide / 10, rel=0.25)


def test_weight_noise_has_standard_deviation_one():
    # The output of a linear net x @ theta has standard deviation sqrt(sum x^2 sigma^2) over the draws of theta.
    model, method = make_model(nn.Linear(3, 1, bias=False), Regression(1.0)), PFedBayes()
    v, x = random_v(3, seed=40), randn(4, 3, seed=41)
    draws = method.predict(model, v, x, randn(20_000, 3, seed=42))
    expected = (x.square() @ softplus(v[1]).square()).sqrt()
    # The standard error of an estimated standard deviation is 1 / sqrt(2 * 20,000) = 0.5 % of it.
    assert_close(draws.std(0)[:, 0], expected, rtol=0.025, atol=0)
    assert_close(draws.mean(0)[:, 0], x @ v[0], rtol=0, atol=0.03)


def test_federation_predicts_with_standard_normal_noise():
    ours = federation(PFedBayes(), model=make_model(nn.Linear(3, 3)))
    x = torch.zeros(1, 3, dtype=torch.float64)  # the outputs are the biases, of standard deviation sigma0 = 0.0789
    for which in ("personal", "shared"):
        draws = ours.predict(which, 0, x, samples=20_000)
        assert_close(draws.std(0)[0], torch.full((3,), 0.0788897, dtype=torch.float64), rtol=0.025, atol=0)


def test_averaging_draws_helps_and_gives_probabilities():
    # A strong and wide prior, so that single draws are blurred.
    method, training = PFedBayes(zeta=3.0, rho0=0.0, eta_personal=0.02, eta_global=0.02), Training(seed=3)
    shards = make_shards((40, 60, 50, 30), (200, 200, 200, 200))
    ours = trained(method, 20, training=training, shards=shards)
    single, averaged, gaps = [], [], []
    for i, rows in enumerate(shards.test):
        x, y = shards.x[rows], shards.y[rows]
        draws = ours.predict("personal", i, x, samples=50)
        log_probs = log_average(draws)
        assert_close(log_probs.exp().sum(-1), torch.ones(len(y), dtype=torch.float64))
        single.append((draws.argmax(-1) == y).double().mean())
        averaged.append((log_probs.argmax(-1) == y).double().mean())
        gaps.append(torch.stack([nll(draw.log_softmax(-1), y) for draw in draws]).mean() - nll(log_probs, y))
    assert sum(averaged) / len(averaged) > sum(single) / len(single) + 0.01
    assert min(gaps) > 0  # Jensen's inequality


class TestBayesianLinearRegression:
    """Eq. (1) with a linear network: the posterior is Gaussian with precision P = X^T X / sigma_eps^2 + I / sigma_0^2.

    Among factorised Gaussians, KL(q || posterior) is least at its mean and the variances 1 / P_mm.
    """

    sigma_eps, rho0, sizes = 0.8, 0.3, (4, 12, 7)
    model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps))
    x, prior_mean = randn(sum(sizes), 3, seed=50), 0.5 * randn(3, seed=51)
    y = x @ randn(3, 1, seed=52) + sigma_eps * randn(sum(sizes), 1, seed=53)
    rows = torch.arange(sum(sizes)).split(list(sizes))
    prior = gaussian(prior_mean, rho0)

    def optimum(self, zeta=1.0):
        """(3, 2, T): in zeta KL the prior's precision counts zeta times, and so does the entropy of q."""
        optima = []
        for rows in self.rows:
            x, y = self.x[rows], self.y[rows, 0]
            prior_precision = zeta / softplus(self.prior[1]).square()
            precision = x.T @ x / self.sigma_eps**2 + prior_precision.diag()
            mean = torch.linalg.solve(precision, x.T @ y / self.sigma_eps**2 + prior_precision * self.prior_mean)
            optima.append(torch.stack([mean, rho_of((zeta / precision.diagonal()).sqrt())]))
        return torch.stack(optima)

    @pytest.mark.parametrize(("zeta", "rate"), [(1.0, 0.03), (5.0, 0.02)])
    def test_exact_expected_gradient_ends_at_the_closed_form(self, zeta, rate):
        # These vectors have mean 0 and covariance I. With them as noise, the average over draws of a quadratic loss
        # and of its gradients in mu and rho is the expectation.
        simplex = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
        method = PFedBayes(zeta, self.rho0, rate, eta_global=0.0, samples=4, prior="fixed", optimizer="sgd")
        for rows, optimum in zip(self.rows, self.optimum(zeta), strict=True):
            batch = Batch(self.x[rows], self.y[rows], torch.ones(len(rows), dtype=torch.float64))
            shard = Shard(torch.tensor(len(rows), dtype=torch.float64), labels=torch.empty(0))
            steps = [((batch,), simplex[None])] * 400
            client, _ = client_round(method, self.model, new_client(self.prior), self.prior, shard, steps)
            assert_close(client.q, optimum, rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize(
        ("optimizer", "rate", "samples", "rounds"),
        [("sgd", 0.003, 1, 60), pytest.param("adam", 0.003, 8, 120, marks=pytest.mark.slow)],
    )
    def test_own_noise_and_mini_batches_end_near_the_closed_form(self, optimizer, rate, samples, rounds):
        # The server never moves (beta = 0), so that every client has the prior v^0 in every round.
        empty = tuple(torch.empty(0, dtype=torch.int64) for _ in self.sizes)
        shards = Shards(self.x, self.y, self.rows, empty, empty, names=("a", "b", "c"), num_classes=None)
        method = PFedBayes(1.0, self.rho0, rate, samples=samples, beta=0.0, prior="fixed", optimizer=optimizer)
        training = Training(rounds=rounds, local_steps=50, batch_size=6, seed=1)
        ours = federation(method, training, shards=shards, model=self.model)
        ours.servers = [self.prior]
        visited = torch.stack([ours.tensors()["clients.q"] for round in ours.rounds() if 2 * round > rounds])
        mu, rho = self.optimum().unbind(1)
        assert ((visited[:, :, 0].mean(0) - mu) / sigma(rho)).abs().max() < 0.1
        assert (sigma(visited[:, :, 1]).mean(0) / sigma(rho) - 1).abs().max() < 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("zeta", -1.0),
        ("eta_personal", -0.1),
        ("eta_data", -0.1),
        ("sigma_by_size", -0.1),
        ("eta_global", -0.1),
        ("samples", 0),
        ("beta", -0.5),
        ("noise_std", -1.0),
        ("personal_steps", 0),
    ],
)
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        PFedBayes(**{field: value})


def test_algorithm_1_with_other_hyper_parameters_has_no_extensions():
    assert PFedBayes().extensions == ()
    tuned = PFedBayes(zeta=1.0, rho0=-4.0, eta_personal=0.01, eta_global=0.02, samples=5, beta=0.5)
    assert tuned.extensions == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("server", "barycentre"),
        ("server", "hyper-prior"),
        ("hyper_weight", 1.0),
        ("noise_std", 0.5),
        ("personal_steps", 2),
        ("reset_personal", True),
        ("prior", "fixed"),
        ("optimizer", "sgd"),
        ("scale", "batch"),
        ("eta_data", 0.01),
        ("sigma_by_size", 1.0),
    ],
)
def test_every_change_of_the_algorithm_is_an_extension(field, value):
    assert PFedBayes(zeta=1.0, **{field: value}).extensions == (field,)


def test_extensions_are_named_in_the_order_of_the_fields():
    assert PFedBayes(eta_data=0.1, scale="batch").extensions == ("scale", "eta_data")


def test_noise_reaches_the_objective_through_eq_26():
    v, g = random_v(7, seed=60), randn(7, seed=61)
    assert_close(sample(mean_field(v), g), v[0] + softplus(v[1]) * g)


def test_first_models_of_server_and_clients_are_equal():
    method = PFedBayes()
    start = first_server(method, make_model(), TRAINING.seed)
    assert same_bits(method.enrol(start).q, start)
    assert not any(leaf.any() for leaf in method.enrol(start).adam_q)


def test_the_posterior_has_the_deviation_of_the_noise_that_trains_it():
    v = torch.stack([torch.tensor([1.0, -2.0]), rho_of(torch.tensor([0.5, 0.25]))]).double()
    for noise_std in (1.0, 0.5, 3.0):
        posterior = PFedBayes(noise_std=noise_std).posterior(v)
        assert posterior[0].tolist() == [1.0, -2.0]
        assert posterior[1].tolist() == pytest.approx([0.5 * noise_std, 0.25 * noise_std], rel=1e-6)
