import math

import pytest
import torch
from scipy.optimize import minimize

from pfedbayes.trust import conformal
from pfedbayes.trust.recalibration import (
    BIAS_PRIOR,
    LIMIT,
    PRIOR,
    RAW,
    Map,
    Maps,
    _bias,
    fit,
    label_rows,
    number_rows,
    sharpened,
    unseen_maps,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def client(size, seed, log_tau=0.0, bias=None, classes=4):
    """Predictions whose calibrated form is known: the truth is drawn from it."""
    log_probs = (2 * torch.randn(size, classes, generator=generator(seed))).double().log_softmax(-1)
    truth = Map(log_tau, None if bias is None else torch.tensor(bias).double()).of_labels(log_probs)
    y = torch.multinomial(truth.exp(), 1, generator=generator(seed + 1)).flatten()
    return log_probs, y, torch.arange(size) % 5


def nll(log_probs, y):
    return float(-log_probs.gather(1, y[:, None]).mean())


@pytest.mark.parametrize("log_tau", [-0.7, 0.5])
def test_a_temperature_is_found(log_tau):
    fitted = fit([label_rows(*client(800, 10 * k, log_tau)) for k in range(4)])
    assert fitted.maps.bias is None
    assert float((fitted.maps.log_factors - log_tau).abs().max()) < 0.15
    assert fitted.loss < fitted.raw_loss
    fresh, y, _ = client(5000, 99, log_tau)
    best = nll(Map(log_tau).of_labels(fresh), y)
    for k in (None, 0, 3):
        assert nll(fitted.maps.of(k).of_labels(fresh), y) - best < 0.003 < nll(fresh, y) - best


def test_biases_are_found_and_are_the_optimum():
    bias = [0.8, -0.4, 0.0, -0.4]
    rows = [label_rows(*client(600, 10 * k, 0.3, bias)) for k in range(3)]
    fitted = fit(rows)
    assert fitted.maps.bias is not None
    found = fitted.maps.bias - fitted.maps.bias.mean()
    assert found.tolist() == pytest.approx(bias, abs=0.2)
    x, y = (torch.cat([each.labels[k] for each in rows]) for k in (0, 1))

    def loss(at):
        at = torch.from_numpy(at)
        logits = at[0] * x + at[1:]
        penalty = (at[0] - 1) ** 2 / PRIOR**2 + at[1:].square().sum() / BIAS_PRIOR**2
        return float((logits.logsumexp(-1) - logits.gather(1, y[:, None])[:, 0]).sum() + penalty / 2)

    best = minimize(loss, [1.0, 0, 0, 0, 0], method="BFGS").x
    assert _bias(rows, -1).tolist() == pytest.approx(best[1:].tolist(), abs=1e-3)


def test_clients_differ_as_far_as_their_rows_show():
    """Half of the clients are too sure and half too unsure; one of each has few rows."""
    sizes = (1500, 1500, 12, 1500, 1500, 12)
    rows = [label_rows(*client(n, 10 * k, -0.6 if k < 3 else 0.6)) for k, n in enumerate(sizes)]
    found = fit(rows).maps.log_factors
    assert found[[0, 1]].tolist() == pytest.approx([-0.6] * 2, abs=0.12)
    assert found[[3, 4]].tolist() == pytest.approx([0.6] * 2, abs=0.12)
    shared = float(found[-1])
    for k, truth in ((2, -0.6), (5, 0.6)):
        assert min(shared, truth) - 0.35 < float(found[k]) < max(shared, truth) + 0.35
        assert abs(float(found[k]) - shared) < 0.5


@pytest.mark.parametrize("size", [30, 200])
def test_predictions_that_are_calibrated_are_mostly_left_alone(size):
    """A map is fitted by chance at most now and then, and then costs little."""
    changed, cost = 0, []
    fresh, y, _ = client(4000, 5000)
    for seed in range(20):
        fitted = fit([label_rows(*client(size, 100 * seed + 10 * k)) for k in range(3)])
        changed += not fitted.maps.is_raw
        cost.append(nll(fitted.maps.of(0).of_labels(fresh), y) - nll(fresh, y))
        assert fitted.loss <= fitted.raw_loss
    print(f"{size} rows: changed {changed} of 20, cost {sum(cost) / 20:.4f}, at most {max(cost):.4f}")
    assert changed <= 8
    assert max(cost) < (0.1 if size == 30 else 0.02)
    assert sum(cost) / 20 < (0.015 if size == 30 else 0.003)


def test_rows_are_scored_by_maps_that_have_not_seen_them():
    data = [client(200, 10 * k, 0.8) for k in range(2)]
    fitted = fit([label_rows(*each) for each in data])
    log_probs, y, fold = data[0]
    factors, biases = fitted.unseen(0, fold)
    assert biases is None
    # Other labels of four rows of a fold change the maps of the other folds only.
    changed = (log_probs, torch.where(torch.arange(200) % 50 == 2, (y + 1) % 4, y), fold)
    again = fit([label_rows(*changed), label_rows(*data[1])])
    others, _ = again.unseen(0, fold)
    assert torch.equal(others[fold == 2], factors[fold == 2])
    assert not torch.equal(others[fold == 1], factors[fold == 1])


@pytest.mark.parametrize("size", [30, 100])
def test_sets_of_cross_fitted_rows_cover_as_promised(size):
    """Federations of three over-confident clients. The maps change the scores, and cost no coverage that is seen.

    Thresholds come from the rows of the fit, by maps that have not seen the row. New rows get the final map.
    """
    covered, changed = [], 0
    for seed in range(100):
        data = [client(size, 1000 * seed + 10 * k, -0.6) for k in range(3)]
        fitted = fit([label_rows(*each) for each in data])
        changed += not fitted.maps.is_raw
        for k, (log_probs, y, fold) in enumerate(data):
            cross = sharpened(log_probs, *fitted.unseen(k, fold))
            calibration = conformal.calibrate(conformal.true_scores(conformal.label_scores(cross), y), 0.1)
            fresh, truth, _ = client(400, 1000 * seed + 10 * k + 5, -0.6)
            sets = conformal.label_sets(conformal.label_scores(fitted.maps.of(k).of_labels(fresh)), calibration)
            covered.append(float(sets.gather(1, truth[:, None]).double().mean()))
    mean, error = sum(covered) / 300, torch.tensor(covered).std() / math.sqrt(300)
    print(f"{size} rows: {changed} of 100 have maps, coverage {mean:.4f} +- {error:.4f}")
    assert changed > 50
    assert 0.9 - 0.012 < mean < 0.9 + 1 / (size + 1) + 0.012


def test_the_margin_is_in_standard_errors():
    rows = [label_rows(*client(60, 10 * k, 0.25)) for k in range(3)]
    kept = [fit(rows, margin).maps.is_raw for margin in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)]
    assert kept == sorted(kept)
    assert kept[0] != kept[-1]
    assert fit(rows).maps.is_raw == kept[2]


def test_a_model_without_errors_is_not_made_certain():
    """60 rows, all right with 95 %: without the pseudo-row, the best temperature would be the lowest one."""
    y = torch.arange(60) % 2
    log_probs = torch.where(torch.nn.functional.one_hot(y, 2).bool(), 0.95, 0.05).double().log()
    rows = label_rows(log_probs, y, torch.arange(60) % 5)
    sharpest = rows.losses(torch.full((60, 2), 0.0).double() + torch.tensor([0.5, LIMIT]), None, 0.0).mean(0)
    assert sharpest[1] < sharpest[0]
    found = fit([rows]).maps.of(0).of_labels(log_probs).exp().amax(-1)
    assert 0.95 <= float(found.min()) <= float(found.max()) < 0.99  # one error in 61 would be 98.4 %
    by_hand = -(log_probs.gather(1, y[:, None]) + 0.5 * log_probs.gather(1, 1 - y[:, None]))
    assert torch.allclose(rows.losses(torch.zeros(60, 1).double(), None, 0.5), by_hand)


def test_too_few_rows_and_no_rows_give_no_map():
    nothing = label_rows(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    for clients in ([], [nothing], [label_rows(*client(19, 0, 1.5))]):
        fitted = fit(clients)
        assert fitted.maps.is_raw
        assert len(fitted.maps.log_factors) == len(clients) + 1
    many = fit([label_rows(*client(300, 0, 1.0)), nothing])
    assert float(many.maps.log_factors[1]) == pytest.approx(float(many.maps.log_factors[2]), abs=0.01)


def test_a_loss_that_is_no_number_gives_no_map():
    log_probs, y, fold = client(100, 0, 1.0)
    log_probs[3] = math.nan
    assert fit([label_rows(log_probs, y, fold)]).maps.is_raw


def normal_density(mean, deviation):
    return lambda y: torch.distributions.Normal(mean, deviation).log_prob(y).sum(-1)


@pytest.mark.parametrize("stretch", [0.5, 2.0])
def test_the_stretch_of_numbers_is_found(stretch):
    rows = []
    for k in range(3):
        mean = torch.randn(400, 1, generator=generator(k)).double()
        deviation = 0.5 + torch.rand(400, 1, generator=generator(10 + k)).double()
        y = mean + stretch * deviation * torch.randn(400, 1, generator=generator(20 + k)).double()
        rows.append(number_rows(normal_density(mean, deviation), mean, y, torch.arange(400) % 5))
    fitted = fit(rows)
    assert fitted.maps.log_factors.tolist() == pytest.approx([math.log(stretch)] * 4, abs=0.1)
    assert fitted.maps.of(1).factor == pytest.approx(stretch, rel=0.1)
    # A stretched normal distribution is a wider one.
    mean, deviation, y = torch.zeros(3, 1), torch.ones(3, 1), torch.tensor([[-1.0], [0.0], [4.0]])
    one = number_rows(normal_density(mean, deviation), mean, y, torch.zeros(3, dtype=torch.int64))
    wider = normal_density(mean, 1.5 * deviation)(y).double()
    assert torch.allclose(one.losses(torch.full((3, 1), math.log(1.5)), None, 0.1)[:, 0], -wider)


def test_maps_by_hand():
    log_probs = torch.tensor([[0.8, 0.2]]).double().log()
    assert Map(math.log(2.0)).of_labels(log_probs).exp().tolist()[0] == pytest.approx([16 / 17, 1 / 17])
    bias = torch.tensor([0.0, math.log(4.0)]).double()
    assert Map(0.0, bias).of_labels(log_probs).exp().tolist()[0] == pytest.approx([0.5, 0.5])
    assert RAW.of_labels(log_probs) is log_probs
    assert (RAW.is_raw, Map(0.1).is_raw, Map(0.0, bias).is_raw) == (True, False, False)
    maps = Maps(torch.tensor([0.1, 0.2, 0.3]).double(), None)
    assert [maps.of(k).log_factor for k in (0, 1, None)] == pytest.approx([0.1, 0.2, 0.3])


def test_factors_are_bounded():
    fitted = fit([label_rows(*client(500, 0, 5.0))])
    assert 1.9 < float(fitted.maps.log_factors.abs().max()) <= LIMIT == 2.0  # no sharper than by e^2


def test_several_factors_at_once_are_each_alone():
    deviation = torch.tensor([0.5, 1.0, 2.0])[:, None]
    mean, y = torch.zeros(3, 1), torch.tensor([[0.3], [-1.0], [4.0]])
    numbers = number_rows(normal_density(mean, deviation), mean, y, torch.zeros(3, dtype=torch.int64))
    labels = label_rows(*client(3, 0))
    factors = torch.linspace(-1, 1, 6).view(3, 2).double()
    biases = torch.linspace(-1, 1, 12).view(3, 4).double()
    for rows, bias in ((numbers, None), (labels, None), (labels, biases)):
        found = rows.losses(factors, bias, 0.1)
        assert found.shape == (3, 2)
        for i in range(3):
            for k in range(2):
                all_alike = factors[i, k].expand(3, 1)
                same_bias = None if bias is None else bias[i].expand(3, -1)
                assert torch.allclose(rows.losses(all_alike, same_bias, 0.1)[i, 0], found[i, k])


def test_rows_meet_the_maps_of_their_own_fold():
    maps = [Maps(torch.tensor([0.1 * k, 0.5]).double(), torch.full((4,), float(k)).double()) for k in range(3)]
    factors, biases = unseen_maps(maps, 0, torch.tensor([2, 0, 2]))
    assert factors.flatten().tolist() == pytest.approx([0.2, 0.0, 0.2])
    assert biases[:, 0].tolist() == [2.0, 0.0, 2.0]
    assert unseen_maps([Maps(torch.zeros(2).double())] * 3, 1, torch.tensor([1]))[1] is None
