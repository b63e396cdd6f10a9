"""Verdicts on joining are right on simulated federations, calm where there is no evidence, and finite everywhere."""

import numpy as np
import pytest
from joining_federations import DESIGNS, OTHERS, count, simulate, tally

from pfedbayes.trust.joining import PairedLosses, Verdict, judge


def paired(difference, name="a", fold=None):
    """A client with these differences, joined minus alone."""
    difference = np.asarray(difference, dtype=float)
    return PairedLosses(name, np.full(len(difference), 2.0), 2 + difference, fold)


def noisy(mean, n, seed=0, spread=0.3):
    values = np.random.default_rng(seed).normal(size=n)
    return mean + spread * (values - values.mean()) / values.std()


class TestSimulatedFederations:
    @staticmethod
    def require(counts):
        assert counts["opposite"] <= 0.05 * counts["clients"], counts
        assert counts["helped, told so"] >= 0.8 * counts["helped"], counts
        assert counts["harmed, told so"] >= 0.7 * counts["harmed"], counts
        # The default is better than always joining and than never joining.
        assert counts["regret, default"] <= 0.3 * min(counts["regret, joined"], counts["regret, alone"]), counts

    def test_few_are_told_the_opposite_and_most_who_are_helped_are_told_so(self):
        few = ("alike", "strangers", "many small clients", "classes, related", "classes, too much shrinkage")
        counts = tally({name: DESIGNS[name] for name in few}, range(4000, 4001))
        assert min(counts["all"][kind] for kind in ("helped", "harmed")) > 20
        self.require(counts["all"])

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_on_seeds_that_chose_no_constant(self):
        self.require(tally(DESIGNS, range(3000, 3008))["all"])

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_on_federations_that_chose_no_constant(self):
        self.require(tally(OTHERS, range(3000, 3008))["all"])

    def test_a_judge_that_reads_losses_the_wrong_way_round_fails(self):
        simulated = simulate(DESIGNS["strangers"], 4000)
        swapped = [each._replace(alone=each.joined, joined=each.alone) for each in simulated.losses]
        with pytest.raises(AssertionError):
            self.require(count(simulated, judge(swapped)))


class TestVerdict:
    def test_clear_evidence_decides(self):
        for n in (20, 200):
            gain, loss, none = judge(
                [paired(noisy(-0.4, n), "a"), paired(noisy(0.4, n), "b"), paired(noisy(0, n), "c")]
            )
            assert (gain.conclusion, loss.conclusion, none.conclusion) == ("better", "worse", "no difference shown")
            assert (gain.use, loss.use) == ("joined", "alone")
            assert gain.probability > 0.95
            assert loss.probability < 0.05
            assert gain.low < -0.4 < gain.high < 0 < loss.low < 0.4 < loss.high
            assert gain.difference == pytest.approx(-0.4, rel=0.2)

    def test_more_rows_give_shorter_intervals(self):
        widths = [one.high - one.low for n in (5, 50, 5000) for one in judge([paired(noisy(-0.1, n))])]
        assert widths[0] > 2 * widths[1] > 10 * widths[2]

    def test_folds_widen_the_interval(self):
        difference = noisy(-0.1, 50)
        (folds,), (test,) = (judge([paired(difference, fold=fold)]) for fold in (np.arange(50) % 5, None))
        assert folds.high - folds.low > 1.05 * (test.high - test.low)
        assert folds.difference == pytest.approx(test.difference, rel=0.02)

    def test_a_client_without_evidence_joins_by_default(self):
        assert [each.use for each in judge([paired([0.0, 0.0])])] == ["joined"]
        assert judge([paired(noisy(0.0, 30))])[0].use == "joined"
        (same,) = judge([paired([0.0, 0.0])])
        assert (same.difference, same.low, same.high, same.probability) == (0, 0, 0, 0.5)

    def test_a_client_of_one_row_borrows_from_the_others(self):
        one = paired([0.1], "one")
        (alone,) = judge([one])
        assert alone.conclusion == "no difference shown"
        helped = judge([one, *(paired(noisy(-0.3, 60, i), f"b{i}") for i in range(20))])[0]
        harmed = judge([one, *(paired(noisy(0.3, 60, i), f"b{i}") for i in range(20))])[0]
        assert helped.probability > alone.probability > harmed.probability

    def test_a_client_unlike_all_others_keeps_its_own_evidence(self):
        others = [paired(noisy(-0.3, 60, i), f"b{i}") for i in range(50)]
        stranger = judge([paired(noisy(0.3, 60)), *others])[0]
        assert (stranger.conclusion, stranger.use) == ("worse", "alone")
        assert stranger.difference == pytest.approx(0.3, rel=0.1)

    def test_scale_and_order_do_not_matter(self):
        clients = [paired(noisy(0.1 * i - 0.3, 10 + 7 * i, i), f"c{i}") for i in range(8)]
        scaled = [each._replace(alone=100 * each.alone, joined=100 * each.joined) for each in clients]
        ours = judge(clients)
        assert [one.conclusion for one in judge(scaled)] == [one.conclusion for one in ours]
        assert [one.difference / 100 for one in judge(scaled)] == pytest.approx(
            [one.difference for one in ours], abs=1e-5
        )
        backwards = judge(clients[::-1])[::-1]
        assert [one.client for one in backwards] == [one.client for one in ours]
        assert [one.difference for one in backwards] == pytest.approx([one.difference for one in ours], abs=1e-5)

    def test_the_intervals_exclude_0_where_a_difference_is_shown(self):
        for seed in range(20):
            for one in judge([paired(noisy(0.15 * k - 0.3, 25, seed + k), f"c{k}") for k in range(5)]):
                if one.conclusion != "no difference shown":
                    assert one.low <= one.high <= 0.01 or one.high >= one.low >= -0.01
                assert one.low <= one.difference <= one.high

    @pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf, 1e300])
    def test_a_model_that_diverged_is_not_used(self, bad):
        others = [paired(noisy(-0.1, 30, i), f"b{i}") for i in range(5)]
        diverged = PairedLosses("a", np.full(9, 1.0), np.full(9, abs(bad)))
        verdicts = judge([diverged, *others])
        assert all(np.isfinite([one.alone, one.joined, one.difference, one.low, one.high]).all() for one in verdicts)
        assert verdicts[0].use == "alone"
        assert judge([PairedLosses("a", diverged.joined, diverged.alone), *others])[0].use == "joined"

    def test_clients_without_rows_are_left_out(self):
        assert judge([]) == []
        assert judge([paired([])]) == []
        assert [one.client for one in judge([paired([], "a"), paired([0.1, 0.2], "b")])] == ["b"]

    def test_probabilities_are_between_0_and_1_where_all_clients_gain_much(self):
        shifts = np.random.default_rng(12).uniform(-3, 0, 42)
        folds = np.arange(100) % 5
        clients = [paired(noisy(shift, 100, k), str(k), folds) for k, shift in enumerate(shifts)]
        assert all(0 <= verdict.probability <= 1 for verdict in judge(clients))

    def test_ten_thousand_rows_and_clients(self):
        big = judge([paired(noisy(-0.001, 10_000))])[0]
        assert np.isfinite(big.difference)
        many = judge([paired(noisy(-0.1, 4, i % 50), f"c{i}") for i in range(10_000)])
        assert len(many) == 10_000

    def test_a_confidence_that_means_nothing_is_refused(self):
        with pytest.raises(ValueError, match="between"):
            judge([paired([0.1])], 0.4)


class TestSentence:
    @staticmethod
    def verdict(conclusion="better", probability=0.964, use="joined", alone=0.41, joined=0.37, rows=25):
        return Verdict("Hungary", rows, alone, joined, joined - alone, -1.0, 1.0, probability, conclusion, use)

    @pytest.mark.parametrize(
        ("fields", "sentence"),
        [
            ({}, "Hungary: NLL 0.41 → 0.37, better with 96 % confidence"),
            (
                {"conclusion": "worse", "probability": 0.029, "use": "alone", "alone": 0.3, "joined": 0.36},
                "Hungary: NLL 0.30 → 0.36, worse with 97 % confidence: use its own model",
            ),
            ({"conclusion": "no difference shown"}, "Hungary: no difference that 25 rows could show"),
            ({"conclusion": "no difference shown", "rows": 1}, "Hungary: no difference that 1 row could show"),
            (
                {"conclusion": "no difference shown", "use": "alone", "rows": 1200},
                "Hungary: no difference that 1,200 rows could show; by default it uses its own model",
            ),
            ({"probability": 1.0}, "Hungary: NLL 0.41 → 0.37, better with 99.9 % confidence"),
            ({"probability": 0.9949}, "Hungary: NLL 0.41 → 0.37, better with 99.4 % confidence"),
            ({"joined": 0.4081}, "Hungary: NLL 0.410 → 0.408, better with 96 % confidence"),
            ({"joined": 0.4098}, "Hungary: NLL 0.4100 → 0.4098, better with 96 % confidence"),
            ({"joined": 0.41}, "Hungary: NLL 0.41 → 0.41, better with 96 % confidence"),
        ],
    )
    def test_the_sentence_says_what_was_found(self, fields, sentence):
        assert self.verdict(**fields).sentence() == sentence

    def test_another_metric_is_named(self):
        assert self.verdict().sentence("CRPS").startswith("Hungary: CRPS 0.41 → 0.37")
