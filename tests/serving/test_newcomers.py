import json

import numpy as np
import pytest
from clinics import clinics

import pfedbayes as package


def test_a_newcomer_gets_its_own_model_and_predicts(home, run):
    done = run("personalize", "outcome", "--data", "west.csv", "--json")
    result = json.loads(done.out.splitlines()[-1])
    assert "84 rows; 36 rows held out" in done.out
    assert result["own"]["accuracy"] > 75
    certificate = result["certificate"]
    assert certificate["certified"]["size"] == 120
    assert certificate["bound"] > certificate["certified"]["gibbs"]
    assert f"at most {certificate['bound']:.1%} of new rows" in done.out
    assert "its data are not here to check" in done.out
    done = run("predict", "outcome", "--client", "west", "--input", "new.csv", "-o", "west.npz", "--error", "0.2")
    with np.load(home / "west.npz") as out:
        assert (out["label"] == out["outcome"]).mean() > 0.7
    assert "calibration sets of 36" in done.err


def test_a_newcomer_does_better_than_the_shared_model_where_it_differs(home, tmp_path):
    other = clinics(300, ("west",), seed=3)
    other["outcome"] = other["outcome"].map({"ill": "well", "well": "ill"})  # all the other way round
    other.to_csv(tmp_path / "odd.csv", index=False)
    joined = package.join(home / "outcome", tmp_path / "odd.csv", steps=600)
    assert joined.own["accuracy"] > joined.shared["accuracy"] + 30
    assert joined.certificate.kl > 1


def test_rows_of_the_run_certify_nothing(home, tmp_path):
    frame = clinics()
    frame.to_csv(home / "clinics.csv", index=False)
    try:
        frame[frame["hospital"] == "north"].to_csv(tmp_path / "again.csv", index=False)
        joined = package.join(home / "outcome", tmp_path / "again.csv")
    finally:
        (home / "clinics.csv").unlink()
    assert joined.certificate is None
    assert "are in the training data of the run" in joined.without
    assert not joined.unchecked


def test_a_newcomer_of_one_row_is_promised_nothing(home, tmp_path):
    clinics(1, ("west",)).to_csv(tmp_path / "one.csv", index=False)
    joined = package.join(home / "outcome", tmp_path / "one.csv")
    assert (joined.trained, joined.held, joined.own) == (1, 0, {})
    out = joined.client.predict(home / "new.csv")
    assert out["abstain"].all()
    assert set(out["conformal_set"]) == {"ill|well"}
    assert "0 calibration examples are too few" in joined.client.statements()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "new.csv", "--client", "north"], "is already a client of the run"),
        (["--data", "none.csv"], "none.csv does not exist"),
        (["--data", "west.csv", "--hold-out", "1"], "--hold-out is 1.0"),
        (["--data", "west.csv", "--client", "a/b"], "cannot be a file name"),
        (["--data", "west.csv", "-o", "west.csv"], "does not end in .safetensors"),
    ],
)
def test_what_is_wrong_with_a_newcomer_is_one_clear_line(home, command, arguments, words):
    before = (home / "west.csv").read_bytes()
    done = command("personalize", "outcome", *arguments)
    assert done.code == 2
    assert words in done.err.splitlines()[-1]
    assert (home / "west.csv").read_bytes() == before
