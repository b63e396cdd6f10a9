"""Parts of a run folder that do not fit each other are told apart from those that do."""

import dataclasses
import math

import pytest

from pfedbayes.evaluation.cross_site import CrossSite
from pfedbayes.files.typed import from_json
from pfedbayes.runs.consistency import require_info, require_rounds, require_summary
from pfedbayes.runs.schema import (
    Answer,
    ClientFacts,
    Example,
    Image,
    JoiningRecord,
    Reliability,
    RiskCoverage,
    RoundRecord,
    RunInfo,
    Summary,
    SurvivalCurves,
)  # fmt: skip
from pfedbayes.trust.joining import Verdict

INFO = from_json(RunInfo, {
    "format": 2, "version": "0.1.0", "commit": None, "created": "2026-01-01T12:00:00+00:00",
    "hardware": {"device": "cpu", "cpu": "Some CPU", "cores": 2, "memory_gb": 23, "gpu": None, "torch": "2",
                 "python": "3"},
    "plan": {"over": "vmap", "threads": 2}, "seeds": [1, 2], "clients": ["a", "b", "c"], "train_sizes": [3, 4, 0],
    "test_sizes": [5, 6, 0], "labels": [[0], [1, 2], []], "num_params": 7, "task": "classification",
    "class_names": ["x", "y", "z"], "num_clients": 3,
    "method": {"name": "fedavg", "title": "FedAvg", "personal": False, "shared": True, "stochastic": False},
})  # fmt: skip
TABLE = [[0.5, None, 1.0], [0.4, 0.3, 0.2]]
VERDICT = Verdict("a", 5, 1.0, 0.5, 0.5, 0.1, 0.9, 1.0, "better", "joined")
ANSWER = Answer([0.2, 0.3, 0.5], [0.1, 0.1, 0.1], 1.0, 0.1)
SUMMARY = Summary(
    rounds=2, seconds=1.0, estimator="mean", reliability={"personal": Reliability([0.5], [0.5], [3.0]), "shared": None},
    risk_coverage={"shared": RiskCoverage([0.5, 1.0], [0.1, 0.2], 0.1)},
    clients=ClientFacts([1.0, None, 2.0], [1, 2, 0]),
    examples=[Example("a", 2, Image([1, 1, 2], "AAA="), ANSWER, None)], gated={"accuracy": TABLE},
    survival=SurvivalCurves([1.0], [0.9], {"personal": [0.8]}), joining=[JoiningRecord(VERDICT)],
    cross_site=CrossSite("accuracy", ["a", "b"], [1, 2], [[1.0, 1.0], [1.0, 1.0]]),
)  # fmt: skip


def test_what_fits_is_taken():
    require_info(INFO)
    require_info(dataclasses.replace(INFO, labels=None, class_names=None, num_clients=None))
    require_info(dataclasses.replace(INFO, labels=[[0], [9], []], class_names=None))
    require_rounds(INFO, [RoundRecord(0, 0.0), RoundRecord(2, 1.5, {"mean": {"accuracy": TABLE}})])
    require_summary(INFO, SUMMARY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_sizes": [3, 4]}, "train_sizes has 2 entries for 3 clients"),
        ({"test_sizes": [5, 6, 0, 1]}, "test_sizes has 4 entries"),
        ({"labels": [[0]]}, "labels has 1 entries"),
        ({"seeds": []}, "no seeds or no clients"),
        ({"clients": [], "train_sizes": [], "test_sizes": [], "labels": []}, "no seeds or no clients"),
        ({"train_sizes": [3, -1, 0]}, "negative"), ({"test_sizes": [-1, 1, 0]}, "negative"),
        ({"num_params": -1}, "negative"), ({"num_clients": -1}, "negative"), ({"labels": [[0], [-1], []]}, "negative"),
        ({"labels": [[0], [3], []]}, "a label has no class name"), ({"task": "guessing"}, "task is 'guessing'"),
    ],
)  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        require_info(dataclasses.replace(INFO, **change))


@pytest.mark.parametrize(
    "rounds",
    [
        [RoundRecord(1, 0.0), RoundRecord(1, 0.0)], [RoundRecord(-1, 0.0)], [RoundRecord(1, math.inf)],
        [RoundRecord(1, 0.0, {"mean": {}})], [RoundRecord(1, 0.0, None, {"mean": {"accuracy": TABLE[:1]}})],
        [RoundRecord(1, 0.0, {"mean": {"accuracy": [[0.5, 0.5], [0.5, 0.5]]}})],
        [RoundRecord(1, 0.0, {"mean": {"accuracy": TABLE, "nll": [[0.5, 0.5, 0.5], [0.5]]}})],
    ],
)  # fmt: skip
def test_a_log_that_does_not_fit_is_refused(rounds):
    with pytest.raises(ValueError, match=r"round|scores"):
        require_rounds(INFO, rounds)


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": -1}, {"seconds": math.nan}, {"reliability": {"personal": Reliability([0.5], [], [3.0])}},
        {"reliability": {"gated": None}}, {"risk_coverage": {"shared": RiskCoverage([0.5], [], 0.1)}},
        {"survival": SurvivalCurves([1.0], [0.9], {"both": [0.8]})},
        {"survival": SurvivalCurves([1.0], [0.9], {"personal": []})}, {"clients": ClientFacts([1.0], None)},
        {"clients": ClientFacts(None, [1, 2, 3, 4])}, {"gated": {"accuracy": TABLE[:1]}}, {"gated": {"nll": [[], []]}},
        {"cross_site": CrossSite("accuracy", ["a", "b"], [1, 2], [[1.0, 1.0]])},
        {"cross_site": CrossSite("accuracy", ["a"], [1, 2], [[1.0]])},
        {"cross_site": CrossSite("luck", ["a"], [1], [[1.0]])},
        *({"joining": [JoiningRecord(dataclasses.replace(VERDICT, **each))]}
          for each in ({"rows": 0}, {"low": math.inf}, {"probability": 1.5}, {"probability": -0.1})),
        {"joining": [JoiningRecord(VERDICT, dataclasses.replace(VERDICT, rows=0))]},
    ],
)  # fmt: skip
def test_a_summary_that_does_not_fit_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        require_summary(INFO, dataclasses.replace(SUMMARY, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"label": 3}, {"label": -1}, {"personal": Answer([0.5, 0.5], [0.1, 0.1], 1.0, 0.1)},
        {"personal": Answer([0.2, 0.3, 0.5], [0.1], 1.0, 0.1)}, {"shared": Answer([1.0], [0.0], 0.0, 0.0)},
        {"image": Image([1, 2], "AAA=")}, {"image": Image([1, 0, 2], "")}, {"image": Image([1, 2, 2], "AAA=")},
        {"image": Image([1, 1, 2], "no base64!")}, {"image": Image([2**13, 2**13, 2], "AAA=")},
    ],
)  # fmt: skip
def test_an_example_that_does_not_fit_is_refused(change):
    example = dataclasses.replace(SUMMARY.examples[0], **change)
    with pytest.raises(ValueError, match=r"example|image"):
        require_summary(INFO, dataclasses.replace(SUMMARY, examples=[example]))
