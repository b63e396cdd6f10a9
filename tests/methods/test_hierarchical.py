import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    difference,
    first_server,
    make_shards,
    randn,
    same_bits,
    train_alone,
    trained,
)
from pfedbayes.data import Shards
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.engine.personalisation import HierarchicalFromPriors, personalise, prior_of
from pfedbayes.engine.setup import Copy
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import MeanField, barycentre, kl, mean_field, rho_of
from pfedbayes.maths.likelihoods import Classification, Gaussian, Regression, StudentT
from pfedbayes.maths.optim import Adam, adam_init
from pfedbayes.maths.survival import Survival
from pfedbayes.maths.trees import pick, stack, tree_map
from pfedbayes.methods import FedAvg, Hierarchical
from pfedbayes.methods.base import Limits, Shard
from pfedbayes.methods.hierarchical import Local, Upload, adam_of_gaussian, annealed, with_schedule
from pfedbayes.nets import Batch, Model, Net, TableNet

ROUNDING = 1e-10
FIXED = 1e12  # a confidence that keeps the scales
NOISE, INPUTS = 0.5, 4
WEIGHTS = INPUTS + 1  # with the bias, the last one
ONE_STEP = Training(local_steps=1, seed=1)


def linear_model(inputs: int = INPUTS) -> Model:
    return Model(Net(TableNet(inputs, 0, 0, 1)), Regression(NOISE))


def linear_shards(sizes, spread, seed=0, inputs=INPUTS) -> Shards:
    """Return a hierarchical linear regression with the scales at which the method starts and correlated inputs."""
    x = 0.8 * randn(sum(sizes), inputs, seed=seed) + 0.6 * randn(sum(sizes), 1, seed=seed + 1)
    scale = torch.tensor([inputs**-0.5] * inputs + [1.0], dtype=torch.float64)
    theta = scale * (randn(inputs + 1, seed=seed + 2) + spread * randn(len(sizes), inputs + 1, seed=seed + 3))
    rows = torch.arange(sum(sizes)).split(list(sizes))
    own = theta.repeat_interleave(torch.tensor(sizes), 0)
    y = (with_bias(x) * own).sum(1, keepdim=True) + NOISE * randn(sum(sizes), 1, seed=seed + 4)
    empty = tuple(torch.empty(0, dtype=torch.int64) for _ in sizes)
    return Shards(x, y, rows, empty, empty, names=tuple(f"site {i}" for i in range(len(sizes))), num_classes=None)


def with_bias(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def joint_posterior(shards, spread):
    """Return mean and precision of (mu, delta_1, ..., delta_N) by dense algebra, with the scales of the start."""
    number, inputs = len(shards.train), shards.x.shape[1]
    count = inputs + 1
    design = torch.zeros(len(shards.x), (number + 1) * count, dtype=torch.float64)
    design[:, :count] = with_bias(shards.x)
    for i, rows in enumerate(shards.train):
        design[rows, (i + 1) * count : (i + 2) * count] = with_bias(shards.x[rows])
    scale = torch.tensor([1 / inputs] * inputs + [1.0], dtype=torch.float64)  # S^2
    prior = torch.cat([scale, *[spread**2 * scale] * number])
    precision = design.T @ design / NOISE**2 + (1 / prior).diag()
    mean = torch.linalg.solve(precision, design.T @ shards.y[:, 0] / NOISE**2)
    return mean.view(number + 1, count), precision


def fit(shards, method, training=ONE_STEP, rounds=400, **others):
    model = linear_model(shards.x.shape[1])
    return trained(method, rounds, shards=shards, model=model, training=training, **others)


def parts_of(result):
    """Return q(mu), and q(delta) and q(theta) of all clients."""
    tensors = result.tensors()
    return tuple(map(mean_field, (result.servers[0].shared, tensors["clients.delta"], tensors["clients.q"])))


class Errors:
    """The largest deviations from the exact posterior means, in its standard deviations, and of the widths."""

    def __init__(self, result, spread):
        shards = result.shards
        mean, precision = joint_posterior(shards, spread)
        covariance = torch.linalg.inv(precision).view(*mean.shape, *mean.shape)
        widths = precision.diagonal().rsqrt().view(mean.shape)
        mu, delta, theta = parts_of(result)
        self.mu = float(((mu.mu - mean[0]) / covariance[0, :, 0].diagonal().sqrt()).abs().max())
        self.theta = 0.0
        for i in range(len(shards.train)):
            own = sum(covariance[a, :, b] for a in (0, i + 1) for b in (0, i + 1)).diagonal().sqrt()
            self.theta = max(self.theta, float(((theta.mu[i] - mean[0] - mean[i + 1]) / own).abs().max()))
        self.widths = float((torch.cat([mu.sigma[None], delta.sigma]) / widths - 1).abs().max())


class WithoutCorrection(Hierarchical):
    """Plain averaging of the clients' copies of q(mu)."""

    def begin(self, client, received, shard):
        local = super().begin(client, received, shard)
        return local._replace(correction=torch.zeros_like(local.correction))


class TestExactPosterior:
    """In linear regression with the true scales the method ends at the mean-field optimum."""

    sizes, spread = (5, 10, 20, 40, 5, 10, 20, 40), 0.3
    shards = linear_shards(sizes, spread)
    many_steps = dataclasses.replace(ONE_STEP, local_steps=25)

    def test_means_are_exact_and_widths_are_the_mean_field_optimum(self):
        result = fit(self.shards, Hierarchical(eta_mean=0.1, confidence=FIXED, anneal=400))
        errors = Errors(result, self.spread)
        assert errors.mu < 0.02
        assert errors.theta < 0.02
        assert errors.widths < 1e-4
        mu, delta, theta = parts_of(result)
        assert_close(theta.mu, mu.mu + delta.mu)
        assert_close(theta.sigma, (mu.sigma.square() + delta.sigma.square()).sqrt())

    def test_few_rounds_of_many_steps_end_there_too_and_plain_averages_do_not(self):
        ours, plain = (
            Errors(
                fit(self.shards, kind(eta_mean=0.03, anneal=1000, confidence=FIXED), self.many_steps, 40), self.spread
            )
            for kind in (Hierarchical, WithoutCorrection)
        )
        assert ours.mu < 0.005
        assert ours.theta < 0.005
        assert ours.widths < 0.005
        assert plain.mu > 10 * ours.mu
        assert plain.theta > 10 * ours.theta
        assert plain.widths > 10 * ours.widths


class TestNewcomers:
    sizes, spread = (30, 20), 0.5

    def prior(self, **fields):
        shards = linear_shards(self.sizes, self.spread)
        return shards, prior_of(fit(shards, Hierarchical(**fields), rounds=20), "shared")

    def test_the_prior_has_the_variances_of_mu_and_of_the_spread(self):
        _, prior = self.prior()
        result = fit(linear_shards(self.sizes, self.spread), Hierarchical(), rounds=20)
        server = result.servers[0]
        mu = mean_field(server.shared)
        found = mean_field(prior.states[0])
        assert_close(found.mu, mu.mu)
        assert_close(found.sigma.square(), mu.sigma.square() + server.spread)

    @pytest.mark.parametrize("zeta", [None, 3.0])
    def test_the_posterior_is_the_conjugate_mean_field_optimum(self, zeta):
        shards, prior = self.prior(kl_personal=2.0)
        weight = 2.0 if zeta is None else zeta
        own = personalise(prior, shards, steps=400, zeta=zeta)
        before = mean_field(prior.states[0])
        for i, rows in enumerate(shards.train):
            design = with_bias(shards.x[rows])
            precision = design.T @ design / NOISE**2 + weight * before.sigma.pow(-2).diag()
            target = design.T @ shards.y[rows, 0] / NOISE**2 + weight * before.sigma.pow(-2) * before.mu
            q = mean_field(own.personal_state(i, 0).q)
            exact, sd = torch.linalg.solve(precision, target), torch.linalg.inv(precision).diagonal().sqrt()
            assert ((q.mu - exact) / sd).abs().max() < 0.02
            assert_close(q.sigma, (precision.diagonal() / weight).rsqrt(), rtol=1e-4, atol=0)

    def test_without_steps_it_is_the_prior(self):
        shards, prior = self.prior()
        own = personalise(prior, shards, steps=0)
        for i in range(2):
            state = own.personal_state(i, 0)
            assert same_bits(state.q, prior.states[0])
            assert float(kl(mean_field(state.q), mean_field(prior.states[0]))) == 0.0
            posterior = own.method.posterior(state)
            assert same_bits(posterior.sigma, mean_field(prior.states[0]).sigma)

    def test_training_keeps_the_setting_and_the_server(self):
        shards, prior = self.prior(full_batch=False, eta_mean=0.02, eta_rho=0.01)
        own = personalise(prior, shards, steps=5)
        assert own.method == HierarchicalFromPriors(0.02, 0.01, 5, False, 1.0)
        assert not own.method.needs.full_batch
        assert same_bits(own.servers[0], prior.states[0].expand(2, -1, -1))
        assert own.round == 1

    def test_personal_models_are_priors_of_their_own(self):
        shards = linear_shards(self.sizes, self.spread)
        result = fit(shards, Hierarchical(), rounds=3)
        prior = prior_of(result, "personal")
        assert same_bits(prior.states[0], result.tensors()["clients.q"])
        own = personalise(prior, shards, steps=0)
        assert same_bits(own.personal_state(1, 0).q, prior.states[0][1])
        with pytest.raises(UserError, match="3 clients cannot start from the personal models of 2"):
            prior.per_client(3)


class TestLemmaA2:
    """With a point for mu and no hyper-prior, the server's distribution of new weights is the barycentre."""

    def test_the_variance_is_the_mean_variance_plus_the_variance_of_the_means(self):
        method = Hierarchical(confidence=1e-12, wait=0.0)
        server = first_server(method, linear_model(), 1, num_clients=3)
        difference_ = randn(3, WEIGHTS, seed=1)
        difference_ -= difference_.mean(0)  # as at the optimum over m
        widths, mean = randn(3, WEIGHTS, seed=2).abs() + 0.1, randn(WEIGHTS, seed=3)
        point = torch.stack([mean, rho_of(torch.full((WEIGHTS,), 1e-12, dtype=torch.float64))])
        uploads = stack([upload_of(point, MeanField(d, w)) for d, w in zip(difference_, widths, strict=True)])
        after = method.aggregate(server, uploads, torch.ones(3), torch.arange(3))
        ours = method.posterior(after)
        clients = torch.stack([mean + difference_, rho_of(widths)], 1)
        lemma = mean_field(barycentre(clients, torch.ones(3, dtype=torch.float64)))
        assert_close(ours.mu, lemma.mu)
        assert_close(ours.sigma, lemma.sigma)

    def test_training_without_the_kl_of_mu_ends_at_the_barycentre_of_the_clients(self):
        shards = linear_shards((20, 30, 40), 1.0)
        method = Hierarchical(eta_mean=0.2, confidence=1e-12, kl_shared=0.0, wait=0.5, anneal=400)
        result = fit(shards, method)
        mu, _, _ = parts_of(result)
        server = method.posterior(result.servers[0])
        lemma = mean_field(barycentre(result.tensors()["clients.q"], torch.ones(3, dtype=torch.float64)))
        assert (mu.sigma < 0.01 * server.sigma).all()
        assert ((server.mu - lemma.mu).abs() < 0.02 * lemma.sigma).all()
        assert_close(server.sigma, lemma.sigma, rtol=1e-3, atol=0)


def test_the_spread_of_few_clients_collapses_without_a_hyper_prior_alone():
    shards = linear_shards((12, 12, 12), 0.1)
    start, training = first_server(Hierarchical(), linear_model(), 1, 3).spread, Training(local_steps=4, seed=1)
    free, held = (
        fit(shards, Hierarchical(confidence=confidence, wait=0.0), training, 100).servers[0].spread / start
        for confidence in (1e-9, 4.0)
    )
    assert free.min() < 0.03
    assert held.min() > 0.15


def upload_of(shared, delta: MeanField, steps=1.0) -> Upload:
    square = delta.mu.square() + delta.sigma.square()
    return Upload(shared, adam_init(shared), torch.zeros_like(shared), square, torch.tensor(steps, dtype=torch.float64))


class TestServer:
    model = Model(Net(TableNet(2, 1, 3, 2, constants=2)), Regression(1.0))

    def test_the_start(self):
        method = Hierarchical(spread=0.2)
        theta = randn(self.model.net.num_params)
        server = method.init(theta, 7, self.model.net)
        number, fan_in = self.model.net.blocks()
        expected = torch.tensor([1 / fan_in[k] for k in number], dtype=torch.float64)
        mu = mean_field(server.shared)
        assert_close(mu.mu, theta)
        assert_close(mu.sigma, 0.05 * expected.sqrt())
        assert_close(server.scale, expected)
        assert_close(server.spread, 0.04 * expected)
        assert_close(server.start, torch.stack([server.scale, server.spread]))
        assert float(server.share) == pytest.approx(1 / 7)
        assert float(server.steps) == 0
        assert not server.gradient.any()
        received = pick(method.download(server, torch.arange(7)), 0)
        client = method.enrol(received)
        delta = mean_field(client.delta)
        assert not delta.mu.any()
        assert_close(delta.sigma, 0.05 * expected.sqrt())
        assert_close(mean_field(client.q).sigma, (mu.sigma.square() + server.spread).sqrt())
        assert_close(mean_field(client.q).mu, theta)
        assert not client.gradient.any()
        assert not any(leaf.any() for leaf in client.adam)

    @pytest.mark.parametrize("nu", [0.5, 4.0])
    def test_the_scales_are_their_formulas(self, nu):
        method = Hierarchical(confidence=nu, wait=0.5, anneal=10)
        size = self.model.net.num_params
        server = method.init(randn(size), 5, self.model.net)._replace(steps=torch.tensor(4.0, dtype=torch.float64))
        shared = torch.stack([torch.stack([randn(size, seed=k), -2 + randn(size, seed=k + 9)]) for k in range(3)])
        deltas = [MeanField(randn(size, seed=20 + k), randn(size, seed=30 + k).abs() + 0.1) for k in range(3)]
        uploads = stack([upload_of(each, delta) for each, delta in zip(shared, deltas, strict=True)])
        after = method.aggregate(server, uploads, torch.ones(3), torch.arange(3))

        q = mean_field(shared.mean(0))
        number = self.model.net.blocks().number.tolist()
        for j, g in enumerate(number):
            block = [k for k, other in enumerate(number) if other == g]
            squares = {k: sum(float(d.mu[k] ** 2 + d.sigma[k] ** 2) for d in deltas) for k in block}
            of_block = (sum(squares.values()) + nu * float(server.start[1, j])) / (3 * len(block) + nu)
            assert float(after.spread[j]) == pytest.approx((squares[j] + nu * of_block) / (3 + nu), rel=1e-12)
            total = sum(float(q.mu[k] ** 2 + q.sigma[k] ** 2) for k in block)
            expected = (total + nu * float(server.start[0, j])) / (len(block) + nu)
            assert float(after.scale[j]) == pytest.approx(expected, rel=1e-12)
        assert float(after.steps) == 5

    def test_it_waits_before_it_learns_the_scales(self):
        method = Hierarchical(wait=0.5, anneal=10)
        size = self.model.net.num_params
        server = method.init(randn(size), 5, self.model.net)
        delta = MeanField(torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64))
        uploads = stack([upload_of(server.shared, delta)] * 2)
        for steps, learns in ((3.9, False), (4.0, True)):
            at = server._replace(steps=torch.tensor(steps, dtype=torch.float64))
            after = method.aggregate(at, uploads, torch.ones(2), torch.arange(2))
            assert same_bits(after.spread, server.spread) != learns
            assert same_bits(after.scale, server.scale) != learns

    def test_without_a_schedule_it_is_that_of_400_steps(self):
        method, size = Hierarchical(), self.model.net.num_params
        server = method.init(randn(size), 5, self.model.net)
        delta = MeanField(torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64))
        uploads = stack([upload_of(server.shared, delta, 0.0)] * 2)
        for steps, learns in ((99.9, False), (100.0, True)):  # a quarter of them
            at = server._replace(steps=torch.tensor(steps, dtype=torch.float64))
            after = method.aggregate(at, uploads, torch.ones(2), torch.arange(2))
            assert same_bits(after.spread, server.spread) != learns

    def test_it_averages_copies_and_keeps_the_mean_gradient_of_all_clients(self):
        method = Hierarchical()
        size = self.model.net.num_params
        server = method.init(randn(size), 5, self.model.net)._replace(gradient=randn(2, size, seed=5))
        delta = MeanField(torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64))
        uploads = stack([upload_of(randn(2, size, seed=k), delta) for k in range(2)])
        uploads = uploads._replace(gradient=randn(2, 2, size, seed=6))
        after = method.aggregate(server, uploads, torch.ones(2), torch.arange(2))
        assert_close(after.shared, uploads.shared.mean(0))
        # Two of five clients replace two fifths of the mean.
        assert_close(after.gradient, 0.6 * server.gradient + 0.4 * uploads.gradient.mean(0))


def filled(like, value, *places):
    changed = torch.zeros_like(like)
    changed[places] = value
    return changed


class TestUploads:
    """Every bound is met exactly by what is accepted, and exceeded in one entry by what is refused."""

    limits = Limits(largest=50.0, rho=20.0, step=10.0, examples=4.0, steps=3)
    size = 6

    def check(self, shared=None, moments=None, limits=None, model=(45, -15), **others):
        nothing = torch.zeros(2, self.size, dtype=torch.float64)
        one, server = torch.ones((), dtype=torch.float64), nothing + torch.tensor(model)[:, None]
        adam = Adam(nothing, nothing, one, 0 * one)._replace(**(moments or {}))
        upload = Upload(server, adam, nothing, nothing[0], 3 * one)._replace(**others)
        if shared is not None:
            upload = upload._replace(shared=server + shared)
        state = Hierarchical().init(server[0], 5, linear_model(self.size - 1).net)._replace(shared=server)
        return Hierarchical().check_upload(state, upload, self.limits._replace(**(limits or {})))

    def test_what_meets_every_bound_is_accepted(self):
        nothing = torch.zeros(2, self.size, dtype=torch.float64)
        assert self.check() is None
        assert self.check(shared=filled(nothing, 5.0, 0, 2) - filled(nothing, 5.0, 1, 3)) is None
        assert self.check(shared=filled(nothing, -10.0, 0, 2) + filled(nothing, 10.0, 1, 3)) is None
        assert self.check(square=filled(nothing[0], 100.0, 1), gradient=filled(nothing, -200.0, 1, 1)) is None
        moments = {"mean": filled(nothing, 200.0, 0, 1), "square": filled(nothing, 4e4, 1, 0)}
        assert self.check(moments=moments) is None
        assert self.check(gradient=filled(nothing, 50.0, 0, 0), limits={"examples": 0.0}) is None  # as for one

    def test_narrow_bounds_are_met_by_what_is_zero(self):
        assert self.check(limits={"largest": 0.1, "step": 0.1, "examples": 1.0}, model=(0, 0)) is None

    @pytest.mark.parametrize(
        ("place", "value", "reason"),
        [
            ((0, 5), 5.1, "its mean has an entry of magnitude 50.1, more than 50"),
            ((1, 0), -5.1, "its rho has an entry of magnitude 20.1, more than 20"),
            ((0, 0), -10.1, "its distance from the server has an entry of magnitude 10.1, more than 10"),
            ((1, 5), 10.1, "its distance from the server has an entry of magnitude 10.1, more than 10"),
        ],
    )
    def test_a_wild_model_is_named(self, place, value, reason):
        changed = filled(torch.zeros(2, self.size, dtype=torch.float64), value, *place)
        assert self.check(shared=changed) == reason

    @pytest.mark.parametrize("value", [-201.0, 201.0])
    def test_gradients_are_limited_per_example(self, value):
        gradient = filled(torch.zeros(2, self.size, dtype=torch.float64), value, 1, 2)
        assert self.check(gradient=gradient) == "its gradient has an entry of magnitude 201, more than 200"
        found = self.check(moments={"mean": gradient})
        assert found == "its mean of gradients has an entry of magnitude 201, more than 200"
        found = self.check(moments={"square": gradient.square()})
        assert found == "its mean of squared gradients has the root of magnitude 201, more than 200"
        assert "more than 50" in self.check(gradient=gradient, limits={"examples": 0.5})

    def test_a_wild_deviation_is_named(self):
        square = filled(torch.zeros(self.size, dtype=torch.float64), 102.01, 2)
        assert self.check(square=square).startswith(
            "its deviation from the shared model has an entry of magnitude 10.1"
        )

    def test_squares_are_not_negative(self):
        nothing = torch.zeros(2, self.size, dtype=torch.float64)
        assert self.check(square=filled(nothing[0], -1e-3, 2)) == "a mean of squares is negative"
        assert self.check(moments={"square": filled(nothing, -1e-3, 0, 2)}) == "a mean of squares is negative"

    @pytest.mark.parametrize("name", ["mean_weight", "square_weight"])
    def test_weights_of_moments_are_shares(self, name):
        for value, fits in ((-0.01, False), (0.0, True), (0.5, True), (1.0, True), (1.01, False)):
            found = self.check(moments={name: torch.tensor(value, dtype=torch.float64)})
            assert found == (None if fits else "a weight of Adam's moments is not between 0 and 1")

    @pytest.mark.parametrize("steps", [2.0, 4.0])
    def test_steps_are_those_of_a_round(self, steps):
        found = self.check(steps=torch.tensor(steps, dtype=torch.float64))
        assert found == f"it took {steps:g} local steps instead of 3"


def test_rates_fall_to_zero_over_the_whole_run_unless_told_otherwise():
    assert with_schedule(Hierarchical(), 120) == Hierarchical(anneal=120)
    assert with_schedule(Hierarchical(), 0) == Hierarchical(anneal=1)
    assert with_schedule(Hierarchical(anneal=7), 120) == Hierarchical(anneal=7)
    assert with_schedule(FedAvg(), 120) == FedAvg()


class TestControlVariates:
    def test_the_server_has_the_mean_of_the_clients_gradients(self):
        result = trained(Hierarchical(), 4, training=dataclasses.replace(TRAINING, participants=None))
        mean = result.tensors()["clients.gradient"].mean(0)
        assert difference(result.servers[0].gradient, mean) < ROUNDING

    def test_the_corrections_sum_to_zero_when_all_take_part(self):
        method, training = Hierarchical(), dataclasses.replace(TRAINING, participants=None)
        result = trained(method, 2, training=training)
        received = method.download(result.servers[0], torch.arange(len(SIZES)))
        total, largest = 0.0, 0.0
        for i in range(len(SIZES)):
            shard = Shard(torch.tensor(1.0), torch.empty(0))
            local = method.begin(result.personal_state(i, 0), pick(received, i), shard)
            total, largest = total + local.correction, max(largest, float(local.correction.abs().max()))
        assert float(total.abs().max()) < ROUNDING * largest

    def test_clients_that_agree_take_the_steps_of_one(self):
        shards = make_shards((12,), (3,))
        four = dataclasses.replace(
            shards, train=shards.train * 4, test=shards.test * 4, validation=shards.validation * 4, names=tuple("abcd")
        )
        model = Model(Net(TableNet(3, 0, 0, 1)), Regression(NOISE))
        shards, four = (
            dataclasses.replace(each, y=each.y[:, None].double(), num_classes=None) for each in (shards, four)
        )
        method = Hierarchical(kl_shared=0.0, confidence=FIXED)
        training = Training(local_steps=3, seed=1)
        one, all_four = (trained(method, 4, training=training, shards=each, model=model) for each in (shards, four))
        assert difference(all_four.servers[0].shared, one.servers[0].shared) < ROUNDING

    def test_one_step_of_all_clients_is_one_of_adam_on_the_mean_gradient(self):
        shards = linear_shards((6, 9, 4), 1.0)
        method = Hierarchical(confidence=FIXED, anneal=50)
        model = linear_model()
        before, after = (fit(shards, method, rounds=rounds) for rounds in (3, 4))
        server = before.servers[0]
        mu, rates = mean_field(server.shared), annealed((method.eta_mean, method.eta_rho), server.steps, 50)
        grads = []
        for i, rows in enumerate(shards.train):
            delta = mean_field(before.personal_state(i, 0).delta)
            shared = server.shared.clone().requires_grad_()
            q = mean_field(shared)
            batch = Batch(shards.x[rows], shards.y[rows], torch.ones(len(rows), dtype=torch.float64))
            variance = q.sigma.square() + delta.sigma.square()
            loss = model.expected_nll(q.mu + delta.mu, variance, batch, torch.zeros(len(rows), 1, dtype=torch.float64))
            prior = MeanField(torch.zeros_like(mu.mu), server.scale.sqrt())
            (grad,) = torch.autograd.grad(loss + kl(q, prior) / 3, shared)
            grads.append(grad)
        expected, _ = adam_of_gaussian(server.shared, torch.stack(grads).mean(0), server.adam, rates)
        # Second moments are those of each client's corrected gradient, which is close to the mean gradient.
        moved = (after.servers[0].shared - server.shared).abs().max()
        assert float((after.servers[0].shared - expected).abs().max()) < 0.01 * float(moved)


def test_adam_has_debiased_moments_and_a_rate_for_each_row():
    v, state = randn(2, 3, seed=1), adam_init(torch.zeros(2, 3, dtype=torch.float64))
    rates = (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.02, dtype=torch.float64))
    ours, rows = v, [v[k].clone().requires_grad_() for k in range(2)]
    optimiser = torch.optim.Adam(
        [{"params": [rows[0]], "lr": 0.1}, {"params": [rows[1]], "lr": 0.02}], betas=(0.9, 0.99), eps=0.0
    )
    for k in range(5):
        grad = randn(2, 3, seed=10 + k)
        ours, state = adam_of_gaussian(ours, grad, state, rates)
        for row, own in zip(rows, grad, strict=True):
            row.grad = own
        optimiser.step()
    assert_close(ours, torch.stack(rows).detach(), rtol=1e-6, atol=1e-6)
    still, _ = adam_of_gaussian(v, torch.zeros_like(v), adam_init(v), rates)
    assert same_bits(still, v)


def test_the_rates_fall_to_zero_by_a_cosine():
    def at(steps):
        return [float(rate) for rate in annealed((0.3, 0.5), torch.tensor(steps, dtype=torch.float64), 100)]

    assert at(0.0) == [0.3, 0.5]
    assert at(50.0) == pytest.approx([0.15, 0.25])
    assert at(25.0) == pytest.approx([0.3 * (0.5 + 0.5 * math.sqrt(0.5)), 0.5 * (0.5 + 0.5 * math.sqrt(0.5))])
    assert at(100.0) == pytest.approx([0.0, 0.0], abs=1e-15)
    assert at(250.0) == at(100.0)


def test_delta_makes_up_for_a_change_of_mu_where_the_data_determine_theta():
    method, model = Hierarchical(), linear_model()
    server = first_server(method, model, 1, 1)
    received = pick(method.download(server, torch.arange(1)), 0)
    client = method.enrol(received)
    shares = torch.tensor([0.0, 0.25, 1 - 1e-12, -1.0], dtype=torch.float64)[torch.arange(WEIGHTS) % 4]
    widths = (received.spread * (1 - shares)).sqrt()
    means = randn(WEIGHTS, seed=3)
    client = client._replace(q=torch.stack([received.shared[0] + means, client.q[1]]),
                             delta=torch.stack([means, rho_of(widths)]))  # fmt: skip
    moved = received._replace(shared=received.shared + torch.tensor([[0.5], [0.0]], dtype=torch.float64))
    shard = Shard(torch.tensor(3.0, dtype=torch.float64), torch.empty(0))
    assert_close(method.begin(client, received, shard).delta, client.delta)
    # A posterior wider than the prior counts as undetermined.
    expected = means - 0.5 * shares.clamp(min=0)
    assert_close(method.begin(client, moved, shard).delta[0], expected, rtol=1e-6, atol=1e-6)
    assert same_bits(method.begin(client, moved, shard).delta[1], client.delta[1])


def test_a_step_of_delta_follows_its_gradient():
    method, model = Hierarchical(kl_personal=0.7, anneal=20), linear_model()
    shards = linear_shards((6,), 1.0)
    server = first_server(method, model, 1, 1)._replace(steps=torch.tensor(5.0, dtype=torch.float64))
    received = pick(method.download(server, torch.arange(1)), 0)
    new = torch.stack([randn(WEIGHTS, seed=1), randn(WEIGHTS, seed=2) - 2])
    client = method.enrol(received)
    client = client._replace(delta=new, q=client.q + torch.stack([new[0], torch.zeros(WEIGHTS)]))
    batch = Batch(shards.x, shards.y, torch.tensor([1.0] * 5 + [0.0], dtype=torch.float64))
    size = torch.tensor(10.0, dtype=torch.float64)  # the batch has half of the rows
    local: Local = method.begin(client, received, Shard(size, torch.empty(0)))._replace(taken=torch.tensor(2.0))
    after = method.step(model, local, (batch,), torch.zeros(6, 1, dtype=torch.float64))

    delta = client.delta.clone().requires_grad_()
    q, mu = mean_field(delta), mean_field(server.shared)
    loss = 2 * model.expected_nll(mu.mu + q.mu, mu.sigma**2 + q.sigma**2, batch, torch.zeros(6, 1).double())
    prior = MeanField(torch.zeros_like(mu.mu), server.spread.sqrt())
    (grad,) = torch.autograd.grad(loss + 0.7 * kl(q, prior), delta)
    rates = annealed((method.eta_mean, method.eta_rho), torch.tensor(5.0, dtype=torch.float64), 20)
    expected, _ = adam_of_gaussian(client.delta, grad, client.adam, rates)
    assert_close(after.delta, expected, rtol=1e-6, atol=1e-7)
    assert float(after.taken) == 3
    client_after, upload = method.end(after)
    assert_close(upload.square, mean_field(after.delta).mu ** 2 + mean_field(after.delta).sigma ** 2)
    assert_close(client_after.gradient, after.gradients / 3)
    assert_close(upload.gradient, after.gradients / 3)
    assert float(upload.steps) == 3


def some_moments(size, seed):
    weights = torch.tensor([0.3, 0.2], dtype=torch.float64)
    return Adam(randn(2, size, seed=seed), randn(2, size, seed=seed + 1).square(), *weights)


def test_a_step_follows_the_gradients_of_a_network_with_noise():
    method = Hierarchical(kl_personal=0.7, kl_shared=0.6, anneal=20)
    model = Model(Net(TableNet(INPUTS, 0, 3, 2, constants=2)), StudentT())
    shards, size = linear_shards((6,), 1.0), model.net.num_params
    # Moments of earlier rounds: the first step of Adam would not depend on the length of the gradient.
    server = method.init(randn(size), 5, model.net)._replace(
        gradient=randn(2, size, seed=3), adam=some_moments(size, 6)
    )
    client = method.enrol(pick(method.download(server, torch.arange(1)), 0))
    client = client._replace(gradient=randn(2, size, seed=4), adam=some_moments(size, 7))
    batch = Batch(shards.x, shards.y, torch.ones(6, dtype=torch.float64))
    noise = randn(*method.noise_shape(model, 6), seed=5)
    received = pick(method.download(server, torch.arange(1)), 0)
    local: Local = method.begin(client, received, Shard(torch.tensor(6.0, dtype=torch.float64), torch.empty(0)))
    assert not local.gradients.any()
    after = method.step(model, local, (batch,), noise)

    shared, delta = (leaf.clone().requires_grad_() for leaf in (server.shared, client.delta))
    mu, q = mean_field(shared), mean_field(delta)
    loss = model.expected_nll(mu.mu + q.mu, mu.sigma**2 + q.sigma**2, batch, noise)
    zero = torch.zeros_like(q.mu)
    priors = [MeanField(zero, each.sqrt()) for each in (server.scale, server.spread)]
    loss = loss + 0.6 / 5 * kl(mu, priors[0]) + 0.7 * kl(q, priors[1])
    in_shared, in_delta = torch.autograd.grad(loss, (shared, delta))
    assert_close(after.gradients, in_shared)
    assert (float(after.taken), float(after.steps)) == (1, 1)
    rates = annealed((method.eta_mean, method.eta_rho), torch.tensor(0.0, dtype=torch.float64), 20)
    corrected = in_shared + server.gradient - client.gradient
    assert_close(after.shared, adam_of_gaussian(server.shared, corrected, server.adam, rates)[0])
    assert_close(after.delta, adam_of_gaussian(client.delta, in_delta, client.adam, rates)[0])


def test_a_round_without_steps_sends_no_gradient():
    method, model = Hierarchical(), linear_model()
    server = first_server(method, model, 1, 1)
    received = pick(method.download(server, torch.arange(1)), 0)
    local = method.begin(method.enrol(received), received, Shard(torch.tensor(6.0), torch.empty(0)))
    client, upload = method.end(local)
    assert not upload.gradient.any()
    assert not client.gradient.any()
    assert float(upload.steps) == 0


def test_tiny_gradients_take_small_steps():
    """The root of the mean square is a tenth of the gradient, as large as EPS: half of a step."""
    v, rates = torch.zeros(2, 3, dtype=torch.float64), (torch.tensor(0.1), torch.tensor(0.02))
    moved, _ = adam_of_gaussian(v, torch.full_like(v, 1e-7), adam_init(v), rates)
    assert_close(moved, -torch.tensor([[0.05] * 3, [0.01] * 3], dtype=torch.float64), rtol=1e-6, atol=0)


class TestCopies:
    training = Training(local_steps=2, batch_size=6, seed=3)
    method = Hierarchical(anneal=12, wait=0.3)

    def run(self, **others):
        return trained(self.method, 4, training=self.training, **others)

    def test_a_client_alone_is_a_federation_of_one_client(self):
        # The moments of a linear model need no noise, which would depend on the number of the client.
        shards = linear_shards((6, 9, 4), 1.0)
        result = fit(shards, self.method, self.training, 4, copies=[Copy(alone=True)])
        for i in range(3):
            lists = {name: getattr(shards, name)[i : i + 1] for name in ("train", "test", "validation", "names")}
            single = fit(dataclasses.replace(shards, **lists), self.method, self.training, 4)
            assert difference(result.personal_state(i, 1), single.personal_state(0, 0)) < ROUNDING
            assert difference(result.personal_state(i, 0), single.personal_state(0, 0)) > 1e-3

    def test_a_fold_is_a_federation_that_never_saw_its_rows(self):
        shards = make_shards()
        left_out = tuple(rows[1:3] for rows in shards.train)
        fewer = dataclasses.replace(shards, train=tuple(torch.cat([rows[:1], rows[3:]]) for rows in shards.train))
        result, other = self.run(copies=[Copy(left_out)]), self.run(shards=fewer)
        for i in range(len(SIZES)):
            assert difference(result.personal_state(i, 1), other.personal_state(i, 0)) < ROUNDING
        assert difference(result.servers[1], other.servers[0]) < ROUNDING
        assert difference(result.servers[1], result.servers[0]) > 1e-3

    def test_the_federations_of_the_seeds_do_not_depend_on_copies(self):
        shards = make_shards()
        folds = [Copy(tuple(rows[:1] for rows in shards.train)), Copy(alone=True)]
        result = trained(self.method, 3, training=self.training, seeds=[3, 4], copies=folds)
        plain = [trained(self.method, 3, training=self.training, seeds=[seed]) for seed in (3, 4)]
        for s, single in enumerate(plain):
            assert difference(result.servers[s], single.servers[0]) < ROUNDING


def test_partial_participation_is_that_of_plain_loops():
    training = dataclasses.replace(TRAINING, participants=2)
    result, alone = trained(Hierarchical(), 3, training=training), train_alone(Hierarchical(), 3, training)
    assert difference(result.servers[0], alone.server) < ROUNDING
    for i, client in alone.clients.items():
        assert difference(result.personal_state(i, 0), client) < ROUNDING


@pytest.mark.parametrize(
    ("field", "value"),
    [("eta_mean", -0.1), ("eta_rho", -0.1), ("anneal", 0), ("spread", 0.0), ("confidence", 0.0), ("wait", 1.1),
     ("wait", -0.1), ("kl_shared", -1.0), ("kl_personal", -1.0)],
)  # fmt: skip
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Hierarchical(**{field: value})


def test_it_trains_on_full_batches_unless_told_otherwise():
    assert Hierarchical().needs.full_batch
    assert not Hierarchical(full_batch=False).needs.full_batch


@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize(
    ("settings", "likelihood"),
    [
        ({"outputs": 3}, Classification()), ({"outputs": 1, "constants": 1}, Gaussian()),
        ({"outputs": 2, "constants": 2}, StudentT()), ({"outputs": 1, "constants": 2}, Survival((0.5, 1.5))),
    ],
    ids=["labels", "gaussian", "student", "survival"],
)  # fmt: skip
def test_stacked_clients_take_the_round_of_each_alone(settings, likelihood, hidden):
    """Tables, with padding and other learning rates: the engine trains stacked clients without mapping them."""
    method = Hierarchical(eta_mean=0.03, eta_rho=0.07, kl_personal=0.7, anneal=20)
    model = Model(Net(TableNet(2, 2, hidden, **settings)), likelihood)
    server = method.init(randn(model.net.num_params), 3, model.net)._replace(steps=torch.tensor(4.0).double())
    received = tree_map(torch.clone, method.download(server, torch.arange(3)))
    clients = torch.func.vmap(method.enrol)(received)
    weight = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    targets = {"labels": torch.arange(12).view(3, 4) % 3, "times": randn(3, 4, 2, seed=1).abs()}
    batch = Batch(randn(3, 4, 4, seed=2), targets.get(likelihood.predicts, randn(3, 4, 1, seed=1)), weight)
    noise = [randn(3, *method.noise_shape(model, 4), seed=3 + k) for k in range(3)]
    together = clients, received, Shard(weight.sum(1), torch.empty(3, 0)), [((batch,), each) for each in noise]
    found = client_round(method, model, *together)
    for i, size in enumerate((4, 3, 1)):
        own = Batch(*(leaf[i, :size] for leaf in batch))
        steps = [((own,), each[i, :size]) for each in noise]
        alone = client_round(method, model, *pick(together[:3], i), steps)
        assert difference(pick(found, i), alone) < ROUNDING
