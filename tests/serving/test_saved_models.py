"""Models that are read from a run folder, against those of the federation that `load` builds around the run's data."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pfedbayes as package
from federations import same_bits
from pfedbayes import runs
from pfedbayes.engine.personalisation import prior_of
from pfedbayes.engine.plan import Plan
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.maths.metrics import log_average
from pfedbayes.maths.trees import leaves
from pfedbayes.methods import METHODS
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.saved_models import _Checkpoint, saved_models

SETTINGS = [
    "data.name=blobs", "data.clients=3", "data.examples=60", "data.classes=3", "data.validation=0.3", "data.labels=iid",
    "training.rounds=2", "training.local_steps=3", "training.evaluate_every=2", "training.batch_size=8",
]  # fmt: skip


def run(folder, name, *changes):
    """A finished run with two seeds."""
    for _ in execute(read_experiment(None, [f"method.name={name}", *SETTINGS, *changes]), folder, [1, 2]):
        pass
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_what_its_federation_does(tmp_path, name):
    federation = package.load(run(tmp_path / "run", name))
    x = federation.shards.x[federation.shards.test[1]]
    np.savez(tmp_path / "new.npz", x=x.numpy())
    for which in federation.models():
        samples = 20 if federation.method.about.stochastic else None
        expected = log_average(federation.predict(which, 1, x, samples)).exp()
        site = federation.shards.names[1]
        client = package.open_client(tmp_path / "run", site, shared=which == "shared", raw=True)
        out = client.predict(tmp_path / "new.npz", samples=20)
        assert np.stack([out[f"p_{k}"] for k in range(3)], 1) == pytest.approx(expected.numpy(), abs=1e-5)
        assert torch.equal(client.outputs(20)(x), trained_model(federation, which, 1).outputs(20)(x))
        assert len(client.own.odd) == len(federation.shards.validation[1])
    if name not in ("pfedbayes", "hierarchical"):
        with pytest.raises(UserError, match="a newcomer needs a run of pfedbayes or hierarchical"):
            package.join(tmp_path / "run", tmp_path / "new.npz")


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["execution.dtype=float64"],
        ["execution.resting=file"],
        ["training.participants=1", "training.train=chosen", "training.rounds=1"],  # two clients never took part
        ["execution.resting=file", "training.participants=1", "training.train=chosen", "training.rounds=1"],
        ["training.patience=2", "training.evaluate_every=1"],  # the best round is kept
        ["training.patience=2", "training.evaluate_every=1", "execution.resting=file"],
    ],
    ids=" ".join,
)
def test_states_are_read_to_the_last_bit(tmp_path, changes):
    folder = run(tmp_path / "run", "pfedbayes", *changes)
    federation, saved = package.load(folder), saved_models(folder, read_calibration(folder))
    for client in range(3):
        for which in ("personal", "shared"):
            found, expected = saved.trained_model(which, client), trained_model(federation, which, client)
            assert found.seed == expected.seed
            assert len(leaves(found.state)) == len(leaves(expected.state))
            assert all(map(same_bits, leaves(found.state), leaves(expected.state)))
    assert all(map(same_bits, saved.shared_prior().states, prior_of(federation, "shared").states))


def test_only_the_rows_of_the_wanted_client_are_read(tmp_path):
    folder = run(tmp_path / "run", "local")
    expected = saved_models(folder, read_calibration(folder)).trained_model("personal", 1).state
    state, meta = folder / runs.STATE, {"round": "2", "seconds": "1.0", "log_bytes": "0"}
    tensors = load_file(state)
    tensors["clients"][[0, 2]] = torch.nan
    del tensors["server.0"], tensors["server.1"], tensors["cursors"]
    save_file(tensors, state, meta)
    assert same_bits(saved_models(folder, read_calibration(folder)).trained_model("personal", 1).state, expected)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("clients"), "is damaged \\(it has no tensor clients"),
        (lambda tensors: tensors.update(clients=tensors["clients"][:, 1:].clone()), r"\(clients differs\)"),
    ],
)
def test_a_state_of_another_experiment_is_refused(tmp_path, damage, message):
    folder = run(tmp_path / "run", "local")
    tensors = load_file(folder / runs.STATE)
    damage(tensors)
    save_file(tensors, folder / runs.STATE, {"round": "2", "seconds": "1.0", "log_bytes": "0"})
    with pytest.raises(UserError, match=message):
        package.open_client(folder, "client 1")


def test_models_are_computed_by_the_plan_of_their_run(tmp_path, monkeypatch):
    folder, activated = run(tmp_path / "run", "local", "execution.threads=1"), []
    monkeypatch.setattr(Plan, "activate", lambda plan: activated.append(plan.threads))
    saved_models(folder, read_calibration(folder))
    assert activated == [1]


def test_a_model_that_is_not_finite_is_refused(tmp_path):
    folder = run(tmp_path / "run", "local")
    tensors = load_file(folder / runs.STATE)
    tensors["clients"][1, 0] = torch.nan
    save_file(tensors, folder / runs.STATE, {"round": "2", "seconds": "1.0", "log_bytes": "0"})
    saved = saved_models(folder, read_calibration(folder))
    assert saved.trained_model("personal", 0).state is not None
    with pytest.raises(UserError, match="a model in it is not finite"):
        saved.trained_model("personal", 1)


def test_a_missing_state_is_one_clear_line(tmp_path):
    folder = run(tmp_path / "run", "local")
    (folder / runs.STATE).unlink()
    with pytest.raises(UserError, match=r"cannot read .*state\.safetensors"):
        package.open_client(folder, "client 1")


def test_methods_that_adapt_need_the_data_of_the_run(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3))
    table = ["a,b,target", *(f"{a:.3f},{b:.3f},{'yes' if c > 0 else 'no'}" for a, b, c in x)]
    (tmp_path / "clients").mkdir()
    for name in ("one", "two"):
        (tmp_path / "clients" / f"{name}.csv").write_text("\n".join(table))
    settings = [f"data.path={tmp_path / 'clients'}", "data.target=target", "training.rounds=2", "method.name=fedper"]
    for _ in execute(read_experiment(None, settings), tmp_path / "run", [1]):
        pass
    assert package.open_client(tmp_path / "run", "one").weights is not None
    (tmp_path / "clients").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="does not exist"):
        package.open_client(tmp_path / "run", "one")


def test_a_shared_model_of_another_shape_is_refused(tmp_path):
    folder = run(tmp_path / "run", "fedavg")
    saved = saved_models(folder, read_calibration(folder))
    other = SimpleNamespace(about={"round": "2"}, names={"server.0"}, tensor=lambda name: torch.zeros(3))
    with pytest.raises(UserError, match=r"does not fit the experiment beside it \(server.0 differs\)"):
        saved._server(_Checkpoint(other, folder / "state"), 0)


def test_only_the_state_of_the_finished_run_is_read(tmp_path):
    folder = run(tmp_path / "run", "fedavg")
    saved = saved_models(folder, read_calibration(folder))
    expected = saved.trained_model("shared", 0).state
    with pytest.raises(UserError, match="is not the state of the finished run: finish it with pfedbayes run --resume"):
        dataclasses.replace(saved, rounds=9).trained_model("shared", 0)
    assert same_bits(dataclasses.replace(saved, rounds=None).trained_model("shared", 0).state, expected)
    # While a finished run is being extended, its state is kept aside.
    shutil.copy(folder / runs.STATE, folder / runs.FINISHED)
    with pytest.raises(UserError, match="is not the state of the finished run"):
        dataclasses.replace(saved, rounds=9).trained_model("shared", 0)
    (folder / runs.STATE).unlink()
    assert same_bits(saved.trained_model("shared", 0).state, expected)


@pytest.mark.parametrize("name", ["pfedbayes", "fedavg", "fedavg-ft"])  # own states, server states, adapted ones
def test_models_that_clients_trained_alone_are_those_of_the_federation(tmp_path, name):
    folder = run(tmp_path / "run", name, "evaluation.alone=true")
    federation, record = package.load(folder), read_calibration(folder)
    assert record.alone == 2  # behind the federations of two seeds
    x = federation.shards.x[federation.shards.test[1]]
    found = package.open_client(folder, "client 1", model="alone").outputs(20)(x)
    which = "personal" if federation.method.about.personal else "shared"
    expected, joined = (trained_model(federation, which, 1, index).outputs(20)(x) for index in (2, 0))
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, joined, atol=1e-4)
