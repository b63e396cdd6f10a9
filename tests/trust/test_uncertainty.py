import dataclasses
import json

import pytest
import torch

from benchmarks import uncertainty as benchmark
from federations import federation, make_shards, trained
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.metrics import accuracy, ece, log_average, reliability
from pfedbayes.methods import FedAvg, Local, PFedBayes
from pfedbayes.trust.shifts import other_set, strange_inputs
from pfedbayes.trust.uncertainty import FIGURES, FURTHER, TABLES, assess, cells, mean_rows, table_rows


def with_validation():
    """Five clients with 30 examples to calibrate on; the last has never seen label 2."""
    shards = make_shards(sizes=(60,) * 5, test_sizes=(80,) * 5)
    train = [rows[:30] for rows in shards.train]
    train[4] = train[4][shards.y[train[4]] != 2]
    return dataclasses.replace(shards, train=tuple(train), validation=tuple(rows[30:] for rows in shards.train))


@pytest.fixture(scope="module")
def ours():
    return trained(PFedBayes(zeta=0.1, eta_personal=0.05), 4, shards=with_validation(), seeds=[1, 2])


@pytest.fixture(scope="module")
def assessed(ours):
    return assess(ours, samples=5)


def test_figures_are_those_of_the_metrics(ours, assessed):
    assert list(assessed) == ["personal", "shared", "gated"]
    rows = assessed["personal"]["as it is"]
    assert [len(of_seed) for of_seed in rows] == [5, 5]
    test = ours.shards.test[3]
    log_probs = log_average(ours.predict("personal", 3, ours.shards.x[test], 5, seed_index=1))
    assert rows[1][3]["accuracy"] == pytest.approx(float(accuracy(log_probs, ours.shards.y[test])))
    assert rows[1][3]["ece"] == pytest.approx(float(ece(reliability(log_probs, ours.shards.y[test]))))


def test_temperature_lowers_the_nll_and_keeps_the_answers(assessed):
    for which in ("personal", "shared"):
        raw, scaled = (mean_rows(assessed[which][way]) for way in ("as it is", "scaled"))
        assert scaled["accuracy"] == raw["accuracy"]
        assert scaled["nll"] < raw["nll"]
    heats = {row["temperature"] for row in assessed["shared"]["scaled"][0]}
    assert len(heats) == 1
    assert len({row["temperature"] for row in assessed["personal"]["scaled"][0]}) == 5


def test_without_validation_data_there_is_nothing_to_scale_or_to_promise():
    shards = dataclasses.replace(with_validation(), validation=make_shards().validation)
    ways = assess(trained(FedAvg(), 1, shards=shards))["shared"]
    assert list(ways) == ["as it is"]
    assert "set_coverage" not in ways["as it is"][0][0]
    assert not any(name.endswith("_mi") for name in ways["as it is"][0][0])  # one network has nobody to disagree with


def test_strange_inputs_are_strange():
    shards = with_validation()
    strange = dict(strange_inputs(shards, 4, {"other": torch.ones(7, 3)}))
    assert list(strange) == ["unseen", "other", "noisy"]
    labels = {tuple(x): int(y) for x, y in zip(shards.x.tolist(), shards.y.tolist(), strict=True)}
    assert {labels[tuple(x)] for x in strange["unseen"].tolist()} == {2}
    assert strange["other"].shape == (7, 3)
    own = {tuple(x) for x in shards.x[shards.test[4]].tolist()}
    assert not own & {tuple(x) for x in strange["noisy"].tolist()}
    assert "unseen" not in dict(strange_inputs(shards, 0, {}))


def test_images_are_turned_and_stay_images():
    shards = with_validation()
    images = (torch.arange(len(shards.x) * 4) % 256).to(torch.uint8).view(-1, 1, 2, 2)
    strange = dict(strange_inputs(dataclasses.replace(shards, x=images), 0, {}))
    assert strange["rotated"].shape == strange["noisy"].shape == (80, 1, 2, 2)
    assert strange["noisy"].dtype == torch.uint8
    pools = {tuple(image.flatten().tolist()) for image in images}
    a, b, c, d = strange["rotated"][0].flatten().tolist()
    assert (b, d, a, c) in pools or (c, a, d, b) in pools


def test_inputs_between_the_classes_are_told_from_the_others():
    """The classes meet at the origin; and a client's own inputs cannot be told from themselves."""
    shards = with_validation()
    ours = trained(PFedBayes(zeta=0.1, eta_personal=0.05), 40, shards=shards)
    between = torch.zeros(50, 3, dtype=torch.float64)
    row = mean_rows(
        assess(ours, strange={"other": between, "own": shards.x[torch.cat(shards.test)]})["personal"]["as it is"]
    )
    assert row["auroc_other"] > 0.8
    assert row["auroc_own"] == pytest.approx(0.5, abs=0.05)


def test_tables_show_a_row_for_each_way(assessed):
    own, strange, promises = TABLES.values()
    titles = [title for title, _ in table_rows(assessed, strange)]
    raw = ("", ", by MI", ", by strangeness")
    ways = {"personal": (*raw, ", scaled"), "shared": (*raw, ", scaled"), "gated": raw}
    assert titles == [f"{model}{way}" for model, of_model in ways.items() for way in of_model]
    assert [title for title, _ in table_rows(assessed, own)] == [t for t in titles if "by" not in t]
    for _, row in table_rows(assessed, promises):
        assert len(cells(row, promises)) == 4
        assert 0.5 < row["set_coverage"] <= 1
    assert {name for columns in (TABLES | FURTHER).values() for name in columns} == FIGURES.keys()


def test_errors_among_answers_are_those_of_all_answers_together():
    rows = [[{"answered": 1.0, "wrong": 0.1}, {"answered": 0.0, "wrong": 0.0}]]
    assert mean_rows(rows)["answered_wrong"] == pytest.approx(0.1)
    assert "answered_wrong" not in mean_rows([[{"answered": 0.0, "wrong": 0.0}]])


def test_local_models_have_no_shared_one():
    assert list(assess(trained(Local(), 1, shards=with_validation()))) == ["personal"]


def test_other_sets(tmp_path):
    assert other_set("blobs") == {}
    assert other_set("fashion-mnist")["other"].shape == (10_000, 1, 28, 28)  # MNIST is part of the package


def test_what_cannot_be_assessed_is_said():
    shards = make_shards()
    none = dataclasses.replace(shards, test=shards.validation)
    with pytest.raises(UserError, match="no client of this run has test data"):
        assess(federation(FedAvg(), shards=none))
    numbers = dataclasses.replace(shards, y=shards.x[:, :1], num_classes=None)
    model = federation(FedAvg()).model._replace(likelihood=Regression(0.1))
    with pytest.raises(UserError, match="targets are labels"):
        assess(federation(FedAvg(), shards=numbers, model=model))


class TestBenchmark:
    def test_the_committed_page_is_made_from_the_committed_figures(self):
        results = benchmark.Path(__file__).parents[2] / "docs" / "results"
        measured = json.loads((results / "uncertainty.json").read_text())
        assert benchmark.render(measured) == (results / "uncertainty.md").read_text()

    def test_the_first_paragraph_of_the_page_says_what_was_measured(self):
        results = benchmark.Path(__file__).parents[2] / "docs" / "results"
        measured = json.loads((results / "uncertainty.json").read_text())
        assert {cell["seeds"] for cell in measured.values()} == {1}
        for name in benchmark.SETS:
            for size in benchmark.SIZES:
                models = {
                    (method, which): mean_rows(ways["as it is"])
                    for method in benchmark.METHODS
                    for which, ways in measured[f"{name}-{size}-{method}"]["figures"].items()
                }
                ours = models.pop(("pfedbayes", "personal"))
                assert all(ours[score] < other[score] for other in models.values() for score in ("nll", "aurc"))
                assert all(ours["auroc_unseen"] > other["auroc_unseen"] for other in models.values())

    def test_it_goes_on_where_it_was(self, tmp_path, monkeypatch, capsys):
        small = ["data.train_per_label=8", "data.test_per_label=8", "training.local_steps=2", "net.hidden=[5]"]
        monkeypatch.setattr(benchmark, "METHODS", {"fedavg": ("FedAvg", small)})
        arguments = ["uncertainty", "--rounds", "1", "--sets", "mnist", "--sizes", "small", "--device", "cpu"]
        arguments += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "page"), "--data-dir", str(tmp_path)]
        monkeypatch.setattr("sys.argv", arguments)
        benchmark.main()
        measured = json.loads((tmp_path / "page.json").read_text())
        assert list(measured) == ["mnist-small-fedavg"]
        page = (tmp_path / "page.md").read_text()
        assert "| FedAvg shared, scaled |" in page
        assert page.count("Not measured.") == 3
        monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured again"))
        benchmark.main()
        assert (tmp_path / "page.md").read_text() == page
