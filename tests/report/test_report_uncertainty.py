"""The uncertainty of clients with its reasons, and its curves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from pfedbayes.report import render, uncertainty
from pfedbayes.runs.folder import Run

MakeRun = Callable[..., Run]


def uncertain(run: Run, client: int, **changes: Any) -> Run:
    """Triple the uncertainty of one client in the last round, and change what the run says about the client."""
    last = run.rounds[-1]
    model = "personal" if last.personal else "shared"
    scores = dict(last.scores(model))
    estimator = next(iter(scores))
    figures = {**scores[estimator]}
    for name in {"entropy", "deviation"} & figures.keys():
        figures[name] = [
            [3 * value if i == client and value is not None else value for i, value in enumerate(row)]
            for row in figures[name]
        ]
    last = dataclasses.replace(last, **{model: scores | {estimator: figures}})
    assert run.summary is not None
    assert run.summary.clients is not None
    facts, info = run.summary.clients, run.info

    def changed(where: Any, name: str, value: Any) -> dict[str, Any]:
        return {name: [value if i == client else old for i, old in enumerate(getattr(where, name))]}

    for name, value in changes.items():
        if hasattr(facts, name):
            facts = dataclasses.replace(facts, **changed(facts, name, value))
        else:
            info = dataclasses.replace(info, **changed(info, name, value))
    summary = dataclasses.replace(run.summary, clients=facts)
    return dataclasses.replace(run, rounds=[*run.rounds[:-1], last], info=info, summary=summary)


def test_clients_that_are_equally_uncertain_get_one_sentence(make_run: MakeRun) -> None:
    (sentence,) = uncertainty.uncertain_clients(make_run())
    assert sentence.startswith("All clients are about equally uncertain: the median entropy is 0.5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_sizes": 20}, "it has few training examples (20, median 90)"),
        ({"rarest_label": 1}, "one of its labels is rare (training examples: 1)"),
        ({"distance": 90.0}, "its model is far from the shared one (KL 90 nats, median 30)"),
        ({"labels": [77]}, "no other client has any of its labels"),
    ],
)
def test_each_reason_is_given_where_it_is_one(make_run: MakeRun, changes: dict[str, Any], words: str) -> None:
    run = make_run()
    (sentence,) = uncertainty.uncertain_clients(uncertain(run, 4, **changes))
    assert sentence.startswith("client-4 is uncertain (entropy 1.")
    assert words in sentence
    (without,) = uncertainty.uncertain_clients(uncertain(run, 4))
    assert words not in without


def test_the_share_of_model_uncertainty_is_given(make_run: MakeRun) -> None:
    (sentence,) = uncertainty.uncertain_clients(uncertain(make_run(), 2))
    share = int(re.search(r"only (\d+)% of it is model uncertainty", sentence)[1])  # type: ignore[index]
    assert share == pytest.approx(7, abs=2)  # (0.5 - 0.4 * 0.95) / (3 * (2 - 1.5 * 0.95))
    (sentence,) = uncertainty.uncertain_clients(uncertain(make_run(method="fedavg"), 2))
    assert "model uncertainty" not in sentence  # one network has no model uncertainty


def test_many_uncertain_clients_are_counted(make_run: MakeRun) -> None:
    run = make_run()
    for client in range(5):
        run = uncertain(run, client)
    # Half of them are uncertain: the median lies between both halves.
    assert len(uncertainty.uncertain_clients(run)) == 4
    assert uncertainty.uncertain_clients(run)[-1].startswith("2 more clients exceed")


def test_a_regression_speaks_of_deviations(make_run: MakeRun) -> None:
    (sentence,) = uncertainty.uncertain_clients(uncertain(make_run(task="regression"), 3))
    assert sentence.startswith("client-3 is uncertain (predicted deviation 1.")
    figures = uncertainty.by_round(make_run(task="regression"))
    assert [figure.title for figure in figures] == ["Predicted deviation by round", "Model deviation by round"]
    assert uncertainty.risk_coverage(make_run(task="regression")) is None


def test_every_client_has_a_line_and_the_mean_is_named(make_run: MakeRun) -> None:
    first, second = uncertainty.by_round(make_run())
    assert (first.title, second.title) == ("Entropy by round", "Mutual information by round")
    assert first.svg.count('class="thin"') == 10
    assert all(f"<title>client-{i}</title>" in first.svg for i in range(10))
    assert first.svg.count("mean over clients</text>") == 2
    assert ">client-3</text>" not in first.svg  # not in the legend


def test_one_network_has_no_mutual_information(make_run: MakeRun) -> None:
    assert [figure.title for figure in uncertainty.by_round(make_run(method="fedavg"))] == ["Entropy by round"]


def test_risk_and_coverage_are_drawn_in_percent(make_run: MakeRun) -> None:
    figure = uncertainty.risk_coverage(make_run())
    assert figure
    assert "personal (AURC 1.67 %)" in figure.svg
    assert "shared, mean" not in figure.svg
    assert "coverage, % (most confident predictions first) 100: 10</title>" in figure.svg


def test_the_page_has_the_section_and_does_without_it(make_run: MakeRun) -> None:
    run = make_run()
    page = render([run])
    assert all(words in page for words in ("Uncertainty by client", "Error rate by coverage"))
    assert run.summary is not None
    old = dataclasses.replace(run, summary=dataclasses.replace(run.summary, risk_coverage={}, clients=None))
    for record in old.rounds:
        for model in ("personal", "shared"):
            for figures in record.scores(model).values():
                del figures["entropy"], figures["mutual_information"]
    assert "Uncertainty by client" not in render([old])
