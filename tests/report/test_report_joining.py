"""What joining bought and who is like whom: in the page, in charts and in sentences for the terminal."""

from __future__ import annotations

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pfedbayes.evaluation.cross_site import CrossSite
from pfedbayes.report import all_figures, charts, cross_site, joining, render
from pfedbayes.runs.folder import Run, read_run
from pfedbayes.runs.schema import JoiningRecord
from pfedbayes.trust.joining import PairedLosses, judge

MakeRun = Callable[..., Run]
NAMES = ["Cleveland", "Hungary", "Switzerland", "Long Beach"]


def with_summary(run: Run, **fields: object) -> Run:
    assert run.summary is not None
    return dataclasses.replace(run, summary=dataclasses.replace(run.summary, **fields))  # type: ignore[arg-type]


def joining_records(names: list[str], differences: list[float], rows: int = 60) -> list[JoiningRecord]:
    """Judge clients whose losses differ by these means, with test rows for every other client."""
    rng = np.random.default_rng(0)
    clients, tests = [], []
    for name, difference in zip(names, differences, strict=True):
        alone = 0.5 + 0.1 * rng.normal(size=(2, rows))
        joined = alone + difference + 0.15 * rng.normal(size=(2, rows))
        clients.append(PairedLosses(name, alone[0], joined[0], np.arange(rows) % 5))
        tests.append(PairedLosses(name, alone[1, :20], joined[1, :20]))
    tested = judge(tests)
    return [JoiningRecord(one, None if k % 2 else tested[k]) for k, one in enumerate(judge(clients))]


def joined_run(make_run: MakeRun) -> Run:
    differences = [-0.08, -0.03, 0.0, 0.12]
    return with_summary(make_run(clients=NAMES), joining=joining_records(NAMES, differences))


def matrix(clients: int, shared: bool = True, seed: int = 0) -> CrossSite:
    """Clients in two groups; within a group, models serve each other well."""
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % 2
    values = 0.4 + 0.5 * (group[:, None] != group) + 0.05 * rng.random((clients, clients)) - 0.06 * np.eye(clients)
    rows = [*values.tolist(), *([[0.45] * clients] if shared else [])]
    names = [f"site {i}" for i in range(clients)]
    return CrossSite("nll", names, [20 + i for i in range(clients)], rows)


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314  (our own output)


def test_a_run_without_records_has_no_section(make_run: MakeRun) -> None:
    html = render([make_run()])
    assert "What joining bought" not in html
    assert "Cross-site" not in html
    assert joining.sentences(make_run()) == []
    assert joining.sentences(make_run(finished=False)) == []
    assert joining.table(make_run()) is None
    assert cross_site.lead(make_run()) == []


def test_the_section_has_a_row_a_dot_and_a_sentence_for_each_client(make_run: MakeRun) -> None:
    run = joined_run(make_run)
    html = render([run])
    assert "<h2>What joining bought</h2>" in html
    found = {one.client: one.folds for one in joining.records(run)}
    assert found["Cleveland"].conclusion == "better"
    assert found["Long Beach"].conclusion == "worse"
    for one in found.values():
        assert one.change in html
        assert one.finding in html
    assert "For 2 of 4 clients the joined model is better" in html
    assert "By default 1 client (Long Beach) uses its own model" in html
    table = joining.table(run)
    assert table is not None
    ((_, rows),) = table.blocks
    assert next(head for head, _ in rows) == "Long Beach"
    assert all(len(cells) == len(table.heads) for _, cells in rows)
    figure = joining.figure(run)
    assert figure is not None
    assert len(parse(figure.svg).findall(".//g/path[@class='line']")) == 4
    assert {"joining", "clients"} <= set(all_figures(run))


def test_everybody_joins_is_a_sentence(make_run: MakeRun) -> None:
    run = with_summary(make_run(clients=2), joining=joining_records(["a", "b"], [-0.1, -0.1]))
    assert joining.lead(run)[-1] == "By default every client uses its joined model."


@pytest.mark.parametrize(("names", "whom"), [("ab", "any of the 2 clients"), ("a", "the client")])
def test_too_little_evidence_for_all_is_a_sentence(make_run: MakeRun, names: str, whom: str) -> None:
    run = with_summary(make_run(clients=len(names)), joining=joining_records([*names], [0.0] * len(names)))
    assert joining.lead(run)[0] == (
        f"There is too little evidence to tell for {whom} whether its joined model is better than one alone."
    )


def test_the_terminal_shows_the_largest_changes_and_counts_the_rest(make_run: MakeRun) -> None:
    names = [f"c{i}" for i in range(14)]
    differences = [0.1 - 0.02 * i for i in range(14)]
    run = with_summary(make_run(clients=names), joining=joining_records(names, differences))
    lines = joining.sentences(run)
    assert len(lines) == 11
    assert "with" in lines[0]
    changes = [
        abs(one.folds.difference) for one in joining.records(run) if one.folds.conclusion != "no difference shown"
    ]
    assert changes == sorted(changes, reverse=True)
    rest = joining.records(run)[10:]
    counted = sum(one.folds.conclusion == "no difference shown" for one in rest)
    assert lines[-1].startswith("4 more clients: ")
    assert f"{counted} without a difference that could be shown" in lines[-1]
    assert len(joining.sentences(run, most=14)) == 14


def test_the_command_line_prints_the_sentences(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    from pfedbayes.cli.output import print_joining

    print_joining(make_run())
    assert capsys.readouterr().out == ""
    print_joining(joined_run(make_run))
    first, worst, *_ = capsys.readouterr().out.splitlines()
    assert first == "what joining bought, by cross-validation:"
    assert worst.startswith("  Long Beach: NLL 0.50 → 0.62, worse with ")


def test_hundreds_of_clients_are_thinned_out_and_the_page_says_so(make_run: MakeRun) -> None:
    names = [f"c{i}" for i in range(300)]
    run = with_summary(
        make_run(clients=names), joining=joining_records(names, [-0.001 * i for i in range(300)], rows=8)
    )
    html = render([run])
    assert "200 of 300 clients" in html
    assert "Shown: the 30 largest changes." in html


def test_records_are_written_and_read(make_run: MakeRun, save_run: Callable[[Run], Path]) -> None:
    run = with_summary(joined_run(make_run), cross_site=matrix(4))
    again = read_run(save_run(run))
    assert again.summary == run.summary
    assert render([again]) == render([run])


def test_a_summary_without_the_fields_is_read_and_stays_as_it_is(
    make_run: MakeRun, save_run: Callable[[Run], Path]
) -> None:
    folder = save_run(make_run())
    assert '"joining"' not in (folder / "summary.json").read_text()
    summary = read_run(folder).summary
    assert summary is not None
    assert summary.joining is None
    assert summary.cross_site is None


@pytest.mark.parametrize(
    "fields",
    [
        {"joining": [JoiningRecord(dataclasses.replace(joining_records(["a"], [0.1])[0].folds, probability=1.5))]},
        {"joining": [JoiningRecord(dataclasses.replace(joining_records(["a"], [0.1])[0].folds, rows=0))]},
        {"cross_site": dataclasses.replace(matrix(3), names=["a"])},
        {"cross_site": dataclasses.replace(matrix(3), scores=[[0.1] * 3] * 5)},
        {"cross_site": dataclasses.replace(matrix(3), metric="<b>")},
    ],
)
def test_a_summary_that_contradicts_itself_is_refused(
    make_run: MakeRun, save_run: Callable[[Run], Path], fields: dict[str, object]
) -> None:
    from pfedbayes.errors import UserError

    with pytest.raises(UserError, match=r"summary\.json"):
        read_run(save_run(with_summary(make_run(), **fields)))


@pytest.mark.parametrize("clients", [2, 4, 12, 13, 40])
@pytest.mark.parametrize("shared", [True, False])
def test_the_heat_map_has_a_cell_for_each_model_and_client(make_run: MakeRun, clients: int, shared: bool) -> None:
    run = with_summary(make_run(), cross_site=matrix(clients, shared))
    figure = cross_site.figure(run)
    assert figure is not None
    root = parse(figure.svg)
    assert len(root.findall(".//rect/title")) == clients * (clients + shared)
    assert len(root.findall(".//rect[@class='own']")) == clients
    numbers = root.findall(".//text[@class='name']")
    assert len(numbers) == (clients * (clients + shared) if clients <= 12 else 0)
    assert figure.svg in render([run])


def test_neighbours_in_a_large_heat_map_are_alike() -> None:
    order = cross_site.order_clients(matrix(20))
    assert sorted(order) == list(range(20))
    changes = sum(a % 2 != b % 2 for a, b in itertools.pairwise(order))
    assert changes == 1
    assert cross_site.order_clients(matrix(12)) == list(range(12))


def test_sentences_say_who_is_like_whom(make_run: MakeRun) -> None:
    scores: list[list[float | None]] = [[0.30, 0.40, 0.9], [0.35, 0.38, 0.8], [0.9, 0.46, 0.5], [0.29, 0.5, 0.6]]
    run = with_summary(make_run(), cross_site=CrossSite("nll", NAMES[:3], [9, 9, 9], scores))
    assert cross_site.lead(run) == [
        "On a client’s own test data, the shared model beats the client’s own model for 1 of 3 clients.",
        "Cleveland and Hungary are alike: among the others’ models, each is served best by the other’s.",
        "Hungary’s model does best on Switzerland’s data after its own.",
    ]


def test_a_better_model_than_the_own_one_is_named(make_run: MakeRun) -> None:
    scores: list[list[float | None]] = [[0.30, 0.40, 0.9], [0.35, 0.38, 0.8], [0.33, 0.36, 0.5]]
    run = with_summary(make_run(), cross_site=CrossSite("nll", NAMES[:3], [9, 9, 9], scores))
    assert cross_site.lead(run)[-2:] == [
        "On Hungary’s data, Switzerland’s model (0.36) does better than Hungary’s own (0.38).",
        "Switzerland’s model does best on Cleveland’s data after its own.",
    ]


def test_a_model_that_is_better_by_less_than_is_shown_does_as_well(make_run: MakeRun) -> None:
    scores: list[list[float | None]] = [[0.30, 0.40, 0.9], [0.35, 0.401, 0.8], [0.8, 0.6, 0.5]]
    run = with_summary(make_run(), cross_site=CrossSite("nll", NAMES[:3], [9, 9, 9], scores))
    assert "does better" not in " ".join(cross_site.lead(run))
    scores[2][1], scores[1][2] = 0.399, 0.95
    run = with_summary(make_run(), cross_site=CrossSite("nll", NAMES[:3], [9, 9, 9], scores))
    assert "On Hungary’s data, Switzerland’s model does as well as Hungary’s own (0.40)." in cross_site.lead(run)


def test_a_metric_that_is_larger_for_better_models_is_turned_round(make_run: MakeRun) -> None:
    run = with_summary(make_run(), cross_site=CrossSite("accuracy", ["a", "b"], [9, 9], [[90, 70], [95, 80], [99, 60]]))
    assert "On a’s data, b’s model (95.00) does better than a’s own (90.00)." in cross_site.lead(run)


def test_missing_scores_do_not_hurt(make_run: MakeRun) -> None:
    gaps = dataclasses.replace(
        matrix(3), scores=[[None, 0.5, 0.6], [0.4, None, 0.5], [None, None, None], [0.1, 0.2, 0.3]]
    )
    run = with_summary(make_run(), cross_site=gaps)
    assert "n/a" in render([run])
    nothing = dataclasses.replace(matrix(14), scores=[[None] * 14] * 15)
    assert "Cross-site" in render([with_summary(make_run(), cross_site=nothing)])


def test_nasty_names_stay_text(make_run: MakeRun) -> None:
    nasty = ['<b>&"x', "]]>"]
    site = dataclasses.replace(matrix(2), names=nasty)
    html = render([with_summary(make_run(), cross_site=site, joining=joining_records(nasty, [-0.1, 0.1]))])
    assert "<b>" not in html


def test_intervals_of_no_or_extreme_width_are_drawn() -> None:
    rows = [charts.Interval("a", 0.0, 0.0, 0.0, "better"), charts.Interval("b", 1e6, -1e7, 1e7, "better")]
    for some in ([], rows[:1], rows, [rows[0]] * 5 + rows[1:]):
        svg = charts.interval_chart("t", {"better": 0}, some, value_label="x", description="d")
        assert "nan" not in svg
        assert "inf" not in svg
        parse(svg)
