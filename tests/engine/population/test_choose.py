"""Where clients' states rest."""

from types import SimpleNamespace

import pytest
import torch
from population_states import SIZE, state

from pfedbayes.engine.population import (
    HOST,
    DevicePopulation,
    FilePopulation,
    HostPopulation,
    choose_resting,
    make_population,
)
from pfedbayes.engine.population import choose as choose_module


def test_clients_rest_where_they_fit(monkeypatch):
    monkeypatch.setattr(choose_module, "host_memory", lambda: 16_000)
    assert choose_resting(100, 10, 1, 1, HOST) == "device"
    assert choose_resting(100, 49, 1, 1, HOST) == "host"
    assert choose_resting(100, 50, 1, 1, HOST) == "file"
    assert choose_resting(100, 49, 2, 1, HOST) == "file"  # a round needs memory too
    assert choose_resting(100, 16, 1, 3, HOST) == "host"
    assert choose_resting(100, 17, 1, 3, HOST) == "file"
    assert choose_resting(100, 1000, 1000, 1, HOST) == "device"  # all train each round anyway


def test_borders_belong_to_the_faster_place(monkeypatch):
    assert choose_resting(105, 10, 1, 1, HOST) == "device"  # this machine has more than 17 kB
    monkeypatch.setattr(choose_module, "host_memory", lambda: 16_000)
    assert choose_resting(105, 10, 1, 1, HOST) == "host"  # more than a sixteenth
    monkeypatch.setattr(choose_module, "host_memory", lambda: 15_000)
    assert choose_resting(100, 46, 1, 1, HOST) == "host"  # 4,600 and 4 times 100 are a third
    assert choose_resting(100, 47, 1, 1, HOST) == "file"


def test_states_stay_on_a_gpu_if_they_take_little_of_its_memory(monkeypatch):
    monkeypatch.setattr(choose_module, "host_memory", lambda: 16_000)
    gpu = SimpleNamespace(total_memory=32_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert choose_resting(100, 20, 1, 1, torch.device("cuda")) == "device"  # a sixteenth
    assert choose_resting(100, 21, 1, 1, torch.device("cuda")) == "host"
    assert choose_resting(100, 20, 1, 1, HOST) == "host"


@pytest.mark.parametrize(
    ("resting", "device", "kind"),
    [
        ("device", "cpu", DevicePopulation), ("host", "cpu", DevicePopulation), ("file", "cpu", FilePopulation),
        ("device", "meta", DevicePopulation), ("host", "meta", HostPopulation), ("file", "meta", FilePopulation),
    ],
)  # fmt: skip
def test_populations_by_place_and_device(resting, device, kind):
    assert type(make_population(resting, SIZE, state(0), torch.device(device), None)) is kind
