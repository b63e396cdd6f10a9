"""The tutorial notebooks run from the first to the last cell, and show what their text says."""

import csv
import sys

import pytest

from test_site import load_script

notebooks = load_script("notebooks")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a notebook in an empty folder and return its namespace and the text of its outputs."""

    def execute(name):
        monkeypatch.setattr(sys, "path", [*sys.path])
        notebook = notebooks.read(notebooks.FOLDER / f"{name}.ipynb")
        names = notebooks.execute(notebook, tmp_path)
        texts = [notebooks.output_markdown(output) for cell in notebook["cells"] for output in cell.get("outputs", [])]
        return names, "\n".join(texts)

    return execute


def test_compare_methods(run, tmp_path):
    names, text = run("compare_methods")
    means = {name: sum(clients) / len(clients) for name, clients in names["accuracies"].items()}
    assert means["pFedBayes, personal"] > means["FedAvg, shared"] > 70
    assert means["Local, personal"] > 75
    assert "report: compared.html" in text
    assert (tmp_path / "compared.html").stat().st_size > 10_000


def test_own_data(run, tmp_path):
    names, text = run("own_data")
    assert len(names["predicted"]["p_readmitted"]) == 6
    assert "certificate: with 95% confidence" in text
    with (tmp_path / "predicted.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"label", "epistemic", "abstain", "conformal_set"} <= rows[0].keys()
    assert len({row["abstain"] for row in rows}) == 2


def test_federation(run, tmp_path):
    names, _ = run("federation")
    assert min(names["scores"]["personal"]["mc10"]["accuracy"][0]) > 75
    assert (tmp_path / "keys" / "node-2.pub").exists()
    assert (tmp_path / "app" / "federation" / "preprocessing.json").exists()
    for name in [name for name in sys.modules if name.split(".")[0] == "federation"]:
        del sys.modules[name]


@pytest.mark.parametrize("path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_code_fits_into_its_box_and_outputs_are_stored(path):
    cells = [cell for cell in notebooks.read(path)["cells"] if cell["cell_type"] == "code"]
    assert max(len(line) for cell in cells for line in notebooks.source(cell).splitlines()) <= 90
    assert all(cell["outputs"] for cell in cells)


def test_a_failing_cell_fails(tmp_path):
    for text in ("1 / 0", "!false"):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            notebooks.execute({"cells": [{"cell_type": "code", "source": [text]}]}, tmp_path)


def test_cells_share_names_and_show_what_they_print_and_their_last_value(tmp_path):
    cells = [{"cell_type": "code", "source": [text]} for text in ("a = 2\nprint('x')", "a + 1", "!echo $((1 + 3))")]
    notebooks.execute({"cells": cells}, tmp_path)
    assert [notebooks.output_markdown(cell["outputs"][0]) for cell in cells] == [
        "```text\nx\n```", "```text\n3\n```", "```text\n4\n```",
    ]  # fmt: skip
