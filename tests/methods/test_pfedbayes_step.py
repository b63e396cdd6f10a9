import dataclasses
import math

import pytest
import torch
from pfedbayes_gaussians import as_normal, new_client, random_v, run
from torch import nn
from torch.distributions import kl_divergence
from torch.nn.functional import softplus
from torch.testing import assert_close

from federations import (
    SIZES,
    TRAINING,
    difference,
    make_model,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)
from pfedbayes.maths.gaussian import MeanField, grad_in_rho, mean_field, sigma
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import Batch

ROUNDING = 1e-12


class TestObjective:
    """omega and grad_omega against the literal Eq. (27)."""

    model = make_model()
    q, prior = random_v(31, seed=1), random_v(31, seed=3)
    x, y = randn(12, 3, seed=5), torch.arange(12) % 3
    n = torch.tensor(12.0, dtype=torch.float64)

    def batch(self, rows, width=None):
        """The rows as a batch, filled up to a width with examples of weight 0."""
        rows = torch.as_tensor(rows)
        filled = torch.cat([rows, rows.new_zeros((width or len(rows)) - len(rows))])
        weight = (torch.arange(len(filled)) < len(rows)).double()
        return Batch(self.x[filled], self.y[filled], weight)

    def gradient(self, method, batch, g):
        own = mean_field(self.q)
        grad = method.grad_omega(self.model, own, mean_field(self.prior), batch, self.n, g)
        return torch.stack([grad.mu, grad_in_rho(grad.sigma, self.q[1])])

    def literal(self, rows, g, zeta):
        """The value and its gradient in v."""
        v = self.q.clone().requires_grad_()
        outputs = [self.model.net(v[0] + softplus(v[1]) * g_k, self.x[rows]) for g_k in g]
        log_p = sum(output.log_softmax(-1)[range(len(rows)), self.y[rows]].sum() for output in outputs)
        omega = -(12 / len(rows)) * log_p / len(g) + zeta * kl_divergence(as_normal(v), as_normal(self.prior)).sum()
        return omega.detach(), torch.autograd.grad(omega, v)[0]

    @pytest.mark.parametrize("samples", [1, 3])
    @pytest.mark.parametrize("zeta", [0.0, 1.0, 10.0])
    @pytest.mark.parametrize("width", [5, 8])
    def test_gradient_is_that_of_the_equation(self, samples, zeta, width):
        method, rows, g = PFedBayes(zeta=zeta, samples=samples), [1, 4, 7, 8, 11], randn(samples, 31, seed=6)
        ours = self.gradient(method, self.batch(rows, width), g)
        assert_close(ours, self.literal(rows, g, zeta)[1], rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("samples", [1, 3])
    @pytest.mark.parametrize("zeta", [0.0, 10.0])
    def test_value_is_that_of_the_equation(self, samples, zeta):
        method, rows, g = PFedBayes(zeta=zeta, samples=samples), [1, 4, 7, 8, 11], randn(samples, 31, seed=6)
        value = method.omega(self.model, mean_field(self.q), mean_field(self.prior), self.batch(rows, 8), self.n, g)
        assert_close(value, self.literal(rows, g, zeta)[0], rtol=1e-12, atol=0)

    @pytest.mark.parametrize("scale", ["data", "batch"])
    def test_gradient_is_that_of_the_value(self, scale):
        method, batch, g = PFedBayes(zeta=3.0, samples=2, scale=scale), self.batch(range(5), 8), randn(2, 31, seed=6)
        prior = mean_field(self.prior)
        q = MeanField(*(part.clone().requires_grad_() for part in mean_field(self.q)))
        expected = torch.autograd.grad(method.omega(self.model, q, prior, batch, self.n, g), q)
        ours = method.grad_omega(self.model, mean_field(self.q), prior, batch, self.n, g)
        assert_close(tuple(ours), expected, rtol=1e-10, atol=1e-10)

    def test_mean_over_equal_batches_is_the_full_objective(self):
        method, g = PFedBayes(zeta=3.0, samples=2), randn(2, 31, seed=6)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        full, *parts = (self.gradient(method, self.batch(rows, 12), g) for rows in (order, *order.split(4)))
        assert_close(torch.stack(parts).mean(0), full, rtol=ROUNDING, atol=ROUNDING)

    def test_scale_batch_drops_the_factor_n_over_b(self):
        g, half = randn(1, 31, seed=6), self.batch(range(6))
        literal, bare = (self.gradient(PFedBayes(zeta=0.0, scale=scale), half, g) for scale in ("data", "batch"))
        assert_close(literal, 2 * bare)


class TestOptions:
    """Each named deviation against one round written out with autograd and plain gradient descent."""

    eta_personal, eta_global, zeta = 1e-3, 2e-3, 2.0

    def literal_round(
        self,
        q,
        w,
        steps,
        n,
        personal_steps=1,
        noise_std=1.0,
        prior="moving",
        reset_personal=False,
        eta_data=0.0,
        sigma_by_size=0.0,
        **others,
    ):
        received = w
        q = received if reset_personal else q
        if sigma_by_size:
            q = torch.stack([q[0], torch.full_like(q[1], math.log(math.expm1(sigma_by_size / math.sqrt(n))))])
        for (batch,), noise in steps:
            anchor = received if prior == "fixed" else w
            for k in range(personal_steps):
                v = q.clone().requires_grad_()
                omega = n * self.drawn_loss(v, noise_std * noise[k], batch)
                omega = omega + self.zeta * kl_divergence(as_normal(v), as_normal(anchor)).sum()
                q = q - self.eta_personal * torch.autograd.grad(omega, v)[0]
            v_w = w.clone().requires_grad_()
            omega_w = kl_divergence(as_normal(q), as_normal(v_w)).sum()
            next_w = w - self.eta_global * torch.autograd.grad(omega_w, v_w)[0]
            if eta_data:
                loss = self.drawn_loss(v_w, noise_std * noise[-1], batch)
                next_w[0] = w[0] - eta_data * torch.autograd.grad(loss, v_w)[0][0]
            w = next_w
        return q, w

    def drawn_loss(self, v, noise, batch):
        """The mean loss of the batch, averaged over draws of the weights."""
        outputs = [make_model().net(v[0] + softplus(v[1]) * g, batch.x) for g in noise]
        losses = [nn.functional.cross_entropy(each, batch.y, reduction="none") @ batch.weight for each in outputs]
        return sum(losses) / (len(losses) * batch.weight.sum())

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"samples": 3},
            {"personal_steps": 3},
            {"noise_std": 0.001},
            {"prior": "fixed"},
            {"reset_personal": True},
            {"eta_data": 0.2},
            {"sigma_by_size": 2.0},
            {"eta_data": 0.2, "personal_steps": 2, "noise_std": 0.5, "samples": 2},
        ],
        ids=str,
    )
    def test_option_does_what_it_says(self, options):
        method = PFedBayes(self.zeta, -1.0, self.eta_personal, self.eta_global, optimizer="sgd", **options)
        inputs = one_of(stacked_inputs(method), 0)
        inputs = inputs._replace(client=new_client(random_v(31, seed=7)))
        client, upload = run(method, inputs)
        expected = self.literal_round(inputs.client.q, inputs.received, inputs.steps, SIZES[0], **options)
        assert difference((client.q, upload), expected) < 1e-11

    @pytest.mark.parametrize(
        "options",
        [{"personal_steps": 3}, {"noise_std": 0.001}, {"prior": "fixed"}, {"reset_personal": True}, {"scale": "batch"},
         {"eta_data": 0.1}, {"sigma_by_size": 0.3}],
        ids=str,
    )  # fmt: skip
    def test_option_makes_a_difference(self, options):
        assert difference(trained(PFedBayes(**options)).servers, trained(PFedBayes()).servers) > 1e-6


class TestWidthsBySize:
    method = PFedBayes(sigma_by_size=0.7)

    def test_each_client_starts_with_its_own(self):
        still = dataclasses.replace(self.method, eta_personal=0.0, eta_global=0.0)
        ours = trained(still, 1, training=dataclasses.replace(TRAINING, participants=5))
        for i, size in enumerate(SIZES):
            q = ours.personal_state(i).q
            assert_close(sigma(q[1]), torch.full_like(q[1], 0.7 / math.sqrt(size)))
            assert_close(q[0], ours.servers[0][0])

    def test_they_need_a_posterior_that_is_kept(self):
        with pytest.raises(ValueError, match="leave it out, or reset_personal"):
            dataclasses.replace(self.method, reset_personal=True)

    def test_they_are_learned_from_then_on(self):
        inputs = one_of(stacked_inputs(self.method), 0)
        later = inputs._replace(client=run(self.method, inputs)[0])
        assert same_bits(run(self.method, later), run(PFedBayes(), later))
