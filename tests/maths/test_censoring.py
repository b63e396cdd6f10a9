import lifelines
import numpy as np
import torch
from torch.testing import assert_close

from pfedbayes.maths.censoring import integrated_brier, kaplan_meier


def test_kaplan_meier_is_that_of_lifelines():
    rng = np.random.default_rng(3)
    y = torch.from_numpy(np.stack([rng.exponential(5, 80).round(), rng.integers(0, 2, 80)], 1))
    fitted = lifelines.KaplanMeierFitter().fit(*y.T.numpy())
    at = torch.linspace(0, 12, 25, dtype=torch.float64)
    expected = fitted.survival_function_at_times(at.numpy()).to_numpy()
    np.testing.assert_allclose(kaplan_meier(y[:, 0], y[:, 1], at), expected, rtol=1e-9)


def brier_by_hand(curves, at, times, event):
    """The integrated Brier score with the weights of Graf et al., row by row."""
    order = sorted(range(len(times)), key=lambda i: (times[i], -event[i]))

    def uncensored(before):
        """The Kaplan-Meier estimate of not being censored; `before` says which rows are looked at."""
        value = 1.0
        for rank, i in enumerate(order):
            if before(i) and not event[i]:
                value *= 1 - 1 / (len(order) - rank)
        return value

    scores = []
    for k, t in enumerate(at):
        if t >= max(times):
            continue
        total = 0.0
        for i, time in enumerate(times):
            if time <= t and event[i]:
                total += curves[i, k] ** 2 / uncensored(lambda j, time=time: times[j] < time)
            elif time > t:
                total += (1 - curves[i, k]) ** 2 / uncensored(lambda j, t=t: times[j] <= t)
        scores.append(total / len(times))
    return np.mean(scores) if scores else np.nan


def test_integrated_brier_score_weights_censoring_out():
    rng = np.random.default_rng(4)
    times, event = rng.integers(0, 12, (3, 30)).astype(float), rng.integers(0, 2, (3, 30))
    curves = np.sort(rng.uniform(size=(3, 30, 20)))[..., ::-1].copy()
    at = np.linspace(0.3, 13, 20)
    arrays = [torch.from_numpy(each) for each in (curves, at, times, event)]
    expected = [brier_by_hand(curves[k], at, times[k], event[k]) for k in range(3)]
    np.testing.assert_allclose(integrated_brier(*arrays), expected, rtol=1e-9)
    assert torch.isnan(integrated_brier(arrays[0], arrays[1] + 20, *arrays[2:])).all()


def test_brier_score_without_censoring_is_the_mean_square():
    times, at = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, 2.5])
    curves = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    survived = (times[:, None] > at).float()
    assert_close(integrated_brier(curves, at, times, torch.ones(3)), (survived - curves).square().mean())
