import json

import pytest
import torch
from safetensors.torch import load_file

from pfedbayes.errors import UserError
from pfedbayes.runs import saving
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.certificates import certify_run


def test_certificates_of_a_run_are_kept_in_its_folder(tmp_path):
    settings = ["data.name=blobs", "data.clients=3", "data.examples=60", "data.certify=0.5", "net.hidden=[6]",
                "training.batch_size=8", "training.local_steps=2", "training.rounds=2"]  # fmt: skip
    folder = tmp_path / "run"
    list(execute(read_experiment(None, settings), folder, [1], device="cpu"))
    found = certify_run(folder, "cpu", steps=3)
    text = (folder / "certificate.json").read_text()
    kept = json.loads(text)
    assert text.startswith("[\n {\n  ")  # a line for each field
    assert text.endswith("\n }\n]\n")
    assert kept == [one.as_json() for one in found]
    assert {"bound", "kl", "draws", "hold_out", "certified", "test", "vacuous"} <= kept[0].keys()
    assert torch.equal(load_file(folder / "certified.safetensors")["q"][2], found[2].posterior)


@pytest.mark.parametrize("trust", [True, False])
def test_the_code_of_a_network_is_trusted_only_if_the_user_says_so(tmp_path, monkeypatch, trust):
    def load(folder, device, trust_module=False):
        raise UserError(f"{folder.name} on {device}: {trust_module}")

    monkeypatch.setattr(saving, "load", load)
    with pytest.raises(UserError, match=f"run on cpu: {trust}"):
        certify_run(tmp_path / "run", "cpu", trust_module=trust)
