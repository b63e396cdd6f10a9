import dataclasses
import json

import pytest
import torch

from benchmarks import uncertainty as benchmark
from federations import federation, make_model, make_shards, trained
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.maths.metrics import accuracy, ece, log_average, reliability
from pfedbayes.maths.survival import Survival
from pfedbayes.methods import FedAvg, Local, PFedBayes
from pfedbayes.nets import mlp
from pfedbayes.trust.answers import Models
from pfedbayes.trust.shifts import other_set, strange_inputs
from pfedbayes.trust.uncertainty import (
    FIGURES,
    FURTHER,
    TABLES,
    assess,
    assess_models,
    cells,
    filled,
    mean_rows,
    table_rows,
    warnings,
)


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
    ways = {"personal": (*raw, ", scaled", ", calibrated"), "shared": (*raw, ", scaled", ", calibrated"), "gated": raw}
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
    models = dataclasses.replace(Models.of(federation(FedAvg()), 1), likelihood=Survival((1.0, 2.0)))
    with pytest.raises(UserError, match="these targets are times"):
        assess_models(models)


def test_clients_weigh_by_their_test_examples():
    rows = [[{"size": 30.0, "nll": 1.0}, {"size": 10.0, "nll": 2.0, "ece": 0.5}]]
    assert mean_rows(rows) == {"nll": 1.25, "ece": 0.5}


def test_a_scaling_that_hurts_is_warned_of():
    ways = {"as it is": [[{"nll": 0.3}]], "scaled": [[{"nll": 0.9}]], "calibrated": [[{"nll": 0.304}]]}
    (sentence,) = warnings({"personal": ways})
    assert "a plain temperature raises the NLL of the personal model on test data from 0.300 to 0.900" in sentence
    ways["calibrated"] = [[{"nll": 0.4}]]
    assert warnings({"personal": ways})[1].endswith("hold out more validation data, or predict with --raw")
    assert warnings({"personal": {"as it is": [[{"nll": 0.3}]]}}) == []


def test_numbers_have_their_own_figures():
    shards = with_validation()
    y = shards.x[:, :1] + 0.1 * torch.randn(len(shards.x), 1, generator=torch.Generator().manual_seed(0))
    shards = dataclasses.replace(shards, y=y.double(), num_classes=None)
    model = make_model(mlp([3, 4, 1], "tanh"), Regression(0.5, 10.0))
    ours = trained(PFedBayes(zeta=0.1, eta_personal=0.05), 20, shards=shards, model=model)
    far = 50 + torch.zeros(40, 3, dtype=torch.float64)
    seen = []
    found = assess_models(Models.of(ours, 5), {"other": far}, lambda which, client, *_: seen.append((which, client)))
    assert seen == [(which, client) for which in ("personal", "shared") for client in range(5)]
    (rows,) = found["personal"]["as it is"]
    rows_of_first = shards.test[0]
    outputs = ours.predict("personal", 0, shards.x[rows_of_first], 5)
    error = float((outputs.mean(0) - y[rows_of_first]).square().mean().sqrt())
    assert rows[0]["rmse"] == pytest.approx(10 * error)
    mean = mean_rows(found["personal"]["as it is"])
    assert mean["auroc_other_strangeness"] == 1.0
    assert mean["false_alarms"] < 0.2
    assert 0.8 < mean["set_coverage"] <= 1
    assert "auroc_unseen" not in mean
    titles = [title for title, _ in table_rows(found, ("rmse", "accuracy"))]
    assert titles == ["personal", "shared"]
    assert filled([mean], ("rmse", "accuracy")) == ["rmse"]


def record(figures, group="pfedbayes", **more):
    return {"seeds": 3, "settings": {group: ["training.rounds=1"]}, "device": "a CPU", "figures": figures} | more


class TestBenchmark:
    def test_the_committed_page_is_made_from_the_committed_figures(self):
        measured = json.loads(benchmark.PAGE.with_suffix(".json").read_text())
        assert benchmark.render(measured) == benchmark.PAGE.with_suffix(".md").read_text()

    def test_every_cell_has_an_experiment_and_the_settings_that_were_chosen_on_validation_data(self):
        for cell in benchmark.order(7, 5):
            for method in benchmark.GROUPS[cell.group]:
                experiment = cell.experiment(method)
                assert (experiment.data.name, experiment.data.size) == (cell.name, cell.size)
                assert (experiment.data.validation, experiment.training.rounds) == (0.2, 7)
                tuned = benchmark.TUNED[cell.name].get(method, {}) if method != "pfedbayes" else {}
                assert tuned.get("method", {}).items() <= dataclasses.asdict(experiment.method).items()
        assert benchmark.Cell("mnist", "small", "pfedbayes", 7, 5).experiment("pfedbayes").method.zeta == 1
        local, fedavg = map(benchmark.Cell("mnist", "small", "networks", 7, 5).experiment, ("local", "fedavg"))
        assert local.method.eta == fedavg.method.eta == 0.1
        assert (local.training.server_optimizer, fedavg.training.server_optimizer) == ("none", "momentum")

    def test_the_first_cells_are_the_most_telling(self):
        titles = [cell.title for cell in benchmark.order(7, 5)]
        first = ["mnist-small", "mnist-medium", "fashion-mnist-small", "fashion-mnist-medium"]
        assert titles[:4] == [f"{each}-pfedbayes" for each in first]
        assert len(set(titles)) == len(titles) == 27
        assert titles.index("fashion-mnist-medium-pfedme") < titles.index("mnist-large-pfedbayes")

    def test_an_ensemble_averages_networks_that_no_other_ensemble_has(self):
        shards = with_validation()
        local, fedavg = (trained(method(eta=0.1), 2, shards=shards, seeds=range(1, 11)) for method in (Local, FedAvg))
        models = benchmark.ensembles({"personal": local, "shared": fedavg}, 2)
        x, found = shards.x[:6], []
        for s in range(2):
            outputs = models.predict("personal", 1, x, s)
            assert outputs.shape == (5, 6, 3)
            found += list(outputs)
            assert torch.equal(outputs[1], local.predict("personal", 1, x, None, s + 2)[0])
        assert all(not torch.equal(one, other) for k, one in enumerate(found) for other in found[:k])
        assessed = assess_models(models)
        assert list(assessed) == ["personal", "shared", "gated"]
        assert assessed["personal"]["as it is"][0][0]["auroc_noisy_mi"] != 0.5
        single = assess(local)["personal"]["as it is"][0]
        assert mean_rows([assessed["personal"]["as it is"][0]])["nll"] < mean_rows([single])["nll"]

    def test_the_best_row_and_those_within_its_deviation_are_bold(self):
        def of(values):
            return {"personal": {"as it is": {"nll": values, "set_coverage": [0.9, 0.9, 0.9]}}}

        figures = {"pfedbayes": of([0.2, 0.3, 0.4]), "local": of([0.39, 0.39, 0.39]), "fedavg": of([0.41, 0.41, 0.41])}
        head, _, *rows = benchmark.table(figures, ("nll", "set_coverage", "ece"))
        assert head.startswith("| | NLL")
        assert rows == [
            "| pFedBayes personal | **0.300 ± 0.100** | 0.900 ± 0.000 |",
            "| Local personal | **0.390 ± 0.000** | 0.900 ± 0.000 |",
            "| FedAvg personal | 0.410 ± 0.000 | 0.900 ± 0.000 |",
        ]
        assert benchmark.table(figures, ("auroc_unseen",)) == []

    def test_the_page_says_how_often_strangeness_is_best(self):
        def of(which, values):
            return {
                which: {"as it is": {f"auroc_{name}_strangeness": values for name in ("unseen", "other", "rotated")}}
            }

        measured = {
            "mnist-small-pfedbayes": record({"pfedbayes": of("gated", [0.9, 0.9, 0.9])}),
            "mnist-small-pfedme": record({"pfedme": of("gated", [0.85, 0.9, 0.95])}, "pfedme"),
            "mnist-medium-pfedbayes": record({"pfedbayes": of("gated", [0.8, 0.8, 0.8])}),
            "mnist-medium-pfedme": record({"pfedme": of("gated", [0.9, 0.9, 0.9])}, "pfedme"),
        }
        page = benchmark.render(measured)
        assert "on 1 of 2 data sets." in page
        assert "| MNIST, small | **0.900 ± 0.000** | 0.900 |" in page
        assert "| MNIST, medium | 0.800 ± 0.000 | 0.900 |" in page
        assert "- pFedMe: training.rounds=1, on a CPU" in page

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        """Run the benchmark with tiny cells in tmp_path; arguments override earlier ones."""
        small = ["data.train_per_label=10", "data.test_per_label=8", "training.local_steps=2", "net.hidden=[5]"]
        settings = benchmark.Cell.settings
        monkeypatch.setattr(benchmark.Cell, "settings", lambda cell, method: [*settings(cell, method), *small])
        arguments = ["uncertainty", "--rounds", "1", "--seeds", "2", "--device", "cpu", "--data-dir", str(tmp_path)]
        arguments += ["--records", str(tmp_path / "records"), "--out", str(tmp_path / "page")]

        def run(*more):
            monkeypatch.setattr("sys.argv", [*arguments, *more])
            benchmark.main()

        return run

    def test_it_goes_on_where_it_was(self, run, tmp_path, monkeypatch, capsys):
        cells = ("--cells", "mnist-small-networks", "mnist-small-pfedme")
        run(*cells, "--part", "2/2")
        assert [path.name for path in (tmp_path / "records").iterdir()] == ["mnist-small-pfedme.json"]
        assert not (tmp_path / "page.md").exists()
        run(*cells)
        measured = json.loads((tmp_path / "page.json").read_text())
        assert list(measured) == ["mnist-small-networks", "mnist-small-pfedme"]
        assert list(measured["mnist-small-networks"]["figures"]) == ["local", "fedavg", "ensembles"]
        figures = measured["mnist-small-networks"]["figures"]["ensembles"]["gated"]["as it is"]
        assert len(figures["auroc_unseen_strangeness"]) == 2
        page = (tmp_path / "page.md").read_text()
        for title in ("FedAvg shared, scaled", "Deep ensembles gated, by strangeness", "pFedMe personal, calibrated"):
            assert f"| {title} |" in page
        monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured again"))
        run(*cells)
        assert (tmp_path / "page.md").read_text() == page

    def test_it_stops_when_the_time_is_over(self, run, tmp_path, capsys):
        run("--cells", "mnist-small-pfedbayes", "--minutes", "0", "--part", "1/1")
        assert "mnist-small-pfedbayes: no time is left" in capsys.readouterr().out
        assert not (tmp_path / "records").exists()
        cell = benchmark.Cell("mnist", "small", "pfedbayes", 1, 1)
        with pytest.raises(benchmark.OutOfTime):
            benchmark.measure(cell, "cpu", deadline=0.0)
