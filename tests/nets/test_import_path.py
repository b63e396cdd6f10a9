"""User-defined networks by import path."""

import sys
import tomllib

import pytest
import torch

import pfedbayes
from pfedbayes import runs
from pfedbayes.data import Shards, load_shards
from pfedbayes.errors import UserError
from pfedbayes.nets.import_path import build_module
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import build_model, fit_net, from_sections, read_experiment
from pfedbayes.serving.saved_models import saved_models

SOURCE = """
import torch

class MyNet(torch.nn.Module):
    def __init__(self, shape, outputs, width=4, deep=False):
        super().__init__()
        sizes = [shape[0], width, width, outputs] if deep else [shape[0], width, outputs]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)

def no_module(shape, outputs):
    return "text"

def too_wide(shape, outputs):
    return torch.nn.Linear(shape[0], outputs + 1)

def other_inputs(shape, outputs):
    return torch.nn.Linear(shape[0] + 1, outputs)

def normed(shape, outputs):
    return torch.nn.Sequential(torch.nn.Linear(shape[0], 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, outputs))

CONSTANT = 3
"""
BLOBS = ["data.name=blobs", "data.clients=3", "data.examples=40", "training.rounds=2", "training.local_steps=2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module, as the current one."""
    (tmp_path / "my_nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_nets", None)


def test_it_is_trained_and_comes_back(here):
    experiment = read_experiment(None, [*BLOBS, "net.name=my_nets:MyNet", "net.width=7", "net.deep=true"])
    list(execute(experiment, here / "run", [1]))
    with pytest.raises(UserError, match=r"names code for its network \('my_nets:MyNet'\).*add --trust-module"):
        pfedbayes.load(here / "run")
    back = pfedbayes.load(here / "run", trust_module=True)
    assert [tuple(shape) for shape in back.model.net.shapes][::2] == [(7, 4), (7, 7), (10, 7)]
    assert str(here) not in sys.path


def test_tables_among_its_settings_are_trained_resumed_and_loaded(here):
    (here / "my_nets.py").write_text(
        SOURCE + "def tabled(shape, outputs, layers, about):\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(one['in'], one['out']) for one in layers))\n"
    )
    (here / "mine.toml").write_text(
        'net = { name = "my_nets:tabled", about = { "a b" = "x\\n\\"]", deep = { er = [[1], [{ a = 1e-05 }]] } }, '
        "layers = [{ in = 4, out = 5 }, { in = 5, out = 10 }] }\n"
    )
    experiment = read_experiment(here / "mine.toml", BLOBS)
    rounds = execute(experiment, here / "run", [1])
    next(rounds)
    rounds.close()
    assert runs.read_run(here / "run").experiment == experiment
    list(execute(experiment, here / "run", [1], resume=True))
    assert pfedbayes.load(here / "run", trust_module=True).round == 2
    assert (
        saved_models(here / "run", read_calibration(here / "run"), "cpu", trust_module=True).model.net.num_params == 85
    )


@pytest.mark.parametrize("value", ["1979-05-27", "inf", "[nan]", "{ a = [07:32:00] }"])
def test_a_setting_that_no_run_folder_can_hold_is_refused_before_training(here, value):
    with pytest.raises(UserError, match=r"net\.when"):
        read_experiment(None, [*BLOBS, "net.name=my_nets:MyNet", f"net.when={value}"])


def test_its_settings_survive_a_config():
    sections = {"net": {"name": "my_nets:MyNet", "width": 7, "hidden": [3], "init": "kaiming"}}
    experiment = from_sections(sections)
    assert experiment.net.settings == {"width": 7, "hidden": [3]}
    back = tomllib.loads(to_toml(experiment.sections()))
    assert from_sections(back) == experiment
    assert experiment.digest([1]) != from_sections({"net": {"name": "my_nets:MyNet"}}).digest([1])


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("my_netz:MyNet", {}, "cannot import 'my_netz' (ModuleNotFoundError"),
        ("my_nets:MyNe", {}, "did you mean 'MyNet'?"),
        ("my_nets:CONSTANT", {}, "is not a class or function"),
        ("my_nets:MyNet", {"wide": 3}, "wide=3): TypeError"),
        ("my_nets:no_module", {}, "returns a str"),
        ("my_nets:too_wide", {}, "maps 2 examples to shape (2, 3): it must be (2, 2)"),
        ("my_nets:other_inputs", {}, "cannot take inputs of shape (2, 5): RuntimeError"),
    ],
)
def test_what_is_wrong_is_named(here, name, settings, words):
    with pytest.raises(UserError) as caught:
        build_module(name, (5,), 2, settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_that_fails_and_hidden_state_are_named(here):
    (here / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        build_module("broken:Net", (5,), 2, {})
    experiment = read_experiment(None, [*BLOBS, "net.name=my_nets:normed"])
    with pytest.raises(UserError, match="GroupNorm instead of BatchNorm"):
        build_model(experiment.net, load_shards(experiment.data).task_shape, experiment.method)


def test_an_unknown_net_names_those_there_are():
    with pytest.raises(UserError, match=r"choose one of mlp, table, vgg, cnn, or a module like my_module:MyNet"):
        read_experiment(None, ["net.name=resnet"])
    with pytest.raises(UserError, match=r"unknown key net\.width"):
        read_experiment(None, ["net.width=3"])


@pytest.mark.parametrize(
    ("shape", "count", "name", "hidden", "params"),
    [
        ((6,), 50, "mlp", (16,), 6 * 16 + 16 + 16 * 2 + 2),
        ((6,), 900, "mlp", (30,), None),
        ((6,), 20_000, "mlp", (100,), None),
        ((1, 28, 28), 50, "mlp", (100,), 784 * 100 + 100 + 202),
        ((3, 32, 32), 50, "vgg", (100,), None),
        ((3, 20, 26), 50, "cnn", (100,), (27 * 16 + 16) + (144 * 32 + 32) + (32 * 5 * 6 * 2 + 2)),
        ((1, 4, 4), 50, "cnn", (100,), 16 * 2 + 2),
    ],
)
def test_a_net_is_chosen_by_the_shape_and_number_of_examples(shape, count, name, hidden, params):
    dtype = torch.uint8 if len(shape) == 3 else torch.float32
    shards = Shards.from_arrays([(torch.zeros(count, *shape, dtype=dtype), torch.arange(count) % 2)])
    experiment = read_experiment(None, ["data.path=x.npz"])
    net = fit_net(experiment.net, shards, experiment.method)
    assert (net.name, net.hidden) == (name, hidden)
    with pytest.raises(ValueError, match="call fit_net first"):
        build_model(experiment.net, shards.task_shape, experiment.method)
    model = build_model(net, shards.task_shape, experiment.method)
    assert params in (None, model.net.num_params)
    assert model.outputs(torch.zeros(model.net.num_params), shards.x[:3]).shape == (3, 2)


def test_the_cnn_needs_images():
    shards = Shards.from_arrays([(torch.zeros(5, 3), torch.arange(5) % 2)])
    experiment = read_experiment(None, ["data.path=x.csv", "net.name=cnn"])
    with pytest.raises(UserError, match="the CNN takes images"):
        build_model(experiment.net, shards.task_shape, experiment.method)
