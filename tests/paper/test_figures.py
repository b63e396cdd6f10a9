"""Figures 2 and 3."""

import json

import pytest
from made_records import FOLDER, record

from pfedbayes.errors import UserError
from pfedbayes.paper import figure3, results
from pfedbayes.paper.figure3 import measure
from pfedbayes.runs.experiment import read_experiment


def test_figure_2_has_a_line_per_method_and_stands_alone(folder):
    curve = {"personal": [[10, 50.0], [20, 60.0]], "shared": [[10, 40.0], [20, 45.0]]}
    other = {"personal": [[10, 52.0], [20, 64.0]], "shared": [[10, 40.0], [20, 45.0]]}
    values = {"personal": {"mean": 60.0}, "shared": {"mean": 45.0}}
    records = [record("pfedme", values, curve=curve), record("pfedme", values, seed=2, curve=other)]
    records.append(record("pfedme", values, variant="public-noise", curve=other))
    (folder / "table1.json").write_text(json.dumps(records))
    files = results.render(folder)
    assert [name for name in files if name.endswith(".svg")] == ["figure2_small.svg"]
    assert "pFedMe (personal): 62.00 at round 20" in files["figure2_small.svg"]
    assert files["figure2_small.svg"].startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "--c0" in files["figure2_small.svg"]
    assert "Figure 2, small MNIST" in files["results.html"]
    fallen = {"personal": [[10, 63.0], [20, 61.0]]}
    records.append(record("pfedbayes", {"personal": {"mc10": 61.0}}, curve=fallen))
    (folder / "table1.json").write_text(json.dumps(records))
    told = "best 63.00 at round 10; 61.00 at round 20, rank 2 of 2."
    assert told not in files["results.html"]
    assert told in results.render(folder)["results.html"]


def test_what_is_not_figure_3_is_named(folder):
    whole = json.loads((FOLDER / "figure3.json").read_text())
    (folder / "figure3.json").write_text(json.dumps(whole))
    assert "figure3.svg" in results.render(folder)
    client = whole["clients"][0]
    for content, words in (
        ("{", "Expecting"),
        ("{}", "it has no 'data'"),
        (json.dumps(whole | {"clients": []}), "it has no clients"),
        (json.dumps(whole | {"clients": [client | {"answers": []}]}), "not one answer for each round"),
        (json.dumps(whole | {"clients": [client | {"answers": [{}, {}, {}]}]}), "has no 'probabilities'"),
        (
            json.dumps(whole | {"clients": [client | {"answers": [client["answers"][0] | {"spread": []}] * 3}]}),
            "not one spread for each",
        ),
    ):
        (folder / "figure3.json").write_text(content)
        with pytest.raises(UserError, match=f"does not hold Figure 3 .*{words}.*pfedbayes paper figure3"):
            results.render(folder)


class TestFigure3:
    TINY = ("data.name=blobs", "data.clients=3", "data.examples=60", "net.hidden=[8]", "training.local_steps=2")

    def test_personal_models_become_surer(self):
        found = measure(read_experiment(None, [*self.TINY, "training.local_steps=20", "training.batch_size=20"]), "cpu")
        assert (found["rounds"], len(found["clients"])) == ([0, 1, 10], 3)
        for client in found["clients"]:
            first, _, last = client["answers"]
            assert sum(first["probabilities"]) == pytest.approx(1, abs=1e-3)
            assert last["entropy"] < first["entropy"]
            assert first["mutual_information"] <= first["entropy"]

    def test_a_folder_is_refused_before_anything_is_trained(self, tmp_path):
        with pytest.raises(UserError, match="is a folder"):
            figure3.write(None, tmp_path)

    def test_a_method_without_draws_is_refused(self):
        with pytest.raises(UserError, match="pfedbayes"):
            measure(read_experiment(None, ["method.name=fedavg"]))
