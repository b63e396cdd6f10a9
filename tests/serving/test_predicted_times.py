"""Predicted times: their options, columns and lower bounds."""

import numpy as np
import pytest
import torch

from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.survival import Survival
from pfedbayes.serving.times import columns, lower_bound, parse_times, quarters, require_options
from pfedbayes.trust.calibration import score
from pfedbayes.trust.conformal import calibrate

OURS = Survival((2.0, 5.0, 9.0), 0.2)


def draws(rows, seed=0, draws=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(draws, rows, 4, generator=generator, dtype=torch.float64) * 0.5


def test_columns_are_ordered_and_fit_each_other():
    outputs = draws(50)
    found = columns(OURS, outputs, 0.9, (1.0, 4.5, 9.0), calibrate(torch.rand(40), 0.1))
    assert list(found) == [
        "risk", "median", "lower", "upper", "survival_1", "survival_4.5", "survival_9", "conformal_lower"
    ]  # fmt: skip
    assert (found["lower"] <= found["median"]).all()
    assert (found["median"] <= found["upper"]).all()
    assert (found["survival_1"] > found["survival_4.5"]).all()
    assert ((found["survival_9"] > 0.5) == np.isinf(found["median"])).all()
    assert np.corrcoef(found["risk"], found["survival_4.5"])[0, 1] < -0.95
    assert ((found["risk"] > 0) & (found["risk"] < 1)).all()
    default = columns(OURS, outputs, 0.9, (), calibrate(torch.rand(40), 0.1))
    assert [name for name in default if "survival" in name] == ["survival_1.5", "survival_3.5", "survival_6"]
    assert quarters((1234.56,)) == (309.0, 617.0, 926.0)


def test_the_lower_bound_covers_times_of_which_many_are_censored():
    rng, outputs = np.random.default_rng(0), draws(4000)
    hazard = 0.2 * np.exp(outputs[0].numpy().sum(-1) / 2)  # not what the model says
    times, censored = rng.exponential(1 / hazard), rng.exponential(4, 4000)
    observed = torch.from_numpy(np.minimum(times, censored))
    event = torch.from_numpy((times <= censored).astype(float))
    scores = score(OURS, outputs, torch.stack([observed, event], 1))
    assert len(scores.sure) == len(scores.wrong) == 0
    bounds = lower_bound(OURS, outputs[:, 2000:], calibrate(scores.odd[:2000], 0.2)).numpy()
    assert (observed[2000:].numpy() >= bounds - 1e-9).mean() == pytest.approx(0.8, abs=0.025)
    assert (times[2000:] >= bounds).mean() > 0.85  # cautious: a censored time counts as that of an event
    assert (bounds > 0).all()


def test_the_bound_is_0_without_enough_rows_and_never_beyond_the_horizon():
    outputs = draws(20)
    assert (lower_bound(OURS, outputs, calibrate(torch.rand(3), 0.1)) == 0).all()
    assert (lower_bound(OURS, outputs, calibrate(torch.zeros(30), 0.1)) == 9).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((0.1, None, ()), "leave --error and --abstain-at out"),
        ((None, 0.5, ()), "leave --error and --abstain-at out"),
        ((None, None, (1.0, 9.5)), "--at has the time 9.5: give times above 0 and up to 9"),
        ((None, None, (0.0,)), "--at has the time 0: give times"),
        ((None, None, (float("nan"),)), "--at has the time nan: give times"),
        ((None, None, (1.0,) * 101), "--at has 101 times: give at most 100"),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(options, told):
    with pytest.raises(UserError, match=told):
        require_options(OURS, *options)


def test_other_models_predict_no_times():
    require_options(Classification(), None, None, ())
    with pytest.raises(UserError, match="this model predicts no times: leave --at out"):
        require_options(Classification(), None, None, (1.0,))


def test_times_are_written_with_commas():
    assert parse_times(None) == ()
    assert parse_times("365, 730.5") == (365.0, 730.5)
    for text in ("", "a", "1,,2", "1;2", "inf", "1_0"):
        with pytest.raises(UserError, match="give times such as 365,730"):
            parse_times(text)
