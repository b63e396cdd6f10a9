"""Tables that are written chunk by chunk hold all rows, in the format that their name asks for."""

import numpy as np
import pytest

from pfedbayes.errors import UserError
from pfedbayes.serving.tables import open_table

CHUNKS = [
    {"id": ["a", None], "p": np.array([0.123456789, 2.0]), "abstain": np.array([True, False])},
    {"id": ["c"], "p": np.array([-1e-9]), "abstain": np.array([True])},
]


def write(path):
    with open_table(path) as append:
        for chunk in CHUNKS:
            append(chunk)
    return path


def test_csv_and_tsv(tmp_path, capsys):
    text = "id,p,abstain\na,0.1234568,true\n,2,false\nc,-1e-09,true\n"
    assert write(tmp_path / "a.csv").read_text() == text
    assert write(tmp_path / "A.TSV").read_text() == text.replace(",", "\t")
    write(None)
    assert capsys.readouterr().out == text


def test_parquet(tmp_path):
    from pyarrow import parquet

    table = parquet.read_table(write(tmp_path / "a.parquet")).to_pydict()
    assert table == {"id": ["a", None, "c"], "p": [0.123456789, 2.0, -1e-9], "abstain": [True, False, True]}


def test_npz_holds_no_objects(tmp_path):
    with np.load(write(tmp_path / "a.npz"), allow_pickle=False) as arrays:
        assert arrays["id"].tolist() == ["a", "", "c"]
        assert arrays["p"].tolist() == [0.123456789, 2.0, -1e-9]
        assert arrays["abstain"].tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["a.xls", "a"])
def test_other_names_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="no known file type"), open_table(tmp_path / name):
        pass
    with pytest.raises(UserError, match=r"the folder .*none does not exist"), open_table(tmp_path / "none" / "a.csv"):
        pass
