"""Encodings, delimiters, headers and rows of CSV files."""

import numpy as np
import pytest

from pfedbayes.data.own.columns import Schema
from pfedbayes.data.own.csv_files import read_cells
from pfedbayes.data.own.readers import read_table
from pfedbayes.errors import Problems, UserError


def read(folder, text, encoding="utf-8", **options):
    (folder / "a.csv").write_bytes(text.encode(encoding) if isinstance(text, str) else text)
    return read_table(folder / "a.csv", Schema(), **options)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
def test_encodings(tmp_path, encoding):
    table = read(tmp_path, "Größe,b\n1,Köln\n", encoding)
    assert list(table.columns) == ["Größe", "b"]
    assert table.columns["b"].levels == ("Köln",)
    assert bool(table.notes) == (encoding in ("cp1252", "latin-1"))


@pytest.mark.parametrize(
    "content", ["ä,b\n1,".encode() + b"\xe4\n", b"a,b\n1,\x81\n", b"\xff\xfe\x00", b"a\0,b\n1,\xe4\n"]
)
def test_what_is_damaged_is_not_guessed(tmp_path, content):
    with pytest.raises(UserError):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a;b\n1,5;2,5\n", ["a", "b"]),
        ("weight, dry;age\n1;2\n", ["weight, dry", "age"]),
        ('"x,y,z"\tb\n"1,2"\t3\n', ["x,y,z", "b"]),
        ("a|b|c\n1|2|3\n", ["a", "b", "c"]),
        ("sep=;\na;b\n1;2\n", ["a", "b"]),
        ("a\n1\n2\n", ["a"]),
    ],
)
def test_delimiters(tmp_path, text, names):
    assert list(read(tmp_path, text).columns) == names


def test_headers(tmp_path):
    table = read(tmp_path, ",a,a,a (2),\n0,1,2,3,\n1,4,5,6,\n")
    assert list(table.columns) == ["column 1", "a", "a (2)'", "a (2)"]
    assert 'the one at position 3 is called "a (2)\'"' in table.notes[0]
    with pytest.raises(UserError, match="two columns 'a'"):
        list(read_cells(tmp_path / "a.csv", Schema(roles=("a",))))


def test_rows_of_another_width_are_named_at_once(tmp_path):
    with pytest.raises(Problems, match=r"line 3 has 1 cells and the header 2 \(so do lines like it: 4 has 3\)"):
        read(tmp_path, "a,b\n1,2\n3\n4,5,6\n7,8,,\n")


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_totals_and_empty_rows_are_left_out_of_training_data(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("pfedbayes.data.own.csv_files.CHUNK", chunk)
    text = "name,n,m\nTotal,1,2\n,,\nx,2,3\nTotal,3,\nGrand total:,6,\n"
    table = read(tmp_path, text)
    assert table.columns["n"].tolist() == [1, 2]  # a total among the rows may be a name, and so may a full last row
    assert table.lines.tolist() == [2, 4]
    assert len(table.notes) == 2
    every = read(tmp_path, text, every_row=True)
    np.testing.assert_array_equal(every.columns["n"], [1, np.nan, 2, 3, 6])
