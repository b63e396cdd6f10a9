import dataclasses
import json

import pytest
import torch
from blobs import BLOBS, same_bits

import pfedbayes
from federations import federation, make_shards, model_for, trained
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.files.checksums import dump_json
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.runs.kept_model import KeptModel


def test_ones_own_federation_is_kept_and_comes_back(tmp_path):
    method = PFedBayes(zeta=2.0)
    ours = trained(method, 2)
    pfedbayes.save(ours, tmp_path / "mine")
    back = pfedbayes.load(tmp_path / "mine", make_shards(), model_for(method), device="cpu")
    assert (back.round, back.method, back.train, back.seeds) == (2, method, ours.train, ours.seeds)
    assert same_bits(ours, back)
    x = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(ours.predict("personal", 1, x, 5), back.predict("personal", 1, x, 5))
    for one in (ours, back):
        one.train_round()
    assert same_bits(ours, back)
    pfedbayes.save(back, tmp_path / "mine")  # a newer state may take the place of an older one


def test_a_method_that_no_config_can_name_cannot_be_saved(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine(FedAvg):
        pass

    with pytest.raises(UserError, match="Mine is defined in a script or a function"):
        pfedbayes.save(federation(Mine()), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_what_load_and_save_need_is_said(tmp_path):
    ours = federation(FedAvg())
    pfedbayes.save(ours, tmp_path / "mine")
    with pytest.raises(UserError, match="its shards and model"):
        pfedbayes.load(tmp_path / "mine")
    other = dataclasses.replace(make_shards(), train=make_shards().train[:4], test=make_shards().test[:4],
                                validation=make_shards().validation[:4], names=make_shards().names[:4])  # fmt: skip
    with pytest.raises(UserError, match="does not fit"):
        pfedbayes.load(tmp_path / "mine", other, model_for(FedAvg()))
    list(execute(read_experiment(None, BLOBS), tmp_path / "run", [1]))
    with pytest.raises(UserError, match="holds a run"):
        pfedbayes.save(ours, tmp_path / "run")


def test_a_run_of_a_gpu_can_be_loaded_without_one(tmp_path):
    list(execute(read_experiment(None, BLOBS), tmp_path / "run", [1], device="cpu"))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["plan"] |= {"device": "cuda", "threads": None, "graph": True, "noise": "philox"}
    (tmp_path / "run" / "run.json").write_text(dump_json(info))
    assert pfedbayes.load(tmp_path / "run", device="cpu").plan.device == "cpu"


def in_python(module, likelihood, x, y):
    """A trained federation of one's own arrays and module, with test and validation data."""
    rows = [torch.arange(k, len(x), 2) for k in range(2)]
    parts = [tuple(own[k::3] for own in rows) for k in range(3)]
    shards = pfedbayes.Shards(x, y, *parts, names=("a", "b"), num_classes=None if y.is_floating_point() else 2)
    model = pfedbayes.Model(pfedbayes.Net(module), likelihood)
    ours = pfedbayes.Federation(shards, model, PFedBayes(), pfedbayes.Training(rounds=2, local_steps=2))
    assert list(ours.rounds()) == [1, 2]
    return ours


@pytest.mark.parametrize("task", ["labels", "numbers"])
def test_a_federation_made_in_python_is_used_like_a_run(tmp_path, task, in_process):
    x = torch.linspace(-2, 2, 120).reshape(60, 2)
    if task == "labels":
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        ours = in_python(module, pfedbayes.Classification(), x, (x[:, 0] > 0).long())
    else:
        ours = in_python(pfedbayes.WithNoise(torch.nn.Linear(2, 1)), pfedbayes.Regression(), x, x[:, :1])
    folder = pfedbayes.save(ours, tmp_path / "saved")
    assert in_process("report", folder).code == 0
    assert "pFedBayes" in (folder / "report.html").read_text()
    assert in_process("verify", folder).code == 0
    client = pfedbayes.open_client(folder, "b", model="personal")
    theirs = trained_model(ours, "personal", 1).outputs(20)(x)
    assert torch.equal(client.outputs(20)(x), theirs)
    assert len(client.own.odd) == 10
    assert repr(client) == f"Client(the model of b; {ours.model.likelihood.task} of y, 10 own calibration rows)"
    assert in_process("export", folder, "--client", "b", "-o", tmp_path / "b.safetensors").code == 0
    again = pfedbayes.open_client(tmp_path / "b.safetensors")
    columns = {"x0": [0.5], "x1": [1.0]}
    assert {*again.predict(columns)} >= ({"abstain", "p_1"} if task == "labels" else {"mean", "lower"})
    (tmp_path / "east.csv").write_text("x0,x1,y\n" + "".join(f"{k / 9},1,{k % 2}\n" for k in range(10)))
    joined = pfedbayes.join(folder, tmp_path / "east.csv", certify=False, steps=2)
    assert joined.unchecked


class Squared(torch.nn.Module):
    """A module that is no list of known layers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.inner = torch.nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.inner(x.square())


def test_a_module_of_ones_own_code_is_saved_without_clients(tmp_path):
    x = torch.linspace(-2, 2, 40).reshape(20, 2)
    module = Squared(2, 2)
    folder = pfedbayes.save(in_python(module, pfedbayes.Classification(), x, (x[:, 0] > 0).long()), tmp_path / "saved")
    with pytest.raises(UserError, match="more than layers of torch: load it in Python"):
        pfedbayes.open_client(folder, "a")


def test_a_kept_model_is_checked(tmp_path):
    model = pfedbayes.Model(pfedbayes.Net(pfedbayes.mlp([2, 3, 2])), pfedbayes.Classification())
    kept = KeptModel.of(model)
    assert kept.build((2,)).net.num_params == model.net.num_params
    for wrong in ({"num_params": 18}, {"layers": [["Evil", {}]]}, {"likelihood": {"name": "Evil"}}):
        with pytest.raises(ValueError, match=r"parameters|not known"):
            dataclasses.replace(kept, **wrong).build((2,))
