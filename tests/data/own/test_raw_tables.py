"""Tables as people have them go through without an edit, or with one message that names all there is to decide."""

import numpy as np
import pytest

from pfedbayes.data import (
    ClientSummary,
    DataConfig,
    Preprocessing,
    combine,
    load_shards,
    read_inputs,
    summarise_client,
)
from pfedbayes.errors import Problems, UserError

NAMES = ["Ada", "Bo", "Cy", "Dee", "Eli", "Flo", "Gus", "Hal", "Ivy", "Jo", "Kit", "Lee", "Mo", "Ned", "Oz", "Pam",
         "Quin", "Rae", "Sid", "Tess", "Uma", "Val", "Wes", "Xena"]  # fmt: skip


def table(folder, header, row, delimiter=",", encoding="utf-8", end="", name="a.csv"):
    """Write 24 rows of two clinics; row(k, name, clinic, label) returns the cells."""
    rows = [row(k, NAMES[k], "north" if k % 2 else "south", "ill" if k % 3 else "well") for k in range(24)]
    text = "\n".join(delimiter.join(map(str, cells)) for cells in [header, *rows])
    (folder / name).write_bytes((text + "\n" + end).encode(encoding))
    return folder / name


def load(path, **settings):
    config = {"target": "outcome", "client_column": "clinic", "test_fraction": 0.0} | settings
    return load_shards(DataConfig(name="files", path=str(path), **config))


def kept_rows(shards):
    """Rows that became examples of any client."""
    return sum(len(rows) for part in (shards.train, shards.validation, shards.test) for rows in part)


def uses(shards):
    return {use.name: use.taken_for for use in shards.columns}


def refused(path, **settings):
    with pytest.raises(UserError) as caught:
        load(path, **settings)
    return str(caught.value)


def restored(shards):
    """The preprocessing as a run folder keeps it."""
    return Preprocessing.from_json(shards.preprocessing.to_json(), "here")


def test_german_spreadsheet(tmp_path):
    """Semicolons, Latin-1, decimal commas with points for thousands, dotted dates and a total at the end."""
    path = table(
        tmp_path, ["Größe (cm)", "Kosten", "Aufnahme", "clinic", "outcome"],
        lambda k, name, clinic, label: [f"1{k:02d},5", f"1.{k:03d},50 €", f"{k + 1:02d}.03.2021", clinic, label],
        ";", "cp1252", "Summe;12.000,00 €;;;\n;;;;\n",
    )  # fmt: skip
    shards = load(path)
    assert uses(shards) == {
        "Größe (cm)": "numbers", "Kosten": "numbers", "Aufnahme": "dates", "outcome": "target",
    }  # fmt: skip
    assert kept_rows(shards) == 24
    assert shards.preprocessing.inputs[1].mean == pytest.approx(1000.5 + 11.5)
    assert any("Windows-1252" in note for note in shards.notes)
    assert any("line 26" in note and "'Summe'" in note for note in shards.notes)
    (tmp_path / "new.csv").write_text("Größe (cm);Kosten;Aufnahme\n112,5;1.012,50 €;2021-03-13\n", "utf-8-sig")
    assert read_inputs(tmp_path / "new.csv", restored(shards))[0].tolist() == shards.x[18].tolist()


def test_american_export(tmp_path):
    """A byte order mark, currency, thousands and percent signs, dates with the month first, and a column of names."""
    path = table(
        tmp_path, ["Patient Name", "Charge", "Share", "Admitted", "clinic", "outcome"],
        lambda k, name, clinic, label: [
            f'"{name}, Jr."', f'"${k + 1},200.00"', f"{k}%", f"03/{k + 1}/21", clinic, label
        ],
        encoding="utf-8-sig",
    )  # fmt: skip
    shards = load(path)
    assert uses(shards) == {
        "Patient Name": "left out", "Charge": "numbers", "Share": "numbers", "Admitted": "dates", "outcome": "target",
    }  # fmt: skip
    assert shards.preprocessing.writing.date("Admitted").day_first is False
    assert shards.preprocessing.inputs[0].mean == pytest.approx(12_700)
    for other in ('"Nobody",', ""):  # a column that was left out may be there or not
        header = ("Patient Name," if other else "") + "Charge,Share,Admitted\n"
        (tmp_path / "new.csv").write_text(header + other + '"$2,200.00",1%,3/2/2021\n')
        assert read_inputs(tmp_path / "new.csv", restored(shards))[0].tolist() == shards.x[0].tolist()


def test_utf16_with_tabs_and_an_index_without_a_name(tmp_path):
    path = table(
        tmp_path, ["", "age", "clinic", "outcome", ""],
        lambda k, name, clinic, label: [k, 20 + k % 7, clinic, label, ""], "\t", "utf-16", name="a.tsv",
    )  # fmt: skip
    shards = load(path)
    assert uses(shards) == {"column 1": "left out", "age": "numbers", "outcome": "target"}


def test_missing_targets_and_numbers_with_remarks_are_one_message(tmp_path):
    path = table(
        tmp_path, ["age", "dose", "born", "clinic", "outcome"],
        lambda k, name, clinic, label: [
            "refused" if k == 3 else 20 + k, "high" if k == 5 else k / 4, "03/04/2020", clinic,
            "" if k in (1, 7) else label,
        ],
    )  # fmt: skip
    with pytest.raises(Problems) as caught:
        load(path)
    problems = caught.value.problems
    assert len(problems) == 4
    for words in ("--missing 'refused'", "data.categories", "day_first", "--drop-missing-target", "and in 1 more rows"):
        assert any(words in problem for problem in problems)
    assert str(caught.value).count("\n") == 4
    shards = load(path, missing=("refused", "high"), day_first=True, drop_missing_target=True)
    assert kept_rows(shards) == 22
    assert any("2 of" in note or "1 of" in note for note in shards.notes)
    (tmp_path / "new.csv").write_text("age,dose,born\nRefused,,04/04/2020\n")
    new = read_inputs(tmp_path / "new.csv", restored(shards))[0]
    age = shards.preprocessing.inputs[0]
    assert (new[0], new[1]) == (0, float(age.indicator))


def test_placeholders_mixed_yes_and_no_and_dates_in_several_forms(tmp_path):
    said = ["Yes", "no", "Y", "N", "TRUE", "false", "oui", "nein"]
    when = ["2020-01-{:02d}", "{} Feb 2020", "March {}, 2020", "{:02d}.04.2020", "2020-05-{:02d} 13:30"]
    path = table(
        tmp_path, ["smoker", "weight", "seen", "clinic", "outcome"],
        lambda k, name, clinic, label: [
            said[k % 8], "unknown" if k == 4 else "-" if k == 9 else 60 + k, f'"{when[k % 5].format(k + 1)}"',
            clinic, label,
        ],
    )  # fmt: skip
    shards = load(path)
    assert uses(shards) == {"smoker": "categories", "weight": "numbers", "seen": "dates", "outcome": "target"}
    assert shards.preprocessing.inputs[0].categories == ("no", "yes")
    assert next(use.missing for use in shards.columns if use.name == "weight") == pytest.approx(2 / 24)
    (tmp_path / "new.csv").write_text("smoker,weight,seen\nJA,60,1 January 2020\n")
    assert read_inputs(tmp_path / "new.csv", restored(shards))[0, :3].tolist() == [0, 1, 0]


def test_repeated_and_empty_columns_and_odd_names(tmp_path):
    path = table(
        tmp_path, ['"the ""real"" age"', "score", "score", "empty", "clinic", "outcome"],
        lambda k, name, clinic, label: [k % 9, k, 2 * k, "", clinic, label],
    )  # fmt: skip
    shards = load(path)
    assert uses(shards) == {
        'the "real" age': "numbers", "score": "numbers", "score (2)": "numbers", "empty": "left out",
        "outcome": "target",
    }  # fmt: skip
    assert any("two columns 'score'" in note for note in shards.notes)
    message = refused(path, target="score")
    assert "two columns 'score': rename or remove one of them" in message  # else one would give the other away


def test_an_identifier_is_left_out_unless_it_is_kept(tmp_path):
    path = table(
        tmp_path,
        ["patient_id", "age", "clinic", "outcome"],
        lambda k, name, clinic, label: [1000 + k, k, clinic, label],
    )
    assert uses(load(path)) == {"patient_id": "left out", "age": "numbers", "outcome": "target"}
    assert uses(load(path, keep=("patient_id",)))["patient_id"] == "numbers"
    assert uses(load(path, ignore=("patient_id",))) == {"age": "numbers", "outcome": "target"}


def test_excel(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    import datetime

    book = openpyxl.Workbook()
    book.active.append(["age", "seen", "code", "clinic", "outcome"])
    for k in range(24):
        seen = datetime.datetime(2020, 1, 1 + k)
        book.active.append([20 + k, seen, "1,200" if k % 2 else "900", "ns"[k % 2], "ill" if k % 3 else "well"])
    book.active.append([None] * 5)
    book.active.append(["Total", 24])
    book.save(tmp_path / "a.xlsx")
    shards = load(tmp_path / "a.xlsx")
    assert uses(shards) == {"age": "numbers", "seen": "dates", "code": "numbers", "outcome": "target"}
    assert kept_rows(shards) == 24
    book.active.delete_rows(26, 2)
    book.save(tmp_path / "new.xlsx")
    assert len(read_inputs(tmp_path / "new.xlsx", restored(shards))) == 24
    (tmp_path / "b.xlsx").write_bytes(b"PK no archive")
    assert "cannot be read as Excel" in refused(tmp_path / "b.xlsx")


def test_frames_of_pandas_and_polars_are_taken_as_they_are():
    import pandas

    from pfedbayes.data import shards_from_tables
    from pfedbayes.data.own.new_rows import read_chunks

    columns = {
        "age": [float(k) if k else None for k in range(24)],
        "seen": [f"2020-01-{k + 1:02d}" for k in range(24)],
        "clinic": ["north", "south"] * 12,
        "outcome": ["ill", "well", "ill"] * 8,
    }
    frames = [pandas.DataFrame(columns)]
    frames.append(frames[0].assign(seen=pandas.to_datetime(frames[0]["seen"])))
    frames += (
        [pytest.importorskip("polars").DataFrame(columns)]
        if __import__("importlib.util").util.find_spec("polars")
        else []
    )
    found = [shards_from_tables(frame, "outcome", client_column="clinic", test_fraction=0) for frame in frames]
    for frame, shards in zip(frames, found, strict=True):
        assert shards.names == ("north", "south")
        assert shards.x.tolist() == found[0].x.tolist()
        (chunk,) = read_chunks(frame, shards.preprocessing)
        np.testing.assert_array_equal(chunk.x.numpy()[::2], shards.x.numpy()[:12])


def test_a_client_without_any_date_fits_the_others(tmp_path):
    for name, seen in (("one", "2020-01-01"), ("other", "")):
        rows = "".join(f"{k},{seen},{'uv'[k % 2]}\n" for k in range(6))
        (tmp_path / f"{name}.csv").write_text("age,seen,outcome\n" + rows)
    shards = load(tmp_path, client_column=None)
    assert uses(shards)["seen"] == "dates"
    assert shards.names == ("one", "other")
    summaries = []
    for k, name in enumerate(shards.names):  # each on a machine of its own
        config = DataConfig(name="files", path=str(tmp_path / f"{name}.csv"), target="outcome", test_fraction=0.0)
        summaries.append(ClientSummary.from_json(summarise_client(config, k, name).to_json()))
    assert combine(summaries).to_json() == shards.preprocessing.to_json()
