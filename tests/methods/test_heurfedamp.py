import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import (
    EXACT,
    SIZES,
    TRAINING,
    client_states,
    client_steps,
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
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.random import choose
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Shard
from pfedbayes.methods.heurfedamp import Client, HeurFedAMP, Server
from pfedbayes.nets import Batch

ROUNDING = 1e-12
EVERYBODY = dataclasses.replace(TRAINING, participants=None)
NUM_CLIENTS = len(SIZES)


def some_models(count=5, num_params=40):
    return randn(num_params, seed=1) + 0.7 * randn(count, num_params, seed=2)


def softmax_by_hand(models, i, sharpness):
    """Weights of client i on the others, one scalar after another."""
    cosine = {j: models[i] @ models[j] / (models[i].norm() * models[j].norm()) for j in range(len(models)) if j != i}
    exponentials = {j: torch.exp(sharpness * value) for j, value in cosine.items()}
    return {j: value / sum(exponentials.values()) for j, value in exponentials.items()}


class TestCosineAttention:
    @pytest.mark.parametrize("sharpness", [0.0, 0.5, 25.0, 500.0])
    @pytest.mark.parametrize("self_weight", [0.0, 0.1, 0.5, 1.0])
    def test_rows_are_weights(self, sharpness, self_weight):
        weights = HeurFedAMP(sharpness=sharpness, self_weight=self_weight).cosine_weights(some_models())
        assert (weights >= 0).all()
        assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))
        assert_close(weights.diagonal(), torch.full((5,), self_weight, dtype=torch.float64))

    def test_it_is_the_formula(self):
        models = some_models()
        weights = HeurFedAMP(sharpness=3.0, self_weight=0.3).cosine_weights(models)
        for i in range(5):
            for j, share in softmax_by_hand(models, i, 3.0).items():
                assert_close(weights[i, j], 0.7 * share)

    def test_the_others_weigh_less_the_less_they_are_alike(self):
        models = torch.stack([torch.tensor([1.0, x]).double() for x in (0.0, 0.2, 1.0, -3.0)])
        first = HeurFedAMP(sharpness=2.0).cosine_weights(models)[0]
        assert first[1] > first[2] > first[3] > 0

    def test_scaling_all_models_changes_nothing(self):
        method = HeurFedAMP(sharpness=7.0)
        assert_close(method.cosine_weights(1000 * some_models()), method.cosine_weights(some_models()))

    def test_infinite_sharpness_gives_all_to_the_most_similar(self):
        models = some_models()
        cosine = nn.functional.cosine_similarity(models[:, None], models[None], dim=2).fill_diagonal_(-2)
        expected = 0.6 * torch.eye(5, dtype=torch.float64) + 0.4 * nn.functional.one_hot(cosine.argmax(1), 5)
        assert_close(HeurFedAMP(sharpness=1e5, self_weight=0.6).cosine_weights(models), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_exponentials_do_not_overflow(self, dtype):
        weights = HeurFedAMP(sharpness=500.0).cosine_weights(some_models().to(dtype))
        assert weights.isfinite().all()
        assert_close(weights.sum(1), torch.ones(5, dtype=dtype))

    def test_equal_models_share_equally_whatever_the_sharpness(self):
        models = randn(1, 40).expand(5, -1)
        weights = HeurFedAMP(self_weight=0.2).cosine_weights(models)
        assert_close(weights, torch.full((5, 5), 0.2, dtype=torch.float64))

    def test_models_of_zeros_are_like_nobody(self):
        weights = HeurFedAMP().cosine_weights(torch.zeros(3, 4, dtype=torch.float64))
        assert_close(weights, 0.25 * torch.ones(3, 3).double() + 0.25 * torch.eye(3).double())

    def test_alone_a_client_keeps_its_own_model(self):
        assert same_bits(HeurFedAMP().cosine_weights(randn(1, 4)), torch.ones(1, 1, dtype=torch.float64))


class TestFedAMP:
    method = HeurFedAMP(attention="fedamp", alpha=3.0, width=15.0)

    def test_cloud_model_is_a_gradient_step_on_the_attention_function(self):
        models = some_models()

        def attention(theta, i):
            others = torch.stack([model for j, model in enumerate(models) if j != i])
            return (1 - torch.exp(-(theta - others).square().sum(1) / 15)).sum()

        clouds = self.method.fedamp_weights(models) @ models
        for i in range(5):
            gradient = torch.func.grad(attention)(models[i], i)
            # The gradient of A(||w_i - w_j||^2) is 2 A' (w_i - w_j); the 2 is absorbed in alpha.
            assert_close(clouds[i] - models[i], -3.0 / 2 * gradient)

    def test_rows_are_weights_at_the_largest_alpha_allowed(self):
        method = HeurFedAMP(attention="fedamp", alpha=25 / 4)
        for spread in (0.0, 0.1, 1.0, 10.0):
            weights = method.fedamp_weights(spread * some_models())
            assert weights.min() >= -ROUNDING
            assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))

    def test_alpha_that_could_make_a_self_weight_negative_is_refused_before_training(self):
        with pytest.raises(UserError, match=r"method\.alpha to at most 6\.25"):
            federation(HeurFedAMP(attention="fedamp", alpha=6.26))
        federation(HeurFedAMP(attention="fedamp", alpha=6.25))

    def test_alone_a_client_keeps_its_own_model(self):
        method = HeurFedAMP(attention="fedamp")  # any alpha will do
        server = method.init(randn(31), 1, make_model().net)
        upload = randn(1, 31, seed=1)
        server = method.aggregate(server, upload, torch.ones(1), torch.arange(1))
        assert same_bits(server.clouds, upload)


class TestServer:
    def test_first_models_are_the_initial_one(self):
        theta = randn(31)
        server = HeurFedAMP().init(theta, 3, make_model().net)
        assert same_bits(server, Server(theta.expand(3, 31), theta.expand(3, 31)))

    def test_clouds_are_mixed_from_uploads_and_from_what_the_others_sent_last(self):
        method, models, uploads = HeurFedAMP(sharpness=2.0, self_weight=0.3), some_models(), randn(2, 40, seed=3)
        server = method.aggregate(
            Server(models, torch.zeros_like(models)), uploads, torch.tensor([9.0, 1.0]), torch.tensor([3, 1])
        )
        expected = torch.stack([models[0], uploads[1], models[2], uploads[0], models[4]])
        assert same_bits(server.models, expected)
        for i in range(5):
            shares = softmax_by_hand(expected, i, 2.0)
            assert_close(server.clouds[i], 0.3 * expected[i] + sum(0.7 * s * expected[j] for j, s in shares.items()))

    def test_each_client_receives_its_own_cloud_model(self):
        server = Server(some_models(), clouds=randn(5, 40, seed=4))
        assert same_bits(HeurFedAMP().download(server, torch.tensor([4, 0])), server.clouds[[4, 0]])

    def test_clients_that_are_not_chosen_keep_their_rows(self):
        training = dataclasses.replace(TRAINING, train="chosen", participants=2)
        running = federation(HeurFedAMP(), training)
        for round in range(1, 4):
            before = running.servers[0].models
            running.train_round()
            after = running.servers[0].models
            changed = (after != before).any(1).nonzero().flatten()
            assert changed.tolist() == choose(TRAINING.seed, round, NUM_CLIENTS, 2).tolist()


class TestReductions:
    def test_equal_weights_and_no_penalty_are_fedavg(self):
        # FedAvg weighs by size, so that all have the same here.
        shards = make_shards(sizes=(11, 11, 11, 11, 11))
        method = HeurFedAMP(eta=0.1, self_weight=1 / NUM_CLIENTS, sharpness=0.0, prox=0.0)
        ours = trained(method, training=EVERYBODY, shards=shards).servers[0].clouds
        fedavg = trained(FedAvg(0.1), training=EVERYBODY, shards=shards).servers[0]
        assert difference(ours, fedavg.expand_as(ours)) < ROUNDING

    @pytest.mark.parametrize("prox", [0.0, 3.0])
    def test_all_weight_on_itself_is_training_alone(self, prox):
        ours = trained(HeurFedAMP(eta=0.1, self_weight=1.0, prox=prox, alpha=2.0), training=EVERYBODY)
        for i in range(NUM_CLIENTS):
            assert difference(client_states(ours)[i][0], self.sgd_alone(i, eta=0.1, prox=prox / 2)) < ROUNDING

    def sgd_alone(self, client, eta, prox):
        """Local SGD by torch's autograd; every round the penalty holds it near where the round began."""
        method, shards, net, cursor = HeurFedAMP(), make_shards(), make_model().net, 0
        theta = first_server(method, make_model(), TRAINING.seed).models[client]
        for round in range(1, TRAINING.rounds + 1):
            anchor = theta
            for (batch,), _ in client_steps(shards, make_model(), method, TRAINING, client, round, cursor):
                theta = theta.detach().requires_grad_()
                loss = nn.functional.cross_entropy(net(theta, batch.x), batch.y)
                loss = loss + prox / 2 * (theta - anchor).square().sum()
                theta = (theta - eta * torch.autograd.grad(loss, theta)[0]).detach()
                cursor += len(batch.y)
        return theta

    def test_with_others_it_is_not(self):
        ours = trained(HeurFedAMP(eta=0.1, self_weight=0.9, prox=0.0), training=EVERYBODY)
        assert difference(client_states(ours)[0][0], self.sgd_alone(0, eta=0.1, prox=0.0)) > 1e-6

    def test_a_single_client_trains_alone(self):
        shards = make_shards((23,), (3,))
        one, other = (trained(HeurFedAMP(self_weight=w), training=EVERYBODY, shards=shards) for w in (0.1, 1.0))
        assert same_bits(one.servers, other.servers)


class TestLocalTraining:
    def test_it_starts_from_the_cloud_model_and_not_from_the_clients_own(self):
        method = HeurFedAMP()
        inputs = one_of(stacked_inputs(method), 0)
        results = [
            client_round(method, make_model(), *inputs._replace(client=Client(theta)))
            for theta in (inputs.received, randn(31, seed=5))
        ]
        assert same_bits(*results)

    def test_first_step_does_not_depend_on_the_penalty_and_later_ones_do(self):
        for local_steps, equal in ((1, True), (2, False)):
            training = dataclasses.replace(EVERYBODY, local_steps=local_steps)
            one, other = (trained(HeurFedAMP(prox=prox, alpha=1.0), 1, training=training) for prox in (0.0, 5.0))
            assert same_bits(one.servers, other.servers) == equal

    @pytest.mark.parametrize(("prox", "alpha"), [(0.0, 1.0), (3.0, 1.0), (3.0, 2.0)])
    def test_it_converges_to_the_proximal_point_of_a_quadratic_loss(self, prox, alpha):
        # The mean loss is w^T A w / 2 - b^T w, the penalty (lambda / (2 alpha)) ||w - u||^2.
        x, y, cloud = randn(12, 3, seed=1), randn(12, 1, seed=2), randn(3, seed=3)
        model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
        step = (Batch(x, y, torch.ones(12).double()),), torch.zeros(())
        shard = Shard(torch.tensor(12.0), labels=torch.empty(0))
        method = HeurFedAMP(eta=0.3, prox=prox, alpha=alpha)
        client, upload = client_round(method, model, Client(torch.zeros(3)), cloud, shard, [step] * 400)
        weight = prox / alpha
        expected = torch.linalg.solve(x.T @ x / 12 + weight * torch.eye(3), (x.T @ y / 12)[:, 0] + weight * cloud)
        assert_close(upload, expected, rtol=1e-9, atol=1e-9)
        assert same_bits(client.theta, upload)


class TestPrediction:
    ours = trained(HeurFedAMP(eta=0.1), training=EVERYBODY)
    x = randn(6, 3, seed=7)

    def test_personal_model_is_the_one_after_local_training(self):
        theta = self.ours.servers[0].models[2]  # every client has just uploaded its model
        assert_close(self.ours.predict("personal", 2, self.x)[0], self.ours.model.net(theta, self.x))

    def test_cloud_model_after_aggregation_is_a_view_of_its_own(self):
        shards, ours = self.ours.shards, self.ours
        test = ours.batch_of(shards.test[2])
        estimates = ours.estimates("personal", 2, shards.test[2], samples=1)
        models, clouds = ours.servers[0]
        assert_close(estimates["mean"][0], ours.model.net(models[2], test.x))
        assert_close(estimates["cloud"][0], ours.model.net(clouds[2], test.x))
        assert difference(estimates["mean"], estimates["cloud"]) > 1e-3

    def test_there_is_no_shared_model(self):
        assert self.ours.evaluate()["shared"] is None


@pytest.mark.parametrize("attention", ["cosine", "fedamp"])
def test_what_one_client_learns_reaches_the_others(attention):
    method = HeurFedAMP(attention=attention, alpha=5.0)
    shards = make_shards()
    flipped = dataclasses.replace(shards, y=shards.y.clone())
    flipped.y[shards.train[0]] = (flipped.y[shards.train[0]] + 1) % 3
    runs = [client_states(trained(method, 2, shards=data, training=EVERYBODY)) for data in (shards, flipped)]
    for i in range(1, NUM_CLIENTS):
        assert difference(runs[0][i], runs[1][i]) > 1e-8


def test_plans_agree():
    for attention in ("cosine", "fedamp"):
        method = HeurFedAMP(eta=0.1, attention=attention, alpha=5.0)
        loop = trained(method, plan=dataclasses.replace(EXACT, over="loop")).servers[0]
        assert difference(trained(method).servers[0], loop) < ROUNDING
        assert difference(train_alone(method, TRAINING.rounds).server, loop) < ROUNDING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eta", -0.1),
        ("self_weight", -0.1),
        ("self_weight", 1.1),
        ("sharpness", -1.0),
        ("prox", -1.0),
        ("alpha", 0.0),
        ("width", 0.0),
    ],
)
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        HeurFedAMP(**{field: value})
