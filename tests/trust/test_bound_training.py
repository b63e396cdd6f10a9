"""Training for a bound: the gradient is that of the bound, and the bound falls."""

import dataclasses
import math

import pytest
import torch

from federations import make_model, make_shards, trained
from pfedbayes.engine.personalisation import personalise, prior_of
from pfedbayes.maths.gaussian import gaussian, kl, mean_field
from pfedbayes.maths.intervals import pac_bayes_kl
from pfedbayes.methods import PFedBayes
from pfedbayes.methods.base import Shard
from pfedbayes.nets import Batch
from pfedbayes.trust.bound_training import LEAST, LENGTH, TowardsBound


def bound(nll, divergence, size, delta):
    """The quadratic PAC-Bayes bound on the cross-entropy."""
    spread = (divergence + torch.log(2 * torch.sqrt(size) / delta)) / (2 * size)
    return ((nll / -math.log(LEAST) + spread).sqrt() + spread.sqrt()).square()


def test_the_weight_of_kl_is_that_of_the_gradient_of_the_bound():
    nll, divergence = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.4, 3.0))
    size = torch.tensor(150.0, dtype=torch.float64)
    bound(nll, divergence, size, 0.05).backward()
    # The steps follow the gradient of n NLL + w KL.
    weight = TowardsBound(10, 0.05).weight_of_kl(nll.detach(), divergence.detach(), size)
    assert float(weight) == pytest.approx(float(size * divergence.grad / nll.grad))


def test_a_step_goes_against_the_gradient_of_the_bound():
    model, method = make_model(), TowardsBound(5, 0.05)
    prior = gaussian(0.3 * torch.randn(model.net.num_params, dtype=torch.float64), -2.0)
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 3
    batch = Batch(x, y, torch.ones(20, dtype=torch.float64))
    noise = torch.randn(method.noise_shape(model, 20), dtype=torch.float64)
    size = torch.tensor(60.0, dtype=torch.float64)
    start = method.begin(method.enrol(prior), prior, Shard(size, torch.empty(0)))
    shift = torch.full_like(prior[0], 0.01).requires_grad_()
    q = mean_field(prior)
    nll = model.expected_nll(q.mu + q.sigma * shift, q.sigma.square(), batch, noise) / 20
    bound(nll, 0.5 * shift.square().sum(), size, 0.05).backward()
    moved = method.step(model, start._replace(shift=shift.detach()), (batch,), noise)
    step = moved.shift - shift.detach()
    assert float(step.norm()) == pytest.approx(LENGTH)
    assert torch.allclose(step / step.norm(), -shift.grad / shift.grad.norm(), atol=1e-9)


@pytest.mark.parametrize("noise_std", [1.0, 0.5])
def test_the_posterior_is_the_prior_shifted_by_its_own_widths(noise_std):
    ours = trained(PFedBayes(eta_personal=0.05, noise_std=noise_std), 3)
    prior = prior_of(ours, "personal")
    new = personalise(prior, ours.shards, 20, method=TowardsBound(20, 0.05, noise_std))
    for i in range(ours.num_clients):
        q, p = new.personal_state(i).q, prior.states[0][i]
        assert torch.equal(q[1], p[1])
        widths = noise_std * mean_field(p).sigma
        distance = 0.5 * ((q[0] - p[0]) / widths).square().sum()
        posterior = new.method.posterior(new.personal_state(i))
        assert float(kl(posterior, mean_field(p)._replace(sigma=widths))) == pytest.approx(float(distance))
        assert torch.allclose(posterior.sigma, widths)


def test_training_lowers_the_bound_of_a_poor_prior():
    shards = make_shards(sizes=(400,) * 3, test_sizes=(10,) * 3)
    ours = trained(PFedBayes(rho0=0.0, eta_personal=0.01, eta_global=0.01), 1, shards=shards)
    prior = prior_of(ours, "shared")
    bounds = []
    for steps in (0, 100):
        found = personalise(prior, shards, steps, method=TowardsBound(max(1, steps), 0.05))
        outputs = found.predict("personal", 0, shards.x[shards.train[0]], 50)
        wrong = float((outputs.argmax(-1) != shards.y[shards.train[0]]).double().mean())
        divergence = kl(mean_field(found.personal_state(0).q), mean_field(prior.states[0]))
        bounds.append(pac_bayes_kl(wrong, float(divergence), 400, 0.05))
    assert bounds[1] < bounds[0] - 0.02


def test_it_uses_full_batches_where_the_method_does():
    assert TowardsBound(1, 0.05, 1.0, full_batch=True).needs.full_batch
    assert not TowardsBound(1, 0.05).needs.full_batch
    assert dataclasses.replace(TowardsBound(1, 0.05), steps=3).steps == 3
