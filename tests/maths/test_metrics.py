import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.testing import assert_close
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_auroc,
    multiclass_calibration_error,
)

from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.maths.metrics import (
    BINS,
    Reliability,
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    confidence,
    decompose_uncertainty,
    ece,
    entropy,
    log_average,
    log_label_prior,
    mutual_information,
    nll,
    reliability,
    risk_coverage,
    temperature,
    tempered,
)
from pfedbayes.maths.ranking import auroc


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=[(3, 2), (10, 1), (10, 10)], ids=lambda p: f"{p[0]}classes-{p[1]}draws")
def logits(request):
    classes, draws = request.param
    return 2 * randn(draws, 500, classes)


@pytest.fixture
def y(logits):
    """Labels that are right about half of the time."""
    guess = logits.mean(0).argmax(-1)
    return torch.where(torch.arange(500) % 2 == 0, guess, torch.arange(500) % logits.shape[-1])


@pytest.fixture
def probs(logits):
    return logits.softmax(-1).mean(0)


def test_average_is_the_mean_of_the_probabilities(logits, probs):
    assert_close(log_average(logits).exp(), probs)
    assert_close(log_average(logits).exp().sum(-1), torch.ones(500, dtype=torch.float64))


def test_average_of_extreme_logits_stays_finite():
    logits = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
    assert_close(log_average(logits).exp(), torch.tensor([[0.5, 0.5]]))


def test_accuracy_agrees_with_torchmetrics(logits, probs, y):
    expected = 100 * multiclass_accuracy(probs, y, num_classes=probs.shape[-1], average="micro")
    assert float(accuracy(log_average(logits), y)) == pytest.approx(float(expected))


def test_ece_agrees_with_torchmetrics(logits, probs, y):
    expected = multiclass_calibration_error(probs, y, num_classes=probs.shape[-1], n_bins=BINS, norm="l1")
    assert float(expected) > 0.01
    assert float(ece(reliability(log_average(logits), y))) == pytest.approx(float(expected), rel=1e-6)


def test_nll_and_brier_by_hand(logits, probs, y):
    squares = [
        sum((float(p[c]) - float(c == label)) ** 2 for c in range(len(p))) for p, label in zip(probs, y, strict=True)
    ]
    logs = [-math.log(float(p[label])) for p, label in zip(probs, y, strict=True)]
    assert float(brier(log_average(logits), y)) == pytest.approx(sum(squares) / 500)
    assert float(nll(log_average(logits), y)) == pytest.approx(sum(logs) / 500)


def test_scores_are_the_named_metrics_in_order(logits, y):
    log_probs = log_average(logits)
    expected = [accuracy(log_probs, y), nll(log_probs, y), brier(log_probs, y), ece(reliability(log_probs, y))]
    expected += [entropy(log_probs).mean(), mutual_information(logits).mean()]
    assert Classification().metrics == ("accuracy", "nll", "brier", "ece", "entropy", "mutual_information")
    assert_close(Classification().scores(logits, y), torch.stack(expected))


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [(Classification(), torch.arange(24).view(2, 3, 4) % 3), (Regression(), randn(2, 3, 4, 2, seed=1))],
)
def test_many_models_are_scored_as_each_alone(likelihood, y):
    outputs = randn(2, 3, 5, 4, 3)  # 2 x 3 models, 5 draws, 4 examples
    each = [[likelihood.scores(outputs[a, b], y[a, b]) for b in range(3)] for a in range(2)]
    assert_close(likelihood.scores(outputs, y), torch.stack([torch.stack(row) for row in each]))


# A sure prediction that is right costs nothing; a sure and wrong one costs 2 (Brier) and is off by 1 (ECE).
@pytest.mark.parametrize(("label", "expected"), [(0, (100, 0, 0)), (1, (0, 2, 1))])
def test_sure_predictions(label, expected):
    log_probs, y = torch.tensor([[100.0, -100.0]] * 4).log_softmax(-1), torch.full((4,), label)
    values = (accuracy(log_probs, y), brier(log_probs, y), ece(reliability(log_probs, y)))
    assert [float(value) for value in values] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_constant_predictor_scores_the_share_of_its_class(label):
    y = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    constant = torch.nn.functional.one_hot(torch.tensor(label), 3).log().expand(10, 3)
    assert float(accuracy(constant, y)) == pytest.approx([50, 30, 20][label])


def test_reliability_of_parts_adds_up_to_the_whole(logits, y):
    log_probs = log_average(logits)
    parts = [reliability(log_probs[rows], y[rows]) for rows in (slice(0, 123), slice(123, None))]
    total = Reliability(*(a + b for a, b in zip(*parts, strict=True)))
    whole = reliability(log_probs, y)
    assert_close(total, whole)
    assert float(whole.total.sum()) == 500
    assert_close(ece(total), ece(whole))


def test_calibrated_predictions_have_small_ece():
    log_probs = (2 * randn(20_000, 4)).log_softmax(-1)
    torch.manual_seed(12345)
    y = Categorical(logits=log_probs).sample()
    assert ece(reliability(log_probs, y)) < 0.015


def test_adaptive_ece_by_hand(logits, probs, y):
    confidences, guess = probs.max(-1)
    pairs = sorted(zip(confidences.tolist(), (guess == y).tolist(), strict=True))
    total, start = 0.0, 0
    for k in range(BINS):  # 500 = 5 bins of 34 and 10 of 33
        part = pairs[start : start + 500 // BINS + (k < 500 % BINS)]
        start += len(part)
        total += abs(sum(c for c, _ in part) - sum(right for _, right in part))
    assert start == 500
    assert float(adaptive_ece(log_average(logits), y)) == pytest.approx(total / 500)


def test_adaptive_ece_of_many_models_is_that_of_each():
    log_probs, y = randn(2, 40, 3).log_softmax(-1), torch.arange(80).view(2, 40) % 3
    together = adaptive_ece(log_probs, y)
    assert_close(together, torch.stack([adaptive_ece(*each) for each in zip(log_probs, y, strict=True)]))


def test_adaptive_ece_of_few_examples_is_their_mean_gap():
    log_probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
    assert float(adaptive_ece(log_probs, torch.tensor([0, 0]))) == pytest.approx((0.1 + 0.6) / 2)


def test_risk_coverage_of_a_single_example():
    for wrong in (True, False):
        assert risk_coverage(torch.tensor([0.5]), torch.tensor([wrong])).tolist() == [float(wrong)]


def test_risk_coverage_by_hand():
    score, wrong = torch.tensor([0.9, 0.1, 0.5, 0.7]), torch.tensor([False, True, True, False])
    assert_close(risk_coverage(score, wrong), torch.tensor([0, 0, 1 / 3, 1 / 2]))
    assert float(aurc(score, wrong)) == pytest.approx((1 / 3 + 1 / 2) / 4)


def test_equal_scores_are_worth_their_mean_error_in_any_order():
    score = torch.tensor([1.0, 1, 1, 0])
    for wrong in ([1, 0, 0, 1], [0, 0, 1, 1]):
        assert_close(risk_coverage(score, torch.tensor(wrong)), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 2]))


def test_auroc_agrees_with_torchmetrics_ties_included():
    negative, positive = randn(300).round(decimals=1), (randn(200, seed=1) + 0.5).round(decimals=1)
    assert len(torch.cat([negative, positive]).unique()) < 100
    label = torch.cat([torch.zeros(300), torch.ones(200)]).long()
    unit = torch.cat([negative, positive]).sigmoid()
    expected = float(binary_auroc(unit, label))
    assert 0.55 < expected < 0.75
    assert float(auroc(negative, positive)) == pytest.approx(expected, abs=1e-6)
    assert float(auroc(positive, negative)) == pytest.approx(1 - expected, abs=1e-6)
    assert float(auroc(torch.zeros(3), torch.zeros(5))) == 0.5


def test_auroc_of_one_class_against_the_rest_agrees_with_torchmetrics(probs, y):
    each = multiclass_auroc(probs, y, num_classes=probs.shape[-1], average=None)
    for label, expected in enumerate(each.tolist()):
        ours = auroc(probs[y != label, label], probs[y == label, label])
        assert float(ours) == pytest.approx(expected, abs=1e-6)


def test_many_curves_at_once_are_each_alone():
    score, wrong = randn(2, 3, 40).round(), randn(2, 3, 40, seed=1) > 0
    other = randn(2, 3, 15, seed=2).round()
    for a in range(2):
        for b in range(3):
            assert_close(risk_coverage(score, wrong)[a, b], risk_coverage(score[a, b], wrong[a, b]))
            assert_close(auroc(score, other)[a, b], auroc(score[a, b], other[a, b]))


def test_confidence_ranks_as_the_probability_and_tells_sure_ones_apart(logits, probs):
    assert_close(confidence(log_average(logits)), -(1 - probs.max(-1).values).log())
    sure = torch.tensor([[0.0, -40.0], [0.0, -50.0]]).log_softmax(-1)
    assert sure.exp()[0, 0] == sure.exp()[1, 0] == 1
    assert confidence(sure)[0] < confidence(sure)[1]


def test_temperature_finds_the_one_that_the_logits_were_multiplied_by():
    truth = (2 * randn(20_000, 4)).log_softmax(-1)
    torch.manual_seed(12345)
    y = Categorical(logits=truth).sample()
    for factor in (0.4, 3.0):
        assert float(temperature(factor * truth, y)) == pytest.approx(factor, rel=0.04)


def test_temperature_has_the_least_nll_of_a_grid(logits, y):
    log_probs = log_average(logits)
    found = temperature(log_probs, y)
    best = min(float(nll(tempered(log_probs, torch.tensor(t)), y)) for t in torch.logspace(-1, 1, 200).tolist())
    assert float(nll(tempered(log_probs, found), y)) == pytest.approx(best, abs=1e-3)
    assert float(nll(tempered(log_probs, found), y)) <= best + 1e-12


def test_temperatures_of_many_models_at_once():
    log_probs, y = randn(3, 50, 4).log_softmax(-1), (randn(3, 50, seed=1) > 0).long()
    together = temperature(log_probs, y)
    assert_close(together, torch.stack([temperature(log_probs[k], y[k]) for k in range(3)]))
    assert_close(tempered(log_probs, together)[1], tempered(log_probs[1], together[1]))


def test_temperature_stays_within_its_range():
    log_probs = torch.tensor([[0.02, 0.0], [0.0, 0.02]]).double().log_softmax(-1)
    assert float(temperature(log_probs, torch.tensor([0, 1]))) == pytest.approx(1 / 64)  # all right: be surer
    assert float(temperature(log_probs, torch.tensor([1, 0]))) == pytest.approx(64)  # all wrong: be unsure


def test_a_probability_above_one_by_rounding_is_in_the_last_bin():
    probs = torch.tensor([[1 + 1e-6, 1e-9], [0.04, 0.03], [0.5, 0.4]])
    sums = reliability(probs.log(), torch.tensor([0, 0, 1]))
    assert sums.total.tolist() == [1.0] + [0.0] * 6 + [1.0] + [0.0] * 6 + [1.0]  # a half is in (7/15, 8/15]
    assert sums.correct.tolist() == [1.0] + [0.0] * 13 + [1.0]


def test_label_prior_smooths_the_counts_by_half_an_example():
    expected = torch.tensor([3.5, 0.5, 1.5]) / 5.5
    assert_close(log_label_prior(torch.tensor([3.0, 0.0, 1.0])).exp(), expected)


def test_doubt_splits_the_entropy(logits):
    total, aleatoric, epistemic = decompose_uncertainty(logits)
    assert_close(total, entropy(log_average(logits)))
    assert_close(aleatoric, Categorical(logits=logits).entropy().mean(0))
    assert_close(aleatoric + epistemic, total)
    assert (epistemic >= 0).all()
    assert bool((epistemic > 0.01).any()) == (len(logits) > 1)


def test_entropy_agrees_with_torch_distributions(logits):
    log_probs = log_average(logits)
    assert_close(entropy(log_probs), Categorical(logits=log_probs).entropy())


def test_mutual_information_is_zero_where_the_draws_agree(logits):
    assert mutual_information(logits[:1].expand(5, -1, -1)).max() < 1e-12


def test_mutual_information_of_sure_draws_that_disagree_is_log_of_their_number():
    draws = 200.0 * torch.eye(4, dtype=torch.float64)[:, None, :]
    assert_close(mutual_information(draws), torch.tensor([math.log(4)], dtype=torch.float64))


def test_mutual_information_is_the_mean_divergence_from_the_average(logits):
    draws = logits.log_softmax(-1)
    divergence = (draws.exp() * (draws - log_average(logits))).sum(-1).mean(0)
    assert_close(mutual_information(logits), divergence, atol=1e-9, rtol=1e-6)


class TestRegression:
    likelihood = Regression()
    outputs = randn(5, 300, 3)
    y = randn(300, 2, seed=1)

    def test_scores_are_those_of_the_mixture(self):
        means, noise = self.outputs[..., :2], torch.log1p(self.outputs[..., 2:].exp()).expand(-1, -1, 2)
        component = torch.distributions.Independent(Normal(means.transpose(0, 1), noise.transpose(0, 1)), 1)
        mixture = MixtureSameFamily(Categorical(torch.ones(300, 5, dtype=torch.float64)), component)
        rmse, log_loss, coverage, deviation, model_deviation = self.likelihood.scores(self.outputs, self.y)
        assert_close(rmse, (self.y - mixture.mean).square().mean().sqrt())
        assert_close(log_loss, -mixture.log_prob(self.y).mean())
        # 1.6449 standard deviations either side hold 90 % of a Gaussian.
        inside = (self.y - mixture.mean).abs() <= 1.6448536 * mixture.variance.sqrt()
        assert_close(coverage, 100 * inside.double().mean())
        assert_close(deviation, mixture.variance.sqrt().mean())
        assert_close(model_deviation, means.std(0, correction=0).mean())

    def test_scores_are_in_the_original_units(self):
        plain, scaled = (Regression(0.5, unit).scores(self.outputs[..., :2], self.y) for unit in (1.0, 10.0))
        rmse, log_loss, coverage, deviation, model_deviation = scaled - plain * torch.tensor([10.0, 1, 1, 10, 10])
        assert_close(torch.stack([rmse, coverage, deviation, model_deviation]), torch.zeros(4, dtype=torch.float64))
        assert float(log_loss) == pytest.approx(2 * math.log(10))  # two targets

    def test_coverage_of_the_true_model_is_90_percent(self):
        mean = randn(20_000, 1)
        y = mean + 0.5 * randn(20_000, 1, seed=1)
        _, log_loss, coverage, deviation, model_deviation = Regression(0.5).scores(mean[None], y)
        assert float(coverage) == pytest.approx(90, abs=1)
        assert (float(deviation), float(model_deviation)) == (0.5, 0)
        # Entropy of a Gaussian: log(sigma sqrt(2 pi e)).
        assert float(log_loss) == pytest.approx(math.log(0.5 * math.sqrt(2 * math.pi * math.e)), abs=0.03)
