"""Methods from outside: import paths and plugins are trained, resumed and reported, and only the user names code."""

import json
import sys
from importlib.metadata import EntryPoint

import pytest

import pfedbayes
from own_method import HALF
from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.flower.settings import from_run_config
from pfedbayes.methods import FedAvg
from pfedbayes.runs import naming
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.naming import NotImported, make_imported, make_method, make_without_code, method_name

BLOBS = [
    "data.name=blobs", "data.clients=3", "data.examples=40", "net.hidden=[4]", "training.rounds=4",
    "training.evaluate_every=2", "training.local_steps=2",
]  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of the user, with the method in a file."""
    (tmp_path / "half_method.py").write_text(HALF)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "half_method", raising=False)
    yield tmp_path
    sys.modules.pop("half_method", None)


def settings(*more):
    return [argument for each in (*BLOBS, *more) for argument in ("--set", each)]


def test_a_method_in_a_file_is_trained_resumed_and_reported(home, in_process):
    assert len([line for line in HALF.splitlines() if line]) <= 12
    done = in_process("run", "--out", "run", *settings("method.name=half_method:Half", "method.pace=0.25"))
    assert done.code == 0, done.err
    assert "Half on blobs" in done.err
    half = runs.read_run(home / "run")
    assert half.info.method.title == "Half"
    assert 'name = "half_method:Half"' in (home / "run" / "config.toml").read_text()
    whole = in_process("run", "--out", "whole", *settings("method.name=fedavg"))
    assert whole.code == 0
    plain = runs.read_run(home / "whole")
    assert half.rounds[-1].shared["mean"]["nll"] != plain.rounds[-1].shared["mean"]["nll"]

    more = ["--resume", "--out", "run", "--set", "training.rounds=6"]
    refused = in_process("run", *more)
    assert refused.code == 2
    assert "names code for its method ('half_method:Half')" in refused.err
    assert in_process("run", *more, "--trust-module").code == 0
    again = ["--set", "training.rounds=8", "--set", "method.name=half_method:Half"]
    assert in_process("run", "--resume", "--out", "run", *again).code == 0
    assert runs.read_run(home / "run").rounds[-1].round == 8


def test_reports_of_a_foreign_method_import_nothing(home, in_process):
    assert in_process("run", "--out", "run", *settings("method.name=half_method:Half")).code == 0
    (home / "half_method.py").write_text("raise RuntimeError('imported')")
    del sys.modules["half_method"]
    assert in_process("report", "run").code == 0
    assert "Half" in (home / "run" / "report.html").read_text()
    assert isinstance(runs.read_run(home / "run").experiment.method, NotImported)
    for call in (lambda: pfedbayes.load("run"), lambda: pfedbayes.open_client("run", shared=True)):
        with pytest.raises(UserError, match="names code for its method"):
            call()
    assert "half_method" not in sys.modules


def test_a_federation_with_a_method_of_ones_own_is_saved_and_loaded(home, monkeypatch):
    monkeypatch.syspath_prepend(home)
    from half_method import Half

    experiment = read_experiment(None, [*BLOBS, "method.name=half_method:Half"])
    shards = pfedbayes.load_shards(experiment.data)
    model = pfedbayes.Model(pfedbayes.Net(pfedbayes.mlp([4, 3, 10])), pfedbayes.Classification())
    federation = pfedbayes.Federation(shards, model, Half(pace=0.1), pfedbayes.Training(rounds=2, local_steps=1))
    assert [int(record) for record in federation.rounds()] == [1, 2]
    pfedbayes.save(federation, home / "saved")
    with pytest.raises(UserError, match="--trust-module"):
        pfedbayes.load(home / "saved", shards, model)
    again = pfedbayes.load(home / "saved", shards, model, trust_module=True)
    assert again.method == Half(pace=0.1)
    assert again.servers[0].equal(federation.servers[0])


def test_messages_name_only_what_is_imported(home, monkeypatch):
    monkeypatch.syspath_prepend(home)
    config = {"method.name": "half_method:Half", "federation.clients": 3}
    with pytest.raises(UserError, match="import half_method in the app"):
        from_run_config(config)
    assert "half_method" not in sys.modules
    import half_method

    settings = from_run_config(config)
    assert settings.method == half_method.Half()
    assert settings.identity()["method.name"] == "half_method:Half"
    for name in ("subprocess:Popen", "sys:path"):
        with pytest.raises(UserError, match="is not a method"):
            make_imported(name, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half_method:Hlaf", "has no 'Hlaf': did you mean 'Half'"),
        ("no_such_module:Half", "method.name='no_such_module:Half': cannot import"),
        ("json:loads", "is not a method: name a frozen dataclass"),
        ("pfedbayes:Method", "is not a method"),
        ("fedavgg", "did you mean 'fedavg'.*my_module:MyMethod"),
    ],
)
def test_what_is_no_method_is_refused(home, name, message):
    with pytest.raises(UserError, match=message):
        read_experiment(None, [f"method.name={json.dumps(name)}"])


def test_settings_of_a_method_of_ones_own_are_checked(home):
    with pytest.raises(UserError, match=r"unknown key method\.speed: .*pace"):
        make_method("half_method:Half", {"speed": 1})
    assert make_without_code("half_method:Half", {"pace": 1}) == NotImported("half_method:Half", {"pace": 1})
    assert method_name(make_without_code("half_method:Half", {})) == "half_method:Half"
    assert make_without_code("fedavg", {}) == FedAvg()


def test_plugins_have_names_like_our_methods(home, monkeypatch, in_process):
    points = [EntryPoint("half", "half_method:Half", naming.GROUP), EntryPoint("fedavg", "evil:Method", naming.GROUP)]
    monkeypatch.setattr(naming, "entry_points", lambda group: [point for point in points if point.group == group])
    done = in_process("run", "--out", "run", *settings("method.name=half"))
    assert done.code == 0, done.err
    assert 'name = "half"' in (home / "run" / "config.toml").read_text()
    assert in_process("run", "--resume", "--out", "run", "--set", "training.rounds=6").code == 0
    assert type(make_method("fedavg", {})) is FedAvg  # a plugin replaces none of ours
    assert "│ half " in in_process("methods").out
