"""The page: well-formed, self-contained, and saying what the log says."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pfedbayes.errors import UserError
from pfedbayes.report import describe, render, write
from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import Answer, Example, Reliability

MakeRun = Callable[..., Run]
VOID = {"meta", "img", "br"}
NO_BREAK = "\N{NO-BREAK SPACE}"


class Page(HTMLParser):
    """Checks that tags nest, and collects the text, the table cells and what the page would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.cells: list[str] = []
        self.loads: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ET.fromstring(svg)  # noqa: S314  (our own output)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        assert tag != "link"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "script" not in self.open:
            self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_one_run(make_run: MakeRun) -> None:
    html = render([make_run()])
    page = Page(html)
    assert "pFedBayes on mnist" in page.text
    for heading in (
        "Result",
        "Scores by round",
        "Scores by client",
        "Calibration",
        "Single predictions",
        "Settings and environment",
    ):
        assert f"<h2>{heading}" in html
    assert "Prediction: average of 10 samples" in page.text
    assert {"average of 10 samples", "one sample", "mean network"} <= set(page.cells)
    for group in ("Correct and confident", "Correct but uncertain", "Wrong"):
        assert group in page.text
    assert "abc1234" in page.text
    assert "zeta = 1e-05" in page.text


def test_nothing_is_loaded_from_elsewhere(make_run: MakeRun) -> None:
    html = render([make_run("a"), make_run("b")])
    assert all(source.startswith("data:image/png;base64,") for source in Page(html).loads)
    assert not re.search(r"https?://|@import|url\(", html)


def test_a_nasty_client_name_stays_text(make_run: MakeRun) -> None:
    html = render([make_run(clients=['<b>&"x', "b", "c"])])
    page = Page(html)
    assert "<b>" not in html
    assert '<b>&"x' in page.cells
    assert 'alt="Test image of &lt;b&gt;&amp;&#34;x' in html


def test_the_table_has_the_numbers_of_the_log(score_run: MakeRun) -> None:
    """See the derivation of the same numbers in the tests of the tables."""
    scores = {"accuracy": [[50, 90], [60, 100]], "nll": [[1, 2], [3, 5]]}
    page = Page(render([score_run({"mc10": scores}, seeds=2)]))
    assert {"85.00 ± 7.07", "55.00 ± 7.07", "3.125 ± 1.945", "3.500 ± 2.121"} <= set(page.cells)
    assert "The worst client of each seed has 55.00 ± 7.07 %" in page.text.replace(NO_BREAK, " ")


def test_several_seeds_have_bands_and_whiskers(make_run: MakeRun) -> None:
    one, several = render([make_run()]), render([make_run(seeds=3)])
    assert 'class="band"' in several
    assert 'class="band"' not in one
    assert "standard deviations over seeds" in several
    assert "standard deviations over seeds" not in one


def test_missing_numbers_do_not_hurt(score_run: MakeRun) -> None:
    page = Page(render([score_run({"mc10": {"accuracy": [[math.nan, 90]], "nll": [[None, 2]]}})]))
    assert "n/a" in page.cells
    assert "(a)" in page.text  # the client without a number is the worst


def with_examples(run: Run, examples: list[Example]) -> Run:
    assert run.summary is not None
    return dataclasses.replace(run, summary=dataclasses.replace(run.summary, examples=examples))


def test_missing_numbers_in_the_examples_do_not_hurt(make_run: MakeRun) -> None:
    run = make_run()
    assert run.summary is not None
    first, second, third, *others = run.summary.examples
    assert third.image is not None
    examples = [
        dataclasses.replace(first, personal=Answer([None] * 10, [None] * 10, None, None)),
        dataclasses.replace(second, image=None),
        dataclasses.replace(third, image=dataclasses.replace(third.image, shape=[2, 14, 28])),
        *others,
    ]
    page = Page(render([with_examples(run, examples)]))
    assert len(page.loads) == len(examples) - 2


def test_a_deterministic_run_without_personal_models(make_run: MakeRun) -> None:
    html = render([make_run(method="fedavg")])
    page = Page(html)
    assert "FedAvg on mnist" in page.text
    assert "one network, without sampling" in page.text
    assert "Personal models" not in page.cells
    assert "All estimators" not in page.text
    assert 'class="c0 bar0"' not in html  # the shared model keeps its own colour


def test_a_regression_run(make_run: MakeRun) -> None:
    page = Page(render([make_run(task="regression")]))
    assert {f"RMSE{NO_BREAK}↓", f"NLL{NO_BREAK}↓", f"Coverage, %{NO_BREAK}→{NO_BREAK}90"} <= set(page.cells)
    assert "Calibration" not in page.text
    assert "Single predictions" not in page.text


def test_an_unfinished_run_says_how_to_go_on(make_run: MakeRun) -> None:
    run = make_run(finished=False, rounds=3)
    page = Page(render([dataclasses.replace(run, folder=Path("runs/my run"))]))
    assert "unfinished: the report shows round 30 of 30" in page.text
    assert "pfedbayes run --resume --out 'runs/my run'" in page.text
    assert "Scores by round" in page.text


def test_a_run_without_an_evaluated_round_is_a_message(make_run: MakeRun) -> None:
    page = Page(render([make_run(finished=False, rounds=0)]))
    assert "No round of this run has been evaluated yet" in page.text
    assert "--resume" in page.text
    assert "Scores by round" not in page.text


def test_a_run_without_test_data_is_a_message(make_run: MakeRun) -> None:
    run = make_run(clients=2)
    page = Page(render([dataclasses.replace(run, info=dataclasses.replace(run.info, test_sizes=[0, 0]))]))
    assert "No client of this run has test data" in page.text
    assert "--resume" not in page.text


def test_comparison_of_three_runs(make_run: MakeRun) -> None:
    runs = [make_run("a"), make_run("b", method="fedavg"), make_run("c", method="pfedme")]
    html = render(runs)
    page = Page(html)
    assert "Comparison of 3 runs" in page.text
    assert html.count('<details class="run">') == 3
    for label in ("pFedBayes (a)", "FedAvg (b)", "pFedMe (c)"):
        assert page.cells.count(label) >= 2  # the shared model's row and the settings
    assert page.cells.count("pFedMe (c)") == 3
    assert sum(cell.endswith("★") for cell in page.cells) == 4 + 4  # metrics, of two models
    assert "Best personal models: " in page.text
    assert {"method.name", "method.zeta"} <= set(page.cells)


def test_runs_on_different_data_are_not_ranked(make_run: MakeRun) -> None:
    runs = [make_run("a"), make_run("b", task="regression"), make_run("c", finished=False, rounds=0)]
    page = Page(render(runs))
    assert "so they are not ranked" in page.text
    assert not any("★" in cell for cell in page.cells)
    assert "pFedBayes (c): No round of this run" in page.text


def test_runs_with_the_same_folder_name_are_told_apart(make_run: MakeRun) -> None:
    runs = [dataclasses.replace(make_run(), folder=Path(parent) / "x") for parent in ("old", "new")]
    page = Page(render(runs))
    assert {f"pFedBayes ({Path('old/x')})", f"pFedBayes ({Path('new/x')})"} <= set(page.cells)
    assert "None: the runs have the same settings." in page.text


def test_a_hundred_clients_become_dots_and_a_sorted_table(make_run: MakeRun) -> None:
    html = render([make_run(clients=100)])
    page = Page(html)
    assert "100 clients, sorted by “personal models”" in page.text
    assert "worst personal model first" in page.text
    assert sum(bool(re.fullmatch(r"client-\d+", cell)) for cell in page.cells) == 100


def test_thousands_of_clients_are_thinned_out_and_the_page_says_so(make_run: MakeRun) -> None:
    run = make_run(clients=3000, rounds=1)
    html = render([run])
    page = Page(html)
    assert "Shown: 500 of 3,000 clients" in page.text
    assert "worst personal model first, 200 of 3,000 clients" in page.text
    assert sum(bool(re.fullmatch(r"client-\d+", cell)) for cell in page.cells) == 200
    (accuracies,) = run.rounds[-1].scores("personal")["mc10"]["accuracy"]
    values = dict(zip(run.info.clients, (each for each in accuracies if each is not None), strict=True))
    for end in (max(values.values()), min(values.values())):
        assert any(f"<title>{name}, personal models" in html for name, value in values.items() if value == end)
    assert len(html) < 500_000


def test_the_facts_tell_scored_clients_from_all(make_run: MakeRun) -> None:
    run = make_run(clients=30)
    many = dataclasses.replace(run, info=dataclasses.replace(run.info, num_clients=10_000))
    for shown, count in ((run, "30"), (many, "10,000")):
        html = render([shown])
        assert f"<dt>clients</dt><dd>{count}</dd>" in html
        assert "<dt>clients scored</dt><dd>30, with" in html


def test_many_classes_show_the_truth_and_the_likely_ones(make_run: MakeRun) -> None:
    answer = Answer(probabilities=[0.01] * 100, spread=[0.0] * 100, entropy=4.6, mutual_information=0.0)
    run = with_examples(make_run(), [Example("a", 70, None, answer, None)])
    assert "✓ 70" in Page(render([run])).text


@pytest.mark.parametrize(
    ("ece", "judgement"),
    [(0.01, "very well"), (0.04, "well"), (0.08, "somewhat mis"), (0.3, "badly mis"), (math.nan, "of unknown ")],
)
def test_calibration_in_words(ece: float, judgement: str) -> None:
    assert describe.judge_calibration(ece).startswith(judgement)


@pytest.mark.parametrize(
    ("count", "words"),
    [(20, "show no miscalibration that 20 test predictions could prove"), (2000, "are badly miscalibrated and under")],
)
def test_few_predictions_prove_no_miscalibration(score_run: MakeRun, count: int, words: str) -> None:
    run = score_run({"mc10": {"accuracy": [[80.0, 80.0]], "ece": [[0.2, 0.2]]}})
    assert run.summary is not None
    bins = Reliability([0.7, None], [0.85, None], [count, 0])
    run = dataclasses.replace(run, summary=dataclasses.replace(run.summary, reliability={"personal": bins}))
    (sentence,) = [each for each in describe.lead(run) if "ECE" in each]
    assert sentence == f"The personal models {words}{'confident' * (count > 20)} (ECE\N{NO-BREAK SPACE}0.150)."


def test_the_lead_compares_personal_and_shared_models(score_run: MakeRun) -> None:
    def lead(personal: float, shared: float) -> str:
        scores = ({"mc10": {"accuracy": [[value, value]]}} for value in (personal, shared))
        return describe.lead(score_run(*scores))[0]

    assert lead(90, 80).endswith("the personal models are 10.00 points better.")
    assert lead(80, 90).endswith("the personal models are 10.00 points worse.")
    assert lead(90, 90.001).endswith("both are equally good.")
    assert lead(math.nan, 90).endswith("for the shared model.")


def test_write_reads_folders_and_makes_the_file(
    make_run: MakeRun, save_run: Callable[[Run], Path], tmp_path: Path
) -> None:
    runs = [make_run("a"), make_run("b", finished=False)]
    out = write([save_run(run) for run in runs], tmp_path / "new" / "report.html")
    assert out == tmp_path / "new" / "report.html"
    assert out.read_text(encoding="utf-8") == render(runs)


def test_no_run_at_all_is_the_user_s_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one"):
        write([], tmp_path / "report.html")


def test_a_full_disk_leaves_the_old_page(
    make_run: MakeRun, save_run: Callable[[Run], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    folder = save_run(make_run())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write([folder], page)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]
