"""What the pages show as Python works as it stands there."""

import dataclasses
import re
import tomllib
from pathlib import Path

import torch

from federations import EXACT, difference, trained
from pfedbayes.methods import FedAvg
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import OWN_DATA, from_sections, read_experiment

ROOT = Path(__file__).parents[1]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_block(text):
    names = {"__name__": "page"}
    exec(compile(text, "page", "exec"), names)  # noqa: S102
    return names


def test_the_readme_trains_on_ones_own_data_and_says_how_sure_it_is(capsys):
    block, _ = python_blocks("README.md")
    names = run_block(block)
    assert names["federation"].round == 50
    assert names["outputs"].shape == (100, 1, 3)
    assert "50" in capsys.readouterr().out
    assert len(block.strip().splitlines()) <= 14


def test_the_page_on_own_data_shows_the_preset_and_tables_that_work(capsys):
    page = "docs/own_data.md"
    presets = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert tomllib.loads(presets[0]) == OWN_DATA
    data = from_sections(tomllib.loads(presets[1])).data
    assert (data.client_column, data.categories) == ("hospital", ("ward",))
    *_, block = python_blocks(page)
    run_block(block)
    assert "2 columns (1 numeric, 1 categorical) as 4 inputs" in capsys.readouterr().out


def test_the_prediction_of_the_page_on_own_data_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k % 7},{'xyz'[k % 3]},{('north', 'south')[k % 2]},{k % 5 // 2}\n" for k in range(60))
    (tmp_path / "clinics.csv").write_text("a,b,hospital,outcome\n" + rows)
    (tmp_path / "new.csv").write_text("a,b\n1,x\n2,never\n")
    settings = ["path=clinics.csv", "target=outcome", "client_column=hospital"]
    experiment = read_experiment(None, [*(f"data.{text}" for text in settings), "training.rounds=2"])
    list(execute(experiment, tmp_path / "runs" / "clinics-pfedbayes", [1]))
    by_tensors, by_client, _ = python_blocks("docs/own_data.md")
    names = run_block(by_tensors)
    assert names["chances"].shape == (100, 2, 3)
    assert "('0', '1', '2')" in capsys.readouterr().out
    (tmp_path / "east.csv").write_text("a,b,outcome\n" + "".join(f"{k % 7},x,{k % 3}\n" for k in range(40)))
    for block in (by_client, "import pfedbayes\n" + python_blocks("README.md")[1]):
        probabilities = torch.from_numpy(run_block(block)["predicted"]["p_2"])
        assert torch.allclose(probabilities, names["chances"].mean(0)[:, 2], atol=1e-5)
        assert "12 rows held out" in capsys.readouterr().out


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
