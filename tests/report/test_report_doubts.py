"""Who is unsure and why, and the curves of doubt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from pfedbayes.report import doubts, render
from pfedbayes.runs.folder import Run

MakeRun = Callable[..., Run]


def with_doubt(run: Run, client: int, **changes: Any) -> Run:
    """The run with one client three times as unsure as the others in its last round, and other facts about it."""
    rounds = [*run.rounds[:-1], {**run.rounds[-1]}]
    model = "personal" if run.rounds[-1]["personal"] else "shared"
    estimator = next(iter(run.rounds[-1][model]))
    figures = {**rounds[-1][model][estimator]}
    for name in {"entropy", "deviation"} & figures.keys():
        figures[name] = [[3 * value if i == client else value for i, value in enumerate(row)] for row in figures[name]]
    rounds[-1][model] = {**rounds[-1][model], estimator: figures}
    known = {**(run.summary or {})["clients"]}
    info = {**run.info}
    for name, value in changes.items():
        where = known if name in known else info
        where[name] = [value if i == client else old for i, old in enumerate(where[name])]
    return dataclasses.replace(run, rounds=rounds, info=info, summary={**(run.summary or {}), "clients": known})


def test_clients_that_are_equally_sure_get_one_sentence(make_run: MakeRun) -> None:
    (sentence,) = doubts.who_and_why(make_run())
    assert sentence.startswith("All clients are about equally sure: the median entropy is 0.5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_sizes": 20}, "it has few training examples (20, the median is 90)"),
        ({"rarest_label": 1}, "one of its labels is rare (its training data have 1 of it)"),
        ({"distance": 90.0}, "its model lies far from the shared one (KL 90 nats, the median is 30)"),
        ({"labels": [77]}, "no other client has any of its labels"),
    ],
)
def test_each_reason_is_given_where_it_is_one(make_run: MakeRun, changes: dict[str, Any], words: str) -> None:
    run = make_run()
    (sentence,) = doubts.who_and_why(with_doubt(run, 4, **changes))
    assert sentence.startswith("client-4 is unsure (entropy 1.")
    assert words in sentence
    (without,) = doubts.who_and_why(with_doubt(run, 4))
    assert words not in without


def test_what_the_doubt_is_about(make_run: MakeRun) -> None:
    (sentence,) = doubts.who_and_why(with_doubt(make_run(), 2))
    share = int(re.search(r"only (\d+)% of the doubt is about the model", sentence)[1])  # type: ignore[index]
    assert share == pytest.approx(7, abs=2)  # (0.5 - 0.4 * 0.95) / (3 * (2 - 1.5 * 0.95))
    (sentence,) = doubts.who_and_why(with_doubt(make_run(method="fedavg"), 2))
    assert "about the model" not in sentence  # one network has nobody to disagree with


def test_many_unsure_clients_are_counted(make_run: MakeRun) -> None:
    run = make_run()
    for client in range(5):
        run = with_doubt(run, client)
    # Half of them doubt: the median lies between both halves.
    assert len(doubts.who_and_why(run)) == 4
    assert doubts.who_and_why(run)[-1].startswith("2 more are less sure")


def test_a_regression_speaks_of_deviations(make_run: MakeRun) -> None:
    (sentence,) = doubts.who_and_why(with_doubt(make_run(task="regression"), 3))
    assert sentence.startswith("client-3 is unsure (predicted deviation 1.")
    figures = doubts.growth(make_run(task="regression"))
    assert [figure.title for figure in figures] == ["Predicted deviation by round", "Model’s deviation by round"]
    assert doubts.risk_coverage(make_run(task="regression")) is None


def test_every_client_has_a_line_and_the_mean_is_named(make_run: MakeRun) -> None:
    first, second = doubts.growth(make_run())
    assert (first.title, second.title) == ("Entropy by round", "Mutual information by round")
    assert first.svg.count('class="thin"') == 10
    assert all(f"<title>client-{i}</title>" in first.svg for i in range(10))
    assert first.svg.count("mean over clients</text>") == 2
    assert ">client-3</text>" not in first.svg  # not in the legend


def test_one_network_has_no_mutual_information(make_run: MakeRun) -> None:
    assert [figure.title for figure in doubts.growth(make_run(method="fedavg"))] == ["Entropy by round"]


def test_risk_and_coverage_are_drawn_in_percent(make_run: MakeRun) -> None:
    figure = doubts.risk_coverage(make_run())
    assert figure
    assert "personal (mean 1.67 %)" in figure.svg
    assert "shared, mean" not in figure.svg
    assert "answered, % (the surest first) 100: 10</title>" in figure.svg


def test_the_page_has_the_section_and_does_without_it(make_run: MakeRun) -> None:
    run = make_run()
    page = render([run])
    assert all(words in page for words in ("Who is unsure, and why", "Errors among the answers given"))
    old = dataclasses.replace(
        run, summary={k: v for k, v in (run.summary or {}).items() if k not in ("risk_coverage", "clients")}
    )
    for record in old.rounds:
        for model in ("personal", "shared"):
            for figures in record[model].values():
                del figures["entropy"], figures["mutual_information"]
    assert "Who is unsure" not in render([old])
