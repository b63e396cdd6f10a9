"""Tables of predictions: what spreadsheets run is disarmed, and odd columns are written or named."""

import csv
import datetime
import io

import numpy as np
import pytest

from pfedbayes.errors import UserError
from pfedbayes.serving.tables import FORMULA, open_table


def cells_of(path, texts, name="t"):
    with open_table(path) as write:
        write({name: texts, "n": np.arange(len(texts))})
    (header, _), *rows = csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), delimiter=",")
    return [header, *(row[0] for row in rows)]


@pytest.mark.parametrize(
    "text",
    [
        '=HYPERLINK("http://x","y")', "=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "-x", "+", "-",
        "＝1",         "-2+3+cmd|' /C calc'!A0", "'=1", "''=1", "-1|=1", "--1", "-0x10", "-inf",
    ],
)  # fmt: skip
def test_what_a_spreadsheet_might_run_gets_an_apostrophe(tmp_path, text):
    assert cells_of(tmp_path / "a.csv", [text], text) == [f"'{text}"] * 2


@pytest.mark.parametrize(
    "text", ["-1", "+1", "-1.5e3", "-1|1", "-1|+2", "a=1", "a", "", "1", "x@y.z", "'a'", "don't", "|", "1-2"]
)
def test_numbers_labels_and_other_texts_stay_as_they_are(tmp_path, text):
    assert cells_of(tmp_path / "a.csv", [text]) == ["t", text]


def test_every_text_can_be_read_back(tmp_path):
    texts = ["=1", "'=1", "''=1", "-1", "'-1", "'a", "a", "\t", "'\t"]
    back = [
        cell[1:] if cell[:1] == "'" and FORMULA.match(cell) else cell
        for cell in cells_of(tmp_path / "a.csv", texts)[1:]
    ]
    assert back == texts


def test_numbers_are_not_taken_for_texts(tmp_path):
    with open_table(tmp_path / "a.tsv") as write:
        write({"mean": np.array([-1.5, np.inf]), "yes": np.array([True, False])})
    assert (tmp_path / "a.tsv").read_text() == "mean\tyes\n-1.5\ttrue\ninf\tfalse\n"


@pytest.mark.parametrize("name", ["file", "allow_pickle", "arr_0", "a/b", "=1"])
def test_an_array_may_have_any_name(tmp_path, name):
    import pyarrow

    with open_table(tmp_path / "a.npz") as write:
        write({name: pyarrow.array([["=1"], None]), "more": np.array([1, 2])})
        write({name: pyarrow.array([["u"], ["v", "w"]]), "more": np.array([3, 4])})
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays[name].tolist() == ["['=1']", "", "['u']", "['v', 'w']"]
        assert arrays["more"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_a_date_beyond_those_of_python_is_named(tmp_path, suffix):
    import pyarrow

    far = pyarrow.array([10**7], pyarrow.date32())
    message = "the column 'when' has cells that cannot be written"
    with pytest.raises(UserError, match=message), open_table(tmp_path / f"a{suffix}") as write:
        write({"when": far})
    assert not list(tmp_path.iterdir())
    with open_table(tmp_path / "a.parquet") as write:
        write({"when": far})


@pytest.mark.parametrize("column", [np.array([1j, 2]), np.array([1, 2], np.longdouble), np.zeros(2, "V4")])
def test_a_type_that_parquet_lacks_is_named(tmp_path, column):
    message = "the column 'odd' has cells that cannot be written"
    with pytest.raises(UserError, match=message), open_table(tmp_path / "a.parquet") as write:
        write({"odd": column})


def test_half_a_surrogate_pair_is_escaped(capsys):
    with open_table(None) as write:
        write({"t": np.array(["é\ud800"])})
    assert capsys.readouterr().out == "t\né\\ud800\n"


def test_dates_are_written_as_text(tmp_path):
    import pyarrow

    with open_table(tmp_path / "a.csv") as write:
        write({"when": pyarrow.array([datetime.date(2026, 1, 2), None])})
    assert (tmp_path / "a.csv").read_text() == 'when\n2026-01-02\n""\n'


@pytest.mark.parametrize("folder", ["x" * 5000, "a\0b"])
def test_an_odd_path_is_one_line(tmp_path, folder):
    with pytest.raises(UserError, match=r"cannot write to|does not exist"), open_table(tmp_path / folder / "a.csv"):
        pass


CHUNKS = [
    {"id": ["a", None], "p": np.array([0.123456789, 2.0]), "abstain": np.array([True, False])},
    {"id": ["c"], "p": np.array([-1e-9]), "abstain": np.array([True])},
]


def written(path):
    with open_table(path) as append:
        for chunk in CHUNKS:
            append(chunk)
    return path


def test_csv_and_tsv(tmp_path, capsys):
    text = "id,p,abstain\na,0.1234568,true\n,2,false\nc,-1e-09,true\n"
    assert written(tmp_path / "a.csv").read_text() == text
    assert written(tmp_path / "A.TSV").read_text() == text.replace(",", "\t")
    written(None)
    assert capsys.readouterr().out == text


def test_parquet(tmp_path):
    from pyarrow import parquet

    table = parquet.read_table(written(tmp_path / "a.parquet")).to_pydict()
    assert table == {"id": ["a", None, "c"], "p": [0.123456789, 2.0, -1e-9], "abstain": [True, False, True]}


def test_npz_holds_no_objects(tmp_path):
    with np.load(written(tmp_path / "a.npz"), allow_pickle=False) as arrays:
        assert arrays["id"].tolist() == ["a", "", "c"]
        assert arrays["p"].tolist() == [0.123456789, 2.0, -1e-9]
        assert arrays["abstain"].tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["a.xls", "a"])
def test_other_names_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="no known file type"), open_table(tmp_path / name):
        pass
    with pytest.raises(UserError, match=r"the folder .*none does not exist"), open_table(tmp_path / "none" / "a.csv"):
        pass
