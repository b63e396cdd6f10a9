"""What differential privacy costs when participants are drawn secretly, against integrals and published values."""

import contextlib
import math

import numpy as np
import pytest
import torch
from grids import FakeGrid, run_config, serve
from scipy import integrate, stats
from scipy.stats import norm
from test_faults import journal

from pfedbayes import UserError, runs
from pfedbayes.flower.messages import facts_of
from pfedbayes.flower.privacy import ORDERS, draw, epsilon, private_mean, sampled_epsilon, sampled_renyi
from pfedbayes.flower.rollback import rollback
from pfedbayes.report import write


def renyi_by_integral(order, noise, rate, reverse=False):
    """The Renyi divergence from its definition."""

    def log_ratio(x):
        return np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))

    power = 1 - order if reverse else order
    log_scale = max(float(power * log_ratio(x) + norm.logpdf(x, scale=noise)) for x in np.linspace(-60, 200, 20_001))
    value, _ = integrate.quad(
        lambda x: math.exp(power * float(log_ratio(x)) + norm.logpdf(x, scale=noise) - log_scale),
        -60 * noise, 60 * noise + 2 * order, limit=2000, points=[0, order],
    )  # fmt: skip
    return (math.log(value) + log_scale) / (order - 1)


@pytest.mark.parametrize(("order", "noise", "rate"), [(2, 1.0, 0.1), (3, 2.0, 0.5), (8, 1.5, 0.02), (32, 4.0, 0.3)])
def test_the_divergence_against_its_definition(order, noise, rate):
    ours = sampled_renyi(order, noise, rate)
    assert ours == pytest.approx(renyi_by_integral(order, noise, rate), rel=1e-6)
    assert renyi_by_integral(order, noise, rate, reverse=True) <= ours * (1 + 1e-6)
    assert sampled_renyi(order, noise, 1.0) == pytest.approx(order / (2 * noise**2))


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "delta", "reference"),
    [
        (256 / 60_000, 1.3, 3515, 1e-5, 0.9544),
        (256 / 60_000, 1.1, 14062, 1e-5, 2.5966),
        (256 / 60_000, 0.7, 10546, 1e-5, 6.3195),
        (0.1, 1.0, 100, 1e-5, 7.9039),
        (0.5, 2.0, 30, 1e-6, 8.5751),
        (0.3, 4.0, 500, 1e-5, 9.0207),
    ],
)
def test_an_independent_accountant_agrees(rate, noise, rounds, delta, reference):
    # By Google's dp-accounting: RdpAccountant over PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), which also
    # tries orders that are not whole. Ours may be slightly larger, never smaller.
    assert reference - 1e-4 <= sampled_epsilon(rounds, noise, delta, rate) <= 1.01 * reference


def test_the_epsilons_of_a_run_depend_on_these_orders():
    assert ORDERS[:127] == tuple(range(2, 129))
    assert ORDERS[126:] == (128, 160, 192, 256, 384, 512, 1024)


def exact_delta(eps, noise, rate):
    """The exact delta of one round, in the worse direction: the hockey-stick divergence by integration."""

    def p(x):
        return (1 - rate) * norm.pdf(x, scale=noise) + rate * norm.pdf(x, loc=1, scale=noise)

    x = np.linspace(-40 * noise, 40 * noise + 1, 2_000_001)
    mixed, plain = p(x), norm.pdf(x, scale=noise)
    deltas = (np.maximum(0, one - math.exp(eps) * two) for one, two in ((mixed, plain), (plain, mixed)))
    return max(float(integrate.trapezoid(delta, x)) for delta in deltas)


@pytest.mark.parametrize(("noise", "rate", "delta"), [(1.0, 0.1, 1e-5), (2.0, 0.5, 1e-6), (0.8, 0.9, 1e-3)])
def test_epsilon_is_a_bound_and_not_a_loose_one(noise, rate, delta):
    eps = sampled_epsilon(1, noise, delta, rate)
    assert exact_delta(eps, noise, rate) <= delta
    assert exact_delta(0.6 * eps, noise, rate) > delta


def test_sampling_costs_less_and_all_the_time_no_more():
    assert sampled_epsilon(20, 4.0, 1e-5, 1.0) == pytest.approx(epsilon(20, 4.0, 1e-5))
    assert sampled_epsilon(20, 4.0, 1e-5, 0.1) < 0.5 < epsilon(2, 4.0, 1e-5)
    assert sampled_epsilon(0, 4.0, 1e-5, 0.1) == 0
    grows = [sampled_epsilon(20, 1.0, 1e-5, rate) for rate in (0.01, 0.1, 0.5, 1.0)]
    assert grows == sorted(grows)


def test_draws_are_independent_and_cannot_be_reproduced():
    sizes = [len(draw(50, 0.2)) for _ in range(2000)]
    expected = stats.binom(50, 0.2)
    assert abs(np.mean(sizes) - expected.mean()) < 0.4
    assert abs(np.var(sizes) - expected.var()) < 1.5  # a fixed size has variance zero
    torch.manual_seed(1)
    first = draw(200, 0.5)
    torch.manual_seed(1)
    assert first != draw(200, 0.5)
    assert draw(5, 1.0) == [0, 1, 2, 3, 4]


def test_the_sum_is_divided_by_a_number_that_reveals_nobody():
    updates = torch.ones(3, 1, 4).double() * 0.1
    longest = torch.ones(1).double()
    assert private_mean(updates, longest, 0.0, count=10)[0].tolist() == pytest.approx([0.03] * 4)
    assert private_mean(updates[:0], longest, 0.0, count=10)[0].tolist() == [0.0] * 4
    noisy = private_mean(torch.zeros(0, 1, 50_000).double(), longest, 2.0, count=10)
    assert float(noisy.std()) == pytest.approx(0.2, rel=0.03)


def private(tmp_path, **others):
    return run_config(tmp_path, federation__privacy_noise=4.0, training__rounds=4, **others)


def test_a_private_federation_draws_secretly_and_accounts_for_it(tmp_path, monkeypatch):
    drawn = []

    def noted(clients, rate):
        drawn.append(draw(clients, rate))
        assert (clients, rate) == (5, 0.6)
        return drawn[-1]

    monkeypatch.setattr("pfedbayes.flower.record.draw", noted)
    server = serve(FakeGrid(private(tmp_path)))
    lines = [entry for entry in journal(tmp_path) if entry.attempt]
    assert [entry.used for entry in lines] == [[f"site {i}" for i in clients] for clients in drawn[:4]]
    assert [entry.epsilon for entry in lines] == [
        pytest.approx(sampled_epsilon(k, 4.0, 1e-5, 0.6)) for k in (1, 2, 3, 4)
    ]
    assert server.record.spent == 4
    assert "differentially private" in write([tmp_path / "run"], tmp_path / "page.html").read_text()


def test_a_repeated_and_a_resumed_round_have_the_same_participants(tmp_path):
    asked = []

    def meddle(client, message, reply):
        facts = facts_of(message)
        if facts.get("round") == 2 and not facts.get("finish"):
            asked.append((facts["nonce"], client, facts["upload"]))
            return None
        return reply

    config = private(tmp_path, federation__attempts=2, federation__timeout=0.05, training__train="all")
    for _ in range(2):
        grid = FakeGrid(config)
        grid.meddle = meddle
        with contextlib.suppress(UserError):  # too few uploads, unless nobody is drawn
            serve(grid)
    clients = [client for _, client, upload in asked if upload]
    assert len({nonce for nonce, _, _ in asked}) == len(asked)
    assert all(clients.count(client) in (0, clients.count(clients[0])) for client in range(5)) if clients else True
    drawn = runs.read_checkpoint(tmp_path / "run").tensors["drawn"]
    assert set(clients) <= set(drawn.nonzero()[:, 0].tolist())


def test_a_round_without_participants_is_noise_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("pfedbayes.flower.record.draw", lambda clients, rate: [])
    server = serve(FakeGrid(private(tmp_path)))
    lines = [entry for entry in journal(tmp_path) if entry.attempt]
    assert [(entry.taken, entry.uploads) for entry in lines] == [(True, 0)] * 4
    assert server.record.spent == 4
    assert bool(server.state.servers[0].isfinite().all())


def test_a_rollback_draws_anew_and_spends_nothing_back(tmp_path):
    grid = FakeGrid(private(tmp_path))
    serve(grid)
    assert rollback(tmp_path / "run", 2) == 4
    server = serve(grid)
    assert server.record.spent == 6
    assert journal(tmp_path)[-1].epsilon == pytest.approx(sampled_epsilon(6, 4.0, 1e-5, 0.6))


def test_a_private_federation_with_public_draws_is_not_continued(tmp_path):
    serve(FakeGrid(private(tmp_path)))
    checkpoint = runs.read_checkpoint(tmp_path / "run")
    writer = runs.Writer(tmp_path / "run")
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items() if name not in ("drawn", "spent")}
    writer.checkpoint(tensors, checkpoint.round, checkpoint.seconds)
    writer.close()
    with pytest.raises(UserError, match=r"drew participants from a seed that nodes know: set federation.out"):
        serve(FakeGrid(private(tmp_path) | {"training.rounds": 5}))
