"""The rows of Table 1."""

import json
import math

from made_records import record, rows_of

from pfedbayes.paper import results


def test_a_cell_has_paper_ours_and_the_difference(folder):
    values = {"one": 90.0, "mc10": 93.0, "mean": 94.0}
    both = {"personal": values, "shared": {way: value - 10 for way, value in values.items()}}
    lower = {model: {way: value - 2 for way, value in each.items()} for model, each in both.items()}
    records = [record("pfedbayes", both), record("pfedbayes", lower, seed=2)]
    (folder / "table1.json").write_text(json.dumps(records))
    files = results.render(folder)
    rows = rows_of(files["table1.md"], "## Preset paper: best")
    row = rows["pFedBayes (personal, one sample)"]
    assert row["small: paper"] == "94.13 ± 0.27"
    assert row["small: ours"] == f"90.00 ± {math.sqrt(2):.2f}"
    assert row["small: difference"] == "-4.13"
    assert (row["medium: ours"], row["medium: difference"], row["seeds"]) == ("–", "–", "2, –, –")
    assert rows["pFedBayes (shared, ten samples)"]["small: ours"].startswith("83.00")
    row = rows_of(files["table1.md"], "## Preset paper, two-block")["pFedBayes (personal, ten samples)"]
    assert row["small: mean of 700–800"].startswith("92.00")
    assert row["small: round 800"].startswith("92.50")
    assert (row["small: NLL"], row["small: ECE"]) == ("0.250 ± 0.000", "0.125 ± 0.000")
    time = rows_of(files["table1.md"], "## Device time")
    assert time["Table 1"] == {"device": "GPU", "minutes": "1.0", "runs": "2"}
    assert "pFedBayes reaches the paper's mean in 0 of 2 cells" in files["table1.md"]
    assert "with the paper's settings: MNIST small personal (-1.13)" in files["table1.md"]


def test_variants_stand_beside_the_method_and_time_counts_once(folder):
    records = [
        record("heurfedamp", {"personal": {"mean": 95.0}}),
        record("heurfedamp", {"personal": {"mean": 90.0}}, variant="cloud"),
        record("heurfedamp", {"personal": {"mean": 96.0}}, variant="label-prior"),
    ]
    (folder / "table1.json").write_text(json.dumps(records))
    page = results.render(folder)["table1.md"]
    rows = rows_of(page, "## Preset paper: best")
    assert rows["HeurFedAMP (personal)"]["small: ours"] == "96.00"
    assert rows["HeurFedAMP (personal, cloud model)"]["small: difference"] == "+0.11"
    rows = rows_of(page, "## Preset paper, two-block")
    assert rows["HeurFedAMP (personal, with the client's label prior)"]["small: mean of 700–800"] == "96.00"
    assert rows_of(page, "## Device time")["Table 1"] == {"device": "GPU", "minutes": "0.5", "runs": "1"}


def test_what_has_diverged_stands_for_all_that_would_have_been_made_of_it(folder):
    records = [
        record("perfedavg", {"personal": {"mean": 60.0}}),
        record("perfedavg", {}, variant="outer-rate", diverged="round 3: …"),
    ]
    (folder / "table1.json").write_text(json.dumps(records))
    rows = rows_of(results.render(folder)["table1.md"], "## Preset paper: best")
    found = {title: row["small: ours"] for title, row in rows.items() if title.startswith("Per-FedAvg")}
    of_rate = [ours for title, ours in found.items() if "outer rate" in title]
    assert of_rate == ["diverged", "diverged"]
    assert [ours for title, ours in found.items() if "outer rate" not in title] == ["61.00", "–"]


def extended_records():
    """Algorithm 1 with the paper's settings, and two tuned runs: one drops n/b, the other changes only ζ."""
    extended = {"method.scale": "batch", "method.zeta": 0.3}
    return [
        record("pfedbayes", {"personal": {"one": 88.0, "mc10": 90.0, "mean": 89.0}}),
        record("pfedbayes", {"personal": {"one": 93.0, "mc10": 95.0, "mean": 94.0}}, preset="tuned", settings=extended),
        record("pfedbayes", {"personal": {"mc10": 80.0}}, preset="tuned", variant="label-prior"),
        record("pfedbayes", {"personal": {"mc10": 85.0}}, preset="tuned", dataset="fashion-mnist",
               settings={"method.zeta": 0.3}),
    ]  # fmt: skip


def test_a_run_that_departs_from_algorithm_1_has_another_name_and_rows_of_its_own(folder):
    (folder / "table1.json").write_text(json.dumps(extended_records()))
    page = results.render(folder)["table1.md"]
    tuned = page[page.index("## Preset tuned: best") :]
    rows = rows_of(tuned, "### MNIST")
    assert rows["extended pFedBayes (personal, ten samples)"]["small: ours"] == "96.00"
    assert rows["pFedBayes (personal, ten samples, the paper's settings)"]["small: ours"] == "91.00"
    assert "pFedBayes (personal, ten samples)" not in rows
    rows = rows_of(tuned, "### Fashion-MNIST")
    assert rows["pFedBayes (personal, ten samples)"]["small: ours"] == "86.00"
    assert not [head for head in rows if "extended" in head]
    rows = rows_of(page[page.index("## Preset tuned, two-block") :], "### MNIST")
    label_prior = "extended pFedBayes (personal, ten samples, with the client's label prior)"
    assert rows[label_prior]["small: mean of 700–800"] == "80.00"


def test_the_summary_and_the_list_of_departures_follow_from_the_settings(folder):
    (folder / "table1.json").write_text(json.dumps(extended_records()))
    page = results.render(folder)["table1.md"]
    rows = rows_of(page, "### personal")
    assert rows["pFedBayes, in the paper"]["MNIST small"] == "94.13 ± 0.27"
    assert rows["pFedBayes, the paper's settings"]["MNIST small"] == "91.00"
    assert rows["extended pFedBayes, tuned settings"]["MNIST small"] == "96.00"
    assert rows["pFedBayes, tuned settings"]["Fashion-MNIST small"] == "86.00"
    (row,) = rows_of(page, "## The settings of the preset tuned").values()
    assert row["departs from Algorithm 1"] == "the likelihood in Eq. (27) is not scaled by n/b (scale = batch)"
    assert row["other settings that differ from the paper's"] == "ζ = 0.3"
