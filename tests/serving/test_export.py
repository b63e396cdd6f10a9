import json
import logging
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from clinics import clinics, train

import pfedbayes as package
from pfedbayes.data.own.columns import canonical
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.data.own.target import Target
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.export import MeanNetwork, export

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_export.py"


def test_images_of_ones_own_are_predicted_personalised_and_exported(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for client in ("a", "b", "late"):
        for label, low in (("dark", 0), ("light", 128)):
            folder = tmp_path / ("late" if client == "late" else "tree/" + client) / label
            folder.mkdir(parents=True)
            for k in range(12):
                Image.fromarray(rng.integers(low, low + 128, (16, 16), dtype=np.uint8)).save(folder / f"{k}.png")
    settings = ["training.rounds=4", "training.local_steps=4", "training.evaluate_every=2"]
    for _ in execute(read_experiment(None, [f"data.path={tmp_path / 'tree'}", *settings]), tmp_path / "run", [1]):
        pass
    joined = package.join(tmp_path / "run", tmp_path / "late", steps=2, certify=False)
    assert "no certificate: none was requested" in joined.describe()[-1]
    assert (joined.client.name, joined.trained, joined.held) == ("late", 24, 0)
    images = tmp_path / "late" / "light"
    out = joined.client.predict(images)
    assert out["file"].tolist() == sorted(f"{k}.png" for k in range(12))
    export(joined.client, tmp_path / "late.safetensors")
    example = runpy.run_path(str(EXAMPLE))
    about, weights = example["load"](tmp_path / "late.safetensors")
    (chunk,) = read_chunks(images, joined.client.preprocessing)
    chances, _ = example["predict"](about, weights, chunk.x)
    assert chances[:, 0].numpy() == pytest.approx(out["p_dark"], abs=1e-5)
    # The mean network takes pixels from 0 to 255.
    mean = joined.client.weights.model.outputs(joined.client.weights.mean, chunk.x).softmax(-1)
    assert MeanNetwork(joined.client)(chunk.x.float()) == pytest.approx(mean, abs=1e-6)


def test_the_example_knows_categories_like_the_package():
    example = runpy.run_path(str(EXAMPLE))
    texts = "1 1.0 1e0 +1 -1 0 -0 -0.0 007 0.50 .5 true TRUE False x 12_34 1e400 -1e400 12345678901234567890 １ nan"
    for text in texts.split():
        assert example["canonical"](text) == canonical(text)
    column = {"name": "q", "kind": "category", "categories": ["1", "True", "false"]}
    rows = [{"q": cell} for cell in ("1.0", "true", "False", "2", "")]
    places = example["encode"]({"preprocessing": {"inputs": [column]}}, rows).argmax(1)
    assert places.tolist() == [0, 1, 2, 3, 3]


def test_the_example_reads_an_export_without_this_package(home, run):
    for target in ("outcome", "cost"):
        run("export", target, "--client", "north", "-o", f"{target}.safetensors")
        run("predict", f"{target}.safetensors", "--input", "new.csv", "-o", "a.csv")
        run("predict", target, "--client", "north", "--input", "new.csv", "-o", "b.csv")
        assert (home / "a.csv").read_bytes() == (home / "b.csv").read_bytes()
        blocked = "import runpy, sys; sys.modules.update(pfedbayes=None, safetensors=None, numpy=None); "
        script = f"{blocked}sys.argv[1:] = [{target + '.safetensors'!r}, 'new.csv']; runpy.run_path({str(EXAMPLE)!r}, "
        command = [sys.executable, "-W", "ignore", "-c", script + "run_name='__main__')"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home, timeout=100)
        assert done.returncode == 0, done.stderr
        said = [line.replace(",", "").split() for line in done.stdout.splitlines()]
        expected = pandas.read_csv(home / "b.csv")
        value, spread = ("p_ill", None) if target == "outcome" else ("mean", "deviation")
        assert [float(words[1]) for words in said] == pytest.approx(expected[value], rel=1e-4)
        if spread:
            assert [float(words[3]) for words in said] == pytest.approx(expected[spread], rel=1e-4)


def test_all_clients_are_exported_at_once(home, run):
    done = run("export", "outcome", "--all", "-o", "models")
    assert sorted(path.name for path in (home / "models").iterdir()) == sorted(
        Path(line).name for line in done.out.splitlines()
    )
    client = package.open_client(home / "models" / "south.safetensors")
    assert (client.name, client.which) == ("south", "personal")
    with pytest.raises(UserError, match=r"is of 'south' and not of 'north'"):
        package.open_client(home / "models" / "south.safetensors", "north")


def test_thresholds_of_an_export_are_those_of_a_prediction(home, run):
    run("export", "outcome", "--client", "north", "-o", "t.safetensors", "--error", "0.08", "--coverage", "0.8")
    header = (home / "t.safetensors").read_bytes()
    about = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["client"])
    out = package.open_client(home / "outcome", "north").predict(home / "new.csv", error=0.08, coverage=0.8)
    most = np.maximum(out["p_ill"], out["p_well"])
    assert ((-np.log1p(-most) <= about["thresholds"]["answer"]) == out["abstain"]).all()
    within = np.stack([1 - out["p_ill"], 1 - out["p_well"]]) <= about["thresholds"]["sets"]
    within |= np.stack([out["p_ill"], out["p_well"]]) == most
    assert (within.sum(0) == [len(words.split("|")) if words else 0 for words in out["conformal_set"]]).all()


@pytest.mark.parametrize(("pixels", "scaled"), [("unit", [0.0, 0.2, 1.0]), ("signed", [-1.0, -0.6, 1.0])])
def test_the_mean_network_scales_pixels_as_training_did(pixels, scaled):
    model = SimpleNamespace(net=SimpleNamespace(module=lambda mean: torch.nn.Identity()), pixels=pixels)
    client = SimpleNamespace(
        weights=SimpleNamespace(model=model, mean=None),
        gated=None,
        preprocessing=SimpleNamespace(image=True, target=Target("shade", "regression", None, 3.0, 2.0)),
        likelihood=Regression(1.0),
    )
    network, x = MeanNetwork(client), torch.tensor([[0.0, 51.0, 255.0]])
    assert network(x).flatten().tolist() == pytest.approx([3 + 2 * value for value in scaled])
    client.preprocessing.image = False
    assert MeanNetwork(client)(x).flatten().tolist() == [3.0, 105.0, 513.0]
    client.likelihood = Regression()  # the last output is the learned noise
    assert MeanNetwork(client)(x).flatten().tolist() == [3.0, 105.0]


@pytest.fixture(params=["outcome", "cost"])
def mean_network(request, home):
    """A run, inputs, and what the mean network of north says of them, in the units of the target."""
    client = package.open_client(home / request.param, "north")
    (chunk,) = read_chunks(home / "new.csv", client.preprocessing)
    output, target = client.weights.model.outputs(client.weights.mean, chunk.x), client.preprocessing.target
    expected = output.softmax(-1) if target.classes else output[:, :1] * target.deviation + target.mean
    return request.param, chunk.x, pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)


def test_the_mean_network_runs_as_onnx(home, run, mean_network):
    import onnx
    from onnx.reference import ReferenceEvaluator

    folder, x, expected = mean_network
    logging.getLogger("torch.onnx").setLevel(logging.NOTSET)
    run("export", folder, "--client", "north", "--onnx", "-o", "a.onnx")
    content = onnx.load(home / "a.onnx")
    (about,) = content.metadata_props
    preprocessing = package.open_client(home / folder, "north").preprocessing
    assert (about.key, about.value) == ("preprocessing", json.dumps(preprocessing.as_object()))
    network = ReferenceEvaluator(content)
    assert network.run(None, {"x": x.numpy()})[0] == expected
    assert network.output_names == ["probabilities" if folder == "outcome" else "mean"]
    assert not logging.getLogger("torch.onnx").isEnabledFor(logging.WARNING)  # of packages that are not needed


def test_the_mean_network_runs_by_torch_export(home, run, mean_network):
    folder, x, expected = mean_network
    run("export", folder, "--client", "north", "--torch-export", "-o", "a.pt2")
    beside = {"preprocessing.json": ""}
    assert torch.export.load(home / "a.pt2", extra_files=beside).module()(x).numpy() == expected
    assert beside["preprocessing.json"] == package.open_client(home / folder, "north").preprocessing.to_json()


def test_a_module_of_ones_own_is_exported_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clinics(80).to_csv(tmp_path / "clinics.csv", index=False)
    (tmp_path / "residual_net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, shape, outputs, width=3):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(*shape, width), nn.Linear(width, outputs)\n"
        "    def forward(self, x):\n        return self.b(self.a(x).tanh())\n"
    )
    train(tmp_path, "outcome", ["patient", "cost"], net__name="residual_net:Net", net__width=4, training__rounds=2)
    with pytest.raises(UserError, match=r"outcome names code for its network .* add --trust-module"):
        package.open_client(tmp_path / "outcome", "east")
    client = package.open_client(tmp_path / "outcome", "east", trust_module=True)
    export(client, tmp_path / "east.safetensors")
    with pytest.raises(UserError, match=r"east\.safetensors names code for its network .* add --trust-module"):
        package.open_client(tmp_path / "east.safetensors")
    again = package.open_client(tmp_path / "east.safetensors", trust_module=True)
    assert client.predict("clinics.csv")["p_ill"] == pytest.approx(again.predict("clinics.csv")["p_ill"])


def test_what_onnx_needs_is_said(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    done = command("export", "outcome", "--client", "north", "--onnx")
    assert done.code == 2
    assert "pip install 'pfedbayes[onnx]'" in done.err


def test_a_missing_folder_is_named_before_anything_is_computed(home, tmp_path, monkeypatch):
    monkeypatch.setattr("pfedbayes.serving.export.client_bytes", lambda *_: pytest.fail("computed"))
    with pytest.raises(UserError, match=r"the folder .*nowhere does not exist: create it"):
        export(package.open_client(home / "outcome", "north"), tmp_path / "nowhere" / "a.safetensors")
