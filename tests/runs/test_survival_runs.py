"""Times to an event, from a table to predictions, the report and an export."""

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from lifelines import KaplanMeierFitter
from lifelines.utils import concordance_index

import pfedbayes as package
from command_line import pfedbayes
from pfedbayes.data import load_shards
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.errors import UserError
from pfedbayes.report import write
from pfedbayes.runs import read_run
from pfedbayes.runs.consistency import require_summary
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.final_analysis import LEAST_AT_RISK
from pfedbayes.serving.certificates import certify_run
from pfedbayes.serving.export import export

SHORT = ["training.rounds=30", "training.evaluate_every=15", "evaluation.folds=2"]


def patients(size=240, seed=0, censored=8.0):
    """Patients of three clinics; the third has a single row, and the second has no event."""
    rng = np.random.default_rng(seed)
    age, clinic = rng.uniform(-1, 1, size), rng.choice(["a", "b"], size).astype(object)
    clinic[0] = "c"
    times, ends = rng.exponential(4 * np.exp(-1.5 * age)), rng.exponential(censored, size)
    event = (times <= ends) & (clinic != "b")
    return pandas.DataFrame({
        "age": age, "clinic": clinic, "years": np.minimum(times, ends), "died": np.where(event, "yes", "no"),
    })  # fmt: skip


def run(folder, table, *settings):
    table.to_csv(folder / "table.csv", index=False)
    data = [f"data.path={folder / 'table.csv'}", "data.target=years", "data.event=died", "data.client_column=clinic"]
    for _ in execute(read_experiment(None, [*data, *SHORT, *settings]), folder / "run", [1]):
        pass
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("survival"), patients(), "evaluation.samples=20")


def rows():
    return patients(40, seed=1).drop(columns=["years", "died"])


def test_a_run_scores_orders_and_judges(finished):
    info, summary = (json.loads((finished / name).read_text()) for name in ("run.json", "summary.json"))
    assert info["task"] == "survival"
    assert info["labels"] is None
    assert summary["pooled"]["personal"]["c_index"] > 0.65
    assert 0 < summary["pooled"]["personal"]["ibs"] < 0.25
    assert {record["folds"]["client"] for record in summary["joining"]} >= {"a", "b"}
    last = json.loads((finished / "rounds.jsonl").read_text().splitlines()[-1])
    scores = last["personal"]["mc20"]
    assert set(scores) == {"c_index", "nll", "ibs"}
    assert scores["c_index"][0][0] > 0.5
    assert scores["c_index"][0][1:] == [None, None]  # no event, and no test row


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_predictions_and_exports_agree(finished, tmp_path, name):
    client = package.open_client(finished, name)
    ours = pandas.DataFrame(client.predict(rows(), at=(1, 2)))
    new = {column: rows()[column] for column in rows()}
    assert list(ours)[2:] == [
        "risk", "median", "lower", "upper", "survival_1", "survival_2", "conformal_lower", "strangeness"
    ]  # fmt: skip
    later = patients(40, seed=1)
    if name == "a":
        assert concordance_index(later["years"], -ours["risk"], later["died"] == "yes") > 0.65
        assert 0 < ours["conformal_lower"].mean() < 2
    export(client, tmp_path / "client.safetensors")
    again = package.open_client(tmp_path / "client.safetensors")
    pandas.testing.assert_frame_equal(ours, pandas.DataFrame(again.predict(rows(), at=(1, 2))))
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "load_export.py"))
    about, weights = example["load"](tmp_path / "client.safetensors")
    (chunk,) = read_chunks(new, client.preprocessing)
    chances, spread = example["predict"](about, weights, chunk.x)
    edges = client.preprocessing.target.edges
    theirs = client.predict(rows(), at=edges)
    for k, edge in enumerate(edges):
        column = next(name for name in theirs if name.startswith("survival_") and float(name[9:]) == edge)
        np.testing.assert_allclose(chances[:, k], theirs[column], atol=1e-5)
    assert (spread >= 0).all()


def test_the_mean_network_gives_survival_probabilities_as_onnx(finished, tmp_path):
    onnx = pytest.importorskip("onnx")
    client = package.open_client(finished, "a")
    export(client, tmp_path / "a.onnx", "onnx")
    model = onnx.load(tmp_path / "a.onnx")
    assert [output.name for output in model.graph.output] == ["survival"]
    network = onnx.reference.ReferenceEvaluator(model)
    (chunk,) = read_chunks({name: rows()[name] for name in rows()}, client.preprocessing)
    (chances,) = network.run(None, {"x": chunk.x.numpy()})
    weights = client.weights
    expected = client.likelihood.point(weights.model.outputs(weights.mean, chunk.x))
    np.testing.assert_allclose(chances, expected, atol=1e-5)


def test_a_newcomer_gets_its_own_model(finished, tmp_path):
    patients(60, seed=2).drop(columns="clinic").to_csv(tmp_path / "d.csv", index=False)
    joined = package.join(finished, tmp_path / "d.csv", steps=20)
    assert (joined.trained, joined.folds) == (60, 5)
    assert any("by cross-validation in 5 folds: C-index" in line for line in joined.describe())
    assert "no certificate" in joined.describe()[-1]
    assert (joined.client.predict(rows())["median"] > 0).all()


def test_the_report_names_the_scores(finished, tmp_path):
    page = write([finished], tmp_path / "report.html").read_text()
    for wanted in ("C-index", "Integrated Brier score", "survival, with events in died", "Survival of the scored rows"):
        assert wanted in page


def test_the_summary_has_the_observed_curve_beside_the_predicted_ones(finished):
    curves = read_run(finished).summary.survival
    assert set(curves.predicted) == {"personal", "shared"}
    shards = load_shards(read_run(finished).experiment.data)
    time, event = shards.y[torch.cat(shards.test)].unbind(1)
    known = KaplanMeierFitter().fit(time, event).survival_function_at_times(curves.times)
    np.testing.assert_allclose(curves.observed, known, rtol=1e-6)
    assert sum(time >= curves.times[-1]) >= LEAST_AT_RISK
    for values in curves.predicted.values():
        assert sorted(values, reverse=True) == values
        assert np.abs(np.subtract(values, curves.observed)).max() < 0.2


def test_damaged_curves_are_refused(finished):
    run = read_run(finished)
    curves = run.summary.survival
    for change in ({"observed": [1.0]}, {"predicted": {"other": curves.times}}):
        damaged = dataclasses.replace(run.summary, survival=dataclasses.replace(curves, **change))
        with pytest.raises(ValueError, match="curve"):
            require_summary(run.info, damaged)


def test_what_needs_labels_says_so_in_one_line(finished):
    with pytest.raises(UserError) as error:
        certify_run(finished)
    assert "\n" not in str(error.value)


def test_other_networks_are_refused(tmp_path):
    with pytest.raises(UserError, match="times to an event need the network for tables"):
        run(tmp_path, patients(40), "net.name=mlp")
    with pytest.raises(UserError, match="the task is survival: leave it out"):
        run(tmp_path, patients(40), "net.likelihood=gaussian")


@pytest.mark.parametrize("method", ["fedavg", "pfedbayes", "ditto"])
def test_other_methods_predict_times_too(tmp_path, method):
    chosen = [f"method.name={method}", "data.validation=0.2", "evaluation.folds=0", "training.rounds=5"]
    folder = run(tmp_path, patients(80, censored=50), *chosen, "training.evaluate_every=5")
    shared = package.open_client(folder, shared=True)
    assert np.isfinite(shared.predict(rows())["risk"]).all()


def test_the_command_line_does_it_all(tmp_path):
    patients(90).to_csv(tmp_path / "patients.csv", index=False)
    rows().to_csv(tmp_path / "new.csv", index=False)
    data = ["--data", "patients.csv", "--target", "years", "--event", "died", "--client-column", "clinic"]
    short = ["--set", "training.rounds=2", "--set", "evaluation.folds=0", "--device", "cpu"]
    trained = pfedbayes("run", *data, *short, "--out", "run", "--json", cwd=tmp_path)
    assert "survival, with events in died" in trained.stderr
    assert "c_index_pooled" in json.loads(trained.stdout.splitlines()[-1])["personal"]
    asked = ["--client", "a", "--input", "new.csv", "--at", "1,2.5", "-o", "out.csv"]
    assert "lower bounds of the time" in pfedbayes("predict", "run", *asked, cwd=tmp_path).stderr
    assert "survival_2.5" in (tmp_path / "out.csv").read_text().splitlines()[0]
