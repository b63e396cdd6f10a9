import math

import pytest
import torch

from pfedbayes.trust.abstention import calibrate, smallest_sample


def examples(count, seed, steepness=0.05):
    """Scores in [0, 1], and errors that are the rarer the higher the score."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(count, generator=generator)
    return score, torch.rand(count, generator=generator) < steepness * (1 - score) ** 2


def test_a_perfect_model_answers_everything():
    found = calibrate(torch.rand(2000), torch.zeros(2000), 0.01)
    assert (found.threshold, found.answered, found.wrong) == (-math.inf, 2000, 0)
    assert found.answers(torch.tensor([-5.0, 0.0])).all()
    assert "at most 1.00% of the answers are wrong, with 95% confidence" in found.statement()


def test_a_model_that_is_always_wrong_answers_nothing():
    found = calibrate(torch.rand(2000), torch.ones(2000), 0.01)
    assert (found.threshold, found.answered, found.wrong) == (math.inf, 0, 0)
    assert not found.answers(torch.tensor([0.0, 1e30])).any()
    assert "abstains on everything" in found.statement()


@pytest.mark.parametrize(("size", "able"), [(298, False), (299, True)])
def test_too_few_examples_cannot_show_a_small_error(size, able):
    # 0.99 ** 299 is the first power below 0.05.
    found = calibrate(torch.rand(size), torch.zeros(size), 0.01)
    assert bool(found.answered) == able
    assert ("at least 299 are needed" in found.statement()) != able


def test_the_threshold_parts_the_right_from_the_wrong():
    score = torch.linspace(0, 1, 4000)
    found = calibrate(score, score < 0.3, 0.01)
    assert found.answered == 2800
    assert found.wrong == 0
    assert float(score[found.answers(score)].min()) > 0.3


def test_equal_scores_are_answered_or_not_together():
    score = torch.tensor([0.0] * 500 + [1.0] * 1500)
    found = calibrate(score, score == 0, 0.01)
    assert (found.threshold, found.answered) == (0.0, 1500)


def test_the_promise_is_kept_as_often_as_it_says():
    """400 calibrations: the error rate among all that the threshold answers, known exactly, exceeds the target in at
    most delta of them."""
    target, delta, failures, shares = 0.01, 0.1, 0, []
    for seed in range(400):
        found = calibrate(*examples(4000, seed), target, delta)
        t = min(max(found.threshold, 0.0), 1.0)
        # The mean of 0.05 (1 - s)^2 over s in [t, 1] is 0.05 (1 - t)^2 / 3.
        failures += found.answered > 0 and 0.05 * (1 - t) ** 2 / 3 > target
        shares.append(1 - t)
    assert failures <= 400 * delta
    assert 0.3 < sum(shares) / len(shares) < math.sqrt(3 * target / 0.05)  # careful, and not for nothing


@pytest.mark.parametrize("target", [0.0, 1.0, 1.5])
def test_a_target_that_makes_no_sense_is_refused(target):
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(torch.zeros(3), torch.zeros(3), target)


@pytest.mark.parametrize(("size", "right"), [(960, 480), (10_000, 1000), (9_000, 8_100)])
def test_only_candidates_that_could_pass_share_delta(size, right):
    """Of 960 examples, six candidates can pass, from 480 on: 0.99^480 is below 0.05 / 6, but not below 0.05 / 7.
    A tenth of 10,000 and nine tenths of 9,000 are candidates too."""
    score = torch.arange(size, 0, -1.0)
    found = calibrate(score, torch.arange(size) >= right)
    assert (found.answered, found.wrong, found.target, found.delta) == (right, 0, 0.01, 0.05)
    assert found == calibrate(score, torch.arange(size) >= right, 0.01, 0.05)


def test_the_statement_tells_too_few_examples_from_too_many_errors():
    for size, words in ((298, "at least 299 are needed"), (299, "no threshold keeps the error at 1.00%")):
        assert words in calibrate(torch.rand(size), torch.ones(size)).statement()


def test_evidence_that_is_just_enough_is_enough():
    # Two right answers under an error rate of one half have the probability 1/4.
    assert calibrate(torch.tensor([1.0, 2.0]), torch.zeros(2), 0.5, 0.25).answered == 2
    # In floating point, log(0.95^20) / log(0.95) exceeds 20.
    assert [smallest_sample(target, (1 - target) ** 20) for target in (0.01, 0.05, 0.3, 0.5)] == [20] * 4


def test_smallest_sample_is_the_first_that_suffices():
    for target, delta in ((0.01, 0.05), (0.1, 0.05), (0.3, 0.001), (0.5, 0.25)):
        size = smallest_sample(target, delta)
        assert (1 - target) ** size <= delta * (1 + 1e-9)
        assert (1 - target) ** (size - 1) > delta
