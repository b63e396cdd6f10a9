import dataclasses
import itertools

import pytest
import torch
from bnfed_networks import (
    DEPTHS,
    FLAT,
    FORCED,
    ONE,
    flat,
    layers_of,
    merge,
    net_of,
    outputs,
    permuted,
    random_assignments,
    random_orders,
    random_thetas,
    small_model,
    some_labels,
    widths,
)
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
from pfedbayes.methods.bnfed import BNFed, ModelAndLabels
from pfedbayes.nets import mlp

ROUNDING = 1e-12
ALL_CLIENTS = dataclasses.replace(TRAINING, participants=None)


@pytest.fixture(params=DEPTHS)
def sizes(request):
    """Layer sizes of the clients' networks."""
    return DEPTHS[request.param]


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


def test_shares_of_a_class_are_those_of_its_examples():
    labels = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 9.0]])
    assert BNFed()._class_shares(labels, torch.zeros(2, 3)).tolist() == [[1.0, 0.0, 0.25], [0.0, 0.0, 0.75]]


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
        start = BNFed().init(thetas[0], 5, net_of(ONE))
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
        ours = trained(BNFed(eta=0.1, **FLAT), training=ALL_CLIENTS, shards=shards)
        received = ours.method.download(ours.servers[0], torch.tensor([0]))[0]
        assert difference(received, self.sgd_alone(0.1, shards, TRAINING.rounds)) < 1e-10
        assert ours.servers[0].assignments[0].tolist() == [[0, 1, 2, 3]]

    def test_one_client_is_shrunk_to_the_prior_mean(self):
        shards = make_shards((23,), (3,))
        ours = trained(BNFed(eta=0.1), 1, training=ALL_CLIENTS, shards=shards)
        shrunk = flat(
            [(weight / 2, (0.1 + bias) / 2) for weight, bias in layers_of(self.sgd_alone(0.1, shards, 1), ONE)]
        )
        assert difference(ours.method.download(ours.servers[0], torch.tensor([0]))[0], shrunk) < ROUNDING

    def test_near_copies_and_a_flat_prior_are_fedavg(self):
        # FedAvg weighs by size, so that all have the same here; both start with the same biases.
        shards = make_shards(sizes=(11, 11, 11, 11, 11))
        ours = federation(BNFed(eta=0.1, class_shares=False, **FLAT, **FORCED), ALL_CLIENTS, shards=shards)
        fedavg = federation(FedAvg(0.1), ALL_CLIENTS, shards=shards)
        fedavg.servers = [ours.method.download(ours.servers[0], torch.tensor([0]))[0]]
        for _ in range(3):
            ours.train_round()
            fedavg.train_round()
        received = ours.method.download(ours.servers[0], torch.arange(5))
        assert difference(received, fedavg.servers[0].expand(5, -1)) < 1e-10

    def test_rate_zero_and_a_flat_prior_leave_the_network_alone(self, sizes):
        ours = federation(BNFed(eta=0.0, class_shares=False, **FLAT), ALL_CLIENTS, model=small_model(sizes))
        start = ours.servers[0]
        for _ in ours.rounds():
            pass
        assert difference(ours.servers[0][:2], start[:2]) < 1e-10


class TestFirstServer:
    def test_every_client_has_the_first_network_with_constant_biases(self, sizes):
        model, theta = small_model(sizes), random_thetas(1, sizes)[0]
        server = BNFed(bias=0.3).init(theta, 4, model.net)
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
            federation(BNFed(), ALL_CLIENTS, model=make_model(module))


class TestSharesOfClasses:
    def test_weights_to_a_class_count_by_share(self):
        labels = torch.tensor([[6, 0, 0], [2, 5, 0]])
        theta = random_thetas(1, ONE)[0]
        layers = layers_of(theta, ONE)
        scaled = [layers[0], (2 * layers[1][0], 2 * layers[1][1])]  # the second client's outputs are twice as large
        server = merge(BNFed(bias=0.0), torch.stack([theta, flat(scaled)]), labels=labels)
        assert widths(server) == [4]
        # Class 0: shares 3/4 and 1/4; class 1: all from the second client; class 2: no examples, so the prior.
        factors = torch.tensor([(0.75 + 0.25 * 2) / 2, 2 / 2, 0.0], dtype=torch.float64)
        assert_close(server.weights[1], factors[:, None] * layers[1][0])
        assert_close(server.biases[1], factors * layers[1][1])

    def test_regression_has_no_classes(self):
        shards = make_shards()
        regression = dataclasses.replace(shards, y=shards.x[:, :1] ** 2, num_classes=None)
        model = make_model(mlp([3, 4, 1], "tanh"), Regression(sigma_eps=1.0))
        ours = trained(BNFed(eta=0.1), training=ALL_CLIENTS, shards=regression, model=model)
        assert ours.servers[0].weights[1].isfinite().all()


class TestFederation:
    def test_all_clients_have_to_take_part(self):
        with pytest.raises(UserError, match=r"all 5 clients.*participants"):
            trained(BNFed(), 1, training=TRAINING)

    def test_uploads_may_arrive_in_any_order(self):
        thetas, labels, order = random_thetas(4, ONE), some_labels(4), torch.tensor([2, 0, 3, 1])
        start = BNFed().init(thetas[0], 4, net_of(ONE))
        shuffled = BNFed().aggregate(start, ModelAndLabels(thetas[order], labels[order]), torch.ones(4), order)
        assert same_bits(shuffled, merge(BNFed(), thetas, labels=labels, server=start))

    @pytest.mark.parametrize("fields", [{}, {"gamma": 30.0}], ids=str)
    def test_together_in_turn_and_alone_agree(self, sizes, fields):
        method, model = BNFed(**fields), small_model(sizes)
        alone = train_alone(method, TRAINING.rounds, ALL_CLIENTS, model=model).server
        for over in ("vmap", "loop"):
            plan = dataclasses.replace(EXACT, over=over)
            assert difference(trained(method, training=ALL_CLIENTS, plan=plan, model=model).servers[0], alone) < 1e-10

    def test_a_restored_federation_has_the_width_that_was_saved(self):
        first = trained(BNFed(gamma=50.0), 2, training=ALL_CLIENTS)
        assert widths(first.servers[0]) != [4]
        second = federation(BNFed(gamma=50.0), ALL_CLIENTS)
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
        ours = federation(BNFed(eta=0.5), dataclasses.replace(ALL_CLIENTS, local_steps=20), shards=shards)
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
