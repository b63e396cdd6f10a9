"""Every method, trained eagerly on a CPU, ends in the state that it ended in before the code was rearranged.

`python tests/engine/test_same_bits.py` writes the digests of the code as it is to same_bits.json. Bits depend on the
processor's instructions and on torch's version. On another machine only the sums are compared, to 1 %: that finds a
broken method, not a changed rounding.
"""

import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch

from federations import federation, model_for
from pfedbayes import Plan, Training
from pfedbayes.methods import METHODS, FedAvg, FedProx, PFedBayes

KEPT = Path(__file__).with_name("same_bits.json")
ROUNDS = 20
TRAINING = Training(rounds=ROUNDS, local_steps=4, batch_size=6, participants=3, seed=3)
SINGLE = Plan(dtype="float32", threads=1)
EARLIER = (
    "pfedbayes", "fedavg", "fedprox", "perfedavg", "pfedme", "heurfedamp", "pfedgp", "local", "pooled", "fedavg-ft",
    "ditto", "fedper", "fedrep",
)  # methods whose bits were recorded  # fmt: skip
CASES = {name: (METHODS[name](), TRAINING) for name in EARLIER} | {
    "bnfed": (METHODS["bnfed"](), Training(rounds=ROUNDS, local_steps=4, batch_size=6, seed=3)),
    "pfedbayes barycentre": (PFedBayes(server="barycentre", samples=3), TRAINING),
    "pfedbayes average-sigma": (PFedBayes(server="average-sigma", beta=0.7), TRAINING),
    "pfedbayes reset": (PFedBayes(reset_personal=True, personal_steps=2, prior="fixed"), TRAINING),
    "pfedbayes sgd": (PFedBayes(optimizer="sgd", eta_personal=1e-5, eta_global=1e-5, noise_std=0.001), TRAINING),
    "pfedbayes scale": (PFedBayes(scale="batch"), TRAINING),
    "pfedbayes eta_data": (PFedBayes(eta_data=0.05, sigma_by_size=1.5, samples=2), TRAINING),
    "fedprox first": (FedProx(anchor="first"), TRAINING),
    "fedavg momentum": (FedAvg(), Training(**{**vars(TRAINING), "server_optimizer": "momentum"})),
    "pfedbayes adam": (PFedBayes(), Training(**{**vars(TRAINING), "server_optimizer": "adam"})),
}


def digest(tensor: torch.Tensor) -> str:
    content = f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.contiguous().cpu().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def outcome(name: str) -> dict:
    """The digests of all tensors of the state, in an order that does not depend on their names, and of the scores."""
    method, training = CASES[name]
    if method.__class__ is METHODS["bnfed"] or name == "pooled":
        training = Training(**{**vars(training), "participants": None})
    result = federation(method, training, SINGLE, model=model_for(method), seeds=(3, 8))
    for _ in result.rounds():
        pass
    tensors = list(result.tensors().values())
    scores = json.dumps(result.evaluate(samples=4), sort_keys=True)
    return {
        "state": hashlib.sha256("".join(sorted(map(digest, tensors))).encode()).hexdigest(),
        "sum": sum(float(tensor.double().abs().sum()) for tensor in tensors),
        "scores": hashlib.sha256(scores.encode()).hexdigest(),
    }


def machine() -> list[str]:
    """What bits depend on."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return [
        platform.machine(),
        cpu.partition(":")[2].strip(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_method_ends_where_it_did(name):
    kept = json.loads(KEPT.read_text())
    found = outcome(name)
    assert found["sum"] == pytest.approx(kept["cases"][name]["sum"], rel=1e-2)
    if kept["machine"] == machine():
        assert found == kept["cases"][name]


if __name__ == "__main__":
    KEPT.write_text(
        json.dumps({"machine": machine(), "cases": {name: outcome(name) for name in CASES}}, indent=1) + "\n"
    )
