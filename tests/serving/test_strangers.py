"""Files and folders from strangers: nothing they name is run, written to or believed."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clinics import clinics, train
from safetensors import safe_open
from safetensors.torch import load_file

import pfedbayes as package
from pfedbayes.cli import app
from pfedbayes.errors import UserError
from pfedbayes.files.tensors import tensor_bytes
from pfedbayes.serving.certificates import certify_run
from pfedbayes.serving.export import export
from pfedbayes.serving.open import open_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of clinics, and the exported file of one."""
    place = tmp_path_factory.mktemp("strangers")
    clinics(80).to_csv(place / "clinics.csv", index=False)
    train(place, "outcome", ["patient", "cost"], training__rounds=2)
    export(package.open_client(place / "outcome", "east"), place / "east.safetensors")
    return place


@pytest.fixture
def forged(folder, tmp_path):
    """Write the exported file with other metadata or tensors, and a checksum that matches."""

    def forge(path=None, tensors=None, **changes):
        with safe_open(folder / "east.safetensors", framework="pt") as file:
            about = json.loads(file.metadata()["client"])
        for name, value in changes.items():
            *parents, last = name.split("__")
            place = about
            for parent in parents:
                place = place[int(parent) if parent.isdecimal() else parent]
            place[last] = value
        content = load_file(folder / "east.safetensors") | (tensors or {})
        path = path or tmp_path / "forged.safetensors"
        path.write_bytes(tensor_bytes(content, {"client": json.dumps(about)}))
        return path

    return forge


POPEN = {"layers": None, "module": {"name": "subprocess:Popen"}}


def test_a_file_runs_no_command(forged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = forged(**POPEN, preprocessing__shape=["sh", "-c", "touch ran"])
    with pytest.raises(UserError, match=r"shape\[0\] is 'sh', not a whole number"):
        package.open_client(path)
    path = forged(**POPEN)
    with pytest.raises(UserError, match=r"names code for its network \('subprocess:Popen'\)"):
        package.open_client(path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_names_no_code(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    run = tmp_path / "run"
    run.mkdir()
    for path in (folder / "outcome").iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "mlp"\n', 'name = "evil:Net"\n'))
    with safe_open(run / "calibration.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["run"])
    about["net"] = {"name": "evil:Net"}
    tensors = load_file(run / "calibration.safetensors")
    (run / "calibration.safetensors").write_bytes(tensor_bytes(tensors, {"run": json.dumps(about)}))
    readers = (
        lambda: package.open_client(run, "east"),
        lambda: package.load(run),
        lambda: certify_run(run),
        lambda: next(open_all(run)),
        lambda: package.join(run, folder / "clinics.csv", "west"),
    )
    for read in readers:
        with pytest.raises(UserError, match="names code for its network"):
            read()
    assert not (tmp_path / "ran").exists()


def test_a_newcomer_takes_the_place_of_nobody(folder, forged):
    rows = clinics(80).head(5).drop(columns=["outcome"])
    before = package.open_client(folder / "outcome", "north").predict(rows)["p_ill"]
    (folder / "outcome" / "newcomers").mkdir(exist_ok=True)
    path = forged(folder / "outcome" / "newcomers" / "north.safetensors", client="north")
    np.testing.assert_array_equal(package.open_client(folder / "outcome", "north").predict(rows)["p_ill"], before)
    path.unlink()
    path = forged(folder / "outcome" / "newcomers" / "west.safetensors", client="north")
    with pytest.raises(UserError, match="is of 'north': give the file the name of its client"):
        package.open_client(folder / "outcome", "west")
    path.unlink()


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "", "a\0b", "a\nb", "x" * 300])
def test_a_file_names_no_path(forged, command_line, name):
    path = forged(client=name)
    done = command_line("export", path)
    assert done.code == 2
    assert "cannot be a file name" in done.err
    assert sorted(found.name for found in path.parent.rglob("*")) == ["forged.safetensors"]


@pytest.fixture
def command_line(monkeypatch, capsys, tmp_path):
    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["pfedbayes", *map(str, arguments)])
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code
        return SimpleNamespace(code=code, err=capsys.readouterr().err)

    return call


LINEAR = {"in_features": 10, "out_features": 2, "bias": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": [["Linear", LINEAR | {"out_features": 10**9, "in_features": 10**9}]]},
        {"layers": [["Linear", LINEAR | {"out_features": 10**30}]]},
        {"layers": [["Linear", LINEAR | {"out_features": -1}]]},
        {"layers": [["Linear", LINEAR | {"in_features": "x"}]]},
        {"layers": [["Linear", {}]]},
        {"layers": [["Popen", {"args": ["sh"]}]]},
        {"layers": [["Linear"]]},
        {"layers": "Linear"},
        {"layers": [["ReLU", {}]] * 2000},
        {"layers": None, "module": None},
        {"module": []},
        {"pixels": "other"},
        {"seed": 10**40},
        {"seed": 2**64},
        {"seed": -1},
        {"seed": "1"},
        {"task": "regression"},
        {"which": "nobody"},
        {"notes": [1]},
        {"client": 3},
        {"preprocessing__shape": [10**12]},
        {"preprocessing__shape": [-1]},
        {"preprocessing__shape": []},
        {"preprocessing__inputs": [{"name": "a"}]},
        {"preprocessing__target__classes": ["a", "a"]},
        {"preprocessing__target__deviation": 0.0},
        {"preprocessing__inputs__0__deviation": 0.0},
        {"format": 99},
        {"format": [2]},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_other_metadata_are_one_clear_line(forged, changes):
    with pytest.raises(UserError) as caught:
        package.open_client(forged(**changes))
    assert "\n" not in str(caught.value)
    assert "forged.safetensors" in str(caught.value)


def test_a_file_of_one_model_is_not_opened_as_another(folder, forged):
    with pytest.raises(UserError, match="holds the model of east: leave --shared out"):
        package.open_client(folder / "east.safetensors", shared=True)
    assert package.open_client(forged(which="shared"), shared=True).which == "shared"
    assert package.open_client(forged(which="shared", client=None), "north").name is None


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_every_seed_that_torch_takes_is_taken(forged, seed):
    assert package.open_client(forged(seed=seed)).weights.seed == seed


@pytest.mark.parametrize(
    "tensors",
    [
        {"mean": torch.zeros(3)},
        {"mean": torch.zeros(3, 4)},
        {"deviation": torch.zeros(3)},
        {"own.odd": torch.zeros(2, 2)},
        {"own.odd": torch.full((17,), torch.nan)},
        {"mean": torch.zeros(10, dtype=torch.int64)},
    ],
    ids=lambda tensors: str(*tensors),
)
def test_other_tensors_are_one_clear_line(forged, tensors):
    with pytest.raises(UserError, match=r"forged\.safetensors is damaged"):
        package.open_client(forged(tensors=tensors))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_numbers_predict_nothing(folder, forged, value):
    mean = load_file(folder / "east.safetensors")["mean"]
    mean[3] = value
    with pytest.raises(UserError, match="its weights are not finite"):
        package.open_client(forged(tensors={"mean": mean}))


def test_deviations_are_not_negative(folder, forged):
    deviation = load_file(folder / "east.safetensors")["deviation"]
    assert package.open_client(forged(tensors={"deviation": 0 * deviation})).weights.deviation.abs().max() == 0
    deviation[2] *= -1
    with pytest.raises(UserError, match="a deviation of its weights is negative"):
        package.open_client(forged(tensors={"deviation": deviation}))


def test_every_flipped_bit_of_an_export_is_noticed(folder, tmp_path):
    content = (folder / "east.safetensors").read_bytes()
    draw = np.random.default_rng(1)
    for position, bit in zip(draw.integers(0, len(content), 200), draw.integers(0, 8, 200), strict=True):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(bit)
        (tmp_path / "damaged.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"damaged\.safetensors (is damaged|has format)"):
            package.open_client(tmp_path / "damaged.safetensors")
