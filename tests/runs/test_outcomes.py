"""Outcomes that people have, from a table to predictions, the report and an export."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas
import pytest

import pfedbayes as package
from pfedbayes.data import TaskShape
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.data.own.preprocessing import Target
from pfedbayes.data.own.summaries import MAX_CLASSES
from pfedbayes.errors import UserError
from pfedbayes.maths.counts import NegativeBinomial, Poisson
from pfedbayes.maths.likelihoods import Classification, Gaussian, Regression, StudentT
from pfedbayes.maths.ordinal import Ordinal
from pfedbayes.nets import Net, TableNet, mlp
from pfedbayes.report import write
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.outcomes import Outcome, as_object, of_object, outcome_of, require_width
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.export import export

SHORT = ["training.rounds=10", "training.evaluate_every=5", "evaluation.folds=2", "evaluation.alone=false"]


def visits(size=120, seed=0):
    """Visits of patients of three clinics; the third has a single row."""
    rng = np.random.default_rng(seed)
    age, clinic = rng.uniform(-1, 1, size), rng.choice(["a", "b"], size).astype(object)
    clinic[0] = "c"
    visits = rng.negative_binomial(3, 3 / (3 + np.exp(1 + age)))
    return pandas.DataFrame({"age": age, "clinic": clinic, "visits": visits})


def run(folder, table, target, *settings):
    table.to_csv(folder / "table.csv", index=False)
    data = [f"data.path={folder / 'table.csv'}", f"data.target={target}", "data.client_column=clinic"]
    for _ in execute(read_experiment(None, [*data, *SHORT, *settings]), folder / "run", [1]):
        pass
    return folder / "run"


def _example(path, rows, client):
    """Return what examples/load_export.py predicts from an exported file."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "load_export.py"))
    about, weights = example["load"](path)
    (chunk,) = read_chunks(rows, client.preprocessing)
    return example["predict"](about, weights, chunk.x)


@pytest.mark.parametrize("likelihood", ["negative-binomial", "poisson"])
def test_counts_from_table_to_export(tmp_path, likelihood):
    chosen = [f"net.likelihood={likelihood}"] if likelihood == "poisson" else []
    folder = run(tmp_path, visits(), "visits", "data.task=count", *chosen)
    summary = json.loads((folder / "run.json").read_text())
    assert summary["task"] == "count"
    assert write([folder], tmp_path / "report.html").stat().st_size > 10_000
    for name in ("a", "c"):
        client = package.open_client(folder, name)
        ours = pandas.DataFrame(client.predict(visits(30, seed=1).drop(columns="visits")))
        assert ((ours["lower"] >= 0) & (ours["lower"] <= ours["upper"])).all()
        assert (ours["lower"] == ours["lower"].round()).all()
        assert 1 < ours["mean"].mean() < 6
        export(client, tmp_path / f"{name}.safetensors")
        again = package.open_client(tmp_path / f"{name}.safetensors")
        theirs = pandas.DataFrame(again.predict(visits(30, seed=1).drop(columns="visits")))
        pandas.testing.assert_frame_equal(ours, theirs)
        rows = visits(30, seed=1).drop(columns="visits")
        means, deviations = _example(tmp_path / f"{name}.safetensors", {key: rows[key] for key in rows}, client)
        np.testing.assert_allclose(means[:, 0], ours["mean"], rtol=1e-4)
        np.testing.assert_allclose(deviations[:, 0], ours["deviation"], rtol=1e-4)


@pytest.mark.parametrize("value", [-1, 2.5])
def test_what_is_no_count_is_one_clear_line(tmp_path, value):
    table = visits(40)
    table["visits"] = table["visits"].astype(float)
    table.loc[5, "visits"] = value
    with pytest.raises(UserError, match=rf"line 7: 'visits' is {value}, but a count is a whole number"):
        run(tmp_path, table, "visits", "data.task=count")


def test_a_likelihood_of_another_task_is_refused(tmp_path):
    with pytest.raises(UserError, match="the task is count: choose one of negative-binomial, poisson"):
        run(tmp_path, visits(40), "visits", "data.task=count", "net.likelihood=gaussian")
    with pytest.raises(UserError, match="counts need the network for tables"):
        run(tmp_path, visits(40), "visits", "data.task=count", "net.name=mlp")


def test_a_class_that_one_client_has_is_no_problem(tmp_path):
    table = visits(60)
    table["kind"] = np.where(table["age"] > 0, "old", "young")
    table.loc[0, "kind"] = "unknown"  # the single row of clinic c
    folder = run(tmp_path, table.drop(columns="visits"), "kind")
    found = package.open_client(folder, "c").predict(table.drop(columns=["visits", "kind"]))
    assert {"p_old", "p_unknown", "p_young"} <= set(found)


def test_ordered_classes_from_table_to_export(tmp_path):
    table = visits().drop(columns="visits")
    table["grade"] = np.select([table["age"] < -0.3, table["age"] < 0.4], ["low", "mid"], "high")
    with pytest.raises(UserError, match="has the classes high, low, mid: list each of them once in --order"):
        run(tmp_path, table, "grade", "data.task=ordinal")
    folder = run(tmp_path, table, "grade", "data.task=ordinal", 'data.order=["low", "mid", "high"]')
    client = package.open_client(folder, "a")
    assert client.preprocessing.target.classes == ("low", "mid", "high")
    new = table.drop(columns="grade")
    ours = pandas.DataFrame(client.predict(new))
    assert (ours["label"] == table["grade"]).mean() > 0.6
    np.testing.assert_allclose(ours[["p_low", "p_mid", "p_high"]].sum(axis=1), 1, rtol=1e-5)
    assert write([folder], tmp_path / "report.html").stat().st_size > 10_000
    export(client, tmp_path / "a.safetensors")
    again = package.open_client(tmp_path / "a.safetensors")
    pandas.testing.assert_frame_equal(ours, pandas.DataFrame(again.predict(new)))
    chances, _ = _example(tmp_path / "a.safetensors", {name: new[name] for name in new}, client)
    np.testing.assert_allclose(chances, ours[["p_low", "p_mid", "p_high"]], atol=1e-4)


def shape(classes=None, target=None, unit=1.0):
    return TaskShape((3,), classes, 1, unit, target=target)


COUNTS = shape(target=Target("visits", "count", rate=4.0))


@pytest.mark.parametrize(
    ("settings", "task", "expected"),
    [
        ({}, shape(unit=5.0), Outcome(StudentT(None, 5.0), outputs=2, constants=2)),
        ({"likelihood": "student-t"}, shape(), Outcome(StudentT(), outputs=2, constants=2)),
        ({"likelihood": "gaussian"}, shape(unit=5.0), Outcome(Gaussian(None, 5.0), outputs=1, constants=1)),
        ({"sigma_eps": 2.0}, shape(unit=5.0), Outcome(Gaussian(0.4, 5.0), outputs=1)),
        ({}, COUNTS, Outcome(NegativeBinomial(4.0), outputs=1, constants=1)),
        ({"likelihood": "poisson"}, COUNTS, Outcome(Poisson(4.0), outputs=1)),
        ({}, shape(4, Target("grade", "ordinal")), Outcome(Ordinal(classes=4), outputs=1, constants=3)),
        ({}, shape(2), Outcome(Classification(True), outputs=1, reference=True)),
        ({}, shape(3), Outcome(Classification(True), outputs=3)),
        ({}, shape(1), Outcome(Classification(True), outputs=1)),
        ({}, shape(3, Target("kind", "classification")), Outcome(Classification(True), outputs=3)),
    ],
)  # fmt: skip
def test_every_task_has_its_likelihood_and_outputs(settings, task, expected):
    assert outcome_of(NetConfig(name="table", **settings), task, None) == expected


def test_a_method_may_determine_the_number_of_outputs():
    for classes in (2, 3):
        assert outcome_of(NetConfig(), shape(classes), 7) == Outcome(Classification(True), outputs=7)


def test_labels_have_one_likelihood():
    with pytest.raises(UserError, match="but the task is classification: leave it out"):
        outcome_of(NetConfig(name="table", likelihood="gaussian"), shape(3), None)


LIKELIHOODS = [
    Classification(), Classification(True), Regression(), Regression(0.3, 2.0), Gaussian(), Gaussian(0.3), StudentT(),
    StudentT(None, 4.0), Ordinal(classes=2), Ordinal(classes=MAX_CLASSES), Poisson(1), NegativeBinomial(0.25),
]  # fmt: skip


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_a_likelihood_is_described_by_an_object(likelihood):
    assert of_object(json.loads(json.dumps(as_object(likelihood)))) == likelihood


@pytest.mark.parametrize(
    ("likelihood", "changes"),
    [
        (Poisson(), {"unit": 0}), (Poisson(), {"unit": -1.0}), (Poisson(), {"unit": float("inf")}),
        (Poisson(), {"unit": True}), (Poisson(), {"unit": None}), (Poisson(), {"unit": "1"}), (Poisson(), {"more": 1}),
        (Poisson(), {"name": "normal"}), (Poisson(), {"name": "gaussian"}), (Gaussian(), {"sigma_eps": 0.0}),
        (Gaussian(), {"unit": None}), (Classification(), {"ranking": 1}), (Ordinal(), {"classes": 1}),
        (Ordinal(), {"classes": 2.0}), (Ordinal(), {"classes": True}), (Ordinal(), {"classes": MAX_CLASSES + 1}),
    ],
)  # fmt: skip
def test_other_objects_are_refused(likelihood, changes):
    with pytest.raises(ValueError, match=r"its likelihood"):
        of_object(as_object(likelihood) | changes)


@pytest.mark.parametrize(
    ("likelihood", "width"),
    [
        (StudentT(), 4), (Poisson(), 1), (NegativeBinomial(), 2), (Gaussian(), 2), (Gaussian(0.5), 1),
        (Ordinal(classes=3), 3),
    ],
)  # fmt: skip
def test_a_network_for_tables_has_the_outputs_that_are_read(likelihood, width):
    for outputs in range(1, 6):
        net = Net(TableNet(2, 0, 0, outputs))
        if outputs == width:
            require_width(likelihood, net)
        else:
            with pytest.raises(ValueError, match=f"has {outputs} outputs, and its likelihood reads {width}"):
                require_width(likelihood, net)
        require_width(Classification(), net)
    require_width(Gaussian(), Net(mlp([2, 3])))  # the outputs of other networks are not known
