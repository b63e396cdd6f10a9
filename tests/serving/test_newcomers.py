import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from clinics import clinics

import pfedbayes as package
from pfedbayes.serving.newcomers import HOLD_OUT, STEPS, Joined, _newcomer


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
    assert (STEPS, HOLD_OUT) == (200, 0.3)


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


def test_no_row_need_be_held_out(home):
    joined = package.join(home / "outcome", home / "west.csv", steps=1, hold_out=0.0, certify=False)
    assert (joined.trained, joined.held, joined.own, joined.shared) == (120, 0, {}, {})


def test_a_newcomer_of_one_row_is_promised_nothing(home, tmp_path):
    clinics(1, ("west",)).to_csv(tmp_path / "one.csv", index=False)
    joined = package.join(home / "outcome", tmp_path / "one.csv")
    assert (joined.trained, joined.held, joined.own) == (1, 0, {})
    out = joined.client.predict(home / "new.csv")
    assert out["abstain"].all()
    assert set(out["conformal_set"]) == {"ill|well"}
    assert "0 calibration examples are too few" in joined.client.statements()[0]


def test_the_result_in_words():
    measured = SimpleNamespace(size=1200, gibbs=0.125)
    certificate = SimpleNamespace(delta=0.05, bound=0.25, vacuous=False, certified=measured, kl=3.14159)
    joined = Joined(
        SimpleNamespace(name="west"), 1000, 2000, {"accuracy": 87.65432}, {"accuracy": 50.0}, certificate, None, False
    )
    assert joined.describe() == [
        "west: own model trained on 1,000 rows; 2,000 rows held out for calibration",
        "accuracy on the rows held out: 87.65 % with its own model, 50 % with the shared model",
        "certificate: with 95% confidence, a network drawn from its model is wrong on at most 25.0% of new rows; based "
        "on all 1,200 rows, of which 12.5% are wrong, and a KL of 3.1 nats from the shared model",
    ]
    certificate.vacuous = True
    doubtful = dataclasses.replace(joined, unchecked=True)
    assert "of new rows (vacuous: no better than guessing); based" in doubtful.describe()[2]
    assert doubtful.describe()[3].startswith("it holds only if the run was not trained on these rows")
    numbers = dataclasses.replace(joined, own={"rmse": 1.5}, shared={"rmse": 2.5}, certificate=None, without="why")
    assert numbers.describe()[1:] == [
        "rmse on the rows held out: 1.5 with its own model, 2.5 with the shared model", "no certificate: why",
    ]  # fmt: skip
    assert len(dataclasses.replace(numbers, own={}, shared={}).describe()) == 2


def test_a_share_of_each_label_is_held_out(home):
    preprocessing = package.open_client(home / "outcome", "north").preprocessing
    for share, held in ((0.0, 0), (0.3, 36), (0.99, 119)):
        shards = _newcomer(preprocessing, home / "west.csv", "west", share)
        assert (len(shards.train[0]), len(shards.validation[0]), len(shards.test[0])) == (120 - held, held, 0)
    kept, out = (shards.y[rows].bincount() for rows in (shards.train[0], shards.validation[0]))
    assert (shards.names, shards.num_classes, kept.sum() + out.sum()) == (("west",), 2, 120)
    # The same rows in every version, so that the results of a newcomer can be reproduced.
    few = _newcomer(preprocessing, home / "west.csv", "west", 0.05)
    assert few.validation[0].tolist() == [21, 53, 56, 65, 77, 97]
    half = _newcomer(preprocessing, home / "west.csv", "west", 0.5)
    assert (half.y[half.train[0]].bincount() - half.y[half.validation[0]].bincount()).abs().max() <= 1


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
