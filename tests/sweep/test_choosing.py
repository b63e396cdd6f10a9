import json

import pytest

from pfedbayes.errors import UserError
from pfedbayes.runs.config import read_toml
from pfedbayes.sweep.cells import read_cells
from pfedbayes.sweep.choosing import choose
from pfedbayes.sweep.results import read_results

TUNING = """
base = "tiny.toml"
preset = "tuning"
set.data.validation = 0.2
set.evaluation.split = "validation"
[[rows]]
dataset = "blobs"
size = ["small", "medium"]
method = "fedavg"
set.training.rounds = 3
set.net.hidden = [5]
vary = [{ method.eta = 0.01 }, { method.eta = 0.1 }, { method.eta = 0.2, training.server_optimizer = "momentum" }]
[[rows]]
dataset = "blobs"
method = "pfedbayes"
vary = [{ method.zeta = 1.0 }, { method.zeta = 2.0, evaluation.sampling = "pairs" }]
"""


def records(cell, **accuracies):
    """Made-up results: accuracies by model."""
    estimator = "mc10" if cell.facts["method"] == "pfedbayes" else "mean"
    models = {
        model: {estimator: {"window_mean": accuracies[model]}} if model in accuracies else None
        for model in ("personal", "shared")
    }
    common = {"cell": cell.name, "seed": 1}
    return [{"variant": "default", **common, **models}, {"variant": "label-prior", **common}]


@pytest.fixture
def cells(sweep):
    sweep.write(TUNING)
    return read_cells(sweep.file)


def named(cells, *words):
    (cell,) = [cell for cell in cells if all(word in cell.name for word in words)]
    return cell


def test_the_best_row_over_sizes_and_models_is_written_as_a_preset(cells, sweep):
    results = {}
    for size, eta, accuracy in (
        ("small", "eta=0.01", 80.0), ("medium", "eta=0.01", 82.0),
        ("small", "eta=0.1", 79.0), ("medium", "eta=0.1", 84.0),
        ("small", "eta=0.2", 99.0),  # the other size is missing
    ):  # fmt: skip
        cell = named(cells, f"_{size}_", "fedavg", eta)
        results[cell.name] = records(cell, shared=accuracy)
    for zeta, personal, shared in ((1, 90.0, 70.0), (2, 80.0, 82.0)):
        cell = named(cells, "pfedbayes", f"zeta={zeta}")
        results[cell.name] = records(cell, personal=personal, shared=shared)
    lines = choose(cells, results, sweep.folder / "tuned.toml")
    assert lines[0].startswith("fedavg on blobs: method.eta=0.1, 81.50 % on validation data, the best of 2 settings")
    assert "81.00 %" in lines[1]
    chosen = read_toml(sweep.folder / "tuned.toml")
    assert chosen["blobs"] == {
        "fedavg": {"net": {"hidden": [5]}, "method": {"eta": 0.1}},  # and nothing of the schedule
        "pfedbayes": {"method": {"zeta": 2.0}, "evaluation": {"sampling": "pairs"}},  # not the split
    }
    assert lines[0] in (sweep.folder / "tuned.toml").read_text()


def test_a_row_that_lacks_a_size_is_not_compared(sweep):
    """What a row has on a size that is easier for all would speak for it."""
    one_size = """[[rows]]
dataset = "blobs"
size = "medium"
method = "fedavg"
vary = [{ method.eta = 0.3 }]
"""
    sweep.write(TUNING + one_size)
    cells, results = read_cells(sweep.file), {}
    for size, eta, accuracy in (("small", "eta=0.1", 70.0), ("medium", "eta=0.1", 80.0), ("medium", "eta=0.3", 79.0)):
        cell = named(cells, f"_{size}_", "fedavg", eta)
        results[cell.name] = records(cell, shared=accuracy)
    line = choose(cells, results, sweep.folder / "tuned.toml")[0]
    assert line.startswith("fedavg on blobs: method.eta=0.1, 75.00 % on validation data, the best of 1 settings")


def test_rows_that_have_diverged_are_out(cells, sweep):
    one, other = named(cells, "zeta=1"), named(cells, "zeta=2")
    results = {one.name: records(one), other.name: records(other, personal=50.0)}
    assert choose(cells, results, sweep.folder / "tuned.toml")[1].startswith("pfedbayes on blobs: method.zeta=2.0")


def test_a_size_that_has_diverged_puts_its_row_out(cells, sweep):
    results = {}
    for size, eta, accuracy in (("small", "eta=0.1", 80.0), ("medium", "eta=0.1", 80.0), ("medium", "eta=0.2", 99.0)):
        cell = named(cells, f"_{size}_", "fedavg", eta)
        results[cell.name] = records(cell, shared=accuracy)
    lost = named(cells, "_small_", "fedavg", "eta=0.2")
    results[lost.name] = [record | {"shared": None, "diverged": "round 3"} for record in records(lost, shared=1.0)]
    assert choose(cells, results, sweep.folder / "tuned.toml")[0].startswith("fedavg on blobs: method.eta=0.1")


def test_nothing_is_chosen_on_test_data_or_from_nothing(cells, sweep):
    with pytest.raises(UserError, match="no row of the sweep is complete"):
        choose(cells, {}, sweep.folder / "tuned.toml")
    sweep.write(sweep.text)
    with pytest.raises(UserError, match="scored on test data"):
        choose(read_cells(sweep.file), {}, sweep.folder / "tuned.toml")


def test_a_choice_is_not_written_over_a_folder(cells, sweep):
    cell = named(cells, "zeta=1")
    with pytest.raises(UserError, match=f"^{sweep.folder} is a folder: give the name of a file$"):
        choose(cells, {cell.name: records(cell, personal=50.0)}, sweep.folder)


def test_a_tuning_sweep_is_run_and_chosen_from_and_the_choice_is_run(sweep):
    sweep.write(TUNING)
    sweep(["pfedbayes"], results=sweep.folder / "tuning.json")
    found = json.loads((sweep.folder / "tuning.json").read_text())["records"]
    assert {record["settings"]["evaluation.split"] for record in found} == {"validation"}
    sweep(choose=sweep.folder / "tuned.toml")
    assert "pfedbayes on blobs" in sweep.said
    assert "fedavg on blobs: no row is complete" in sweep.said
    top = 'base = "tiny.toml"\npreset = "tuned"\npreset_file = "tuned.toml"\n'
    sweep.write(top + '[[rows]]\ndataset = "blobs"\nmethod = "pfedbayes"\n')
    assert sweep()["done"] == ["tuned_blobs_small_two-block_pfedbayes"]


def test_the_tuning_sweep_of_the_repository_is_on_validation_data_with_one_net_for_all(pytestconfig):
    cells = read_cells(pytestconfig.rootpath / "experiments" / "tuning.toml")
    assert {cell.facts["method"] for cell in cells} == {"pfedbayes", "fedavg", "pfedme", "fedrep"}
    for cell in cells:
        assert cell.experiment.evaluation.split == "validation"
        images = cell.facts["dataset"] == "cifar10"
        assert (cell.experiment.net.norm, cell.experiment.training.flip) == (
            ("group", True) if images else ("none", False)
        )


def test_the_preset_of_the_repository_is_what_its_results_choose(pytestconfig, tmp_path):
    root = pytestconfig.rootpath
    cells, results = (
        read_cells(root / "experiments" / "tuning.toml"),
        read_results(root / "docs" / "results" / "tuning.json"),
    )
    assert results.keys() <= {cell.name for cell in cells}  # what was tried is what was to be tried
    choose(cells, results, tmp_path / "tuned.toml")
    assert (tmp_path / "tuned.toml").read_text() == (root / "experiments" / "tuned.toml").read_text()
