"""The result in plain words: intervals that cover, and differences that are only named where they show."""

import dataclasses
import math

import pytest
from scipy.stats import binomtest

from pfedbayes.report import figures, plain, render
from pfedbayes.report.run_tables import client_table


@pytest.mark.parametrize(("right", "rows"), [(0, 10), (7, 10), (10, 10), (930, 1000)])
def test_intervals_are_exact(right, rows):
    low, high = plain.accuracy_interval(100 * right / rows, rows)
    exact = binomtest(right, rows).proportion_ci(0.95, "exact")
    assert (low, high) == pytest.approx((100 * exact.low, 100 * exact.high), abs=1e-6)


def test_no_rows_have_no_interval():
    assert plain.accuracy_interval(50, 0) is None
    assert plain.accuracy_interval(math.nan, 10) is None
    assert plain.format_interval(math.nan, 10) == "–"
    assert plain.format_interval(80, 10) == "44–97"


def with_scores(make_run, personal, shared, name="accuracy"):
    run = make_run(clients=len(personal))
    scores = ({"mc10": {name: [values]}} for values in (personal, shared))
    record = dataclasses.replace(run.rounds[-1], **dict(zip(("personal", "shared"), scores, strict=True)))
    info = dataclasses.replace(run.info, test_sizes=[100] * len(personal))
    return dataclasses.replace(run, rounds=[record], info=info)


def test_a_difference_is_named_only_if_it_shows(make_run):
    run = with_scores(make_run, [90.0, 80, 85, 70, 95, 88], [88.0, 82, 85, 72, 93, 88])
    mean, error = plain.difference(run, "accuracy")
    gains = [2, -2, 0, -2, 2, 0]
    assert mean == pytest.approx(0)
    assert error == pytest.approx(math.sqrt(sum(g * g for g in gains) / 5 / 6))
    assert any("indistinguishable here (difference 0.00 ± " in each for each in plain.summary(run))
    better = with_scores(make_run, [90.0, 91, 92, 93, 94, 95], [80.0, 81, 82, 83, 84, 86])
    assert any("is better than the shared one (by 9.83 ± 0.33 points" in each for each in plain.summary(better))
    loss = with_scores(make_run, [1.0] * 6, [0.5, 0.6, 0.5, 0.6, 0.5, 0.6], "nll")
    assert plain.difference(loss, "nll")[0] < 0
    assert plain.difference(with_scores(make_run, [90.0] * 4, [80.0] * 4), "accuracy") is None


def test_the_summary_says_how_many_answers_are_right(make_run):
    run = with_scores(make_run, [80.0, 90], [80.0, 90])
    text = " ".join(plain.summary(run))
    assert "trained together by 2 clients; each kept its data" in text
    assert "Of 100 new cases like the 200 test cases, about 85 are answered correctly (95 % interval: 79 to 90)" in text
    assert plain.summary(dataclasses.replace(run, summary=None)) == []
    assert "typically off by" in " ".join(plain.summary(make_run(task="regression")))
    assert "In plain words" in render([run])


def test_the_table_of_clients_has_intervals(make_run):
    table = client_table(with_scores(make_run, [80.0, 90], [70.0, 95]), "accuracy")
    assert table.heads[-4:] == ["personal", "95 % interval", "shared", "95 % interval"]
    assert table.blocks[0][1][0][1][-4:] == ["80.00", "71–87", "70.00", "60–79"]
    assert "95 % interval" not in client_table(make_run(task="regression"), "rmse").heads
    assert "95 % interval" not in client_table(make_run(seeds=3), "accuracy").heads


def test_the_validation_curve_shows_the_round_that_was_kept(make_run):
    run = make_run(rounds=5)
    assert figures.validation(run) is None
    losses = [0.9, 0.5, 0.6, 0.7, 0.8]
    records = [dataclasses.replace(each, validation_nll=loss) for each, loss in zip(run.rounds, losses, strict=True)]
    run = dataclasses.replace(run, rounds=records, summary=dataclasses.replace(run.summary, kept_round=20))
    figure = figures.validation(run)
    assert "kept: round 20" in figure.svg
    assert "0.5 in round 20" in figure.caption
    assert "validation" in figures.all_figures(run)
