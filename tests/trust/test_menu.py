import math

import pytest
import torch
from scipy.stats import binomtest

from pfedbayes.trust import abstention
from pfedbayes.trust.calibration import DELTA, NO_SCORES, OWN_MENU, Scores, default_rule, menus
from pfedbayes.trust.menu import ENOUGH, LEVELS, _Candidate, _needed, menu

TIMES = 150


def examples(count, seed, steepness):
    """Scores in [0, 1]; a prediction of score s is wrong with probability steepness * (1 - s)."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(count, generator=generator)
    return score, torch.rand(count, generator=generator) < steepness * (1 - score)


def true_error(rule, steepness):
    """The error rate among all answers of a rule, and the share that it answers: known exactly."""
    t = min(max(rule.threshold, 0.0), 1.0)
    return steepness * (1 - t) / 2, 1 - t


@pytest.mark.parametrize(("count", "steepness"), [(60, 0.3), (200, 0.2), (1000, 0.5), (1000, 0.08)])
def test_all_offers_of_a_menu_hold_at_once(count, steepness):
    """Many calibrations: in at most a share of DELTA of them, some level is exceeded."""
    broken, defaults, hoped, half = 0, 0, 0, []
    for seed in range(TIMES):
        found = menu(*examples(count, seed, steepness))
        broken += any(
            offer.guaranteed.answered and true_error(offer.guaranteed, steepness)[0] > offer.target
            for offer in found.offers
        )
        rule = found.default()
        error, share = true_error(rule, steepness)
        defaults += not rule.estimated and error > rule.target
        hoped += rule.estimated and error > rule.target
        half.append(share)
    print(
        f"{count} rows: {broken} menus broken, {defaults} defaults, {hoped} estimates, {sum(half) / TIMES:.2f} answered"
    )
    assert broken <= TIMES * DELTA
    assert defaults <= TIMES * DELTA
    assert hoped <= TIMES * 0.25  # an estimate promises nothing, but should not mislead
    assert sum(half) / TIMES > ENOUGH - 0.02


def test_the_offers_by_hand():
    score = torch.arange(1000, 0, -1.0)
    found = menu(score, torch.arange(1000) >= 700)  # the surest 700 are right
    assert (found.size, found.whose, len(found.offers)) == (1000, "client", len(LEVELS))
    shares = [offer.guaranteed.answered for offer in found.offers]
    # By Clopper-Pearson with 0.05 / 10, 700 right answers show 0.75 %, and 800 with 100 errors show 15.8 %.
    assert shares == [700, 700, 700, 700, 800]
    assert binomtest(100, 800).proportion_ci(1 - 2 * DELTA / 10, "exact").high == pytest.approx(0.158, abs=1e-4)
    assert [offer.needed for offer in found.offers] == [None] * 5
    assert found.default() == found.offers[0].guaranteed
    assert found.default() == abstention.Abstention(300.0, 0.01, DELTA, 1000, 700, 0)


def test_where_nothing_is_shown_it_says_what_is_estimated_and_what_would_show_it():
    score = torch.arange(40, 0, -1.0)
    found = menu(score, torch.arange(40) >= 36)
    assert not any(offer.guaranteed.answered for offer in found.offers[:4])
    five = found.offers[2]
    assert (five.estimated.answered, five.estimated.wrong, five.estimated.estimated) == (36, 0, True)
    # About 1 / 38 of the answers are wrong, which the rows in question would show to be below 5 %, but hardly more.
    # Three candidates share DELTA, those of 40, 36 and 32 rows: fewer could not even show 20 %.
    answered = round(0.9 * five.needed)
    at_rate = binomtest(round(answered / 38), answered, 0.05, "less").pvalue
    assert (at_rate == pytest.approx(DELTA / 3, rel=0.7), five.estimated.needed) == (True, five.needed)
    text = five.estimated.statement()
    assert "without a guarantee" in text
    assert f"about {five.needed:,} calibration examples would guarantee it" in text
    assert "5% wrong: nothing (estimated 90%)" in found.statement()
    json = five.as_json()
    assert json == {
        "error": 0.05, "guaranteed": 0.0, "estimated": 0.9, "rows_to_guarantee_estimated": five.needed
    }  # fmt: skip


def test_the_default_is_the_smallest_level_that_answers_half():
    score = torch.arange(2000, 0, -1.0)
    # With 20 wrong among the surest 1,000, a rate of at most 3.5 % is shown.
    for first_wrong, level in ((1990, 0.01), (1000, 0.01), (980, 0.05), (900, 0.2)):
        wrong = torch.arange(2000) >= first_wrong
        assert menu(score, wrong).default().target == level, first_wrong
        assert menu(score, wrong).default().answered >= 1000


def test_a_hopeless_model_abstains_on_everything():
    found = menu(torch.rand(500), torch.ones(500, dtype=torch.bool))
    assert (found.default().answered, found.default().threshold) == (0, math.inf)
    assert "no threshold keeps the error at 20.00%" in found.default().statement()
    assert "20% wrong: nothing" in found.statement()
    empty = menu(torch.empty(0), torch.empty(0))
    assert (empty.default().answered, empty.size) == (0, 0)


def test_ties_are_answered_together():
    score = torch.tensor([0.0] * 500 + [1.0] * 1500)
    found = menu(score, score == 0)
    assert [offer.guaranteed.answered for offer in found.offers] == [1500] * 5


def some_scores(size, errors):
    sure = torch.linspace(5, 0, size)
    return Scores(torch.linspace(0, 1, size), sure, torch.arange(size) >= size - errors)


def test_a_client_with_few_rows_gets_the_menu_of_all():
    many, few, of_all = some_scores(OWN_MENU, 0), some_scores(OWN_MENU - 1, 0), some_scores(1000, 0)
    assert [each.whose for each in menus(many, of_all)] == ["client", "federation"]
    assert default_rule(menus(many, of_all)).whose == "client"
    assert default_rule(menus(few, of_all)).whose == "federation"
    assert default_rule(menus(few, few)).whose == "client"
    assert [each.whose for each in menus(NO_SCORES, of_all)] == ["federation"]
    assert menus(NO_SCORES, NO_SCORES) == ()
    nothing = default_rule(())
    assert (nothing.answered, nothing.size, nothing.wrong, nothing.threshold) == (0, 0, 0, math.inf)
    assert "0 calibration examples cannot show" in nothing.statement()
    # Not by how the rows turned out.
    assert default_rule(menus(some_scores(OWN_MENU, OWN_MENU), of_all)).whose == "client"


@pytest.mark.parametrize(
    ("answered", "wrong", "size", "needed"),
    [(98, 1, 100, 146), (98, 1, 196, 286), (998, 0, 1000, 60), (38, 1, 50, None), (100_000, 4_998, 100_000, None)],
)
def test_about_as_many_rows_are_needed_as_the_normal_approximation_says(answered, wrong, size, needed):
    """The reach of 0.05 - 0.02 is (1.645 * 0.218 / 0.03)^2 = 142.8 answered rows; no error at all takes 59."""
    assert _needed(_Candidate(0.0, answered, wrong, True), size, 0.05, 0.05) == needed
