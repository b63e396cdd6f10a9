import math

import torch

from pfedbayes.trust import abstention
from pfedbayes.trust.calibration import NO_SCORES, Scores, guarantee


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
