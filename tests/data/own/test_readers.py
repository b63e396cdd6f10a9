"""Reading tables: what works, and one clear line for what does not."""

import numpy as np
import pytest

from pfedbayes.data.own import columns, csv_files
from pfedbayes.data.own.columns import Schema, Texts, concatenate
from pfedbayes.data.own.readers import read_table
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError


def write(folder, text, name="a.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def texts(column):
    assert isinstance(column, Texts)
    return [None if code < 0 else column.levels[code] for code in column.codes]


def refused(path, schema=None):
    with pytest.raises(UserError) as caught:
        read_table(path, schema or Schema())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_numbers_texts_and_missing_cells(tmp_path):
    path = write(tmp_path, "age,sex,städte\n30,m,Köln\n,f,\nNA,?,東京\n2.5e1,m,Köln\n\n")
    table = read_table(path, Schema())
    np.testing.assert_array_equal(table.columns["age"], [30, np.nan, np.nan, 25])
    assert texts(table.columns["sex"]) == ["m", "f", None, "m"]
    assert texts(table.columns["städte"]) == ["Köln", None, "東京", "Köln"]
    assert table.place(2) == f"{path}, line 4"


def test_none_is_an_answer(tmp_path):
    assert texts(read_table(write(tmp_path, "pain,b\nnone,1\nmild,2\n"), Schema()).columns["pain"]) == ["none", "mild"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_quotes_and_a_byte_order_mark(tmp_path, delimiter):
    rows = [["a", "b", "c"], ["1", '"x, y; z"', "3"], ["2", "w", "4"]]
    path = write(tmp_path, "\ufeff" + "\r\n".join(delimiter.join(row) for row in rows))
    table = read_table(path, Schema())
    assert list(table.columns) == ["a", "b", "c"]
    assert texts(table.columns["b"]) == ["x, y; z", "w"]


def test_a_decimal_comma_goes_with_semicolons(tmp_path):
    table = read_table(write(tmp_path, "a;b\n1,5;x\n-2,25;y\n"), Schema())
    np.testing.assert_array_equal(table.columns["a"], [1.5, -2.25])


def test_chunks_do_not_matter(tmp_path, monkeypatch):
    rows = "".join(f"{k if k > 4 else ''},{'v' + str(k % 3) if k > 7 else ''},{k}\n" for k in range(23))
    path = write(tmp_path, "late,text,n\n" + rows)
    whole = read_table(path, Schema())
    monkeypatch.setattr(csv_files, "CHUNK", 3)
    parts = read_table(path, Schema())
    np.testing.assert_array_equal(whole.columns["late"], parts.columns["late"])
    assert texts(whole.columns["text"]) == texts(parts.columns["text"])
    np.testing.assert_array_equal(whole.lines, parts.lines)


@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize(
    ("cells", "line", "says"), [(["1", "2", "3", "old"], 5, "'old'"), (["x", "y", "", "7"], 5, "'7'")]
)
def test_mixed_types_name_both_lines(tmp_path, monkeypatch, cells, line, says, chunk):
    monkeypatch.setattr(csv_files, "CHUNK", chunk)
    path = write(tmp_path, "age,b\n" + "".join(f"{cell},1\n" for cell in cells))
    message = refused(path)
    assert f"a.csv, line {line}" in message
    assert says in message
    assert "'age'" in message
    assert "line 2" in message
    assert "data.categories" in message
    column = read_table(path, Schema(kinds={"age": "category"})).columns["age"]
    assert texts(column) == [cell or None for cell in cells]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        ("\n\n", "no header"),
        ("a,b\n1,2\n1,2,3\n", "line 3 has 3 cells and the header 2"),
        ("a,b\n1,inf\n", "line 2: the column 'b' is infinite"),
        ('a,b\n1,"2\n', "line 2"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path, text, words):
    message = refused(write(tmp_path, text))
    assert words in message
    assert "a.csv" in message


def test_an_unreadable_file_is_named(tmp_path):
    assert "cannot be read" in refused(tmp_path / "missing.csv")


def test_a_file_larger_than_memory_is_noticed_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, "a,b\n" + "1,2\n" * 3000)
    monkeypatch.setattr(csv_files, "CHUNK", 100)
    monkeypatch.setattr(columns, "host_memory", lambda: 2 * 16 * 3001)
    assert len(read_table(path, Schema())) == 3000
    monkeypatch.setattr(columns, "host_memory", lambda: 2 * 16 * 2999)
    message = refused(path)
    assert "do not fit into half of the memory" in message
    assert "data.ignore" in message


def test_an_archive_larger_than_memory_is_not_even_opened(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 50)))
    assert (tmp_path / "a.npz").stat().st_size < 10_000
    monkeypatch.setattr(columns, "host_memory", lambda: 100_000)
    monkeypatch.setattr(np, "load", None)
    assert "do not fit into half of the memory" in refused(tmp_path / "a.npz")


def test_a_column_that_is_ignored_is_not_even_looked_at(tmp_path):
    path = write(tmp_path, "id,a\nx,1\n7,2\n")
    assert list(read_table(path, Schema(ignore=("id",))).columns) == ["a"]


def write_parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_has_types(tmp_path):
    import pyarrow

    write_parquet(
        tmp_path / "a.parquet", n=[1, None, 3], t=["1", None, "3"], b=[True, False, None], f=[0.5, None, 1.0],
        c=pyarrow.array(["u", "v", None]).dictionary_encode(),
    )  # fmt: skip
    columns = read_table(tmp_path / "a.parquet", Schema()).columns
    np.testing.assert_array_equal(columns["n"], [1, np.nan, 3])
    assert texts(columns["t"]) == ["1", None, "3"]
    assert texts(columns["b"]) == ["True", "False", None]
    assert texts(columns["c"]) == ["u", "v", None]
    columns = read_table(tmp_path / "a.parquet", Schema(kinds={"n": "category"})).columns
    assert texts(columns["n"]) == ["1", None, "3"]


def test_bad_parquet_is_one_clear_line(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not a table at all")
    assert "cannot be read as Parquet" in refused(tmp_path / "a.parquet")


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    assert "needs pyarrow: pip install 'pfedbayes[tables]'" in refused(tmp_path / "a.parquet")


def test_npz(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([[1.0, 2], [3, 4]]), y=[0, 1], client=["u", "v"])
    columns = read_table(tmp_path / "a.npz", Schema()).columns
    assert list(columns) == ["x0", "x1", "y", "client"]
    np.testing.assert_array_equal(columns["x1"], [2, 4])
    images = np.zeros((3, 1, 4, 4), np.uint8)
    np.savez(tmp_path / "b.npz", x=images)
    table = read_table(tmp_path / "b.npz", Schema())
    assert (len(table), table.x.dtype) == (3, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.zeros(3)}, "no numeric array x"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "x has 3 rows and y has 2"),
        ({"x": np.full((2, 2, 2), np.nan)}, "NaN or infinity"),
        ({"x": np.array([None, {}], dtype=object)}, "cannot be read as NPZ"),
    ],
)
def test_bad_npz_is_one_clear_line(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    assert words in refused(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    assert "cannot be read as NPZ" in refused(tmp_path / "a.npz")


def test_frames_are_tables():
    import pandas as pd

    frame = pd.DataFrame(
        {
            "n": [1, 2, None],
            "t": ["a", None, "b"],
            "c": pd.Categorical(["u", "v", "u"]),
            "i": pd.array([1, None, 3], dtype="Int64"),
        }
    )
    columns = table_of(frame, "frame", Schema()).columns
    np.testing.assert_array_equal(columns["n"], [1, 2, np.nan])
    np.testing.assert_array_equal(columns["i"], [1, np.nan, 3])
    assert texts(columns["t"]) == ["a", None, "b"]
    assert texts(columns["c"]) == ["u", "v", "u"]


def test_tables_are_put_under_one_another():
    one = table_of({"t": ["a", "b"], "n": [1, 2]}, "one", Schema())
    other = table_of({"t": ["c", "a"], "n": [3, 4]}, "other", Schema())
    empty = table_of({"t": [np.nan, np.nan], "n": [5, 6]}, "empty", Schema())
    whole = concatenate([one, other, empty])
    assert texts(whole.columns["t"]) == ["a", "b", "c", "a", None, None]
    np.testing.assert_array_equal(whole.columns["n"], [1, 2, 3, 4, 5, 6])
    with pytest.raises(UserError, match="holds numbers in odd and text in another"):
        concatenate([one, table_of({"t": [1, 2], "n": [3, 4]}, "odd", Schema())])
