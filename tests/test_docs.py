"""README and pages: their Python runs as printed, their numbers are measured, their lines fit the page."""

import dataclasses
import json
import re
import statistics
import tomllib
from pathlib import Path

import pytest
import torch

import pfedbayes
from federations import EXACT, difference, trained
from own_method import HALF
from pfedbayes.methods import FedAvg
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import OWN_DATA, OWN_TABLES, from_sections, read_experiment

ROOT = Path(__file__).parents[1]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_block(text):
    names = {"__name__": "page"}
    exec(compile(text, "page", "exec"), names)  # noqa: S102
    return names


WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/examples").glob("*.md"),
]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in WRITTEN)
RESULTS = ROOT / "docs" / "results"
COLUMNS = [(data, size) for data in ("mnist", "fashion-mnist", "cifar10") for size in ("small", "medium", "large")]
ROWS = {  # rows of the README's table: preset, method and estimator in table1.json; None: the paper's own numbers
    "personal: pFedBayes, the paper's numbers": (None, "pfedbayes", None),
    "personal: pFedBayes (Algorithm 1), ours": ("paper", "pfedbayes", "mc10"),
    "personal: pFedMe, ours": ("paper", "pfedme", "mean"),
    "personal: extended pFedBayes, tuned": ("tuned", "pfedbayes", "mc10"),
    "personal: pFedMe, tuned": ("tuned", "pfedme", "mean"),
    "shared: pFedBayes, the paper's numbers": (None, "pfedbayes", None),
    "shared: pFedBayes (Algorithm 1), ours": ("paper", "pfedbayes", "mc10"),
    "shared: FedAvg, ours": ("paper", "fedavg", "mean"),
    "shared: extended pFedBayes, tuned": ("tuned", "pfedbayes", "mc10"),
    "shared: FedAvg, tuned": ("tuned", "fedavg", "mean"),
}


def test_the_readme_trains_on_your_own_data_and_says_how_sure_it_is(capsys):
    (block,) = python_blocks("README.md")
    names = run_block(block)
    assert names["federation"].round == 50
    assert names["outputs"].shape == (100, 1, 3)
    assert "50" in capsys.readouterr().out
    assert len(block.strip().splitlines()) <= 14


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def measured(preset, method, estimator, model):
    """The accuracies of a row of the README's table, one per column."""
    if preset is None:
        records = json.loads((RESULTS / "paper.json").read_text())["table1"]
        cells = {(row["dataset"], row["size"]): row[model][0] for row in records if row["method"] == method}
        return [cells[column] for column in COLUMNS]
    records = json.loads((RESULTS / "table1.json").read_text())
    kind = {"preset": preset, "method": method, "variant": "default", "split": "two-block"}
    chosen = [row for row in records if kind.items() <= row.items()]
    best = next(name for name in chosen[0][model][estimator] if "best" in name)
    return [
        statistics.mean(
            row[model][estimator][best] for row in chosen if (row["dataset"], row["size"]) == column
        )
        for column in COLUMNS
    ]  # fmt: skip


def test_the_readmes_results_are_what_was_measured():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| (personal|shared):", line)]
    table = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    assert table.keys() == ROWS.keys()
    for name, source in ROWS.items():
        assert table[name] == [f"{value:.1f}" for value in measured(*source, name.split(":")[0])], name


def test_the_readmes_counts_of_cells_are_what_was_measured():
    text = (ROOT / "README.md").read_text()

    def reached(preset):
        return sum(
            ours >= paper
            for model in ("personal", "shared")
            for ours, paper in zip(
                measured(preset, "pfedbayes", "mc10", model), measured(None, "pfedbayes", None, model), strict=True
            )
        )

    assert f"mean accuracy in {reached('paper')} of 18 cells" in text
    assert reached("tuned") == 18
    assert "reaches it in all 18" in text
    assert "in 15 of 18 columns" in text
    assert "15 of 18" in (RESULTS / "table1.md").read_text()


def test_the_readme_states_how_many_settings_were_tried():
    tuned = (ROOT / "experiments" / "tuned.toml").read_text()
    tried = re.findall(r"^# (\S+) on (\S+): .* the best of (\d+) settings", tuned, re.MULTILINE)
    ours = {data: int(count) for method, data, count in tried if method == "pfedbayes"}
    grey = [int(count) for method, data, count in tried if method != "pfedbayes" and data != "cifar10"]
    colour = [int(count) for method, data, count in tried if method != "pfedbayes" and data == "cifar10"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"chosen among {ours['mnist']} and {ours['fashion-mnist']} settings, "
        f"the others among {min(grey)} to {max(grey)}; "
        f"on CIFAR-10 among {ours['cifar10']} and {min(colour)} to {max(colour)}"
    ) in text


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_into_its_box(page):
    """Printed output (```text) wraps on the page; code does not. Methods in CONTRIBUTING are as wide as the source."""
    free = "text|python" if page == "CONTRIBUTING.md" else "text"
    blocks = re.findall(rf"^ *```(?!{free})\w+\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 90] == []


def test_the_page_on_own_data_shows_the_preset_and_tables_that_work(capsys):
    page = "docs/own_data.md"
    presets = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert [tomllib.loads(preset) for preset in presets[:2]] == [OWN_TABLES, OWN_DATA]
    data = from_sections(tomllib.loads(presets[2])).data
    assert (data.client_column, data.categories) == ("hospital", ("ward",))
    *_, block = python_blocks(page)
    run_block(block)
    assert "2 columns (1 numeric, 1 categorical) as 10 inputs, 6 of them piecewise linear" in capsys.readouterr().out


def test_the_prediction_of_the_page_on_own_data_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k % 7},{'xyz'[k % 3]},{('north', 'south')[k % 2]},{k % 5 // 2}\n" for k in range(60))
    (tmp_path / "clinics.csv").write_text("a,b,hospital,outcome\n" + rows)
    (tmp_path / "new.csv").write_text("a,b\n1,x\n2,z\n")
    settings = ["path=clinics.csv", "target=outcome", "client_column=hospital"]
    experiment = read_experiment(
        None, [*(f"data.{text}" for text in settings), "training.rounds=2", "evaluation.alone=false"]
    )
    list(execute(experiment, tmp_path / "runs" / "clinics-pfedbayes", [1]))
    by_tensors, by_client, method, _ = python_blocks("docs/own_data.md")
    assert method == HALF  # which tests/runs/test_naming.py trains
    names = run_block(by_tensors)
    assert names["chances"].shape == (100, 2, 3)
    assert "('0', '1', '2')" in capsys.readouterr().out
    (tmp_path / "east.csv").write_text("a,b,outcome\n" + "".join(f"{k % 7},x,{k % 3}\n" for k in range(40)))
    run_block(by_client)
    raw = pfedbayes.open_client("runs/clinics-pfedbayes", "north", raw=True)
    probabilities = torch.from_numpy(raw.predict("new.csv")["p_2"])
    assert torch.allclose(probabilities, names["chances"].mean(0)[:, 2], atol=1e-5)
    assert "by cross-validation in 5 folds" in capsys.readouterr().out


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
