import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from federations import EXACT, TRAINING, make_model, randn, same_bits, trained
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import FedAvg, FedProx
from pfedbayes.methods.base import Shard
from pfedbayes.nets import Batch


@pytest.mark.parametrize("over", ["vmap", "loop"])
def test_without_penalty_it_is_fedavg_to_the_last_bit(over):
    plan = dataclasses.replace(EXACT, over=over)
    fedavg, fedprox = (trained(method, plan=plan) for method in (FedAvg(0.1), FedProx(0.1, prox=0.0)))
    assert same_bits(fedavg.servers, fedprox.servers)


def test_first_local_step_does_not_depend_on_the_penalty():
    one_step = dataclasses.replace(TRAINING, local_steps=1)
    servers = [trained(FedProx(prox=prox), 1, training=one_step).servers for prox in (0.0, 0.1, 100.0)]
    assert same_bits(servers[0], servers[1])
    assert same_bits(servers[0], servers[2])


def test_later_steps_do():
    servers = [trained(FedProx(prox=prox), 1).servers for prox in (0.0, 0.1)]
    assert not same_bits(*servers)


class TestFirstAnchor:
    """Held near the first model received instead of the last."""

    def test_the_first_round_is_the_same(self):
        servers = [trained(FedProx(prox=0.5, anchor=anchor), 1).servers for anchor in ("received", "first")]
        assert same_bits(*servers)

    def test_a_strong_penalty_keeps_the_shared_model_where_it_began(self):
        start = trained(FedProx(), 0).servers[0]
        held, free = (
            trained(FedProx(eta=0.1, prox=9.0, anchor=anchor), 20).servers[0] for anchor in ("first", "received")
        )
        assert (held - start).norm() < 0.5 * (free - start).norm()

    def test_a_client_remembers_what_it_received_first(self):
        method, first, later = FedProx(anchor="first"), randn(3, seed=4), randn(3, seed=5)
        local = method.begin(method.enrol(first), later, shard=None)
        assert same_bits(local.anchor, first)
        assert same_bits(local.theta, later)
        assert same_bits(method.end(local)[0], first)


class TestQuadraticLoss:
    """Linear regression with unit noise: the mean loss is theta^T A theta / 2 - b^T theta + constant."""

    x, y, w = randn(12, 3, seed=1), randn(12, 1, seed=2), randn(3, seed=3)
    A, b = x.T @ x / 12, (x.T @ y / 12)[:, 0]

    def local_optimum(self, method: FedProx, steps: int) -> torch.Tensor:
        model = make_model(nn.Linear(3, 1, bias=False), Regression(sigma_eps=1.0))
        batch = Batch(self.x, self.y, torch.ones(12, dtype=torch.float64))
        step = (batch,), torch.zeros(())
        shard = Shard(torch.tensor(12.0, dtype=torch.float64), labels=torch.empty(0))
        _, upload = client_round(method, model, (), self.w, shard, [step] * steps)
        return upload

    @pytest.mark.parametrize("prox", [0.0, 0.7, 5.0])
    def test_local_training_converges_to_the_proximal_point(self, prox):
        expected = torch.linalg.solve(self.A + prox * torch.eye(3, dtype=torch.float64), self.b + prox * self.w)
        assert_close(self.local_optimum(FedProx(eta=0.1, prox=prox), 1500), expected, rtol=1e-9, atol=1e-9)

    def test_a_large_penalty_holds_the_model_at_the_anchor(self):
        distances = [
            float((self.local_optimum(FedProx(eta=0.5 / prox, prox=prox), 200) - self.w).norm())
            for prox in (1e2, 1e4, 1e6)
        ]
        gradient = float((self.A @ self.w - self.b).norm())
        # theta - w = -(A + lambda I)^-1 (A w - b), about the gradient divided by lambda.
        assert distances == pytest.approx([gradient / prox for prox in (1e2, 1e4, 1e6)], rel=0.05)


@pytest.mark.parametrize("field", ["eta", "prox"])
def test_negative_values_are_refused(field):
    with pytest.raises(ValueError, match=field):
        FedProx(**{field: -0.1})
