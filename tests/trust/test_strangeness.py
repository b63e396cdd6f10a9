"""Strangeness: a p-value that is valid for any scores, from a Gaussian of the inputs and from the model."""

import math

import pytest
import torch

from federations import randn, trained
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.methods import Local, PFedBayes
from pfedbayes.trust.strangeness import (
    COMPONENTS,
    FEWEST,
    LARGEST,
    _log_e_values,
    distances,
    fit_inputs,
    held_out_distances,
    held_out_scores,
    model_scores,
    strangeness,
)


class TestStrangeness:
    @pytest.mark.parametrize("size", [1, 5, 19, 60])
    def test_a_threshold_is_a_false_alarm_rate(self, size):
        """Held-out and new rows of heavy-tailed, correlated scores of very different scales."""
        trials = 4000
        rows = randn(trials, size + 1, 2)
        rows[..., 1] = 100 * (rows[..., 0] + rows[..., 1]).exp()
        found = torch.cat([strangeness(own[:size], own[size:]) for own in rows])
        for level in (0.5, 0.8, 0.95):
            allowed = 1 - level
            if allowed * (size + 1) >= 1 - 1e-9:
                rate = float((found >= level).double().mean())
                assert rate <= allowed + 3 * math.sqrt(allowed * level / trials)
        even = 1 - torch.arange(1, size + 1) / (size + 1)  # exact at these levels
        for level in even[:5].tolist() if size > 1 else ():  # ties of a single row make it conservative
            rate = float((found >= level - 1e-6).double().mean())
            assert rate == pytest.approx(1 - level, abs=4 * math.sqrt(level * (1 - level) / trials) + 1e-9)

    def test_stranger_rows_have_larger_numbers_also_beyond_all_held_out_ones(self):
        held_out = randn(50, 2)
        new = torch.linspace(-3, 40, 100).double()[:, None].repeat(1, 2)
        found = strangeness(held_out, new)
        assert (found.diff() >= 0).all()
        assert 0 <= found.min() <= found.max() < 1
        beyond = found[new[:, 0] > 5]
        assert (beyond >= 50 / 51).all()
        assert (beyond.diff() > 0).all()

    @pytest.mark.parametrize("size", [9, 60])
    def test_the_evidence_of_a_gate_keeps_the_false_alarm_rate_even_where_it_is_wrong(self, size):
        trials = 3000
        rows = 3 * randn(trials, size + 1, 2) + 2  # no likelihood ratio: its mean is far above 1
        found = torch.cat([strangeness(own[:size], own[size:], gated=True) for own in rows])
        rate = float((found >= 0.8).double().mean())
        assert rate == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / trials))

    def test_the_e_values_by_hand(self):
        held_out = torch.tensor([[-2.0, 1.0], [3.0, 2.0], [-1.0, 4.0]], dtype=torch.float64)
        others, own = _log_e_values(held_out, torch.tensor([[0.5, 3.0]], dtype=torch.float64), True)
        # The evidence enters as it is; the p-values of the distances 1, 2, 4 and 3 are 4/4, 3/4, 1/4 and 2/4.
        assert others[0, :, 0].tolist() == [-2.0, 3.0, -1.0]
        assert float(own[0, 0]) == 0.5
        plain = [math.log(0.5 / math.sqrt(p)) for p in (1, 0.75, 0.25)]
        beyond = 0.5 * (4 - 3) / (3 - 2)  # the largest one lies so many units beyond the second largest
        assert others[0, :, 1].tolist() == pytest.approx([plain[0], plain[1], plain[2] + beyond])
        assert float(own[0, 1]) == pytest.approx(math.log(0.5 / math.sqrt(0.5)))

    def test_either_score_suffices(self):
        held_out = randn(99, 2)
        for row in ([20.0, 0.0], [0.0, 20.0]):
            assert float(strangeness(held_out, torch.tensor([row]))) >= 0.99
        assert float(strangeness(held_out, torch.zeros(1, 2))) < 0.9

    def test_rows_do_not_depend_on_each_other(self, monkeypatch):
        held_out, new = randn(30, 2), randn(40, 2, seed=1)
        whole = strangeness(held_out, new)
        monkeypatch.setattr("pfedbayes.trust.strangeness.AT_ONCE", 100)
        assert torch.equal(strangeness(held_out, new), whole)

    def test_equal_scores_are_not_strange(self):
        same = torch.ones(20, 2)
        assert strangeness(same, torch.ones(3, 2)).tolist() == [0.0] * 3
        assert float(strangeness(same, torch.full((1, 2), LARGEST))) >= 20 / 21

    def test_without_held_out_rows_it_is_unknown(self):
        assert strangeness(torch.empty(0, 2), torch.zeros(4, 2)).isnan().all()


class TestInputs:
    def test_the_distance_is_that_of_the_fitted_gaussian(self):
        x = randn(500, 4) @ randn(4, 4, seed=1) + 3
        inputs = fit_inputs(x)
        covariance = torch.cov(x.T, correction=0)
        centred = x - x.mean(0)
        expected = ((centred @ covariance.inverse()) * centred).sum(-1).log()
        assert distances(x, inputs).tolist() == pytest.approx(expected.tolist(), abs=1e-3)

    @pytest.mark.parametrize("size", [30, 400])
    def test_few_components_and_one_variance_for_the_rest(self, size):
        x = randn(size, 2) @ randn(2, 200, seed=1) + 0.1 * randn(size, 200, seed=2)
        inputs = fit_inputs(x)
        assert len(inputs.variances) == min(COMPONENTS, size // 5)
        identity = inputs.components @ inputs.components.T
        assert torch.allclose(identity, torch.eye(len(identity)), atol=1e-4)
        other = randn(size, 200, seed=3)
        own = randn(size, 2, seed=4) @ randn(2, 200, seed=1) + 0.1 * randn(size, 200, seed=5)
        assert distances(own, inputs).max() < distances(other, inputs).min()

    def test_a_category_that_no_row_had_is_far(self):
        x = torch.cat([randn(100, 3), torch.zeros(100, 1)], dim=1)
        inputs = fit_inputs(x)
        new = x[:20].clone()
        new[:, 3] = 1
        assert distances(new, inputs).min() > distances(x, inputs).max()

    def test_bytes_are_scaled(self):
        x = torch.randint(256, (40, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        assert distances(x, fit_inputs(x)).tolist() == pytest.approx(
            distances(x / 255, fit_inputs(x / 255)).tolist(), abs=1e-4
        )

    @pytest.mark.parametrize("size", [0, 1, FEWEST - 1])
    def test_few_rows_are_not_kept(self, size):
        inputs = fit_inputs(randn(size, 3) + 7)
        assert (inputs.mean.tolist(), len(inputs.variances), float(inputs.rest)) == ([0.0] * 3, 0, 1.0)
        assert distances(torch.ones(2, 3), inputs).exp().tolist() == pytest.approx([3.0, 3.0])

    def test_equal_rows(self):
        inputs = fit_inputs(torch.ones(20, 3))
        assert distances(torch.ones(2, 3), inputs).isfinite().all()
        assert distances(torch.zeros(2, 3), inputs).min() > 10


def test_scores_of_models_by_hand():
    logits = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]]).double()
    assert float(model_scores(Classification(), logits)) == pytest.approx(-(math.log(2) + 0.5))
    numbers = torch.tensor([[[1.0]], [[5.0]]]).double()
    assert float(model_scores(Regression(1.0), numbers)) == pytest.approx(math.log(4))
    assert float(model_scores(Classification(), logits * torch.nan)) == LARGEST


@pytest.mark.parametrize("method", [PFedBayes(), Local()])
def test_held_out_rows_of_a_federation(method):
    ours = trained(method, 1)
    sets = [ours.shards.test[0], ours.shards.test[1][:0], *ours.shards.test[2:]]
    for found in (held_out_scores(ours, "personal", [(0, sets)], 3), held_out_distances(ours, [(0, sets)])):
        assert [len(each) for each in found] == [len(rows) for rows in sets]
        assert all(each.isfinite().all() for each in found)
    # Rows of a fold are left out of the Gaussian from which their distance is measured.
    train = ours.shards.train[0]
    fold = [train[:5], *(rows[:0] for rows in ours.shards.train[1:])]
    x = ours.shards.x
    assert torch.equal(held_out_distances(ours, [(0, fold)])[0], distances(x[train[:5]], fit_inputs(x[train[5:]])))
