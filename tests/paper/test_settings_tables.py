"""Tables 2 and 3."""

import json

from made_records import paper_rows, record, rows_of

from pfedbayes.paper import results


def test_rows_of_tables_2_and_3(folder):
    one = paper_rows("table2")[0]
    values = {
        "personal": {"one": 90.0, "mc10": 95.0, "mean": 96.0},
        "shared": {"one": 80.0, "mc10": 85.0, "mean": 86.0},
    }
    quiet = {"personal": {"one": 96.38}, "shared": {"one": 89.61}}
    both = [record("pfedbayes", values, varied=one["varied"])]
    both.append(record("pfedbayes", quiet, variant="public-noise", varied=one["varied"]))
    (folder / "table2.json").write_text(json.dumps(both))
    last = next(row for row in paper_rows("table3") if row["varied"].get("method.eta") == 0.1)
    pfedme = [
        record("pfedme", {"personal": {"mean": 60.0}, "shared": {"mean": 50.0}}, varied=last["varied"]),
        record("pfedme", {"personal": {"mean": 40.0}}, variant="local", varied=last["varied"]),
        record("bnfed", {}, varied={"method.eta": 0.5}, diverged="round 1: …"),
    ]
    (folder / "table3.json").write_text(json.dumps(pfedme))
    files = results.render(folder)
    row = rows_of(files["table2.md"], "#")["pFedBayes: ρ = -1, ζ = 10, η₁ = 0.001, η₂ = 0.001"]
    assert list(row.values())[:5] == ["97.38", "91.00", "-6.38", "95.00", "97.38"]
    assert list(row.values())[5:] == ["91.61", "81.00", "-10.61", "85.00", "90.61", "1"]
    assert "is 8.49 points with weight noise of standard deviation 1" in files["table2.md"]
    assert "and 0.50 points with 0.001, as its public code draws it (2 scores" in files["table2.md"]
    assert "Of 2 scores 0 are within 1.5 points of the paper." in files["table2.md"]
    rows = rows_of(files["table3.md"], "#")
    row = rows["pFedMe: η₁ = 0.1, η₂ = 0.1, λ = 15"]
    assert list(row.values()) == ["19.73", "41.00", "+21.27", "60.00", "9.90", "51.00", "+41.10", "50.00", "1"]
    assert list(rows["BNFed: η = 0.5"].values())[4:] == ["80.31", "diverged", "–", "diverged", "1"]
