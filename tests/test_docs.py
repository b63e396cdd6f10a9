"""What the pages show as Python works as it stands there."""

import dataclasses
import re
from pathlib import Path

import torch

from federations import EXACT, difference, trained
from pfedbayes.methods import FedAvg

ROOT = Path(__file__).parents[1]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_block(text):
    names = {"__name__": "page"}
    exec(compile(text, "page", "exec"), names)  # noqa: S102
    return names


def test_the_readme_trains_on_ones_own_data_and_says_how_sure_it_is(capsys):
    (block,) = python_blocks("README.md")
    names = run_block(block)
    assert names["federation"].round == 50
    assert names["outputs"].shape == (100, 1, 3)
    assert "50" in capsys.readouterr().out
    assert len(block.strip().splitlines()) <= 14


def test_the_method_of_the_contributing_page_is_a_method():
    (block,) = python_blocks("CONTRIBUTING.md")
    reptile = run_block(block)["Reptile"]
    together, in_turn = trained(reptile()), trained(reptile(), plan=dataclasses.replace(EXACT, over="loop"))
    assert difference(together.servers, in_turn.servers) < 1e-12
    assert difference(trained(reptile(pace=1.0)).servers, trained(FedAvg()).servers) < 1e-12
    assert difference(together.servers, trained(FedAvg()).servers) > 1e-3


def test_the_page_about_uncertainty_calibrates_sets_and_abstention(capsys):
    (block,) = python_blocks("docs/uncertainty.md")
    names = run_block(block)
    assert names["sets"].shape == (100, 3)
    assert names["answered"].double().mean() > 0.5
    assert torch.allclose(names["aleatoric"] + names["epistemic"], names["total"])
    assert "at least 90%" in capsys.readouterr().out
