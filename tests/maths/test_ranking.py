import numpy as np
import pytest
import torch
from lifelines.utils import concordance_index
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from pfedbayes.maths import ranking
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.ranking import (
    area_under_roc,
    average_precision,
    balanced_accuracy,
    concordance,
    one_vs_rest,
)


def rounded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Log-probabilities with ties."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * drawn).round().log_softmax(-1)


def labels(size: int, classes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(classes, (size,), generator=torch.Generator().manual_seed(seed))


def test_two_classes_agree_with_scikit_learn():
    log_probs, y = rounded(60, 2), labels(60, 2)
    score = (log_probs[:, 1] - log_probs[:, 0]).numpy()
    assert float(one_vs_rest(area_under_roc, log_probs, y)) == pytest.approx(roc_auc_score(y, score))
    assert float(one_vs_rest(average_precision, log_probs, y)) == pytest.approx(average_precision_score(y, score))
    expected = balanced_accuracy_score(y, log_probs.argmax(-1))
    assert float(balanced_accuracy(log_probs, y)) == pytest.approx(100 * expected)


def test_more_classes_agree_with_scikit_learn():
    log_probs, y = rounded(90, 4), labels(90, 4)
    probs, sparse = log_probs.exp().numpy(), np.eye(4)[y]
    expected = roc_auc_score(y, probs, multi_class="ovr")
    assert float(one_vs_rest(area_under_roc, log_probs, y)) == pytest.approx(expected)
    expected = average_precision_score(sparse, probs)
    assert float(one_vs_rest(average_precision, log_probs, y)) == pytest.approx(expected)


def test_a_class_that_no_row_has_is_left_out():
    log_probs, y = rounded(50, 3), labels(50, 2)
    probs = log_probs.exp().numpy()
    expected = (roc_auc_score(y == 0, probs[:, 0]) + roc_auc_score(y == 1, probs[:, 1])) / 2
    assert float(one_vs_rest(area_under_roc, log_probs, y)) == pytest.approx(expected)


def test_rows_of_one_class_have_no_curve_but_an_accuracy():
    scores = Classification(ranking=True).scores(rounded(1, 9, 2), torch.ones(9, dtype=torch.int64))
    found = dict(zip(Classification(ranking=True).metrics, scores.tolist(), strict=True))
    assert np.isnan(found["auroc"])
    assert np.isnan(found["auprc"])
    assert found["balanced_accuracy"] == pytest.approx(found["accuracy"])


def test_scores_of_rankings_are_added_to_the_others():
    plain, ranked = Classification(), Classification(ranking=True)
    outputs, y = rounded(5, 40, 3), labels(40, 3)
    every = dict(zip(ranked.metrics, ranked.scores(outputs, y).tolist(), strict=True))
    assert [every[name] for name in plain.metrics] == plain.scores(outputs, y).tolist()
    pooled = ranked.pooled_scores(ranked.gist(outputs), y).tolist()
    assert [every[name] for name in ranked.pooled_metrics] == pooled


def test_many_models_are_ranked_as_each_alone():
    log_probs, y = rounded(3, 2, 30, 3), labels(180, 3).view(3, 2, 30)
    for curve in (area_under_roc, average_precision):
        together = one_vs_rest(curve, log_probs, y)
        each = [[float(one_vs_rest(curve, log_probs[a, b], y[a, b])) for b in range(2)] for a in range(3)]
        assert together.tolist() == each
    each = [[float(balanced_accuracy(log_probs[a, b], y[a, b])) for b in range(2)] for a in range(3)]
    assert balanced_accuracy(log_probs, y).tolist() == each


@pytest.mark.parametrize("at_once", [1, 100, 200])
def test_what_is_sorted_in_one_pass_changes_nothing(monkeypatch, at_once):
    log_probs, y = rounded(2, 40, 5), labels(80, 5).view(2, 40)
    risk, time, event = rounded(2, 40, seed=2), rounded(2, 40, seed=3), labels(80, 2).view(2, 40)
    curves = [lambda: one_vs_rest(area_under_roc, log_probs, y), lambda: concordance(risk, time, event)]
    expected = [curve() for curve in curves]
    monkeypatch.setattr(ranking, "AT_ONCE", at_once)
    for curve, whole in zip(curves, expected, strict=True):
        torch.testing.assert_close(curve(), whole)


def test_concordance_agrees_with_lifelines():
    rng = np.random.default_rng(0)
    risk, time, event = rng.normal(size=(2, 80)).round(1), rng.integers(1, 20, (2, 80)), rng.integers(0, 2, (2, 80))
    found = concordance(*(torch.tensor(each, dtype=torch.float64) for each in (risk, time, event)))
    expected = [concordance_index(time[k], -risk[k], event[k]) for k in range(2)]
    assert found.tolist() == pytest.approx(expected)
    assert torch.isnan(concordance(torch.rand(5), torch.rand(5), torch.zeros(5)))
