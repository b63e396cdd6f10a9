"""The court: its closed forms against dense algebra and draws, and a session with tiny sizes."""

import json
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks.court import collapse, exact, judge
from benchmarks.court.__main__ import hold_court
from benchmarks.court.cases import CASES, NOISE, TAU2, WIDE, network, num_weights, simulate
from benchmarks.court.draws import CHECKSUMS
from benchmarks.court.exact import Gaussian
from benchmarks.court.page import cell, table, verdict
from benchmarks.court.train import Federations, methods_of, model_of
from pfedbayes.nets import Batch
from pfedbayes.nets.model import Model

TINY = {"rounds": 2, "steps": 2, "judged": 2, "tuned": 1, "sbc": 3}


def dense(data):
    """Return mean and covariance of (w, theta_1, ..., theta_N) in case B, each weight beside the others."""
    count, dims = len(data.x), data.x[0].shape[1]
    eye = torch.eye(dims).double()
    precision = torch.zeros((count + 1) * dims, (count + 1) * dims).double()
    target = torch.zeros((count + 1) * dims).double()
    precision[:dims, :dims] = eye / WIDE**2 + count * eye / data.tau2
    a, b = exact.sums(data)
    for i in range(count):
        own = slice((i + 1) * dims, (i + 2) * dims)
        precision[own, own] = a[i] + eye / data.tau2
        precision[own, :dims] = precision[:dims, own] = -eye / data.tau2
        target[own] = b[i]
    covariance = precision.inverse()
    return covariance @ target, covariance, precision


class TestClosedForms:
    data = simulate("B", 3)

    def test_the_hierarchical_posterior_is_that_of_the_dense_joint(self):
        mean, covariance, precision = dense(self.data)
        found, best = exact.hierarchical(self.data, WIDE**2, TAU2), exact.mean_field(self.data, "B")
        for i in range(len(self.data.x)):
            own = slice((i + 1) * 5, (i + 2) * 5)
            assert_close(found.mean[i], mean[own])
            assert_close(found.covariance[i], covariance[own, own])
            assert_close(best.covariance[i].diagonal(), 1 / precision.diagonal()[own])
            assert_close(best.mean[i], mean[own])

    def test_limits_of_the_spread(self):
        pooled, local = exact.hierarchical(self.data, 4.0, 1e-8), exact.hierarchical(self.data, 4.0, 1e8)
        assert_close(pooled.mean[0], exact.linear(self.data, 4.0).mean[0], rtol=1e-4, atol=1e-4)
        i = int(np.argmax([len(y) for y in self.data.y]))
        alone = exact.linear(self.data._replace(x=[self.data.x[i]], y=[self.data.y[i]]), 1e8)
        assert_close(local.mean[i], alone.mean[0], rtol=1e-4, atol=1e-4)

    def test_laplace_ends_at_the_mode(self):
        data = simulate("C", 1)
        x, y = torch.from_numpy(np.concatenate(data.x)), torch.from_numpy(np.concatenate(data.y))
        found = exact.laplace(x, y, 4.0)
        theta = found.mean[0].clone().requires_grad_()

        def loss(theta):
            return (
                torch.nn.functional.binary_cross_entropy_with_logits(x @ theta, y, reduction="sum") + theta @ theta / 8
            )

        (grad,) = torch.autograd.grad(loss(theta), theta)
        assert grad.abs().max() < 1e-9
        assert_close(found.covariance[0].inverse(), torch.autograd.functional.hessian(loss, theta.detach()))

    def test_exact_posteriors_are_calibrated(self):
        covered = []
        for k in range(200):
            data = simulate("A", 9000 + k)
            q = exact.linear(data, 1.0)
            covered.append(judge.judge(q, q, data, None)["coverage 0.8"])
        assert abs(np.mean(covered) - 0.8) < 0.05


class TestDistances:
    p = Gaussian(torch.zeros(1, 2).double(), torch.tensor([[[1.0, 0.5], [0.5, 2.0]]]).double())
    q = Gaussian(torch.tensor([[1.0, -1.0]]).double(), torch.tensor([[[0.5, 0.0], [0.0, 0.7]]]).double())

    def test_divergence_and_mean_error(self):
        normal = torch.distributions.MultivariateNormal
        p, q = (normal(each.mean[0], each.covariance[0]) for each in (self.p, self.q))
        assert_close(judge.kl(self.p, self.q)[0], torch.distributions.kl_divergence(p, q))
        gap = self.q.mean[0]
        assert_close(judge.mean_error(self.q, self.p)[0], (gap @ self.p.covariance[0].inverse() @ gap / 2).sqrt())

    def test_probabilities_are_integrals(self):
        x = torch.tensor([[0.3, -1.2], [2.0, 1.0]]).double()
        draws = torch.distributions.MultivariateNormal(self.q.mean[0], self.q.covariance[0]).sample((200_000,))
        expected = torch.sigmoid(draws @ x.T).mean(0)
        assert_close(judge.probability(self.q, x)[0], expected, rtol=0, atol=5e-3)

    def test_a_claim_is_compared_with_draws_too(self):
        data = simulate("C", 0)
        draws = exact.draws("C", 0)["theta"][:, None]
        own = exact.of_draws(draws)
        scores = judge.judge(own, own, data, draws)
        assert scores["mean error"] == pytest.approx(0, abs=1e-9)
        assert scores["W1"] < 0.1 * float(judge.deviations(own).mean())
        wider = judge.judge(own._replace(covariance=4 * own.covariance), own, data, draws)
        assert wider["log sd ratio"] == pytest.approx(math.log(2))
        assert wider["W1"] > 5 * scores["W1"]
        assert judge.judge(own._replace(mean=math.nan * own.mean), own, data, draws) == {"diverged": 1.0}

    def test_uniform_ranks_score_about_one_and_others_more(self):
        uniform = torch.randint(100, (4000,), generator=torch.Generator().manual_seed(1))
        assert judge.rank_test(uniform, 99) < 1.9
        assert judge.rank_test(uniform // 2, 99) > 50

    def test_the_loss_to_the_truth_is_least_at_the_truth(self):
        data = simulate("A", 5)
        sure = Gaussian(torch.from_numpy(data.theta[:1]), 1e-9 * torch.eye(5).double()[None])
        off = sure._replace(mean=sure.mean + 0.1)
        assert judge.loss_to_truth(sure, data, binary=False) < 1e-6 < judge.loss_to_truth(off, data, binary=False)


@pytest.mark.parametrize("name", ["A", "C"])
def test_closed_form_gradients_are_those_of_the_network(name):
    model, data = model_of(name), simulate(name, 2)
    y = torch.from_numpy(data.y[1])
    batch = Batch(torch.from_numpy(data.x[1]), y.long() if name == "C" else y[:, None], torch.rand(len(y)).double())
    theta = torch.randn(5).double()
    assert_close(model.grad_nll(theta, batch), Model.grad_nll(model, theta, batch))


def test_the_network_of_e_is_that_of_numpy():
    data, model = simulate("E", 0), model_of("E")
    assert model.net.num_params == num_weights()
    x = torch.from_numpy(data.held_out[:7])
    found = model.outputs(torch.from_numpy(data.theta[0]), x)[:, 0]
    assert_close(found, torch.from_numpy(network(data.theta[0], data.held_out[:7])))


def test_data_sets_come_from_the_prior_and_repeat():
    one, again, other = simulate("B", 1), simulate("B", 1), simulate("B", 2)
    assert all(np.array_equal(a, b) for a, b in zip(one.x, again.x, strict=True))
    assert not np.array_equal(one.theta, other.theta)
    spread = np.mean([simulate("B", k).theta.var(0, ddof=1).mean() for k in range(200)])
    assert spread == pytest.approx(TAU2, rel=0.1)
    residuals = np.concatenate(
        [np.concatenate(d.y) - np.concatenate(d.x) @ d.theta[0] for d in (simulate("A", k) for k in range(20))]
    )
    assert residuals.std() == pytest.approx(NOISE, rel=0.05)


@pytest.mark.parametrize("name", ["A", "B", "D"])
def test_every_method_makes_claims_of_its_case(name):
    datasets = [simulate(name, k) for k in range(2)]
    for label, settings in methods_of(name).items():
        federations = Federations(settings[0], name, datasets, rounds=2, steps=2)
        assert list(federations.train()) == [1, 2]
        claims = federations.claims(CASES[name].personal)
        assert len(claims) == 2, label
        for q in claims:
            assert q.mean.shape == (8 if CASES[name].personal else 1, 5)
            assert q.covariance.shape == (*q.mean.shape, 5)
            assert q.mean.isfinite().all()


def test_the_prior_collapses_under_lemma_a2_and_not_under_the_hyper_prior():
    found = collapse.curves(8, datasets=3, rounds=200)
    assert found["Lemma A.2, ζ = 10"][-1] < 0.5 * found["hyper-prior, ζ = 10"][-1]
    for label, values in found.items():
        if label.startswith("hyper-prior"):
            assert values[-1] >= (4 / 12) ** 0.5 * collapse.EXPECTED - 1e-9
    assert "<svg" in collapse.picture(found)


def test_exact_clients_minimise_their_objective():
    data = exact.sums(simulate("B", 7))
    v = torch.stack([torch.randn(5).double(), torch.zeros(5).double()])
    best = collapse.best_clients(data, v, 2.0)

    def objective(client, i):
        mu, sigma = client[0], torch.nn.functional.softplus(client[1])
        prior_sigma = torch.nn.functional.softplus(v[1])
        fit = 0.5 * (mu @ data.a[i] @ mu + (data.a[i].diagonal() * sigma**2).sum()) - data.b[i] @ mu
        kl = (prior_sigma.log() - sigma.log() + (sigma**2 + (mu - v[0]) ** 2) / (2 * prior_sigma**2)).sum()
        return fit + 2.0 * kl

    for i in (0, 5):
        at = best[i].clone().requires_grad_()
        (grad,) = torch.autograd.grad(objective(at, i), at)
        assert grad.abs().max() < 1e-8


def test_a_file_of_draws_that_was_changed_is_refused(tmp_path):
    (tmp_path / "C0.safetensors").write_bytes(b"other")
    (tmp_path / CHECKSUMS).write_text(json.dumps({"C0.safetensors": "0" * 64}))
    assert exact.stored(tmp_path) == {"C": [0], "D": [], "E": []}
    with pytest.raises(ValueError, match="is not the file that was made"):
        exact.draws("C", 0, tmp_path)


def test_a_session_writes_the_page_and_continues(tmp_path):
    out = tmp_path / "court.md"
    results = hold_court(out, TINY, "AE")
    text = out.read_text()
    assert "\n| A | PVI |" in text
    assert "## Case E: tiny network" in text
    assert "Prior collapse" in text
    assert "| A | exact mean-field optimum |" in text
    assert out.with_suffix(".svg").read_text().startswith("<svg")
    kept = json.loads(out.with_suffix(".json").read_text())
    kept["cases"]["A"]["PVI"]["scores"][0]["mean error"] = 77.0  # would be computed again if it were not kept
    out.with_suffix(".json").write_text(json.dumps(kept))
    again = hold_court(out, TINY, "AE")
    assert again["cases"]["A"]["PVI"]["scores"][0]["mean error"] == 77.0
    assert again["cases"]["E"] == results["cases"]["E"]


def test_verdicts_in_plain_words():
    def row(**scores):
        return {"trained": True, "scores": [{key.replace("_", " "): value for key, value in scores.items()}]}

    found = {
        "good": row(mean_error=0.1, log_sd_ratio=0.05, predictive_KL=0.1),
        "bad": row(mean_error=2.0, log_sd_ratio=math.log(0.5), predictive_KL=0.5),
        "mode": row(mean_error=0.5, predictive_KL=0.1),
        "lost": {"trained": True, "scores": [{"diverged": 1.0}]},
        "local only": row(predictive_KL=0.3),
        "pooled only": row(predictive_KL=0.9),
    }
    assert verdict("good", "B", found) == "| B | good | believe | believe | better than local and pooled |"
    assert verdict("bad", "B", found) == (
        "| B | bad | do not believe | do not believe: 50 % too narrow | no case: not better than local only |"
    )
    assert "| rough | makes no claim |" in verdict("mode", "B", found)
    assert verdict("lost", "B", found) == "| B | lost | diverges | – | – |"
    assert cell([{"KL": 1e-17}], "KL") == "0"
    assert "| 0.1 ± 0 |" in table("A", {"good": found["good"]})
