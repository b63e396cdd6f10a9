"""Which texts are numbers, and which texts are the same category in CSV, Parquet, NPZ and memory."""

import dataclasses

import numpy as np
import pytest

from pfedbayes.data import DataConfig, Preprocessing, load_shards, read_inputs, shards_from_tables
from pfedbayes.data.own.columns import Schema, Texts, as_number, canonical
from pfedbayes.data.own.readers import read_table
from pfedbayes.errors import UserError


def read(folder, *cells, **kinds):
    (folder / "a.csv").write_text("a,b\n" + "".join(f"{cell},1\n" for cell in cells))
    return read_table(folder / "a.csv", Schema(kinds=kinds)).columns["a"]


@pytest.mark.parametrize("cell", ["12_34", "１２", "0x10", "1e5_0", "٣", "1 2", "--1", "1e", "1.2.3", "1d3"])
def test_what_only_python_takes_for_a_number_is_text(tmp_path, cell):
    quoted = f'"{cell}"'
    assert read(tmp_path, quoted).levels == (cell,)
    with pytest.raises(UserError, match=r"a.csv, line 3: the column 'a' is .* but the column holds numbers elsewhere"):
        read(tmp_path, "7", quoted)
    with pytest.raises(UserError, match="but the column must hold numbers"):
        read(tmp_path, quoted, a="number")


@pytest.mark.parametrize("cell", ["7", "+7", "-7.", ".5", "7e2", "7E-2", " 7 ", "007", "\u00a07"])
def test_numbers(tmp_path, cell):
    assert read(tmp_path, cell).tolist() == [float(cell)]


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e400", "1e308", "-1e31", "9" * 400])
def test_numbers_whose_squares_overflow_are_refused_with_their_line(tmp_path, cell):
    with pytest.raises(UserError, match=r"a.csv, line 3: the column 'a' is (infinite|.*, beyond ±1e\+30)"):
        read(tmp_path, "1", cell)
    with pytest.raises(UserError, match="line 2"):
        read(tmp_path, cell)
    assert read(tmp_path, "sup", "inf").levels == ("sup", "inf")  # a column of text may have such a word


@pytest.mark.parametrize("target", ["1e308", "-1e308", "inf"])
def test_a_target_whose_square_overflows_is_refused(tmp_path, target):
    rows = "".join(f"{k},{'uv'[k % 2]},{k}.5\n" for k in range(20))
    (tmp_path / "a.csv").write_text(f"a,c,y\n1,u,{target}\n{rows}")
    with pytest.raises(UserError, match="line 2: the column 'y' is"):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize("column", ["a", "y"])
def test_held_out_numbers_beyond_the_reach_of_a_network_are_refused(tmp_path, column):
    rows = "".join(f"{k},{'uv'[k % 2]},{k}.5,train\n" for k in range(20))
    far = "1e29,u,1.5,test\n" if column == "a" else "1,u,1e29,test\n"
    (tmp_path / "a.csv").write_text(f"a,c,y,split\n{far}{rows}")
    with pytest.raises(UserError, match=rf"line 2: '{column}' is 1e\+29, more than 1e\+12 standard deviations"):
        load(tmp_path / "a.csv", split_column="split")


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["1", "1.0", "1e0", "+1", "1.", "1.00"], "1"),
        (["0", "-0", "0.0", "+0", "-0.0"], "0"),
        (["-2", "-2.0"], "-2"),
        (["0.5", ".5", "5e-1", "0.50"], "0.5"),
        (["True", "true", "TRUE"], "True"),
        (["False", "false", "FALSE"], "False"),
        (["007"], "007"),
        (["12345678901234567890"], "12345678901234567890"),
        (["1_0"], "1_0"),
        (["1e400"], "1e400"),
        (["truely"], "truely"),
    ],
)
def test_the_same_value_has_one_form(texts, form):
    assert {canonical(text) for text in texts} == {form}
    assert canonical(form) == form


def test_long_texts_are_parsed_in_linear_time():
    assert as_number("1" * 100_000 + "x") is None


def load(path, **settings):
    settings = {"target": "y", "client_column": "c", "validation": 0.2} | settings
    return load_shards(DataConfig(name="files", path=str(path), **settings))


WAYS = {
    "number": (["1", "2", "3"], [1, 2, 3], [1.0, 2.0, 3.0], ["1.0", "2.0", "3.0"]),
    "truth": (["true", "false", "true"], [True, False, True], ["TRUE", "FALSE", "TRUE"], ["True", "False", "True"]),
    "tenth": (["0.10", "0.20", "0.5"], np.array([0.1, 0.2, 0.5], np.float32), [0.1, 0.2, 0.5], ["1e-1", "2e-1", ".5"]),
}


@pytest.mark.parametrize("trained", range(4))
@pytest.mark.parametrize("name", WAYS)
def test_categories_match_across_formats(tmp_path, name, trained):
    """Whatever the format that a model was trained with, rows in all other formats are seen categories."""
    import pyarrow
    import pyarrow.parquet

    values = WAYS[name]
    table = {"q": values[trained], "n": [1, 2, 4], "y": ["a", "b", "a"]}
    fitted = shards_from_tables({"u": table}, "y", categories=["q"], test_fraction=0).preprocessing
    encoded = []
    for value in values:
        pyarrow.parquet.write_table(pyarrow.table({"q": value, "n": [1, 2, 4]}), tmp_path / "new.parquet")
        rows = zip(map(str, value), ["1", "2", "4"], strict=True)
        (tmp_path / "new.csv").write_text("q,n\n" + "".join(f"{q},{n}\n" for q, n in rows))
        encoded += [read_inputs(tmp_path / file, fitted).tolist() for file in ("new.csv", "new.parquet")]
    assert all(each == encoded[0] for each in encoded)
    assert sum(row[len(fitted.inputs[0].categories)] for row in encoded[0]) == 0  # none is unseen


def test_clients_and_labels_of_different_formats_are_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text("n,c,y\n" + "1,1.0,true\n2,2.0,false\n" * 6)
    columns = {"n": [1, 2] * 6, "c": [1, 2] * 6, "y": [True, False] * 6}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet")
    shards = load(tmp_path)
    assert shards.names == ("1", "2")
    assert shards.class_names == ("False", "True")
    assert shards.y.tolist() == [1] * 12 + [0] * 12


def test_models_of_earlier_versions_still_know_their_categories(tmp_path):
    table = {"q": ["1", "2", "1"], "y": ["a", "b", "a"]}
    fitted = shards_from_tables({"u": table}, "y", categories=["q"], test_fraction=0).preprocessing
    for names, seen in (
        (("true", "false"), {"true": 0, "True": 0, "FALSE": 1}),
        (("1.0", "2.0"), {"1": 0, "2.0": 1}),
        (("1", "1.0"), {"1": 0, "1.0": 1}),  # kept apart, as they were
        (("01", "1"), {"01": 0, "1": 1, "1.0": 1}),
    ):
        old = dataclasses.replace(fitted, inputs=(dataclasses.replace(fitted.inputs[0], categories=names),))
        old = Preprocessing.from_json(old.to_json(), "here")
        for text, place in seen.items():
            (tmp_path / "new.csv").write_text(f"q\n{text}\n")
            assert read_inputs(tmp_path / "new.csv", old)[0].tolist().index(1) == place
    old = dataclasses.replace(fitted, target=dataclasses.replace(fitted.target, classes=("1.0", "0")))
    column = Texts(np.array([0, 1], np.int32), ("0", "1"))
    assert old.target.encode(read_like(column)).tolist() == [1, 0]


def read_like(column):
    from pfedbayes.data.own.columns import Table

    return Table("here", {"y": column}, np.arange(len(column.codes)))
