"""Which runs are Algorithm 1."""

import dataclasses

import pytest

from pfedbayes.methods import PFedBayes
from pfedbayes.paper.extensions import EXTENDED, EXTENSIONS, extensions, title

# The hyper-parameters of Algorithm 1: they change no step of it.
ALGORITHM1 = {"zeta", "rho0", "eta_personal", "eta_global", "samples", "beta"}


def test_every_setting_of_pfedbayes_is_of_algorithm_1_or_an_extension():
    fields = {field.name for field in dataclasses.fields(PFedBayes)}
    assert {key.removeprefix("method.") for key in EXTENSIONS if key.startswith("method.")} == fields - ALGORITHM1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ()),
        ({"method.zeta": 0.3, "method.samples": 4, "method.rho0": -4.0, "training.shift": 4}, ()),
        ({"method.scale": "data", "method.eta_data": 0.0, "training.server_optimizer": "none"}, ()),
        ({"method.scale": "batch", "method.zeta": 0.3}, ("method.scale",)),
        ({"method.eta_data": 0.1, "training.server_optimizer": "momentum"},
         ("method.eta_data", "training.server_optimizer")),
    ],
)  # fmt: skip
def test_what_departs_from_algorithm_1(settings, expected):
    assert extensions(settings) == expected
    assert title("pfedbayes", [{"settings": settings}, {}]) == (EXTENDED if expected else "pFedBayes")


def test_other_methods_keep_their_name():
    assert title("fedavg", [{"settings": {"training.server_optimizer": "momentum"}}]) == "FedAvg"
