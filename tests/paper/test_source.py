"""The folder of results: the paper's numbers, our records, and what is refused."""

import itertools
import json

import pytest
from made_records import FOLDER, ON_VALIDATION, ROOT, paper_rows, record

from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS
from pfedbayes.paper import results
from pfedbayes.paper.source import DATASETS, METHODS_OF_THE_PAPER, SIZES, STUDIES, TUNED
from pfedbayes.sweep.cells import read_cells


class TestThePaper:
    def test_its_claims_about_table_1_hold_for_our_copy(self):
        """Section 5.3 says by how much pFedBayes is ahead of the best other method."""
        claims = {
            ("mnist", "personal"): (1.25, 1.78, 0.52),
            ("mnist", "shared"): (2.79, 1.67, 1.97),
            ("fashion-mnist", "personal"): (0.42, 0.63, 0.79),
            ("cifar10", "personal"): (11.71, 7.19, 6.33),
            ("cifar10", "shared"): (3.47, 3.49, None),
        }
        for (dataset, model), margins in claims.items():
            for size, margin in zip(SIZES, margins, strict=True):
                of = {
                    row["method"]: row[model][0]
                    for row in paper_rows("table1")
                    if (row["dataset"], row["size"]) == (dataset, size) and row[model]
                }
                ours = of.pop("pfedbayes")
                if margin is not None:
                    assert ours - max(of.values()) == pytest.approx(margin, abs=0.005)

    def test_the_settings_it_settles_on_are_the_best_of_their_rows(self):
        """Appendix B: zeta = 10, rho = -2.5 by the shared model; rates by what each method is for."""
        rows = [row for row in paper_rows("table2") if row["varied"]["method.rho0"] == -2.5]
        assert max(rows, key=lambda row: row["shared"])["varied"]["method.zeta"] == 10
        for method, model, key, value in (
            ("pfedme", "personal", "method.eta", 0.01),
            ("heurfedamp", "personal", "method.self_weight", 0.5),
            ("perfedavg", "personal", "method.alpha", 0.01),
            ("pfedgp", "personal", "method.eta", 0.05),
            ("fedavg", "shared", "method.eta", 0.01),
            ("fedprox", "shared", "method.prox", 0.001),
            ("bnfed", "shared", "method.eta", 0.5),
        ):
            rows = [row for row in paper_rows("table3") if row["method"] == method]
            assert max(rows, key=lambda row: row[model])["varied"][key] == value

    def test_every_model_of_every_method_has_its_cells(self):
        rows = paper_rows("table1")
        assert len(rows) == 8 * 3 * 3
        assert {(row["method"], row["dataset"], row["size"]) for row in rows} == set(
            itertools.product(METHODS_OF_THE_PAPER, DATASETS, SIZES)
        )
        for row in rows:
            for model in ("personal", "shared"):
                assert row[model] is None or getattr(METHODS[row["method"]].about, model)

    @pytest.mark.parametrize(("table", "count"), [("table2", 20), ("table3", 42)])
    def test_the_sweep_of_a_table_has_a_run_for_each_of_its_rows(self, table, count):
        rows = paper_rows(table)
        assert len(rows) == count
        cells = read_cells(ROOT / "experiments" / f"{table}.toml")
        wanted = {(row["method"], json.dumps(row["varied"])) for row in rows}
        assert {(cell.facts["method"], json.dumps(cell.varied)) for cell in cells} == wanted
        for cell in cells:
            assert (cell.experiment.data.name, cell.experiment.data.size) == ("mnist", "medium")

    def test_the_sweep_of_table_1_has_all_cells_most_telling_first(self):
        cells = read_cells(ROOT / "experiments" / "table1.toml")
        two_block = [cell for cell in cells if cell.facts["split"] == "two-block"]
        assert {tuple(cell.facts[key] for key in ("method", "dataset", "size")) for cell in two_block} == set(
            itertools.product(METHODS_OF_THE_PAPER, DATASETS, SIZES)
        )
        assert {cell.facts["method"] for cell in cells[:18]} == {"pfedbayes", "fedavg"}
        assert {cell.facts["method"] for cell in cells if cell.facts["split"] == "sliding"} == set(TUNED)
        for cell in cells:
            assert cell.experiment.training.rounds == 800
            if cell.facts["dataset"] == "cifar10":
                assert len(cell.seeds) == 3
            else:
                slow = (cell.facts["method"], cell.facts["size"]) == ("pfedgp", "large")
                assert len(cell.seeds) == (1 if slow else 5)


def test_a_folder_that_holds_no_results_is_named(tmp_path):
    with pytest.raises(UserError, match="docs/results"):
        results.render(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting"),
        ("[]", "it is no object"),
        ("{}", "it has no 'table1'"),
        ('{"table1": [], "table2": []}', "it has no 'table3'"),
        ('{"table1": {}, "table2": [], "table3": []}', "'table1' of it is not understood"),
        ('{"table1": [1], "table2": [], "table3": []}', "row 1 of table1 is no object"),
        ('{"table1": [], "table2": [{"method": "fedavg"}], "table3": []}', "row 1 of table2 has no 'varied'"),
    ],
)
def test_what_is_not_the_paper_is_named(tmp_path, content, words):
    (tmp_path / "paper.json").write_text(content)
    with pytest.raises(UserError, match=rf"paper.json does not hold the paper's tables \({words}.*docs/results"):
        results.render(tmp_path)


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "tuning", *STUDIES])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{", "Expecting"),
        ("{}", "it is no list"),
        ("[1]", "record 1 is no object"),
        ('[{"cell": "x", "seed": 1}]', "record 1 has no 'method'"),
    ],
)
def test_what_is_no_records_is_named_and_nothing_is_written(folder, name, content, words):
    (folder / f"{name}.json").write_text(content)
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=rf"{name}.json does not hold the results of a sweep \({words}"):
        results.write(folder)
    assert sorted(folder.iterdir()) == before


def test_tuning_on_test_data_is_refused(folder):
    made = [
        record("fedavg", {"shared": {"mean": 80.0}}, preset="tuning", settings=ON_VALIDATION),
        record("fedavg", {"shared": {"mean": 90.0}}, preset="tuned"),
    ]
    (folder / "tuning.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"tuning.json has tuned_mnist_small_two-block_fedavg, .* on test data"):
        results.render(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("reasons", "{}", r"reasons \(it is no list"),
        ("reasons", '[{"method": "fedavg"}]', r"reasons \(reason 1 has no 'why'"),
        ("theory", "[]", r"measurements of the rate \(it is no object"),
        ("theory", '{"about": {}, "records": []}', r"measurements of the rate \('about' has no 'date'"),
    ],
)
def test_other_files_that_hold_something_else_are_named(folder, name, content, words):
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(UserError, match=f"{name}.json does not hold {words}"):
        results.render(folder)


def test_measurements_of_the_rate_that_are_not_whole_are_named(folder):
    kept = json.loads((FOLDER / "theory.json").read_text())
    first = kept["records"][0]
    for records, words in (
        ([], "no curve"),
        ([first], "no curve of the rate has been measured at two n yet"),
        ([first, first | {"size": 100, "replicate": 99}], "no curve"),
        ([first | {"size": "50"}], "'size' of record 1 is not understood"),
        ([first, first | {"clients": [{}]}], "a client of record 2 has no 'hellinger'"),
    ):
        (folder / "theory.json").write_text(json.dumps(kept | {"records": records}))
        with pytest.raises(UserError, match=words):
            results.render(folder)


def test_a_record_that_is_not_whole_is_named(folder):
    whole = record("fedavg", {"shared": {"mean": 80.0}})
    (folder / "table1.json").write_text(json.dumps([whole, whole]))
    results.render(folder)
    for wrong, words in (
        ({key: value for key, value in whole.items() if key != "shared"}, "record 2 has no 'shared'"),
        (whole | {"method": "fedavgg"}, "record 2 is of an unknown method 'fedavgg'"),
        (whole | {"seed": "1"}, "'seed' of record 2 is not understood"),
        (whole | {"shared": {"mean": {}}}, "shared mean of record 2 has no 'window_best'"),
        ({key: value for key, value in whole.items() if key != "settings"}, "record 2 has no 'settings'"),
    ):
        (folder / "table1.json").write_text(json.dumps([whole, wrong]))
        with pytest.raises(UserError, match=words):
            results.render(folder)
