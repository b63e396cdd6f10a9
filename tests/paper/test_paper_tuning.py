"""The tables of the tuning and of the studies."""

import json

from made_records import FOLDER, ON_VALIDATION, ROOT, record, rows_of

from pfedbayes.paper import results
from pfedbayes.paper.source import STUDIES
from pfedbayes.sweep.cells import read_cells


class TestTuning:
    def test_every_setting_has_a_row_and_the_best_one_is_marked(self, folder):
        settings = {"training.rounds": 400, "method.scale": "batch", **ON_VALIDATION}
        made = [
            record("pfedbayes", {"personal": {"mc10": personal}, "shared": {"mc10": shared}}, seed, preset="tuning",
                   varied={"method.zeta": zeta, "method.scale": "batch"}, size=size, settings=settings)
            for zeta, personal, shared in ((1.0, 90.0, 80.0), (3.0, 91.0, 82.0))
            for size in ("small", "medium", "large")
            for seed in (1, 2)
        ]  # fmt: skip
        (folder / "tuning.json").write_text(json.dumps(made))
        page = results.render(folder)["tuning.md"]
        rows = rows_of(page, "## All settings")
        assert rows["extended pFedBayes: ζ = 1, scale = batch"]["overall"] == "85.00"
        assert rows["extended pFedBayes: ζ = 3, scale = batch"]["overall"] == "86.50 (chosen)"
        assert rows_of(page, "## Best settings") == {
            "extended pFedBayes": {"setting": "ζ = 3, scale = batch", "overall": "86.50", "settings compared": "2"}
        }
        assert "all sizes of MNIST extend Algorithm 1: pFedBayes itself has no tuned setting there." in page
        for size in ("small", "large"):
            assert rows["extended pFedBayes: ζ = 3, scale = batch"][f"{size}: shared"] == "82.00 ± 0.00"

    def test_a_setting_that_lacks_a_size_is_not_the_chosen_one(self, folder):
        made = [
            record("fedavg", {"shared": {"mean": accuracy}}, preset="tuning", varied={"method.eta": eta}, size=size,
                   settings=ON_VALIDATION)
            for eta, size, accuracy in ((0.1, "small", 80.0), (0.1, "medium", 80.0), (0.2, "medium", 99.0))
        ]  # fmt: skip
        (folder / "tuning.json").write_text(json.dumps(made))
        rows = rows_of(results.render(folder)["tuning.md"], "## All settings")
        assert [rows[f"FedAvg: η = {eta}"]["overall"] for eta in (0.1, 0.2)] == ["80.00 (chosen)", "–"]

    def test_without_a_sweep_there_is_no_page(self, folder):
        assert "tuning.md" not in results.render(folder)


class TestStudies:
    def test_every_setting_has_a_row_with_the_sizes_and_models_there_are(self, folder):
        made = [
            record("fedavg", {"shared": {"mean": 80.0 + shift}}, seed, preset="views", size=size,
                   varied={"training.shift": shift})
            for shift in (0, 1)
            for size in ("small", "large")
            for seed in (1, 2)
        ]  # fmt: skip
        (folder / "views.json").write_text(json.dumps(made[:-1]))
        page = results.render(folder)["studies.md"]
        rows = rows_of(page, "## Shifted training images")
        assert rows == {
            f"FedAvg: shift = {shift}": {
                "small: shared, mean": f"{80 + shift:.2f} ± 0.00",
                "small: shared, best": f"{81 + shift:.2f} ± 0.00",
                "large: shared, mean": f"{80 + shift:.2f}" + ("" if shift else " ± 0.00"),
                "large: shared, best": f"{81 + shift:.2f}" + ("" if shift else " ± 0.00"),
                "seeds": "2, 1" if shift else "2",
            }
            for shift in (0, 1)
        }
        assert "BNFed" not in page
        assert rows_of(page, "## The studies")["views"]["runs"] == "4"

    def test_a_method_with_nothing_varied_is_called_by_its_name(self, folder):
        made = [record("fedavg", {"shared": {"mean": 40.0}}, preset="overlap", dataset="cifar10")]
        (folder / "overlap.json").write_text(json.dumps(made))
        assert list(rows_of(results.render(folder)["studies.md"], "## Clients that share")) == ["FedAvg"]

    def test_without_a_study_there_is_no_page(self, folder):
        assert "studies.md" not in results.render(folder)

    def test_every_study_is_a_sweep_of_the_repository_with_results(self):
        for name in STUDIES:
            known = {cell.name for cell in read_cells(ROOT / "experiments" / f"{name}.toml")}
            assert {record["cell"] for record in json.loads((FOLDER / f"{name}.json").read_text())} <= known

    def test_settings_that_are_lists_have_a_name_too(self, folder):
        made = [record("fedavg", {"shared": {"mean": 40.0}}, preset="views", varied={"net.hidden": [5, 6]})]
        (folder / "views.json").write_text(json.dumps(made))
        assert "FedAvg: hidden = [5, 6]" in rows_of(results.render(folder)["studies.md"], "## Shifted training images")
