"""The reductions of the log, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pfedbayes.report import tables
from pfedbayes.report.tables import Estimate
from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import Reliability, RoundRecord, Summary

MakeRun = Callable[..., Run]


def test_headline_weighs_clients_by_test_size_and_takes_the_mean_over_seeds(score_run: MakeRun) -> None:
    scores = {"accuracy": [[50.0, 90.0], [60.0, 100.0]], "nll": [[1.0, 2.0], [3.0, 5.0]]}
    (row,) = tables.headline(score_run({"mc10": scores}, None))
    assert (row.model, row.estimator) == ("personal", "mc10")
    # Seed by seed (50 + 3 * 90) / 4 = 80 and (60 + 3 * 100) / 4 = 90; their deviation is 10 / sqrt(2).
    assert row.mean["accuracy"].value == pytest.approx(85)
    assert row.mean["accuracy"].std == pytest.approx(10 / math.sqrt(2))
    # (1 + 3 * 2) / 4 = 1.75 and (3 + 3 * 5) / 4 = 4.5.
    assert row.mean["nll"].value == pytest.approx(3.125)
    assert row.mean["nll"].std == pytest.approx(2.75 / math.sqrt(2))
    # The worst client has the least accuracy (50, 60) and the largest NLL (2, 5).
    assert row.worst["accuracy"] == Estimate(pytest.approx(55), pytest.approx(10 / math.sqrt(2)))
    assert row.worst["nll"] == Estimate(pytest.approx(3.5), pytest.approx(3 / math.sqrt(2)))


def test_weighted_accuracy_is_the_pooled_accuracy() -> None:
    rng = np.random.default_rng(0)
    right = [rng.random(size) < 0.7 for size in (3, 10, 25)]
    per_client = np.array([[100 * client.mean() for client in right]])
    pooled = 100 * np.concatenate(right).mean()
    assert tables.mean_over_clients(per_client, np.array([3.0, 10.0, 25.0])) == pytest.approx(pooled)


def test_one_seed_has_no_deviation(score_run: MakeRun) -> None:
    (row,) = tables.headline(score_run(None, {"mc10": {"accuracy": [[50.0, 90.0]]}}))
    assert row.mean["accuracy"] == Estimate(80.0, None)
    assert tables.format_estimate("accuracy", row.mean["accuracy"]) == "80.00"


def test_a_failed_client_shows_in_the_mean_and_as_the_worst(score_run: MakeRun) -> None:
    (row,) = tables.headline(score_run({"mc10": {"nll": [[None, 2.0]]}}, None))
    assert math.isnan(row.mean["nll"].value)
    assert math.isnan(row.worst["nll"].value)
    assert tables.format_estimate("nll", row.mean["nll"]) == "n/a"


def test_a_client_without_test_examples_does_not_count(score_run: MakeRun) -> None:
    run = score_run({"mc10": {"accuracy": [[None, 90.0]]}}, None)
    run = dataclasses.replace(run, info=dataclasses.replace(run.info, test_sizes=[0, 3]))
    (row,) = tables.headline(run)
    assert row.mean["accuracy"].value == row.worst["accuracy"].value == 90
    nobody = dataclasses.replace(run, info=dataclasses.replace(run.info, test_sizes=[0, 0]))
    assert tables.headline(nobody) == []


def test_infinite_scores_are_reduced_without_a_warning(score_run: MakeRun) -> None:
    (row,) = tables.headline(score_run({"mc10": {"nll": [[math.inf, 1.0], [1.0, 2.0]]}}, None))
    assert tables.format_estimate("nll", row.mean["nll"]) == "n/a"


def test_the_headline_estimator_is_the_summary_s_choice_or_the_averaged_samples(score_run: MakeRun) -> None:
    scores = {"accuracy": [[50.0, 90.0]]}
    run = score_run({"one": scores, "mc25": scores, "mean": scores}, None)
    unfinished = dataclasses.replace(run, summary=None)
    assert tables.estimators(unfinished, "personal") == ["mc25", "one", "mean"]
    chosen = dataclasses.replace(run, summary=Summary(rounds=5, seconds=1.0, estimator="mean"))
    assert tables.estimators(chosen, "personal") == ["mean", "mc25", "one"]
    assert [row.estimator for row in tables.every_estimator(chosen)] == ["mean", "mc25", "one"]


def test_curves_skip_rounds_without_evaluation(score_run: MakeRun) -> None:
    run = score_run({"mc10": {"accuracy": [[50.0, 90.0]]}}, None)
    idle = RoundRecord(4, 0.5)
    run = dataclasses.replace(run, rounds=[idle, *run.rounds])
    assert tables.curve(run, "personal", "mc10", "accuracy") == [(5, Estimate(80.0, None))]


def test_leaders_are_finished_runs_on_the_same_data(score_run: MakeRun) -> None:
    def scored(name: str, accuracy: float, **more: Any) -> Run:
        scores = {
            "accuracy": [[accuracy, accuracy]],
            "nll": [[1 / accuracy, 1 / accuracy]],
            "coverage": [[accuracy, 1]],
        }
        return score_run({"mc10": scores}, name=name, **more)

    runs = [scored("a", 50.0), scored("b", 60.0), scored("c", 70.0, finished=False)]
    assert tables.leaders(runs, "personal") == {"accuracy": 1, "nll": 1}  # coverage has a level to meet
    assert tables.leaders(runs, "shared") == {}
    other_data = dataclasses.replace(runs[0], sections=runs[0].sections | {"data": {"name": "cifar10"}})
    assert tables.leaders([other_data, *runs[1:]], "personal") == {}


def test_calibration_of_a_diagram_by_hand() -> None:
    # Half of the predictions are 0.2 too sure, the other half 0.1 not sure enough; one bin is empty.
    bins = Reliability(confidence=[0.5, None, 0.9], accuracy=[0.3, None, 1.0], count=[10, 0, 10])
    assert tables.pooled_ece(bins) == pytest.approx(0.15)
    assert tables.overconfidence(bins) == pytest.approx(0.05)
    assert tables.pooled_ece(Reliability([None], [None], [0])) == 0


def test_a_calibrated_model_rarely_has_a_larger_error_than_chance() -> None:
    rng, confidence, count = np.random.default_rng(0), np.array([0.55, 0.7, 0.85, 0.95]), np.array([20, 40, 60, 80])
    found = []
    for accuracy in rng.binomial(count, confidence, (2000, 4)) / count:
        bins = Reliability([*confidence.tolist(), None], [*accuracy.tolist(), None], [*count.tolist(), 0])
        found.append(tables.pooled_ece(bins) > tables.ece_by_chance(bins))
    assert 0.03 < np.mean(found) < 0.08
    assert tables.ece_by_chance(Reliability([None], [None], [0])) == 0


@pytest.mark.parametrize(
    ("name", "title"),
    [("mc10", "average of 10 samples"), ("one", "one sample"), ("mean", "mean network"), ("new", "new")],
)
def test_estimators_have_titles(name: str, title: str) -> None:
    assert tables.estimator_title(name) == title


def test_an_unknown_metric_is_printed_under_its_own_name() -> None:
    assert tables.metric("regret").label == "regret"
    assert tables.format_estimate("regret", Estimate(0.12345, 0.01)) == "0.123 ± 0.010"
