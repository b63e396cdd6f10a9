"""The pages of a folder of results."""

import math
import re
import shutil
from html import unescape

import pytest
from made_records import FOLDER, ROOT

from pfedbayes.methods import METHODS
from pfedbayes.paper import pages, results
from pfedbayes.paper.extensions import EXTENDED
from pfedbayes.paper.ranks import count_firsts
from pfedbayes.paper.source import BEST, DATASETS, SIZES, over_seeds, read_source
from pfedbayes.paper.table1 import name_of, paper_score, records_of, shown_lines
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.sweep.scores import DEFAULT


def test_the_page_needs_nothing_from_elsewhere():
    page = results.render(FOLDER)["results.html"]
    assert page.startswith("<!doctype html>")
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert all(f"Table {number}" in page for number in (1, 2, 3))


class TestTheory:
    @pytest.fixture
    def files(self, folder):
        shutil.copy(FOLDER / "theory.json", folder)
        return results.render(folder)

    def test_the_one_page_says_what_its_own_page_says(self, files):
        page = files["results.html"]
        section = page[page.index("<h2>Theory") :]
        shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", section[: section.index("</section>")])).split())
        told = re.sub(
            r"!\[.*\]\(.*\)|\|---.*|<[^>]+>|^- ", "", files["theory.md"].replace(pages.NOTE, ""), flags=re.MULTILINE
        )
        lines = [" ".join(re.findall(r"[^\s|#]+", line)) for line in told.splitlines()]
        assert [line for line in lines if line not in shown] == []

    def test_the_figure_stands_before_the_slopes(self, files):
        text, page = files["theory.md"], files["results.html"]
        row = "squared Hellinger distance | -0.42 [-0.45"
        assert text.index("## The rate") < text.index("![error against n](theory.svg)") < text.index(row)
        drawing = files["theory.svg"][files["theory.svg"].index("</style>") + len("</style>") :].strip()
        assert page.index("<h3>The rate</h3>") < page.index(drawing) < page.index("<td>-0.42 [-0.45")

    def test_without_measurements_there_is_none(self, folder):
        files = results.render(folder)
        assert not [name for name in files if "theory" in name]
        assert "Theory" not in files["results.html"]
        assert results.write_theory(folder) == []

    def test_it_can_be_written_alone(self, tmp_path):
        shutil.copy(FOLDER / "theory.json", tmp_path)
        assert results.write_theory(tmp_path) == [tmp_path / "theory.md", tmp_path / "theory.svg"]
        for name in ("theory.md", "theory.svg"):
            assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_what_is_committed_is_what_the_data_say():
    for name, content in results.render(FOLDER).items():
        assert (FOLDER / name).read_text() == content, f"run pfedbayes paper results docs/results ({name} differs)"


def readme_rows():
    """The rows of accuracies in the README: model, label and values."""
    rows = re.findall(r"^\| (personal|shared): (.*?)((?: \| \d+\.\d+){9}) \|$", (ROOT / "README.md").read_text(), re.M)
    return [(model, label, values.split(" | ")[1:]) for model, label, values in rows]


def table1_rows(source, model, digits):
    """By values, as texts, the names of the methods that have them: scored as in the paper, by ten samples."""
    columns = [(dataset, size) for dataset in DATASETS for size in SIZES]
    found = {}
    for line in [*shown_lines("paper"), *shown_lines("tuned")]:
        if (line.model, line.variant) == (model, DEFAULT) and line.estimator in (None, "mc10"):
            ours = [over_seeds(records_of(source, line, *at), model, line.estimator, BEST).value for at in columns]
            paper = [(paper_score(source, line, *at) or (math.nan,))[0] for at in columns]
            for values in (ours, paper):
                name = name_of(source, line, "mnist") if values is ours else METHODS[line.method].about.title
                found.setdefault(tuple(f"{value:.{digits}f}" for value in values), set()).add(name)
    return found


def test_the_readme_says_what_table_1_says():
    source = read_source(FOLDER)
    rows = readme_rows()
    assert len(rows) >= 8
    for model, label, values in rows:
        names = table1_rows(source, model, len(values[0].partition(".")[2]))[tuple(values)]
        named = [name for name in (EXTENDED, *(method.about.title for method in METHODS.values())) if name in label]
        assert not named or named[0] in names, label
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{count_firsts(source)[EXTENDED]} columns" in readme


TINY = ("data.name=blobs", "data.clients=3", "data.examples=60", "net.hidden=[8]", "training.local_steps=2")


def test_scores_average_over_rounds_that_were_scored_and_weigh_by_images(tmp_path):
    """The dear estimator is scored rarely: its records say in how many rounds of the window."""
    from pfedbayes import runs
    from pfedbayes.report import tables
    from pfedbayes.sweep import scores

    settings = [
        "training.rounds=8",
        "training.evaluate_every=4",
        "training.evaluate_window=[5,8]",
        "training.batch_size=10",
    ]
    setup = read_experiment(None, [*TINY, *settings, "evaluation.average_every=4"])
    assert [step.round for step in execute(setup, tmp_path / "run", [1, 2], "cpu")] == list(range(1, 9))
    run = runs.read_run(tmp_path / "run")
    assert {r.round: "mc10" in r.personal for r in run.rounds} == {4: True, 5: False, 6: False, 7: False, 8: True}
    names = {"preset": "paper", "variant": "default", "cell": "x", "varied": {}}
    first, second = scores.records(names, {"seeds": [1, 2]}, run)
    assert (first["seed"], second["seed"]) == (1, 2)
    mean = [tables.by_seed(run, [r], "personal", "mean", "accuracy")[0, 1] for r in run.rounds[1:]]
    assert second["personal"]["mean"]["window_best"] == pytest.approx(max(mean), abs=1e-4)
    assert second["personal"]["mean"]["window_mean"] == pytest.approx(sum(mean) / 4, abs=1e-4)
    assert second["personal"]["mean"]["last"] == pytest.approx(mean[-1], abs=1e-4)
    assert (second["personal"]["mean"]["evaluations"], second["personal"]["mc10"]["evaluations"]) == (4, 1)
    assert [number for number, _ in first["curve"]["shared"]] == [4, 8]
    (row,) = [r for r in tables.window(run) if (r.model, r.estimator) == ("personal", "mc10")]
    assert row.best == row.last
