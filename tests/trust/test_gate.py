import dataclasses

import pytest
import torch

from federations import make_shards, randn, trained
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.trust import gate
from pfedbayes.trust.calibration import predict_held_out, score, score_gated, scores_at
from pfedbayes.trust.gate import Gate, HeldOut, fit_bias, fit_weight, gated, judged, parts, share_of_others, summaries

OWN = torch.tensor([True, False, True, False])
PLAIN = Gate(OWN, 0.5, torch.zeros(4))
P, S = torch.tensor([[0.6, 0.1, 0.2, 0.1]]), torch.tensor([[0.2, 0.3, 0.2, 0.3]])


def log_probs(*shape, seed=0):
    return randn(*shape, seed=seed).log_softmax(-1)


def test_the_shared_model_says_whether_and_the_personal_one_which():
    found = gated(P.log(), S.log(), PLAIN).exp()
    assert found[0].tolist() == pytest.approx([0.4 * 0.75, 0.3, 0.4 * 0.25, 0.3])
    half = gated(P.log(), S.log(), PLAIN._replace(weight=0.5)).exp()
    assert half[0].tolist() == pytest.approx([0.4 * 0.625, 0.3, 0.4 * 0.375, 0.3])
    few = gated(P.log(), S.log(), PLAIN, share=0.1).exp()  # odds of 9 * 0.4 / 0.6
    assert float(few[0, OWN].sum()) == pytest.approx(6 / 7)
    biased = gated(P.log(), S.log(), PLAIN._replace(bias=torch.tensor([2.0, 1, 2, 1]).log())).exp()
    assert float(biased[0, OWN].sum()) == pytest.approx(0.8 / 1.4)


@pytest.mark.parametrize("share", [None, 0.0, 0.3, 1.0])
def test_probabilities_sum_to_one(share):
    fitted = Gate(OWN, 0.3, randn(4, seed=3), 0.7)
    found = gated(log_probs(5, 20, 4), log_probs(5, 20, 4, seed=1), fitted, share)
    assert found.logsumexp(-1).numpy() == pytest.approx(0, abs=1e-9)
    assert not found.isnan().any()


def test_with_all_labels_the_personal_prediction_stays_as_it_is():
    everything = Gate(torch.ones(4, dtype=torch.bool), 0.0, randn(4), 1.0)
    assert torch.equal(gated(P.log(), S.log(), everything), P.log())
    found = parts(P.log(), S.log(), everything)
    assert gate.joined(found, everything).exp()[0].tolist() == pytest.approx(P[0].tolist())
    assert share_of_others(found.evidence, 0.0) == 0.0


def test_a_client_whose_model_excludes_its_own_labels_gets_the_shared_ones():
    blind = torch.tensor([[0.0, 0.5, 0.0, 0.5]]).log()
    assert gated(blind, S.log(), PLAIN).exp()[0].tolist() == pytest.approx(S[0].tolist())


class TestShare:
    def rows(self, size, share, usual=0.5):
        """Log-likelihood ratios of two normal distributions at -1.5 and 1.5."""
        others = torch.arange(size) < share * size
        x = randn(size) + torch.where(others, -1.5, 1.5)
        return 3 * x

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_it_is_found_without_labels(self, share):
        assert share_of_others(self.rows(4000, share), 0.5) == pytest.approx(share, abs=0.03)

    def test_few_rows_hardly_move_it(self):
        assert share_of_others(torch.empty(0), 0.3) == pytest.approx(0.3)
        assert 0.3 < share_of_others(torch.tensor([50.0]), 0.5) < 0.5
        assert 0.5 < share_of_others(torch.tensor([-50.0]), 0.5) < 0.7


class TestFit:
    def test_the_bias_undoes_a_bias(self):
        truth = log_probs(4000, 4)
        y = torch.multinomial(truth.exp(), 1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
        wrong = torch.tensor([1.0, -1.0, 0.5, -0.5])
        found = fit_bias((truth + wrong).log_softmax(-1), y)
        assert found.tolist() == pytest.approx((-wrong).tolist(), abs=0.2)
        assert fit_bias(truth[:1], y[:1]).abs().max() < 1  # the prior holds it back
        sure = torch.tensor([[0.0, -1e4, -1e4, -1e4]]).double().repeat(50, 1)
        assert fit_bias(sure, torch.ones(50, dtype=torch.int64)).isfinite().all()

    def test_the_weight_is_that_of_the_better_model(self):
        p, s = torch.full((50,), 0.9), torch.full((50,), 0.5)
        better, worse = torch.stack([p, s]).double(), torch.stack([s, p]).double()
        assert fit_weight(better, better) == pytest.approx(1)
        assert fit_weight(worse, worse) == pytest.approx(0)
        assert fit_weight(better[:, :0], worse) == pytest.approx(0)  # without own rows those of all count
        assert fit_weight(better[:, :0], better[:, :0]) == 1
        either = torch.cat([better, worse], dim=1)
        assert fit_weight(either, either) == pytest.approx(0.5)

    def test_only_clients_that_lack_a_label_get_a_weight(self):
        labels = OWN.nonzero().squeeze(-1).repeat(30)
        right = torch.nn.functional.one_hot(labels, len(OWN)) * 3.0
        rows = HeldOut((-right).log_softmax(-1), right.log_softmax(-1), labels)  # the personal model is always wrong
        every = PLAIN._replace(own=torch.ones_like(OWN))
        fitted = gate.fit([PLAIN, every], {0: [(PLAIN, rows)], 1: [(every, rows)]})
        assert (fitted[0].weight, fitted[1].weight) == (pytest.approx(0), 1.0)

    def test_without_held_out_rows_nothing_is_fitted(self):
        assert gate.fit([PLAIN], {0: []}) == [PLAIN]


def test_summaries_say_what_log_probabilities_say():
    fitted = Gate(OWN, 0.3, randn(4, seed=3), 0.7)
    personal, shared, y = log_probs(200, 4), log_probs(200, 4, seed=1), torch.arange(200) % 4
    rows = summaries(parts(personal, shared, fitted), y, fitted)
    for share in (0.01, 0.3, 0.9):
        expected = score(Classification(), gated(personal, shared, fitted, share)[None], y)
        found = scores_at(rows, share)
        assert found.odd.tolist() == pytest.approx(expected.odd.tolist(), abs=1e-5)
        assert found.sure.tolist() == pytest.approx(expected.sure.tolist(), abs=1e-4)
        assert torch.equal(found.wrong, expected.wrong)
    sure = judged(rows._replace(evidence=torch.full((200,), 90.0)), 0.5).sure
    assert bool(sure.isfinite().all())


def without_a_label():
    """The last client has never seen label 2; all have validation rows."""
    shards = make_shards(sizes=(40,) * 5)
    train = [rows[:25] for rows in shards.train]
    train[4] = train[4][shards.y[train[4]] != 2]
    return dataclasses.replace(shards, train=tuple(train), validation=tuple(rows[25:] for rows in shards.train))


def test_gates_of_a_federation():
    ours = trained(PFedBayes(zeta=0.1, eta_personal=0.05), 4, shards=without_a_label())
    assert gate.applies(ours)
    plain = gate.gates(ours.data)
    assert plain[4].own.tolist() == [True, True, False]
    y = torch.cat([ours.shards.y[rows] for rows in ours.shards.train])
    assert plain[4].usual == pytest.approx(float((y == 2).double().mean()))
    assert [each.usual for each in plain[:4]] == [0.0] * 4
    rows = predict_held_out(ours, [(0, ours.shards.validation)], samples=5)
    fitted = gate.fit(plain, rows)
    assert [each.weight for each in fitted[:4]] == [1.0] * 4
    assert 0 <= fitted[4].weight <= 1
    assert all(torch.equal(each.bias, fitted[0].bias) for each in fitted)
    assert bool(fitted[0].bias.any())
    scored = score_gated(fitted[4], rows[4])
    assert len(scored.true) == len(ours.shards.validation[4])
    assert scored.lacking.tolist() == (ours.shards.y[ours.shards.validation[4]] == 2).tolist()
    assert score_gated(fitted[4], []) is gate.NO_SUMMARIES


def test_there_may_be_nothing_to_gate():
    assert not gate.applies(trained(PFedBayes(), 1, shards=make_shards(sizes=(60,) * 5)))  # all have all labels
    assert not gate.applies(trained(FedAvg(), 1, shards=without_a_label()))  # there is no personal model


def test_a_newcomer_takes_the_bias_of_the_run():
    rows = HeldOut(log_probs(30, 4), log_probs(30, 4, seed=1), torch.arange(30) % 2 * 2)
    known = Gate(~OWN, 0.9, randn(4).float())
    found = gate.of_newcomer(OWN, [known], rows)
    assert torch.equal(found.bias, known.bias)
    assert (found.usual, found.own.tolist()) == (0.5, OWN.tolist())
    assert 0 <= found.weight <= 1
    assert not gate.of_newcomer(OWN, [], rows).bias.any()


def test_equal_models_need_no_gate():
    same = torch.full((2, 5), 0.3, dtype=torch.float64)
    assert fit_weight(same, same) == 0.0
