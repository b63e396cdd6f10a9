import math

import pytest
import torch
from scipy.stats import beta
from torch.distributions import Categorical
from torch.testing import assert_close

from pfedbayes.maths.metrics import Gaussians
from pfedbayes.trust.conformal import (
    Calibration,
    calibrate,
    calibrate_clients,
    interval,
    label_scores,
    label_sets,
    rank,
    residuals,
    true_scores,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_the_threshold_is_the_order_statistic_of_the_theorem():
    scores = torch.tensor([0.3, 0.1, 0.9, 0.5, 0.7, 0.2, 0.8, 0.4, 0.6])
    assert calibrate(scores, 0.1).threshold == pytest.approx(0.9)  # ceil(10 * 0.9) = 9th of 9
    assert calibrate(scores, 0.2).threshold == pytest.approx(0.8)
    assert calibrate(scores, 0.5).threshold == pytest.approx(0.5)
    assert [rank(9, alpha) for alpha in (0.1, 0.2, 0.5, 0.05)] == [9, 8, 5, 10]


@pytest.mark.parametrize(("size", "full"), [(0, True), (8, True), (9, False), (10, False)])
def test_too_few_examples_give_the_full_set_and_say_so(size, full):
    calibration = calibrate(torch.linspace(0, 1, size), 0.1)
    assert calibration.is_trivial == full
    assert ("at least 9 are needed" in calibration.statement()) == full
    assert calibration.coverage_with() == 1 or not full
    if full:
        assert label_sets(label_scores(torch.zeros(4, 3).log_softmax(-1)), calibration).all()
        low, high = interval(Gaussians(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(2, 1)), calibration)
        assert (low == -math.inf).all()
        assert (high == math.inf).all()


@pytest.mark.parametrize(("size", "alpha"), [(50, 0.1), (500, 0.1), (99, 0.05)])
def test_coverage_of_a_calibration_has_the_beta_distribution(size, alpha):
    k = rank(size, alpha)
    assert Calibration(0.5, alpha, size).coverage_with(0.95) == pytest.approx(beta.ppf(0.05, k, size + 1 - k))


def test_lac_and_aps_scores_by_hand():
    log_probs = torch.tensor([[0.2, 0.7, 0.1]]).log()
    # The most probable label is in every set.
    assert_close(label_scores(log_probs), torch.tensor([[0.8, 0.0, 0.9]]))
    # The next one has all of its probability before it, and a part u of its own.
    assert_close(label_scores(log_probs, torch.tensor([0.5])), torch.tensor([[0.8, 0.0, 0.95]]))
    assert_close(true_scores(label_scores(log_probs), torch.tensor([2])), torch.tensor([0.9]))


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_sets_cover_as_promised_though_the_model_is_wrong(kind):
    """500 calibration sets of 40: the mean coverage is within its bounds [1 - alpha, 1 - alpha + 1 / (n + 1)]."""
    truth = 2 * torch.randn(500, 140, 5, generator=generator(0))
    torch.manual_seed(1)
    y = Categorical(logits=truth).sample()
    model = (0.5 * truth + torch.randn(500, 140, 5, generator=generator(2))).log_softmax(-1)
    scores = label_scores(model, torch.rand(500, 140, generator=generator(3)) if kind == "aps" else None)
    inside, sizes = [], []
    for each, label in zip(scores, y, strict=True):
        calibration = calibrate(true_scores(each[:40], label[:40]), 0.2)
        sets = label_sets(each[40:], calibration)
        inside.append(sets.gather(-1, label[40:, None]).double().mean())
        sizes.append(sets.double().sum(-1).mean())
    # 500 means of 100 examples and a Beta(33, 8): a standard error of about 0.0033.
    assert 0.8 - 0.01 < float(torch.stack(inside).mean()) < 0.8 + 1 / 41 + 0.01
    assert float(torch.stack(sizes).mean()) < 4


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_no_set_is_empty_and_a_good_model_covers_as_often_as_it_is_right(kind):
    """A model that is right on 97 % needs one label to cover 90 %: every set is its most probable label."""
    y = torch.randint(4, (4000,), generator=generator(0))
    noise = torch.randn(4000, 4, generator=generator(1))
    log_probs = (4 * torch.nn.functional.one_hot(y, 4) + 1.3 * noise).log_softmax(-1)
    u = torch.rand(4000, generator=generator(2)) if kind == "aps" else None
    scores = label_scores(log_probs, u)
    right = float((log_probs.argmax(-1) == y).double().mean())
    assert 0.95 < right < 0.99
    for alpha, only_top in ((0.1, True), (0.005, False)):
        calibration = calibrate(true_scores(scores[:2000], y[:2000]), alpha)
        sets = label_sets(scores[2000:], calibration)
        assert sets.gather(-1, log_probs[2000:].argmax(-1, keepdim=True)).all()
        assert bool((sets.sum(-1) == 1).all()) == only_top
        assert float(sets.gather(-1, y[2000:, None]).double().mean()) > 1 - alpha - 0.005


def test_intervals_cover_as_promised_though_the_deviations_are_wrong():
    deviation = 0.2 + torch.rand(300, 160, 2, generator=generator(0))
    y = 3 * deviation * torch.randn(300, 160, 2, generator=generator(1))
    predicted = Gaussians(torch.zeros_like(y), deviation, deviation)
    inside = []
    for k in range(300):
        one = Gaussians(*(part[k] for part in predicted))
        calibration = calibrate(residuals(one, y[k])[:60], 0.1)
        low, high = interval(one, calibration)
        inside.append(((low <= y[k]) & (y[k] <= high)).all(-1)[60:].double().mean())
    assert 0.9 - 0.012 < float(torch.stack(inside).mean()) < 0.9 + 1 / 61 + 0.012


def test_a_client_with_enough_examples_has_a_threshold_of_its_own():
    own, few = calibrate_clients([torch.linspace(0, 1, 30), torch.linspace(5, 6, 4)], 0.1)
    assert (own.whose, own.size) == ("client", 30)
    assert (few.whose, few.size) == ("federation", 34)
    assert own.threshold <= 1 < few.threshold
    assert "of this client" in own.statement()
    assert "not of each of them" in few.statement()


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.5])
def test_an_alpha_that_makes_no_sense_is_refused(alpha):
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(torch.zeros(3), alpha)


def test_a_score_that_equals_the_threshold_is_in_the_set():
    # Scores with ties are common: a network that is sure gives many examples the score 0.
    scores = torch.tensor([0.0, 0.5, 0.75])
    assert label_sets(scores, Calibration(0.5, 0.1, 20)).tolist() == [True, True, False]
    tied = calibrate(torch.zeros(20), 0.1)
    assert label_sets(torch.zeros(20), tied).all()


def test_residuals_by_hand():
    predicted = Gaussians(torch.tensor([[[1.0, -2.0]], [[0.0, 4.0]]]), torch.tensor([[[2.0, 0.5]], [[1.0, 8.0]]]), None)
    y = torch.tensor([[[4.0, -1.0]], [[-3.0, 4.0]]])  # off by 3, 1 and 3, 0
    assert_close(residuals(predicted, y), torch.tensor([[2.0], [3.0]]))


def test_ninety_per_cent_with_95_per_cent_confidence_is_the_default():
    scores = torch.linspace(0, 1, 50)
    assert calibrate(scores) == calibrate(scores, 0.1)
    assert calibrate_clients([scores]) == calibrate_clients([scores], 0.1)
    assert calibrate(scores).coverage_with() == calibrate(scores).coverage_with(0.95)


def test_rounding_of_the_coverage_costs_no_example():
    # In floating point, 150 * (1 - 0.18) exceeds 123 and 1 / (1 - 0.9) exceeds 10.
    assert rank(149, 0.18) == 123
    assert "at least 9 are needed" in calibrate(torch.zeros(3), 1 - 0.9).statement()
