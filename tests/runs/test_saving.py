import dataclasses
import json

import pytest
import torch
from blobs import BLOBS, same_bits

import pfedbayes
from federations import federation, make_shards, model_for, trained
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment


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
