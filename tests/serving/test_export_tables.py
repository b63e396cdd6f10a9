"""Exports of the default models for tables: classes, Student's t and Gaussian noise."""

import json
import runpy
from pathlib import Path

import pandas
import pytest
import torch
from clinics import clinics

import pfedbayes as package
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Gaussian
from pfedbayes.nets import TableNet
from pfedbayes.nets.layers import describe, rebuild
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.outcomes import as_object, of_object
from pfedbayes.serving import portable
from pfedbayes.serving.export import MeanNetwork, export

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_export.py"
SHORT = ["training.rounds=4", "training.evaluate_every=2", "evaluation.folds=2", "evaluation.alone=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("tables")
    clinics(150).to_csv(home / "clinics.csv", index=False)
    common = [f"data.path={home / 'clinics.csv'}", "data.client_column=hospital", *SHORT]
    for name, target, other, more in [
        ("outcome", "outcome", "cost", []),
        ("cost", "cost", "outcome", []),
        ("gaussian", "cost", "outcome", ["net.likelihood=gaussian"]),
    ]:
        ignored = f"data.ignore={json.dumps(['patient', other])}"
        experiment = read_experiment(None, [*common, f"data.target={target}", ignored, *more])
        for _ in execute(experiment, home / name, [1]):
            pass
    clinics(40, ("north",), seed=1).drop(columns=["hospital"]).to_csv(home / "new.csv", index=False)
    return home


@pytest.mark.parametrize("name", ["outcome", "cost", "gaussian"])
def test_an_export_predicts_like_the_run_also_with_torch_alone(folder, name):
    client = package.open_client(folder / name, "north")
    export(client, folder / f"{name}.safetensors")
    again = package.open_client(folder / f"{name}.safetensors")
    assert again.likelihood == client.likelihood
    ours, theirs = (pandas.DataFrame(each.predict(folder / "new.csv")) for each in (client, again))
    pandas.testing.assert_frame_equal(ours, theirs)
    example = runpy.run_path(str(EXAMPLE))
    about, weights = example["load"](folder / f"{name}.safetensors")
    (chunk,) = read_chunks(folder / "new.csv", client.preprocessing)
    values, spreads = example["predict"](about, weights, chunk.x)
    column = "p_ill" if name == "outcome" else "mean"
    assert values[:, 0].numpy() == pytest.approx(ours[column], rel=1e-4)
    if name != "outcome":
        assert spreads[:, 0].numpy() == pytest.approx(ours["deviation"], rel=1e-4)
        assert (ours["lower"] < ours["mean"]).all()
        assert (ours["mean"] < ours["upper"]).all()
    mean = MeanNetwork(client)(chunk.x)
    assert mean.shape == values.shape
    export(client, folder / f"{name}.onnx", "onnx")


@pytest.mark.parametrize("sizes", [(3, 2, 4, 1, 0, True), (3, 0, 4, 2, 2, False), (5, 6, 16, 3, 0, False)])
def test_the_network_for_tables_is_rebuilt_from_its_sizes(sizes):
    module = TableNet(*sizes)
    count = sum(part.numel() for part in module.parameters())
    layers = json.loads(json.dumps(describe(module)))
    again = rebuild(layers, count, (sizes[0] + sizes[1],), None)
    again.load_state_dict(module.state_dict())
    x = torch.randn(5, sizes[0] + sizes[1])
    assert torch.equal(again(x), module(x))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 10**12},
        {"plain": 0},
        {"outputs": -1},
        {"reference": 1},
        {"constants": 2.0},
        {"more": 1},
        {"pieces": 3},
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_allocated(changes):
    module = TableNet(3, 2, 4, 1)
    ((name, sizes),) = describe(module)
    with pytest.raises(ValueError, match="layer"):
        rebuild([[name, sizes | changes]], sum(part.numel() for part in module.parameters()), (5,), None)


@pytest.mark.parametrize(
    "content",
    [
        {"name": "student-t", "sigma_eps": None, "unit": float("nan")},
        {"name": "student-t", "sigma_eps": None, "unit": "1"},
        {"name": "student-t", "sigma_eps": None},
        {"name": "os.system", "unit": 1.0},
        {"name": "classification", "ranking": 2},
        {"name": "gaussian", "sigma_eps": -1.0, "unit": 1.0},
    ],
)
def test_a_hostile_likelihood_is_refused(content):
    with pytest.raises(ValueError, match="likelihood"):
        of_object(content)


def test_a_likelihood_of_another_network_is_one_clear_line(folder, monkeypatch):
    path, client = folder / "odd.safetensors", package.open_client(folder / "cost", "north")
    for name, fault in [("gaussian", "has 4 outputs, and its likelihood reads 2"), ("classification", "does not fit")]:
        odd = {"gaussian": Gaussian(), "classification": Classification()}[name]
        monkeypatch.setattr(portable, "as_object", lambda _, odd=odd: as_object(odd))
        export(client, path)
        with pytest.raises(UserError, match=f"{fault}.*export the client again"):
            package.open_client(path)
