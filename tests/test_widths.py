"""The benchmark of posterior widths: its closed forms against dense algebra."""

import sys

import pytest
import torch
from torch.testing import assert_close

from benchmarks import widths
from benchmarks.widths import Sample, correlated, exact, factorised, independent, mean_field_variances, simulate


def sample(number=3, rows=6, ratio=0.5):
    return simulate(number, rows, ratio, 0.6, torch.Generator().manual_seed(1))


def joint(sample):
    """Return mean and precision of the joint posterior of (mu, delta_1, ..., delta_N), each (K,), by dense algebra."""
    number, rows, inputs = sample.x.shape
    design = torch.zeros(number, rows, number + 1, inputs, dtype=torch.float64)
    design[:, :, 0] = sample.x
    for i in range(number):
        design[i, :, i + 1] = sample.x[i]
    flat = design.view(number * rows, -1)
    prior = torch.cat([sample.scale, *[sample.spread] * number]) ** -2
    precision = flat.T @ flat / widths.NOISE**2 + prior.diag()
    mean = torch.linalg.solve(precision, flat.T @ sample.y.flatten() / widths.NOISE**2)
    return mean.view(number + 1, inputs), precision


def test_the_exact_posterior_is_that_of_dense_algebra():
    data = sample()
    number, _, inputs = data.x.shape
    mean, precision = joint(data)
    covariance = torch.linalg.inv(precision).view(number + 1, inputs, number + 1, inputs)
    found = exact(data)
    assert_close(found.mean, mean[0] + mean[1:])
    for i in range(number):
        parts = [covariance[a, :, b] for a in (0, i + 1) for b in (0, i + 1)]
        assert_close(found.covariance[i], sum(parts))


def test_the_mean_field_optimum_is_one_over_the_diagonal_of_the_precision():
    data = sample()
    variances = (1 / joint(data)[1].diagonal()).view(-1, data.x.shape[-1])
    shared, personal = mean_field_variances(data)
    assert_close(shared, variances[0])
    assert_close(personal, variances[1:])
    assert_close(independent(data), variances[0] + variances[1:])


def test_for_a_single_weight_the_correlated_variance_is_exact_and_less_than_the_sum():
    whole = sample()
    one = Sample(whole.x[..., :1], whole.y, whole.theta[:, :1], whole.scale[:1], whole.spread[:1])
    assert_close(correlated(one), exact(one).covariance[..., 0])
    assert (independent(whole) > correlated(whole)).all()


def test_independent_weights_are_too_narrow():
    posterior = exact(sample())
    assert (factorised(posterior) < posterior.covariance.diagonal(dim1=-2, dim2=-1)).all()


def test_inputs_have_the_correlation():
    data = simulate(1, 20_000, 1.0, 0.6, torch.Generator().manual_seed(1))
    found = torch.corrcoef(data.x[0, :, :4].T)
    assert_close(found, torch.full((4, 4), 0.6, dtype=torch.float64).fill_diagonal_(1.0), rtol=0, atol=0.02)
    assert (data.x[..., 4] == 1).all()


def test_exact_intervals_cover_as_often_as_they_should():
    samples = [simulate(8, 20, 0.5, 0.6, torch.Generator().manual_seed(seed)) for seed in range(200)]
    found = []
    for each in samples:
        posterior = exact(each)
        found.append(widths.coverage(each, posterior.mean, posterior.covariance.diagonal(dim1=-2, dim2=-1)))
    assert float(torch.stack(found).mean()) == pytest.approx(widths.LEVEL, abs=0.015)


def test_it_writes_its_page(tmp_path, monkeypatch, capsys):
    page = tmp_path / "widths.md"
    monkeypatch.setattr(widths, "NUMBERS", (2,))
    monkeypatch.setattr(sys, "argv", ["widths", "--federations", "1", "--out", str(page)])
    widths.main()
    rows = [line for line in page.read_text().splitlines() if line.startswith("| 2 |")]
    assert len(rows) == 2 * 2 * 3
    printed = capsys.readouterr().out.splitlines()
    assert all(line in printed for line in rows)
