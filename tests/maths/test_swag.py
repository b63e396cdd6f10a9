import pytest
import torch
from torch.testing import assert_close

from federations import difference, randn, same_bits
from pfedbayes.maths.swag import collected, draws, no_moments

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def moments_of(iterates, rank):
    moments = no_moments(iterates[0], rank)
    for theta in iterates:
        moments = collected(moments, theta, TRUE)
    return moments


@pytest.mark.parametrize(("count", "rank"), [(1, 4), (3, 4), (9, 4), (6, 1), (6, 0)])
def test_moments_are_those_of_the_iterates(count, rank):
    iterates = randn(count, 5, seed=1)
    moments = moments_of(iterates, rank)
    assert int(moments.models) == count
    assert difference(moments.mean, iterates.mean(0)) < 1e-12
    assert_close(moments.variance, iterates.var(0, correction=0), rtol=0, atol=1e-12)
    differences = [iterates[k] - iterates[: k + 1].mean(0) for k in range(count)][-rank:] if rank else []
    expected = torch.zeros(rank, 5, dtype=torch.float64)
    for k, difference_of in enumerate(differences, start=count - len(differences)):
        expected[k % rank] = difference_of
    assert_close(moments.last, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [3, 9])
def test_the_covariance_of_draws_is_half_diagonal_and_half_low_rank(count):
    rank, iterates = 4, randn(count, 3, seed=2)
    moments = moments_of(iterates, rank)
    # Draws are linear in the noise, so unit vectors show the whole covariance.
    root = draws(moments, torch.eye(3 + rank, dtype=torch.float64)) - moments.mean
    used = min(count, rank)
    expected = (torch.diag(iterates.var(0, correction=0)) + moments.last.T @ moments.last / (used - 1)) / 2
    assert_close(root.T @ root, expected, rtol=0, atol=1e-12)


def test_a_million_draws_have_this_covariance():
    moments = moments_of(randn(6, 3, seed=3), 4)
    drawn = draws(moments, randn(200_000, 7, seed=4))
    expected = (torch.diag(moments.variance) + moments.last.T @ moments.last / 3) / 2
    assert_close(drawn.T.cov(), expected, rtol=0.02, atol=0.01)
    assert_close(drawn.mean(0), moments.mean, rtol=0, atol=0.01)


def test_without_a_low_rank_part_the_diagonal_has_the_whole_variance():
    moments = moments_of(randn(6, 3, seed=3), 0)
    root = draws(moments, torch.eye(3, dtype=torch.float64)) - moments.mean
    assert_close(root, torch.diag(moments.variance.sqrt()), rtol=0, atol=1e-12)


def test_constant_iterates_have_no_variance():
    moments = moments_of(randn(1, 3).expand(5, 3), 4)
    assert same_bits(draws(moments, randn(2, 7, seed=1)), randn(1, 3).expand(2, 3))


def test_a_shift_of_the_iterates_shifts_the_mean_alone():
    iterates = randn(7, 3, seed=5)
    one, other = moments_of(iterates, 4), moments_of(iterates + 3, 4)
    assert_close(other.mean, one.mean + 3, rtol=0, atol=1e-12)
    assert_close(other.last, one.last, rtol=0, atol=1e-12)
    assert_close(other.variance, one.variance, rtol=0, atol=1e-12)


def test_many_gaussian_iterates_recover_their_covariance():
    root = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=torch.float64)
    moments = moments_of(randn(4000, 2, seed=6) @ root.T, 4000)
    unit = draws(moments, torch.eye(4002, dtype=torch.float64)) - moments.mean
    expected = root @ root.T
    # The diagonal half has no correlations, so they are halved.
    assert_close(unit.T @ unit, (torch.diag(expected.diagonal()) + expected) / 2, rtol=0, atol=0.05)


def test_before_anything_is_collected_the_last_model_is_kept():
    moments = no_moments(randn(3), 4)
    for theta in randn(5, 3, seed=7):
        moments = collected(moments, theta, FALSE)
    assert int(moments.models) == 0
    assert same_bits(draws(moments, randn(2, 7, seed=1)), randn(5, 3, seed=7)[-1].expand(2, 3))
    after = collected(moments, randn(3, seed=8), TRUE)
    assert int(after.models) == 1
    assert same_bits(after.mean, randn(3, seed=8))
    assert not after.variance.any()
