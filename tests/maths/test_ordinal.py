import numpy as np
import pytest
import torch
from statsmodels.miscmodels.ordinal_model import OrderedModel

from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.ordinal import Ordinal


def test_the_likelihood_agrees_with_statsmodels():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), np.arange(60) % 4
    weights, ends = np.array([0.4, -0.8]), np.array([-1.0, 0.2, 0.9])
    model = OrderedModel(y, x, distr="logit")
    params = np.concatenate([weights, ends[:1], np.log(np.diff(ends))])
    equal = np.log([1 / 3, 1.0, 3.0])
    free = np.concatenate([ends[:1] - equal[:1], np.log(np.diff(ends) / np.diff(equal))])
    outputs = torch.from_numpy(np.column_stack([x @ weights, np.tile(free, (60, 1))]))
    found = Ordinal(classes=4).nll(outputs, torch.from_numpy(y))
    assert float(found.sum()) == pytest.approx(-model.loglike(params))
    assert torch.autograd.gradcheck(
        lambda z: Ordinal(classes=4).nll(z, torch.from_numpy(y)), (outputs.requires_grad_(),)
    )


def test_two_classes_are_a_logistic_regression():
    outputs = torch.randn(3, 9, 2, dtype=torch.float64)
    logits = torch.stack([torch.zeros(3, 9, dtype=torch.float64), outputs[..., 0] - outputs[..., 1]], -1)
    torch.testing.assert_close(Ordinal().logits(outputs), logits.log_softmax(-1))
    y = torch.arange(9) % 2
    scores = dict(zip(Ordinal().metrics, Ordinal().scores(outputs, y).tolist(), strict=True))
    plain = dict(zip(Classification().metrics, Classification().scores(logits, y).tolist(), strict=True))
    assert {name: scores[name] for name in plain} == pytest.approx(plain)
    assert scores["mae"] == pytest.approx(1 - scores["accuracy"] / 100)


def test_probabilities_sum_to_one_and_extremes_stay_finite():
    outputs = torch.tensor([[0.3, 0.1, -0.5, 2.0], [300.0, 50.0, -60.0, 60.0]])
    logits = Ordinal(classes=4).logits(outputs)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2))
    assert logits.isfinite().all()


def test_steps_between_thresholds_are_limited():
    for sign in (-1, 1):
        less, capped, beyond = (torch.tensor([[0.3, 0.1, sign * t, 1.0]]).double() for t in (14.5, 15.0, 15.5))
        torch.testing.assert_close(Ordinal(classes=4).logits(beyond), Ordinal(classes=4).logits(capped), rtol=0, atol=0)
        assert not torch.equal(Ordinal(classes=4).logits(less), Ordinal(classes=4).logits(capped))
