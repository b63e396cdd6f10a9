"""Guards and noise in the server's average, against closed forms."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grids import FakeGrid, run_config, serve
from scipy import integrate, stats
from scipy.stats import norm

from federations import difference, randn
from pfedbayes import UserError, runs
from pfedbayes.flower.combine import _aggregate_mean, combine, limited, robust_tree, shortened, trimmed_mean
from pfedbayes.flower.privacy import epsilon, private_mean, secret_normals
from pfedbayes.flower.settings import FederationConfig, from_run_config
from pfedbayes.methods.fedavg import FedAvg
from pfedbayes.methods.pfedbayes import PFedBayes
from pfedbayes.report import write

CLIENTS = torch.arange(5)
PLAIN = FederationConfig(5, robust="none")
SIZES = torch.tensor([4.0, 1.0, 2.0, 3.0, 7.0]).double()


def test_without_options_it_is_the_methods_own_aggregation():
    server, uploads = randn(2, 6), list(randn(5, 2, 6, seed=1))
    for method in (PFedBayes(beta=0.5), FedAvg()):
        expected = method.aggregate(server, torch.stack(uploads), SIZES, CLIENTS)
        assert torch.equal(combine(method, PLAIN, server, uploads, SIZES, CLIENTS), expected)


def test_trimmed_mean_leaves_out_both_ends_of_every_entry():
    uploads = torch.tensor([[1.0, 9.0], [2.0, -50.0], [300.0, 5.0], [4.0, 6.0], [-7.0, 7.0]])
    assert trimmed_mean(uploads, 0.2).tolist() == pytest.approx([(1 + 2 + 4) / 3, 6.0])
    assert trimmed_mean(uploads, 0.0).tolist() == pytest.approx(uploads.mean(0).tolist())
    assert trimmed_mean(uploads[:2], 0.4).tolist() == pytest.approx([1.5, -20.5])  # of two none can be left out
    assert trimmed_mean(torch.tensor([0.0, 1.0, 5.0, 8.0, 90.0]), 0.4) == 5  # the median is left
    # 0.2 of 7 values are 1.4: two at each end.
    assert trimmed_mean(torch.tensor([0.0, 9.0, 1.0, 3.0, 6.0, 70.0, 80.0]), 0.2) == 6


def test_a_mean_is_aggregated_as_one_upload_of_one_client():
    method, mean = SimpleNamespace(aggregate=lambda *arguments: arguments), randn(2, 3)
    server, uploads, sizes, clients = _aggregate_mean(method, mean + 1, mean)
    assert torch.equal(server, mean + 1)
    assert torch.equal(uploads, mean[None])
    assert (sizes.tolist(), clients.tolist()) == ([1.0], [0])


def test_long_updates_become_as_long_as_the_median_one():
    updates = torch.eye(3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 1000.0], dtype=torch.float64)
    assert shortened(updates).norm(dim=1).tolist() == pytest.approx([1.0, 2.0, 2.0])
    still = shortened(torch.zeros(3, 4))
    assert torch.equal(still, torch.zeros(3, 4))


def test_trees_are_guarded_leaf_by_leaf():
    uploads = (torch.tensor([[11.0], [8.0], [310.0]]), torch.tensor([5.0, 6.0, -9.0]))
    start = (torch.tensor([10.0]), torch.tensor(5.0))
    same = robust_tree(uploads, "none", start, 0.2)
    assert all(torch.equal(*pair) for pair in zip(same, uploads, strict=True))
    trimmed = robust_tree(uploads, "trimmed-mean", start, 0.2)
    assert [leaf.tolist() for leaf in trimmed] == [[[11.0]] * 3, [5.0] * 3]
    # Updates 1, -2 and 300 of the first leaf, and 0, 1 and -14 of the second one.
    short = robust_tree(uploads, "median-norm", start, 0.2)
    assert [leaf.flatten().tolist() for leaf in short] == [[11.0, 8.0, 12.0], [5.0, 6.0, 4.0]]


@pytest.mark.parametrize(
    ("robust", "expected"), [("none", [4.0, 1.0, 2.0, 3.0, 6.0]), ("median-norm", [3.0, 1.0, 2.0, 3.0, 3.0])]
)
def test_nobody_counts_as_much_as_it_claims(robust, expected):
    config = FederationConfig(5, robust=robust, largest_size=2.0)
    assert limited(SIZES, FedAvg(), config).tolist() == expected


@pytest.mark.parametrize(("robust", "expected"), [("median-norm", 10 + (1 - 2 + 2) / 3), ("trimmed-mean", 11.0)])
def test_robust_averages_by_hand(robust, expected):
    # The updates 1, -2 and 300 of a server at 10: the longest one is shortened to 2, or both ends are left out.
    uploads, sizes = list(torch.tensor([[11.0], [8.0], [310.0]]).double()), torch.ones(3).double()
    config = FederationConfig(3, robust=robust)
    after = combine(FedAvg(), config, torch.tensor([10.0]).double(), uploads, sizes, CLIENTS[:3])
    assert after.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("robust", ["trimmed-mean", "median-norm"])
@pytest.mark.parametrize("attack", [50.0, -8000.0])
def test_a_liar_moves_a_guarded_average_no_further_than_an_honest_client_could(tmp_path, robust, attack):
    honest = randn(5, 2, 6, seed=1) * 0.1
    server = torch.zeros(2, 6, dtype=torch.float64)
    lied = honest.clone()
    lied[3] = attack
    config = FederationConfig(5, robust=robust)
    method = PFedBayes()
    states = [combine(method, config, server, list(uploads), SIZES, CLIENTS) for uploads in (honest, lied)]
    plain = combine(method, PLAIN, server, list(lied), SIZES, CLIENTS)
    longest = float(honest.flatten(1).norm(dim=1).max())
    assert float((states[1] - states[0]).norm()) < longest
    assert float(plain.norm()) > 10 * longest


def test_private_mean_clips_each_part_and_adds_noise_of_the_right_size():
    count, size = 8, 40000
    updates = torch.zeros(count, 2, size, dtype=torch.float64)
    updates[:, 0, 0] = 30.0  # far longer than allowed
    updates[:, 1, 1] = 0.01  # shorter
    longest = torch.tensor([2.0, 0.5], dtype=torch.float64)
    quiet = private_mean(updates, longest, 0.0)
    assert quiet[0, 0] == pytest.approx(2.0)
    assert quiet[1, 1] == pytest.approx(0.01)
    noisy = private_mean(updates, longest, 1.5)
    measured = (noisy - quiet).std(dim=1)
    expected = 1.5 * math.sqrt(2) / count * longest
    assert measured.tolist() == pytest.approx(expected.tolist(), rel=0.03)
    assert not torch.equal(noisy, private_mean(updates, longest, 1.5)), "the noise must not be the same again"


def test_epsilon_against_its_definition():
    # One round with z = 1 loses delta(epsilon) = Phi(1/2 - e) - exp(e) Phi(-1/2 - e).
    eps = epsilon(1, 1.0, 1e-5)
    phi = torch.distributions.Normal(torch.tensor(0.0).double(), 1.0).cdf
    lost = phi(torch.tensor(0.5 - eps).double()) - math.exp(eps) * phi(torch.tensor(-0.5 - eps).double())
    assert float(lost) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(4, 2.0, 1e-5) == pytest.approx(eps, rel=1e-9)  # four rounds with twice the noise
    assert epsilon(0, 1.0, 1e-5) == 0
    assert math.isfinite(epsilon(10_000, 0.5, 1e-5))


def hockey_stick(mu, eps):
    """What is lost between N(0, 1) and N(mu, 1), from its definition: the integral of max(0, q - exp(eps) p)."""
    start = eps / mu + mu / 2  # where q is exp(eps) p
    return integrate.quad(lambda x: norm.pdf(x - mu) - math.exp(eps) * norm.pdf(x), start, start + 40, epsabs=1e-14)[0]


def renyi(rounds, noise, delta):
    """An upper bound on epsilon from Renyi's divergence of order a, k a / (2 z^2), by Mironov's conversion."""
    orders = np.linspace(1.01, 200, 20_000)
    return float(np.min(rounds * orders / (2 * noise**2) + math.log(1 / delta) / (orders - 1)))


@pytest.mark.parametrize(
    ("rounds", "noise", "delta"),
    [(1, 1.0, 1e-5), (20, 4.0, 1e-5), (200, 8.0, 1e-6), (5, 0.7, 1e-3), (1, 10.0, 1e-5)],
)
def test_epsilon_against_the_integral_and_a_bound(rounds, noise, delta):
    eps = epsilon(rounds, noise, delta)
    assert hockey_stick(math.sqrt(rounds) / noise, eps) == pytest.approx(delta, rel=1e-4)
    assert 0.7 * renyi(rounds, noise, delta) < eps < renyi(rounds, noise, delta)


def test_epsilon_of_the_documentation():
    assert epsilon(20, 4.0, 1e-5) == pytest.approx(5.0, abs=0.05)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_client_moves_the_private_mean_by_at_most_one_noise_multiplier(num_parts):
    # Mean and rho together, in units of the noise on each, whatever the client sends and however many examples it has.
    noise, longest = 1.7, torch.tensor([2.0, 0.05], dtype=torch.float64)[:num_parts]
    others = randn(6, num_parts, 30_000, seed=1)
    deviations = (private_mean(others, longest, noise) - private_mean(others, longest, 0.0)).std(dim=1)
    for scale in (1e-9, 1.0, 1e6):
        own = randn(1, num_parts, 30_000, seed=2) * scale
        means = [private_mean(torch.cat([others[1:], one]), longest, 0.0) for one in (own, torch.zeros_like(own))]
        moved = float(((means[0] - means[1]) / deviations[:, None]).norm())
        assert moved <= 1 / noise * 1.03
    assert moved == pytest.approx(1 / noise, rel=0.03)  # the longest updates are as bad as that


def test_private_noise_cannot_be_drawn_again(monkeypatch):
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(secret_normals(torch.Size((3, 50_000))))
    assert not torch.equal(*drawn)
    assert stats.kstest(drawn[0].flatten().numpy(), "norm").pvalue > 1e-6
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(os, "urandom", lambda count, byte=byte: byte * count)
        extreme = secret_normals(torch.Size((2,)))
        assert bool(extreme.isfinite().all())
        assert 8 < abs(float(extreme[0])) < 9


def test_private_federation_reports_what_it_has_spent(tmp_path):
    config = run_config(tmp_path, federation__privacy_noise=4.0, federation__privacy_clip=0.5)
    del config["training.participants"]
    grid = FakeGrid(config)
    server = serve(grid)
    journal = runs.read_run(tmp_path / "run").journal
    most = max(member.taken for member in server.members)
    assert journal[-1].epsilon == pytest.approx(epsilon(most, 4.0, 1e-5))
    assert "differentially private" in write([tmp_path / "run"], tmp_path / "page.html").read_text()
    (tmp_path / "other").mkdir()
    config = run_config(tmp_path / "other")
    del config["training.participants"]
    plain = serve(FakeGrid(config))
    assert difference(server.state.servers[0], plain.state.servers[0]) > 0.01


def test_wide_clips_and_no_noise_are_the_plain_average():
    server, uploads = randn(2, 6), list(randn(5, 2, 6, seed=1))
    config = FederationConfig(5, privacy_noise=1e-12, privacy_clip=1e6, privacy_clip_rho=1e6)
    private = combine(PFedBayes(beta=0.3), config, server, uploads, SIZES, CLIENTS)
    plain = combine(PFedBayes(beta=0.3), PLAIN, server, uploads, SIZES, CLIENTS)
    assert difference(private, plain) < 1e-5


def test_an_update_that_is_no_gaussian_is_clipped_as_a_whole():
    update = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double()
    config = FederationConfig(3, privacy_noise=1e-12, privacy_clip=1.0, privacy_clip_rho=1e-3)
    whole = combine(FedAvg(), config, torch.zeros(4).double(), [update.flatten()] * 3, SIZES[:3], CLIENTS[:3])
    assert whole.tolist() == pytest.approx([0.6, 0.0, 0.0, 0.8], abs=1e-9)
    parts = combine(PFedBayes(), config, torch.zeros(2, 2).double(), [update] * 3, SIZES[:3], CLIENTS[:3])
    assert parts.flatten().tolist() == pytest.approx([1.0, 0.0, 0.0, 1e-3], abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy_noise": 1.0, "robust": "trimmed-mean"}, "leave robust out"),
        ({"privacy_noise": 1.0, "secure": True}, "no single update"),
        ({"clients": 2, "secure": True}, "secure needs 3 to 1000 clients, got 2"),
        ({"trim": 0.5}, "trim must be"),
        ({"min_replies": 9}, "min_replies must be between 1 and clients = 5"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"privacy_delta": 1.0}, "privacy_delta"),
        ({"clients": 0}, "clients must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, message):
    others = {f"federation__{name}": value for name, value in settings.items()}
    with pytest.raises(UserError, match=message):
        from_run_config(run_config(tmp_path, **others))


def test_run_configs_that_are_not_understood_name_the_key(tmp_path):
    config = run_config(tmp_path)
    with pytest.raises(UserError, match=r"unknown key federation.timout: did you mean 'timeout'"):
        from_run_config(config | {"federation.timout": 3})
    with pytest.raises(UserError, match="unknown key lr in the run config"):
        from_run_config(config | {"lr": 3})
    with pytest.raises(UserError, match=r"federation.clients is missing"):
        from_run_config({"method.name": "fedavg"})
    with pytest.raises(UserError, match=r"leave evaluation.clients out"):
        from_run_config(config | {"evaluation.clients": 2})
