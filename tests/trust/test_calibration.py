import math

import pytest
import torch

from federations import trained
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.methods import PFedBayes
from pfedbayes.trust import abstention, conformal
from pfedbayes.trust.calibration import (
    DELTA,
    DRAWS,
    NO_SCORES,
    Scores,
    concatenate,
    guarantee,
    hold_clients,
    score,
)


def some_scores(size, errors):
    """The least sure are wrong."""
    sure = torch.linspace(5, 0, size)
    return Scores(torch.linspace(0, 1, size), sure, torch.arange(size) >= size - errors)


def test_a_client_with_enough_examples_is_promised_something_itself():
    own, of_all = some_scores(100, 5), some_scores(1000, 0)
    sets, rule = guarantee(own, of_all, 0.9, 0.1)
    assert (sets.whose, sets.size, rule.whose, rule.size) == ("client", 100, "client", 100)
    assert rule == abstention.calibrate(own.sure, own.wrong, 0.1)
    sets, rule = guarantee(some_scores(8, 0), of_all, 0.9, 0.1)
    assert (sets.whose, sets.size, rule.whose, rule.size) == ("federation", 1000, "federation", 1000)
    assert "of the answers to all clients together are wrong" in rule.statement()
    sets, rule = guarantee(some_scores(8, 0), NO_SCORES, 0.9, 0.1)
    assert (sets.whose, rule.whose, math.isinf(rule.threshold)) == ("client", "client", True)


def test_whose_examples_count_does_not_depend_on_how_they_turned_out():
    of_all = some_scores(1000, 0)
    for errors in (0, 50, 100):
        assert guarantee(some_scores(100, errors), of_all, 0.9, 0.1).rule.whose == "client"
    assert guarantee(some_scores(100, 100), of_all, 0.9, 0.1).rule.answered == 0


def test_scores_of_labels_and_of_numbers_by_hand():
    log_probs = torch.tensor([[[0.7, 0.3], [0.2, 0.8]]]).double().log()
    labels = score(Classification(), log_probs, torch.tensor([0, 0]))
    assert labels.odd.tolist() == pytest.approx([0.0, 0.8])
    assert labels.sure.tolist() == pytest.approx([-math.log(0.3), -math.log(0.2)])
    assert labels.wrong.tolist() == [False, True]
    numbers = score(Regression(2.0), torch.tensor([[[1.0], [3.0]]]), torch.tensor([[5.0], [3.0]]))
    assert numbers.odd.tolist() == [2.0, 0.0]
    assert (len(numbers.sure), len(numbers.wrong)) == (0, 0)
    assert concatenate([labels, labels]).odd.tolist() == [*labels.odd, *labels.odd]
    assert concatenate([]) is NO_SCORES


def test_clients_without_rows_have_none_and_the_shared_model_is_asked_with_the_same_draws():
    ours = trained(PFedBayes(), 1)
    sets = [ours.shards.test[0], ours.shards.test[1][:0], ours.shards.test[2]]
    for which in ("personal", "shared"):
        held = hold_clients(ours, which, [(0, sets)])
        assert [len(each.y) for each in held] == [len(rows) for rows in sets]
        assert held[1].scores(ours.model.likelihood) is NO_SCORES
        for client in (0, 2):
            batch = ours.batch_of(sets[client])
            outputs = trained_model(ours, which, client).outputs(DRAWS)(batch.x)
            found = held[client].scores(ours.model.likelihood)
            assert torch.equal(found.odd, score(ours.model.likelihood, outputs, batch.y).odd)
            assert held[client].fold.tolist() == [k % 5 for k in range(len(sets[client]))]


def test_files_of_early_versions_have_only_the_scores_that_they_had():
    early = some_scores(100, 20)
    for kind in ("aps", "raps", "quantile"):
        with pytest.raises(UserError, match="early version"):
            guarantee(early, NO_SCORES, 0.9, None, kind)
    with pytest.raises(UserError, match="leave --class-conditional out"):
        guarantee(early, NO_SCORES, 0.9, None, "lac", 3)


def test_files_of_early_versions_give_no_empty_sets():
    """They hold 1 - p for true labels that are the most probable ones, too."""
    early = some_scores(100, 20)
    few = early._replace(wrong=torch.arange(100) >= 95)
    sets, _ = guarantee(few, NO_SCORES, 0.9, None)
    assert (sets.threshold, conformal.calibrate(few.odd).threshold > 0.9) == (0, True)
    assert guarantee(early, NO_SCORES, 0.9, None).sets == conformal.calibrate(early.odd * early.wrong, 1 - 0.9)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_shares_that_make_no_sense_are_refused(share):
    with pytest.raises(UserError, match="coverage is"):
        guarantee(NO_SCORES, NO_SCORES, share, None)
    with pytest.raises(UserError, match="error is"):
        guarantee(NO_SCORES, NO_SCORES, 0.9, share)


def test_the_border_between_own_examples_and_those_of_all():
    # 29 right answers show an error of 10 %; three times as many are needed.
    for size, whose in ((86, "federation"), (87, "client")):
        assert guarantee(some_scores(size, 0), some_scores(1000, 0), 0.9, 0.1).rule.whose == whose
    own = some_scores(20, 0)
    for other, whose in ((some_scores(20, 0), "client"), (some_scores(21, 0), "federation")):
        assert guarantee(own, other, 0.9, 0.1).rule.whose == whose
    # Nine examples suffice for 90 % coverage; eight do not, and no more of all clients do not help.
    for size, others, whose in ((9, 1000, "client"), (8, 1000, "federation"), (8, 9, "federation"), (8, 8, "client")):
        assert guarantee(some_scores(size, 0), some_scores(others, 0), 0.9, None).sets.whose == whose
    assert guarantee(own, own, 0.9, None).rule is None
    assert DRAWS == 100
    assert guarantee(some_scores(300, 0), NO_SCORES, 0.9, 0.1).rule.delta == DELTA == 0.05
