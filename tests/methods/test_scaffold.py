import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import SIZES, TRAINING, difference, federation, make_model, one_of, randn, same_bits, stacked_inputs
from federations import trained as trained_federation
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.trees import pick, stack
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Limits, Shard
from pfedbayes.methods.scaffold import Scaffold, Server, Upload
from pfedbayes.nets import Batch

ROUNDING = 1e-12
EVERYBODY = dataclasses.replace(TRAINING, participants=None)
FEW = dataclasses.replace(TRAINING, participants=2, rounds=6)


def controls(result):
    """The control variates of all clients; those of clients that have not been met are 0."""
    return result.client_states(range(len(SIZES)))


@pytest.mark.parametrize("training", [EVERYBODY, FEW])
def test_the_servers_control_is_the_sum_of_the_clients_controls_over_their_number(training):
    result = trained_federation(Scaffold(0.3), rounds=training.rounds, training=training)
    control = result.servers[0].control
    assert control.abs().max() > 0.01
    assert difference(control, controls(result).sum(0) / len(SIZES)) < ROUNDING


def test_a_round_without_control_variates_is_one_of_fedavg():
    inputs = stacked_inputs(Scaffold(0.3))
    ours = client_round(Scaffold(0.3), make_model(), *inputs, over=torch.func.vmap)[1]
    theta = client_round(
        FedAvg(0.3), make_model(), (), inputs.received.theta, inputs.shard, inputs.steps, over=torch.func.vmap
    )[1]
    assert difference(inputs.received.theta + ours.theta, theta) < ROUNDING
    # The server's mean has equal weights.
    server = Scaffold().aggregate(pick(inputs.received, 0), ours, inputs.shard.size, torch.arange(len(SIZES)))
    assert difference(server.theta, theta.mean(0)) < ROUNDING


def test_the_new_control_is_that_of_option_two():
    method, inputs = Scaffold(0.3), one_of(stacked_inputs(Scaffold(0.3)), 2)
    own, received = 0.1 * randn(31, seed=5), inputs.received._replace(control=0.1 * randn(31, seed=6))
    after, upload = client_round(method, make_model(), own, received, inputs.shard, inputs.steps)
    option_two = own - received.control - upload.theta / (len(inputs.steps) * 0.3)
    assert difference(after, option_two) < 1e-10
    assert difference(upload.control, after - own) < ROUNDING


def test_with_one_full_batch_options_one_and_two_agree():
    method, inputs = Scaffold(0.3), one_of(stacked_inputs(Scaffold(0.3)), 2)
    (batch,), _ = inputs.steps[0]
    own = randn(31, seed=5)
    after, _ = client_round(method, make_model(), own, inputs.received, inputs.shard, inputs.steps[:1])
    assert difference(after, make_model().grad_loss(inputs.received.theta, batch)) < ROUNDING


class TestQuadraticLosses:
    """Linear regression, full batches: client i has the loss theta^T A_i theta / 2 - b_i^T theta."""

    model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
    x, y = randn(4, 12, 3, seed=1), randn(4, 12, 1, seed=2)
    A, b = x.mT @ x / 12, (x.mT @ y)[..., 0] / 12
    optimum = torch.linalg.solve(A.mean(0), b.mean(0))

    def server_after(self, method, rounds, x=None, y=None):
        x, y = self.x if x is None else x, self.y if y is None else y
        server = method.init(torch.zeros(3, dtype=torch.float64), 4, self.model.net)
        received = method.download(server, torch.arange(4))
        client = torch.func.vmap(method.enrol)(received)
        shard = Shard(torch.full((4,), 12.0, dtype=torch.float64), torch.empty(4, 0))
        steps = [((Batch(x, y, torch.ones(4, 12, dtype=torch.float64)),), torch.zeros(4))] * 20
        for _ in range(rounds):
            received = method.download(server, torch.arange(4))
            client, upload = client_round(method, self.model, client, received, shard, steps, over=torch.func.vmap)
            server = method.aggregate(server, upload, shard.size, torch.arange(4))
        return server

    def test_scaffold_finds_the_joint_optimum_and_fedavg_does_not(self):
        ours, theirs = self.server_after(Scaffold(0.1), 40).theta, self.server_after(FedAvg(0.1), 40)
        assert_close(ours, self.optimum, rtol=1e-4, atol=1e-4)
        assert float((theirs - self.optimum).norm()) > 0.01

    def test_with_identical_clients_it_is_fedavg(self):
        same = (each[:1].expand(4, *each.shape[1:]) for each in (self.x, self.y))
        x, y = same
        assert_close(
            self.server_after(Scaffold(0.05), 3, x, y).theta,
            self.server_after(FedAvg(0.05), 3, x, y),
            rtol=0,
            atol=1e-12,
        )


def test_a_server_that_does_not_move_keeps_its_model_and_learns_its_control():
    still = Scaffold(eta_global=0.0)
    result = trained_federation(still)
    assert same_bits(result.servers[0].theta, federation(still).servers[0].theta)
    assert float(result.servers[0].control.abs().max()) > 0


def test_a_client_without_steps_uploads_nothing_new():
    method, received = Scaffold(), Server(randn(3), randn(3, seed=1), torch.tensor(0.2, dtype=torch.float64))
    own = randn(3, seed=2)
    client, upload = method.end(method.begin(own, received, Shard(torch.tensor(1.0), torch.empty(0))))
    assert same_bits(client, own)
    assert same_bits(upload, Upload(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)))


def test_clients_whose_uploads_are_dropped_may_not_train():
    with pytest.raises(UserError, match="SCAFFOLD may only train clients whose uploads are used"):
        federation(Scaffold(), dataclasses.replace(TRAINING, train="all"))
    with pytest.raises(UserError, match="SCAFFOLD does not average uploads"):
        federation(Scaffold(), dataclasses.replace(TRAINING, server_optimizer="adam"))


def test_uploads_of_no_honest_client_are_named():
    method, limits = Scaffold(), Limits(largest=10, rho=1, step=2, examples=100, steps=5)
    server = method.init(torch.zeros(3), 4, make_model().net)
    honest = Upload(torch.full((3,), 1.9), torch.full((3,), -19.0))
    assert method.check_upload(server, honest, limits) is None
    far = method.check_upload(server, honest._replace(theta=torch.tensor([0.0, -2.1, 0.0])), limits)
    assert far == "its distance from the server has an entry of magnitude 2.1, more than 2"
    steep = method.check_upload(server, honest._replace(control=torch.tensor([0.0, 21.0, 0.0])), limits)
    assert steep == "its change of the control variate has an entry of magnitude 21, more than 20"


def test_the_servers_step_uses_the_mean_and_the_number_of_uploads_alone():
    method = Scaffold(eta_global=0.7)
    server = method.init(randn(3), 4, make_model().net)
    uploads = stack([Upload(randn(3, seed=k), randn(3, seed=10 + k)) for k in range(3)])
    mean = stack([Upload(uploads.theta.mean(0), uploads.control.mean(0))] * 3)
    sizes, ids = torch.tensor([1.0, 5.0, 9.0]), torch.arange(3)
    found = method.aggregate(server, uploads, sizes, ids)
    assert difference(found, method.aggregate(server, mean, sizes.flip(0), ids)) < ROUNDING
    assert difference(found.control, 0.75 * uploads.control.mean(0)) < ROUNDING
