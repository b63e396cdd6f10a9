"""The page of `pfedbayes uncertainty`, of small runs."""

import re

import pytest

from pfedbayes import runs
from pfedbayes.report.assessed import BINS, Observed, page_of
from pfedbayes.runs import saving
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.trust.answers import Models
from pfedbayes.trust.uncertainty import assess_models

BLOBS = [
    "data.name=blobs", "data.clients=3", "data.examples=90", "data.labels_per_client=2", "data.classes=4",
    "data.validation=0.3", "net.hidden=[8]", "training.rounds=3", "training.local_steps=3", "training.batch_size=20",
    "training.evaluate_every=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    list(execute(read_experiment(None, BLOBS), folder, [1], "cpu"))
    return runs.read_run(folder)


@pytest.fixture(scope="module")
def observed(run):
    return Observed()


@pytest.fixture(scope="module")
def assessed(run, observed):
    return assess_models(Models.of(saving.load(run.folder, device="cpu"), 3), None, observed.add)


@pytest.fixture(scope="module")
def page(run, assessed, observed):
    return page_of(run, assessed, observed)


def test_all_sections_are_there(page):
    for title in ("Clients most at risk", "Abstention", "Strangeness", "never seen", "Scores"):
        assert re.search(f"<h2>[^<]*{title}", page)
    assert "None" not in page
    assert "nan" not in page


def test_it_needs_no_other_file_and_is_named_for_screen_readers(page):
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)
    assert page.count("<svg") == page.count('role="img"') > 3
    assert '<html lang="en">' in page
    assert "<td></td>" in page  # the corner of a table is no heading


def test_own_and_strange_inputs_are_counted(observed, run):
    kinds = observed.strangeness["personal"]
    assert set(kinds) == {"own", "unseen", "noisy"}
    assert len(kinds["own"]) == BINS
    assert float(kinds["own"].sum()) == sum(run.info.test_sizes)


def test_what_is_said_of_unseen_labels(observed):
    counts = observed.unseen["personal"]
    assert counts.shape == (4, 5)
    # A personal model names own labels, and its confidence is one number for each input.
    total = counts[:, :4].sum(1)
    assert total.sum() > 0
    assert bool((counts[:, 4] <= total).all())
    assert bool((counts[:, 4] >= total / 4).all())


def test_the_worst_clients_come_first(page, assessed, run):
    rows = assessed["gated"]["as it is"][0]
    worst = max(range(3), key=lambda i: rows[i]["nll"])
    section = page[page.index("most at risk") :]
    assert section.index(run.info.clients[worst]) == min(section.index(name) for name in run.info.clients)


def test_a_scaling_that_hurts_stands_at_the_top(run, assessed, observed):
    hurt = {which: dict(ways) for which, ways in assessed.items()}
    hurt["personal"]["scaled"] = [[row | {"nll": 9.0} for row in rows] for rows in hurt["personal"]["as it is"]]
    page = page_of(run, hurt, observed)
    assert "Warning: a plain temperature raises the NLL of the personal model" in page
    assert page.index("Warning") < page.index("most at risk")


def test_numbers(tmp_path):
    table = tmp_path / "table.csv"
    lines = [f"{'ab'[k % 2]},{k % 17},{0.37 * (k % 17) + (k * 7 % 5)}" for k in range(120)]
    table.write_text("\n".join(["place,size,cost", *lines]) + "\n")
    settings = [f"data.path={table}", "data.target=cost", "data.client_column=place", "data.task=regression",
                "training.rounds=2", "training.local_steps=2", "data.validation=0.3", "evaluation.folds=0"]  # fmt: skip
    list(execute(read_experiment(None, settings), tmp_path / "run", [1], "cpu"))
    run, observed = runs.read_run(tmp_path / "run"), Observed()
    assessed = assess_models(Models.of(saving.load(run.folder, device="cpu"), 3), None, observed.add)
    page = page_of(run, assessed, observed)
    assert "RMSE" in page
    assert "accuracy" not in page
    assert "<h2>Strangeness" in page
    assert "never seen" not in page
