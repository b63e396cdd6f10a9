import dataclasses

import pytest
import torch
from torch.testing import assert_close

from federations import TRAINING, difference, model_for, one_of, randn, stacked_inputs, trained
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.methods import FedAvg, FedPA
from pfedbayes.methods.fedpa import corrected_update

W, SAMPLES = randn(7, seed=1), randn(4, 7, seed=2)
ALL = torch.ones(4, dtype=torch.bool)


def by_matrix(w, samples, rho):
    r = 1 / (1 + (len(samples) - 1) * rho)
    covariance = r * torch.eye(samples.shape[1]).double() + (1 - r) * torch.cov(samples.T)
    return torch.linalg.solve(covariance, w - samples.mean(0))


def by_recursion(w, samples, rho):
    """The dynamic programme of the paper, one sample after another."""
    delta, mean, pairs = w - samples[0], samples[0], []
    for t in range(2, len(samples) + 1):
        u = samples[t - 1] - mean
        v = u.clone()
        for k, (old_u, old_v) in enumerate(pairs, 2):
            gamma = rho * (k - 1) / k
            v -= gamma * (old_v @ u) / (1 + gamma * old_u @ old_v) * old_v
        gamma = rho * (t - 1) / t
        factor = gamma * (t * u @ delta - u @ v) / (1 + gamma * u @ v)
        delta = delta - (1 + factor) * v / t
        mean = ((t - 1) * mean + samples[t - 1]) / t
        pairs.append((u, v))
    return (1 + (len(samples) - 1) * rho) * delta


@pytest.mark.parametrize("rho", [0.0, 0.01, 0.3, 2.0])
def test_three_formulas_agree(rho):
    ours = corrected_update(W, SAMPLES, ALL, rho)
    assert_close(ours, by_matrix(W, SAMPLES, rho), rtol=1e-11, atol=1e-11)
    assert_close(ours, by_recursion(W, SAMPLES, rho), rtol=1e-11, atol=1e-11)


def test_samples_that_were_not_drawn_do_not_count():
    some = torch.tensor([True, True, False, True])
    assert_close(corrected_update(W, SAMPLES, some, 0.3), by_matrix(W, SAMPLES[some], 0.3))
    one = torch.tensor([False, True, False, False])
    assert_close(corrected_update(W, SAMPLES, one, 0.3), W - SAMPLES[1])


def test_rotations_and_sums():
    turn = torch.linalg.qr(randn(7, 7, seed=3))[0]
    turned = corrected_update(turn @ W, SAMPLES @ turn.T, ALL, 0.3)
    assert_close(turned, turn @ corrected_update(W, SAMPLES, ALL, 0.3))
    mean, step = SAMPLES.mean(0), randn(7, seed=4)
    parts = [corrected_update(mean + each, SAMPLES, ALL, 0.3) for each in (W, step, W + step)]
    assert_close(parts[0] + parts[1], parts[2])


def run(method, steps=4, client=0.0):
    inputs = one_of(stacked_inputs(method), 0)
    inputs = inputs._replace(client=torch.tensor(client).double(), steps=inputs.steps[:steps])
    return client_round(method, model_for(method), *inputs)


def test_one_sample_of_the_last_iterate_is_fedavg():
    expected = run(FedAvg(eta=0.1))[1]
    assert_close(run(FedPA(eta=0.1, burn_in=3, samples=1, sample_steps=1))[1], expected, rtol=0, atol=1e-15)
    for method in (FedPA(eta=0.1), FedPA(eta=0.1, burn_in=0, samples=4, warm_rounds=1)):
        assert torch.equal(run(method)[1], expected)  # no sample yet; a warm round
    assert not torch.equal(run(FedPA(eta=0.1, burn_in=0, samples=4, warm_rounds=1), client=1.0)[1], expected)


def test_without_shrinkage_the_update_is_that_of_the_mean_iterate():
    method = FedPA(eta=0.1, burn_in=0, samples=2, sample_steps=2, shrinkage=0.0)
    iterates = [run(FedAvg(eta=0.1), k)[1] for k in range(1, 5)]
    assert_close(run(method)[1], sum(iterates) / 4)


def test_samples_are_means_of_consecutive_iterates():
    method, inputs = FedPA(eta=0.1, burn_in=1, samples=2, sample_steps=1), one_of(stacked_inputs(FedPA()), 0)
    iterates = torch.stack([run(FedAvg(eta=0.1), k)[1] for k in (2, 3)])
    expected = inputs.received - by_matrix(inputs.received, iterates, 0.01)
    assert_close(run(method, 3)[1], expected, rtol=1e-9, atol=1e-9)


def test_the_fixed_point_is_the_mode_of_the_product():
    # Exact samples of Gaussian clients: FedPA ends at the product's mode, FedAvg at the mean of the clients' modes.
    modes, roots = randn(3, 2, seed=5), torch.linalg.qr(randn(3, 2, 2, seed=6))[0] * torch.tensor([0.6, 2.0]).double()
    samples = randn(3, 60, 2, seed=7) @ roots.transpose(1, 2)
    samples = samples - samples.mean(1, keepdim=True) + modes[:, None]
    precisions = torch.stack([torch.cov(each.T).inverse() for each in samples])
    mode = torch.linalg.solve(precisions.sum(0), (precisions @ modes[..., None]).sum(0)[:, 0])
    w, drawn = torch.zeros(2).double(), torch.ones(60, dtype=torch.bool)
    for _ in range(100):
        w = w - 0.3 * sum(corrected_update(w, each, drawn, 10.0) for each in samples) / 3
    assert (w - mode).norm() < 0.02 * (modes.mean(0) - mode).norm()


def test_a_round_ends_with_the_last_sample():
    assert FedPA(burn_in=4, samples=3, sample_steps=2).needs.max_steps == 10
    training = dataclasses.replace(TRAINING, local_steps=4)
    short, full = (trained(FedPA(burn_in=1, samples=n, sample_steps=1), training=training) for n in (2, 3))
    assert difference(short.servers, full.servers) > 0
