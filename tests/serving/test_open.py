import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clinics import clinics

import pfedbayes as package
from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.files.typed import to_json
from pfedbayes.methods import METHODS
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.schema import JoiningRecord
from pfedbayes.serving.export import export
from pfedbayes.serving.open import _own_model, _require_model, _verdicts, file_name
from pfedbayes.trust.gate import Gate
from pfedbayes.trust.joining import Verdict


def test_a_run_has_to_be_finished(tmp_path):
    clinics(60).to_csv(tmp_path / "clinics.csv", index=False)
    settings = [f"data.path={tmp_path / 'clinics.csv'}", "data.target=outcome", "data.client_column=hospital"]
    rounds = execute(
        read_experiment(None, [*settings, "data.ignore=['patient']", "training.rounds=3"]), tmp_path / "a", [1]
    )
    next(rounds)
    rounds.close()
    with pytest.raises(UserError, match="is not finished: continue it with pfedbayes run --resume"):
        package.open_client(tmp_path / "a", "north")


def test_images_are_predicted_without_their_data_set(tmp_path):
    settings = ["data.clients=2", "data.train_per_label=4", "data.test_per_label=2", "data.validation=0.25"]
    experiment = read_experiment(None, [*settings, "training.rounds=2", "training.local_steps=2", "net.hidden=[8]"])
    for _ in execute(experiment, tmp_path / "run", [1]):
        pass
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", x=images, id=np.arange(5))
    out = package.open_client(tmp_path / "run", "client 1").predict(tmp_path / "new.npz")
    assert out["id"].tolist() == [0, 1, 2, 3, 4]
    assert [name for name in out if name.startswith("p_")] == [f"p_{k}" for k in range(10)]


@pytest.mark.parametrize(("count", "cut"), [(20, False), (21, True)])
def test_twenty_of_many_clients_are_named(tmp_path, monkeypatch, count, cut):
    names = [f"site {k}" for k in range(count)]
    monkeypatch.setattr("pfedbayes.serving.open.read_calibration", lambda _: SimpleNamespace(names=names))
    with pytest.raises(UserError) as caught:
        package.open_client(tmp_path, "nobody")
    assert ("site 19, …:" in str(caught.value), "site 19:" in str(caught.value)) == (cut, not cut)
    with pytest.raises(UserError, match=r"with one of site 0, .*site 19, or --shared"):
        package.open_client(tmp_path)


def test_newcomers_are_named_in_order_behind_the_clients(tmp_path, monkeypatch):
    monkeypatch.setattr("pfedbayes.serving.open.read_calibration", lambda _: SimpleNamespace(names=["z"]))
    (tmp_path / "newcomers").mkdir()
    for name in "hcefdgbaij":
        (tmp_path / "newcomers" / f"{name}.safetensors").touch()
    (tmp_path / "newcomers" / "link.safetensors").symlink_to(tmp_path / "newcomers" / "a.safetensors")
    with pytest.raises(UserError, match="only z, a, b, c, d, e, f, g, h, i, j: predict"):
        package.open_client(tmp_path, "nobody")


def test_a_name_of_at_most_200_bytes_is_a_file_name():
    for name in ("a", "ä" * 100, "site 3", "a.b"):
        assert file_name(name, ".safetensors", "remedy") == f"{name}.safetensors"
    for name in ("", ".", ".a", "a/b", "a\n", "ä" * 100 + "a"):
        with pytest.raises(UserError, match="cannot be a file name: remedy"):
            file_name(name, ".safetensors", "remedy")


def test_a_model_that_the_method_does_not_have_is_named_with_the_remedy():
    with pytest.raises(UserError, match="Local has no shared model: leave --shared out"):
        _require_model(METHODS["local"](), "shared")
    with pytest.raises(UserError, match="FedAvg has no personal model: add --shared"):
        _require_model(METHODS["fedavg"](), "personal")
    _require_model(METHODS["local"](), "personal")
    _require_model(METHODS["fedavg"](), "shared")


def test_a_file_holds_one_of_the_models_of_its_client(home, tmp_path):
    client = package.open_client(home / "outcome", "north")
    for which, other, title in (
        ("joined", "alone", "the model of north"), ("alone", "joined", "the model that north trained alone"),
    ):  # fmt: skip
        path = tmp_path / f"{which}.safetensors"
        export(dataclasses.replace(client, which="personal" if which == "joined" else "alone"), path)
        assert package.open_client(path).title == package.open_client(path, model=which).title == title
        with pytest.raises(UserError, match=f"holds {title}: leave --model out, or give the run folder"):
            package.open_client(path, model=other)
        with pytest.raises(UserError, match=f"holds {title}: leave --shared out, or give the run folder"):
            package.open_client(path, shared=True)
        assert package.open_client(path, "north").name == "north"
        with pytest.raises(UserError, match="is of 'north' and not of 'south': correct --client"):
            package.open_client(path, "south")
    with pytest.raises(UserError, match="there is no model 'own': choose personal, joined, alone, shared, gated"):
        package.open_client(home / "outcome", "north", model="own")
    with pytest.raises(UserError, match="--shared and --model joined exclude each other"):
        package.open_client(home / "outcome", "north", model="joined", shared=True)


OPEN, SHUT = (Gate(torch.tensor(own), 0.1, torch.zeros(2)) for own in ([True, True], [True, False]))


def verdict(client, use):
    conclusion = "better" if use == "joined" else "worse"
    return Verdict(client, 9, 1.0, 1.5, 0.5, 0.1, 0.9, 0.0, conclusion, use)


@pytest.mark.parametrize(
    ("name", "wanted", "gates", "chosen"),
    [
        ("a", None, (OPEN, SHUT), "personal"), ("b", None, (OPEN, SHUT), "gated"), ("b", None, (), "personal"),
        ("c", None, (), "alone"), ("c", "personal", (), "personal"), ("a", "alone", (), "alone"),
        ("a", "gated", (OPEN, SHUT), "gated"),
    ],
)  # fmt: skip
def test_a_client_predicts_with_what_cross_validation_and_its_labels_say(name, wanted, gates, chosen):
    verdicts = {"a": verdict("a", "joined"), "c": verdict("c", "alone")}
    record = SimpleNamespace(names=["a", "b"], scores={"alone": ()}, gates=gates)
    which, notes = _own_model(record, name, wanted, verdicts)
    assert which == chosen
    told = f"by cross-validation its own model is the better one ({verdicts['c'].sentence()})"
    assert notes == ((told,) if name == "c" and wanted is None else ())


@pytest.mark.parametrize(("wanted", "message"), [("alone", "trained alone"), ("gated", "no gated predictions")])
def test_a_model_that_a_run_does_not_have_is_refused(wanted, message):
    with pytest.raises(UserError, match=message):
        _own_model(SimpleNamespace(names=["a"], scores={"personal": ()}, gates=()), "a", wanted, {})


def test_verdicts_are_those_of_the_cross_validation(home, tmp_path):
    folder = shutil.copytree(home / "outcome", tmp_path / "run")
    summary = runs.read_run(folder).summary
    for joining, expected in (([JoiningRecord(verdict("north", "alone"))], {"north": "alone"}), ([], {}), (None, {})):
        (folder / runs.SUMMARY).write_text(dump_json(to_json(dataclasses.replace(summary, joining=joining))))
        assert {name: one.use for name, one in _verdicts(folder).items()} == expected
    (folder / runs.SUMMARY).unlink()
    assert _verdicts(folder) == {}
