"""Kinds of conformal sets and intervals, against independent libraries on the same scores."""

import math

import numpy as np
import pytest
import torch
from crepes import ConformalClassifier, ConformalRegressor
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from torch.distributions import Categorical

from pfedbayes.maths.metrics import Gaussians
from pfedbayes.trust import conformal
from pfedbayes.trust.conformal import Band

CLASSES = 6


def generator(seed):
    return torch.Generator().manual_seed(seed)


def examples(size=1200, seed=0, noise=1.0):
    """Log-probabilities of a model that is wrong in its way, and labels."""
    truth = 2 * torch.randn(size, CLASSES, generator=generator(seed))
    torch.manual_seed(seed + 1)
    y = Categorical(logits=truth).sample()
    model = truth + noise * torch.randn(size, CLASSES, generator=generator(seed + 2))
    return model.double().log_softmax(-1), y


class Known(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its probabilities."""

    def __init__(self):
        self.classes_ = np.arange(CLASSES)
        self.fitted_ = True

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return np.asarray(x)

    def predict(self, x):
        return np.asarray(x).argmax(1)


def library_sets(log_probs, y, score, **others):
    p = log_probs.exp().numpy()
    classifier = SplitConformalClassifier(Known(), 0.9, score, prefit=True, random_state=7).conformalize(
        p[:600], y[:600].numpy()
    )
    _, sets = classifier.predict_set(p[600:], conformity_score_params=others or None)
    return torch.from_numpy(sets[:, :, 0])


def ours(scores, y, alpha=0.1):
    calibration = conformal.calibrate(conformal.true_scores(scores, y)[:600], alpha)
    return conformal.label_sets(scores[600:], calibration)


def test_lac_is_the_library_s_but_for_the_most_probable_label():
    log_probs, y = examples()
    plain = 1 - log_probs.exp()
    library = library_sets(log_probs, y, "lac")
    calibration = conformal.calibrate(conformal.true_scores(plain, y)[:600], 0.1)
    assert torch.equal(plain[600:] <= calibration.threshold, library)
    own = ours(conformal.label_scores(log_probs), y)
    top = torch.nn.functional.one_hot(log_probs[600:].argmax(-1), CLASSES).bool()
    assert (own <= (library | top)).all()  # never larger, but for the most probable label
    assert own.any(-1).all()
    covered = float(own.gather(-1, y[600:, None]).double().mean())
    sizes = [float(each.sum(-1).double().mean()) for each in (own, library)]
    print(f"LAC: covers {covered:.3f}, {sizes[0]:.2f} labels; the library's sets have {sizes[1]:.2f}")
    assert abs(covered - 0.9) < 0.035
    assert sizes[0] < sizes[1] + 0.05


def test_aps_is_the_library_s_but_for_the_most_probable_label():
    """The library draws the share of the true label's probability; without a draw for new rows, the label that crosses
    the threshold is in, which is u = 0 here."""
    log_probs, y = examples(seed=5)
    probs = log_probs.exp()
    library = library_sets(log_probs, y, APSConformityScore(), include_last_label=True)
    drawn = torch.from_numpy(np.random.RandomState(7).uniform(size=(600, 1)))[:, 0]
    plain = [conformal.label_scores(log_probs, u) for u in (torch.zeros(1200).double(), torch.ones(1200).double())]
    above = plain[1] - probs
    own = torch.where(plain[1] == 0, 0, above)
    top = torch.nn.functional.one_hot(log_probs.argmax(-1), CLASSES).bool()
    cumulative = torch.where(top, probs, plain[1])
    true = conformal.true_scores(cumulative, y)[:600] - drawn * conformal.true_scores(probs, y)[:600]
    calibration = conformal.calibrate(true, 0.1)
    assert torch.equal((own[600:] <= calibration.threshold), library)
    torch.testing.assert_close(plain[0], own)


def test_aps_and_raps_cover_and_the_penalty_makes_large_sets_rare():
    sizes, covered, large = {}, {}, {}
    for kind, penalty in (("lac", None), ("aps", 0.0), ("raps", conformal.PENALTY)):
        shares, counts, many = [], [], []
        for seed in range(20):
            log_probs, y = examples(seed=100 + seed)
            u = None if penalty is None else torch.rand(len(y), generator=generator(seed)).double()
            sets = ours(conformal.label_scores(log_probs, u, penalty or 0.0), y)
            assert sets.any(-1).all()
            shares.append(float(sets.gather(-1, y[600:, None]).double().mean()))
            counts.append(float(sets.sum(-1).double().mean()))
            many.append(float((sets.sum(-1) > 4).double().mean()))
        covered[kind], sizes[kind], large[kind] = (sum(each) / 20 for each in (shares, counts, many))
    print(f"covered {covered}, labels {sizes}, more than four {large}")
    assert all(abs(share - 0.9) < 0.012 for share in covered.values())
    assert sizes["lac"] < min(sizes["raps"], sizes["aps"])
    assert large["raps"] < large["aps"]


def test_raps_by_hand():
    log_probs = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).double().log()
    u = torch.tensor([0.5]).double()
    scores = conformal.label_scores(log_probs, u, 0.05)[0].tolist()
    assert scores[0] == 0
    assert sorted(scores[1:3]) == pytest.approx([0.6, 0.8 + 0.05])
    assert scores[3] == pytest.approx(0.95 + 0.1)


def test_class_conditional_thresholds_are_the_library_s_and_cover_each_label():
    log_probs, y = examples(4000, seed=9)
    scores = 1 - log_probs.exp()
    true = conformal.true_scores(scores, y)
    found = conformal.calibrate_classes(true[:2000], y[:2000], torch.empty(0), torch.empty(0), 0.1, CLASSES)
    library = ConformalClassifier().fit(true[:2000].numpy(), bins=y[:2000].numpy())
    each = [
        library.predict_set(scores[2000:].numpy(), bins=np.full(2000, k), confidence=0.9, smoothing=False)[:, k]
        for k in range(CLASSES)
    ]
    sets = scores[2000:] <= found.threshold
    assert np.array_equal(sets.numpy(), np.stack(each, 1).astype(bool))
    inside = sets.gather(-1, y[2000:, None])[:, 0]
    for k in range(CLASSES):
        assert abs(float(inside[y[2000:] == k].double().mean()) - 0.9) < 0.07
    assert "6 labels by examples of this client, 0 by those of all" in found.statement()


def test_a_label_that_a_client_lacks_takes_the_threshold_of_all_or_is_always_in():
    y = torch.tensor([0] * 20 + [1] * 5)
    all_y = torch.tensor([0] * 20 + [1] * 20 + [2] * 3)
    found = conformal.calibrate_classes(torch.rand(25), y, torch.rand(43) + 1, all_y, 0.1, 3)
    assert [each.whose for each in found.labels] == ["client", "federation", "federation"]
    assert [each.size for each in found.labels] == [20, 20, 3]
    assert found.threshold[0] < 1 < found.threshold[1] < found.threshold[2] == math.inf
    assert conformal.label_sets(torch.tensor([[5.0, 5.0, 5.0]]), found).tolist() == [[False, False, True]]
    assert "1 with too few of them are in every set" in found.statement()


def test_normalised_intervals_are_the_library_s():
    deviation = 0.2 + torch.rand(900, 1, generator=generator(0)).double()
    mean = torch.randn(900, 1, generator=generator(1)).double()
    y = mean + 2 * deviation * torch.randn(900, 1, generator=generator(2)).double()
    predicted = [Gaussians(mean[s], deviation[s], deviation[s]) for s in (slice(0, 400), slice(400, 900))]
    calibration = conformal.calibrate(conformal.residuals(predicted[0], y[:400]), 0.1)
    low, high = conformal.interval(predicted[1], calibration)
    library = ConformalRegressor().fit((y - mean)[:400, 0].numpy(), sigmas=deviation[:400, 0].numpy())
    ends = library.predict_int(mean[400:, 0].numpy(), sigmas=deviation[400:, 0].numpy(), confidence=0.9)
    assert np.allclose(ends, torch.cat([low, high], 1).numpy())


def test_quantile_intervals_cover_lopsided_targets_and_are_shorter():
    """Exponential targets: the model's quantiles are right in shape but half as wide as they should be."""
    covered, widths = [], []
    for seed in range(40):
        scale = 0.5 + torch.rand(400, 1, generator=generator(seed)).double()
        y = -2 * scale * torch.rand(400, 1, generator=generator(100 + seed)).double().log()
        band = Band(*(-scale * math.log(1 - level) for level in (0.05, 0.5, 0.95)))
        symmetric = Gaussians(scale, scale, scale)
        kinds = []
        for scores, ends in (
            (conformal.band_scores(band, y), lambda c, band=band: conformal.band_interval(band, c)),
            (conformal.residuals(symmetric, y), lambda c, predicted=symmetric: conformal.interval(predicted, c)),
        ):
            low, high = ends(conformal.calibrate(scores[:200], 0.1))
            inside = ((low <= y) & (y <= high))[200:].double().mean()
            kinds.append((float(inside), float((high - low)[200:].mean())))
        covered.append(kinds[0][0])
        widths.append([width for _, width in kinds])
    mean = np.mean(widths, 0)
    print(f"covered {np.mean(covered):.3f}, width {mean[0]:.2f} by quantiles, {mean[1]:.2f} by deviation")
    assert abs(np.mean(covered) - 0.9) < 0.015
    assert mean[0] < mean[1]


def test_the_scores_of_quantiles_by_hand():
    band = Band(*(torch.tensor([[value]]).double() for value in (1.0, 2.0, 4.0)))
    for y, score in ((3.0, 0.5), (1.0, 1.0), (-1.0, 3.0), (2.0, 0.0)):
        assert float(conformal.band_scores(band, torch.tensor([[y]]))) == pytest.approx(score)
    low, high = conformal.band_interval(band, conformal.Calibration(3.0, 0.1, 20))
    assert (float(low), float(high)) == (-1.0, 8.0)
    flat = Band(*(torch.tensor([[2.0]]) for _ in range(3)))
    assert math.isfinite(float(conformal.band_scores(flat, torch.tensor([[2.5]]))))


def test_a_weighted_threshold_follows_the_shift():
    """Calibration inputs are uniform and new ones lie near 1, where errors are three times as large."""
    plain, weighted = [], []
    for seed in range(60):
        x, new = (torch.rand(300, generator=generator(2 * seed + k)).double() for k in (0, 1))
        new = new.sqrt()  # density 2 x
        noise = torch.randn(2, 300, generator=generator(500 + seed)).double()
        scores, fresh = (1 + 2 * x) * noise[0].abs(), (1 + 2 * new) * noise[1].abs()
        plain.append(float((fresh <= conformal.calibrate(scores, 0.1).threshold).double().mean()))
        inside = [
            float(s) <= conformal.weighted_threshold(scores, 2 * x, 2 * float(at), 0.1)
            for s, at in zip(fresh[:60], new[:60], strict=True)
        ]
        weighted.append(sum(inside) / 60)
    print(f"plain {np.mean(plain):.3f}, weighted {np.mean(weighted):.3f}")
    assert np.mean(plain) < 0.88
    assert 0.89 < np.mean(weighted) < 0.92


@pytest.mark.parametrize("size", [5, 9, 40, 149])
def test_equal_weights_give_the_plain_threshold(size):
    scores = torch.rand(size, generator=generator(size))
    for alpha in (0.1, 0.18, 0.5):
        found = conformal.weighted_threshold(scores, torch.full((size,), 3.0), 3.0, alpha)
        assert found == conformal.calibrate(scores, alpha).threshold


def test_uniform_numbers_are_uniform_and_belong_to_the_inputs():
    x = torch.randn(4000, 3, generator=generator(0))
    u = conformal.uniforms(x)
    assert torch.equal(u[7:9], conformal.uniforms(x[7:9]))
    counts = torch.histc(u, 10, 0, 1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 28  # the 99.9 % quantile of chi-squared with 9 degrees
    assert ((u > 0) & (u < 1)).all()
    assert len(conformal.uniforms(x[:0])) == 0
