import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import (
    EXACT,
    TRAINING,
    client_steps,
    copy,
    difference,
    federation,
    first_server,
    make_model,
    make_shards,
    model_for,
    randn,
    same_bits,
    train_alone,
    trained,
)
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg
from pfedbayes.methods.bnfed import BNFed, ModelAndLabels, Units, posterior
from pfedbayes.nets import mlp

ROUNDING = 1e-12
EVERYBODY = dataclasses.replace(TRAINING, participants=None)
FLAT = {"sigma02": 1e12}  # a prior that says nothing
FORCED = {"gamma": 1e-300}  # no new units if it can be avoided
DEPTHS = {"one": [3, 4, 3], "two": [3, 5, 4, 3], "three": [3, 4, 6, 5, 3]}
ONE = DEPTHS["one"]


@pytest.fixture(params=DEPTHS)
def sizes(request):
    """Layer sizes of the clients' networks."""
    return DEPTHS[request.param]


def small_model(sizes):
    return make_model(mlp(sizes, "tanh"))


def shapes_of(sizes):
    return small_model(sizes).net.shapes


def layers_of(theta, sizes):
    """Parameters of one flat network, cut by hand: [(W, b), ...]."""
    layers, start = [], 0
    for below, above in itertools.pairwise(sizes):
        weight = theta[start : start + above * below].view(above, below)
        start += above * below
        layers.append((weight, theta[start : start + above]))
        start += above
    return layers


def flat(layers):
    return torch.cat([part.flatten() for layer in layers for part in layer])


def permuted(theta, sizes, orders):
    """The same function with the units of each hidden layer in another order."""
    layers = layers_of(theta, sizes)
    for k, order in enumerate(orders):
        (weight, bias), (above, above_bias) = layers[k], layers[k + 1]
        layers[k], layers[k + 1] = (weight[order], bias[order]), (above[:, order], above_bias)
    return flat(layers)


def random_orders(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(width, generator=generator) for width in sizes[1:-1]]


def random_thetas(count, sizes, seed=0, scale=1.0):
    return scale * randn(count, small_model(sizes).net.num_params, seed=seed)


def some_labels(count, classes=3):
    return torch.randint(1, 30, (count, classes), generator=torch.Generator().manual_seed(9))


def merge(method, thetas, sizes=ONE, labels=None, server=None):
    """The server after a round in which the clients sent these networks."""
    server = server or method.init(thetas[0], len(thetas), shapes_of(sizes))
    labels = some_labels(len(thetas)) if labels is None else labels
    return method.aggregate(server, ModelAndLabels(thetas, labels), torch.ones(len(thetas)), torch.arange(len(thetas)))


def widths(server):
    return [len(bias) for bias in server.biases[:-1]]


def outputs(server, sizes, x):
    return BNFed().predict(small_model(sizes), server, x, None)[0]


class TestPermutedCopies:
    """J copies of one network, each with its hidden units in another order."""

    num_clients = 4

    def merged(self, sizes, **fields):
        theta = random_thetas(1, sizes, seed=3)[0]
        orders = [random_orders(sizes, seed) for seed in range(self.num_clients)]
        thetas = torch.stack([permuted(theta, sizes, own) for own in orders])
        return layers_of(thetas[0], sizes), orders, merge(BNFed(**fields), thetas, sizes)

    def test_permutations_are_recovered(self, sizes):
        _, orders, server = self.merged(sizes, **FLAT)
        assert widths(server) == sizes[1:-1]
        for k, assignments in enumerate(server.assignments):
            first = orders[0][k]  # global units have the order of the first client's
            for own, order in zip(assignments, orders, strict=True):
                assert torch.equal(first[own], order[k])

    def test_the_network_is_recovered(self, sizes):
        layers, _, server = self.merged(sizes, **FLAT)
        assert difference((server.weights, server.biases), tuple(zip(*layers, strict=True))) < 1e-10

    def test_with_equal_variances_the_prior_counts_as_one_more_client(self, sizes):
        layers, _, server = self.merged(sizes)
        assert widths(server) == sizes[1:-1]
        count = self.num_clients
        for weight, (original, _) in zip(server.weights[:-1], layers[:-1], strict=True):
            assert_close(weight, original * count / (count + 1))
        for bias, (_, original) in zip(server.biases[:-1], layers[:-1], strict=True):
            assert_close(bias, (0.1 + count * original) / (count + 1))
        # The clients' shares of a class sum to one, so that its weights and bias are halfway to the prior mean.
        assert_close(server.weights[-1], layers[-1][0] / 2)
        assert_close(server.biases[-1], (0.1 + layers[-1][1]) / 2)

    def test_without_class_shares_outgoing_weights_shrink_no_more_than_others(self):
        layers, _, server = self.merged(ONE, class_shares=False)
        assert_close(server.weights[-1], layers[-1][0] * self.num_clients / (self.num_clients + 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1e-300, 1.0, 50.0])
def test_the_order_of_a_clients_units_does_not_matter(sizes, seed, gamma):
    method, x = BNFed(gamma=gamma), randn(9, 3, seed=1)
    thetas, labels = random_thetas(4, sizes, seed), some_labels(4)
    server = merge(method, thetas, sizes, labels)
    for client in range(4):
        other = thetas.clone()
        other[client] = permuted(thetas[client], sizes, random_orders(sizes, seed + client))
        assert difference(outputs(merge(method, other, sizes, labels), sizes, x), outputs(server, sizes, x)) < 1e-10


@pytest.mark.parametrize("fields", [{}, {"gamma": 50.0}, {"sigma2": 0.3, "sigma02": 4.0, "bias": -0.7}], ids=str)
def test_every_parameter_is_the_posterior_mean_given_the_assignments(sizes, fields):
    """num / den, added up parameter by parameter and client by client."""
    method = BNFed(**fields)
    thetas, labels = random_thetas(4, sizes, seed=5, scale=0.5), some_labels(4)
    labels[:, 1] = torch.tensor([0, 3, 0, 1])
    server = merge(method, thetas, sizes, labels)
    networks = [layers_of(theta, sizes) for theta in thetas]
    # Where the units of a client stand in the global network, layer by layer; inputs and outputs are where they are.
    places = [
        [list(range(3)), *(assignments[j].tolist() for assignments in server.assignments), list(range(3))]
        for j in range(4)
    ]
    for k, (weights, biases) in enumerate(zip(server.weights, server.biases, strict=True)):
        last = k == len(server.weights) - 1
        for i, row in enumerate(weights):
            clients = [j for j in range(4) if i in places[j][k + 1]]
            share = {j: float(labels[j, i] / labels[:, i].sum()) if last else 1.0 for j in clients}
            rows = {j: places[j][k + 1].index(i) for j in clients}
            num = method.bias / method.sigma02 + sum(
                share[j] / method.sigma2 * networks[j][k][1][rows[j]] for j in clients
            )
            den = 1 / method.sigma02 + sum(share[j] / method.sigma2 for j in clients)
            assert_close(biases[i], num / den)
            for h, weight in enumerate(row):
                have = [j for j in clients if h in places[j][k]]
                num = sum(share[j] / method.sigma2 * networks[j][k][0][rows[j], places[j][k].index(h)] for j in have)
                den = 1 / method.sigma02 + sum(share[j] / method.sigma2 for j in have)
                assert_close(weight, torch.as_tensor(num / den, dtype=torch.float64))


@pytest.mark.parametrize("gamma", [1e-300, 1.0, 50.0, 1e300])
def test_a_clients_units_are_copies_of_distinct_global_ones_and_none_is_unused(sizes, gamma):
    server = merge(BNFed(gamma=gamma), random_thetas(4, sizes, seed=2), sizes)
    for assignments, width in zip(server.assignments, widths(server), strict=True):
        assert all(len(own.unique()) == len(own) for own in assignments)
        assert assignments.unique().tolist() == list(range(width))
        assert assignments[0].tolist() == list(range(assignments.shape[1]))  # in the order of their first use
    for (below, above), weight in zip(itertools.pairwise([3, *widths(server), 3]), server.weights, strict=True):
        assert weight.shape == (above, below)


def some_units(num_clients=4, width=3, length=5, seed=0, spread=1.0):
    precision = 0.1 + randn(num_clients, length, seed=seed).abs()
    vectors = spread * randn(num_clients, width, length, seed=seed + 1)
    return Units(vectors * precision[:, None], precision, randn(length, seed=seed + 2), prior_precision=0.7)


def random_assignments(num_clients, width, known, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(known, generator=generator)[:width] for _ in range(num_clients)])


def objective(units, clients, assignments):
    """sum_i (num_i^2 / den_i - its prior value), unit by unit."""
    total = 0.0
    for i in assignments.unique().tolist():
        num, den = units.prior_evidence.clone(), torch.full_like(units.prior_evidence, units.prior_precision)
        for client, own in zip(clients, assignments, strict=True):
            for unit in (own == i).nonzero().flatten().tolist():
                num, den = num + units.evidence[client, unit], den + units.precision[client]
        total += float((num**2 / den - units.prior_evidence**2 / units.prior_precision).sum())
    return total


class TestPosterior:
    def test_sums_over_the_copies(self):
        units, clients = some_units(), [3, 0, 2]
        assignments = torch.tensor([[1, 0, 2], [3, 1, 0], [4, 3, 1]])
        num, den, counts = posterior(units, clients, assignments)
        members = {0: [(3, 1), (0, 2)], 1: [(3, 0), (0, 1), (2, 2)], 2: [(3, 2)], 3: [(0, 0), (2, 1)], 4: [(2, 0)]}
        for i, copies in members.items():
            assert_close(num[i], units.prior_evidence + sum(units.evidence[j, unit] for j, unit in copies))
            assert_close(den[i], 0.7 + sum(units.precision[j] for j, _ in copies))
        assert counts.tolist() == [2, 3, 1, 2, 1]
        assert counts.sum() == assignments.numel()

    def test_nobody_has_anything(self):
        num, den, counts = posterior(some_units(), [], torch.empty(0, 3, dtype=torch.int64))
        assert (num.shape, den.shape, counts.shape) == ((0, 5), (0, 5), (0,))


class TestMatchingOfOneClient:
    """Against the most probable of all assignments, each scored by what it does to the whole objective."""

    def score(self, method, units, client, others, assignments, own):
        counts, num_clients = torch.bincount(assignments.flatten()), len(others) + 1
        known = len(counts)
        new = sum(i >= known for i in own)
        score = objective(units, [*others, client], torch.cat([assignments, torch.tensor([own])]))
        score += sum(2 * math.log(counts[i] / (num_clients - counts[i])) for i in own if i < known)
        return score + 2 * new * math.log(method.gamma / num_clients) - 2 * math.log(math.factorial(new))

    @pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
    @pytest.mark.parametrize("seed", range(6))
    def test_brute_force(self, gamma, seed):
        method = BNFed(gamma=gamma)
        units, client, others = some_units(seed=10 * seed), 1, [0, 2, 3]
        assignments = random_assignments(3, 3, known=4, seed=seed)
        assignments = torch.unique(assignments, return_inverse=True)[1]
        known = int(assignments.max()) + 1
        own = method.match_client(units, client, posterior(units, others, assignments))

        best, best_score = None, -math.inf
        for choice in itertools.product([*range(known), None], repeat=3):
            fresh = itertools.count(known)
            candidate = [next(fresh) if i is None else i for i in choice]
            if len(set(candidate)) == 3:
                score = self.score(method, units, client, others, assignments, candidate)
                if score > best_score:
                    best, best_score = candidate, score
        assert own.tolist() == best


class TestLimits:
    thetas = random_thetas(5, ONE, seed=4)

    def test_no_mass_no_new_units(self):
        assert widths(merge(BNFed(**FORCED), self.thetas)) == [4]

    def test_much_mass_makes_every_unit_new(self):
        server = merge(BNFed(gamma=1e300), self.thetas)
        assert widths(server) == [20]
        for own, theta in zip(server.assignments[0], self.thetas, strict=True):
            assert_close(server.weights[0][own], layers_of(theta, ONE)[0][0] / 2)

    @pytest.mark.parametrize(("max_width", "expected"), [(1, 4), (4, 4), (7, 7), (20, 20), (99, 20)])
    def test_up_to_the_largest_width_allowed(self, max_width, expected):
        assert widths(merge(BNFed(gamma=1e300, max_width=max_width), self.thetas)) == [expected]


class TestSweeps:
    @pytest.mark.parametrize("seed", range(5))
    def test_without_log_terms_a_rematch_never_lowers_the_objective(self, seed):
        method, units = BNFed(popularity=0.0, novelty=0.0), some_units(5, 4, 6, seed=20 + seed)
        assignments = random_assignments(5, 4, known=7, seed=seed)
        values = [objective(units, range(5), assignments)]
        for client in [2, 0, 4, 1, 3] * 3:
            others = [j for j in range(5) if j != client]
            assignments[others] = torch.unique(assignments[others], return_inverse=True)[1]
            assignments[client] = method.match_client(units, client, posterior(units, others, assignments[others]))
            values.append(objective(units, range(5), assignments))
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
        assert values[-1] > values[0] + 0.1

    def test_sweeps_end_no_lower_than_they_began(self):
        units = some_units(5, 4, 6, seed=30)
        start = random_assignments(5, 4, known=7, seed=0)
        values = [objective(units, range(5), start)]
        for sweeps in (0, 1, 2, 5):
            method = BNFed(popularity=0.0, novelty=0.0, sweeps=sweeps)
            found = method.match(units, start, torch.Generator().manual_seed(0))
            values.append(objective(units, range(5), found))
        assert values[1] == pytest.approx(values[0])  # numbered anew, else the same
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
        assert values[2] > values[1]

    def test_true_copies_are_found_from_a_bad_start(self):
        truth = random_assignments(6, 3, known=5, seed=1)
        vectors = 5 * randn(5, 8, seed=2)[truth] + 0.1 * randn(6, 3, 8, seed=3)
        units = Units(vectors, torch.ones(6, 8).double(), torch.zeros(8).double(), prior_precision=0.01)
        for start in (None, random_assignments(6, 3, known=18, seed=4)):
            found = BNFed().match(units, start, torch.Generator().manual_seed(0))
            same = (found.flatten()[:, None] == found.flatten()) == (truth.flatten()[:, None] == truth.flatten())
            assert same.all()


class TestGains:
    units = some_units(6, 3, 5, seed=40)
    others = posterior(units, range(1, 6), random_assignments(5, 3, known=4, seed=1))

    def gains(self, **fields):
        return BNFed(**fields).gains(self.units, 0, self.others)

    def test_log_terms(self):
        bare = self.gains(popularity=0.0, novelty=0.0)
        counts = self.others.counts
        existing = 2 * torch.log(counts / (6 - counts))
        new = torch.tensor([2 * math.log(3.0 / 6) - 2 * math.log(k) for k in (1, 2, 3)]).double()
        assert_close(self.gains(gamma=3.0) - bare, torch.cat([existing, new]).expand(3, -1))
        half = self.gains(gamma=3.0, popularity=1.0) - bare
        assert_close(half, torch.cat([existing / 2, new]).expand(3, -1))

    def test_popularity_may_count_no_further_than_some_number(self):
        assert self.others.counts.max() > 2
        capped = self.others.counts.clamp(max=2)
        expected = (self.gains(popularity=0.0)[:, :4] + 2 * torch.log(capped / (6 - capped))).double()
        assert_close(self.gains(max_count=2)[:, :4], expected)


def scattered_copies(sizes, num_clients=5, noise=0.05):
    """Networks of clients that each have all but two of the hidden units of a global one, which lie far apart; and how
    many units of each layer anybody has."""
    wide = [sizes[0], *(width + 2 for width in sizes[1:-1]), sizes[-1]]
    layers = layers_of(5 * random_thetas(1, wide, seed=1)[0], wide)
    have = [random_assignments(num_clients, width, known=width + 2, seed=width) for width in sizes[1:-1]]
    networks = []
    for client in range(num_clients):
        units = [torch.arange(sizes[0]), *(own[client] for own in have), torch.arange(sizes[-1])]
        cut = zip(layers, itertools.pairwise(units), strict=True)
        networks.append(flat([(weight[own][:, below], bias[own]) for (weight, bias), (below, own) in cut]))
    thetas = torch.stack(networks) + noise * random_thetas(num_clients, sizes, seed=5)
    return thetas, [len(own.unique()) for own in have]


class TestRounds:
    method, labels = BNFed(sigma2=0.01), some_labels(5)

    def test_clients_receive_the_units_they_have_and_the_output_bias(self):
        thetas, used = scattered_copies(ONE)
        server = merge(self.method, thetas, labels=self.labels)
        assert widths(server) == used
        assert used > [4]
        received = BNFed().download(server, torch.tensor([3, 1]))
        for client, theta in zip((3, 1), received, strict=True):
            own = server.assignments[0][client]
            (weight, bias), (upward, output_bias) = layers_of(theta, ONE)
            assert same_bits((weight, bias), (server.weights[0][own], server.biases[0][own]))
            assert same_bits((upward, output_bias), (server.weights[1][:, own], server.biases[1]))

    def test_what_clients_receive_is_a_subnetwork(self, sizes):
        server = merge(BNFed(gamma=50.0), random_thetas(4, sizes, seed=6), sizes)
        for client, theta in enumerate(BNFed().download(server, torch.arange(4))):
            without = copy(server)
            for k, assignments in enumerate(server.assignments):  # cut what leaves the units that it has not
                foreign = [i for i in range(len(server.biases[k])) if i not in assignments[client].tolist()]
                without.weights[k + 1][:, foreign] = 0
            x = randn(5, 3)
            assert_close(small_model(sizes).net(theta, x), outputs(without, sizes, x))

    def test_a_round_without_training_leaves_the_assignments_alone(self, sizes):
        thetas, used = scattered_copies(sizes)
        first = merge(self.method, thetas, sizes, self.labels)
        assert widths(first) == used
        sent = self.method.download(first, torch.arange(5))
        second = merge(self.method, sent, sizes, self.labels, server=first)
        assert same_bits(second.assignments, first.assignments)
        assert int(second.round) == 2

    def test_later_rounds_start_from_the_assignments_before(self):
        method = dataclasses.replace(self.method, sweeps=0)
        first = merge(method, scattered_copies(ONE)[0], labels=self.labels)
        other = random_thetas(5, ONE, seed=8)
        second = merge(method, other, labels=self.labels, server=first)
        assert same_bits(second.assignments, first.assignments)
        assert not same_bits(merge(method, other, labels=self.labels).assignments, first.assignments)

    def test_a_permutation_after_the_first_round_is_followed(self):
        x, (sent, _) = randn(5, 3), scattered_copies(ONE, noise=0.1)
        first = merge(self.method, scattered_copies(ONE)[0], labels=self.labels)
        expected = merge(self.method, sent, labels=self.labels, server=first)
        sent[2] = permuted(sent[2], ONE, random_orders(ONE, 1))
        second = merge(self.method, sent, labels=self.labels, server=first)
        assert_close(outputs(second, ONE, x), outputs(expected, ONE, x))

    def test_the_order_of_the_sweeps_depends_on_the_round_alone(self):
        thetas = random_thetas(5, ONE, seed=9, scale=0.5)
        start = BNFed().init(thetas[0], 5, shapes_of(ONE))
        before = torch.get_rng_state()
        servers = [merge(BNFed(), thetas, labels=self.labels, server=start) for _ in range(2)]
        assert same_bits(*servers)
        assert torch.equal(torch.get_rng_state(), before)


class TestReductions:
    def sgd_alone(self, eta, shards, rounds):
        method, model, cursor = BNFed(), model_for(BNFed()), 0
        theta = method.download(first_server(method, model, TRAINING.seed, 1), torch.tensor([0]))[0]
        for round in range(1, rounds + 1):
            for (batch,), _ in client_steps(shards, model, method, TRAINING, 0, round, cursor):
                theta = theta.detach().requires_grad_()
                loss = nn.functional.cross_entropy(model.net(theta, batch.x), batch.y)
                theta = (theta - eta * torch.autograd.grad(loss, theta)[0]).detach()
                cursor += len(batch.y)
        return theta

    def test_one_client_and_a_flat_prior_are_sgd(self):
        shards = make_shards((23,), (3,))
        ours = trained(BNFed(eta=0.1, **FLAT), training=EVERYBODY, shards=shards)
        received = ours.method.download(ours.servers[0], torch.tensor([0]))[0]
        assert difference(received, self.sgd_alone(0.1, shards, TRAINING.rounds)) < 1e-10
        assert ours.servers[0].assignments[0].tolist() == [[0, 1, 2, 3]]

    def test_one_client_is_shrunk_to_the_prior_mean(self):
        shards = make_shards((23,), (3,))
        ours = trained(BNFed(eta=0.1), 1, training=EVERYBODY, shards=shards)
        shrunk = flat(
            [(weight / 2, (0.1 + bias) / 2) for weight, bias in layers_of(self.sgd_alone(0.1, shards, 1), ONE)]
        )
        assert difference(ours.method.download(ours.servers[0], torch.tensor([0]))[0], shrunk) < ROUNDING

    def test_near_copies_and_a_flat_prior_are_fedavg(self):
        # FedAvg weighs by size, so that all have the same here; both start with the same biases.
        shards = make_shards(sizes=(11, 11, 11, 11, 11))
        ours = federation(BNFed(eta=0.1, class_shares=False, **FLAT, **FORCED), EVERYBODY, shards=shards)
        fedavg = federation(FedAvg(0.1), EVERYBODY, shards=shards)
        fedavg.servers = [ours.method.download(ours.servers[0], torch.tensor([0]))[0]]
        for _ in range(3):
            ours.train_round()
            fedavg.train_round()
        received = ours.method.download(ours.servers[0], torch.arange(5))
        assert difference(received, fedavg.servers[0].expand(5, -1)) < 1e-10

    def test_rate_zero_and_a_flat_prior_leave_the_network_alone(self, sizes):
        ours = federation(BNFed(eta=0.0, class_shares=False, **FLAT), EVERYBODY, model=small_model(sizes))
        start = ours.servers[0]
        for _ in ours.rounds():
            pass
        assert difference(ours.servers[0][:2], start[:2]) < 1e-10


class TestFirstServer:
    def test_everybody_has_the_first_network_with_constant_biases(self, sizes):
        model, theta = small_model(sizes), random_thetas(1, sizes)[0]
        server = BNFed(bias=0.3).init(theta, 4, model.net.shapes)
        expected = flat([(weight, torch.full_like(bias, 0.3)) for weight, bias in layers_of(theta, sizes)])
        assert same_bits(BNFed().download(server, torch.arange(4)), expected.expand(4, -1))
        x = randn(5, 3)
        assert_close(outputs(server, sizes, x), model.net(expected, x))

    @pytest.mark.parametrize(
        "module",
        [
            nn.Linear(3, 3),
            nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)),
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)),
        ],
        ids=["no hidden layer", "no bias", "norm", "convolution"],
    )
    def test_other_networks_are_refused(self, module):
        with pytest.raises(UserError, match=r"fully connected .* net\.name=mlp"):
            federation(BNFed(), EVERYBODY, model=make_model(module))


class TestSharesOfClasses:
    def test_weights_to_a_class_count_by_share(self):
        labels = torch.tensor([[6, 0, 0], [2, 5, 0]])
        theta = random_thetas(1, ONE)[0]
        layers = layers_of(theta, ONE)
        scaled = [layers[0], (2 * layers[1][0], 2 * layers[1][1])]  # the second client's outputs are twice as large
        server = merge(BNFed(bias=0.0), torch.stack([theta, flat(scaled)]), labels=labels)
        assert widths(server) == [4]
        # Class 0: shares 3/4 and 1/4; class 1: all of it the second client's; class 2: nobody's, so the prior's.
        factors = torch.tensor([(0.75 + 0.25 * 2) / 2, 2 / 2, 0.0], dtype=torch.float64)
        assert_close(server.weights[1], factors[:, None] * layers[1][0])
        assert_close(server.biases[1], factors * layers[1][1])

    def test_regression_has_no_classes(self):
        shards = make_shards()
        regression = dataclasses.replace(shards, y=shards.x[:, :1] ** 2, num_classes=None)
        model = make_model(mlp([3, 4, 1], "tanh"), Regression(sigma_eps=1.0))
        ours = trained(BNFed(eta=0.1), training=EVERYBODY, shards=regression, model=model)
        assert ours.servers[0].weights[1].isfinite().all()


class TestFederation:
    def test_all_clients_have_to_take_part(self):
        with pytest.raises(UserError, match=r"all 5 clients.*participants"):
            trained(BNFed(), 1, training=TRAINING)

    def test_uploads_may_arrive_in_any_order(self):
        thetas, labels, order = random_thetas(4, ONE), some_labels(4), torch.tensor([2, 0, 3, 1])
        start = BNFed().init(thetas[0], 4, shapes_of(ONE))
        shuffled = BNFed().aggregate(start, ModelAndLabels(thetas[order], labels[order]), torch.ones(4), order)
        assert same_bits(shuffled, merge(BNFed(), thetas, labels=labels, server=start))

    @pytest.mark.parametrize("fields", [{}, {"gamma": 30.0}], ids=str)
    def test_together_in_turn_and_alone_agree(self, sizes, fields):
        method, model = BNFed(**fields), small_model(sizes)
        alone = train_alone(method, TRAINING.rounds, EVERYBODY, model=model).server
        for over in ("vmap", "loop"):
            plan = dataclasses.replace(EXACT, over=over)
            assert difference(trained(method, training=EVERYBODY, plan=plan, model=model).servers[0], alone) < 1e-10

    def test_a_restored_federation_has_the_width_that_was_saved(self):
        first = trained(BNFed(gamma=50.0), 2, training=EVERYBODY)
        assert widths(first.servers[0]) != [4]
        second = federation(BNFed(gamma=50.0), EVERYBODY)
        second.restore(first.tensors(), round=2)
        first.train_round()
        second.train_round()
        assert same_bits(first.servers, second.servers)

    def test_bytes_are_scaled_to_the_unit_interval(self):
        model = model_for(BNFed())
        server = merge(BNFed(), random_thetas(4, ONE))
        pixels = torch.tensor([[0, 255, 51], [102, 3, 7]], dtype=torch.uint8)
        assert_close(
            BNFed().predict(model, server, pixels, None),
            BNFed().predict(model, server, pixels.double() / 255, None),
        )

    @pytest.mark.parametrize("activation", ["relu", "tanh"])
    def test_the_global_network_has_the_activation_of_the_clients(self, activation):
        server = merge(BNFed(gamma=50.0), random_thetas(4, ONE))
        assert widths(server) > [4]
        x = randn(6, 3)
        hidden = getattr(torch, activation)(x @ server.weights[0].T + server.biases[0])
        ours = BNFed().predict(make_model(mlp(ONE, activation)), server, x, None)
        assert_close(ours, (hidden @ server.weights[1].T + server.biases[1])[None])

    def test_matched_units_learn(self):
        shards = make_shards((40, 60, 50, 30), (100, 100, 100, 100))
        ours = federation(BNFed(eta=0.5), dataclasses.replace(EVERYBODY, local_steps=20), shards=shards)
        before = ours.evaluate()["shared"]["mean"]["nll"]
        for _ in ours.rounds(5):
            pass
        after = ours.evaluate()["shared"]["mean"]["nll"]
        assert torch.tensor(after).mean() < torch.tensor(before).mean() - 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eta", -0.1),
        ("sigma2", 0.0),
        ("sigma02", 0.0),
        ("gamma", 0.0),
        ("sweeps", -1),
        ("popularity", -1.0),
        ("novelty", -1.0),
        ("max_count", 0),
        ("max_width", 0),
    ],
)
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        BNFed(**{field: value})
