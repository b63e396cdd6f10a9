import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clinics import clinics

import pfedbayes as package
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.newcomers import COMPARED, FOLDS, STEPS, Joined, _newcomer
from pfedbayes.trust.certificate import Certificate, Measured
from pfedbayes.trust.joining import Verdict


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A run of the hierarchical model whose clients have trained alone too, and tables of newcomers."""
    folder = tmp_path_factory.mktemp("hospitals")
    clinics().to_csv(folder / "clinics.csv", index=False)
    settings = [
        f"data.path={folder / 'clinics.csv'}", "data.target=outcome", "data.client_column=hospital",
        "data.ignore=['patient', 'cost']", "training.rounds=40", "evaluation.folds=0",
    ]  # fmt: skip
    for _ in execute(read_experiment(None, settings), folder / "outcome", [1]):
        pass
    west = clinics(120, ("west",), seed=2)
    for rows in (1, 2, 5, COMPARED - 1, COMPARED, 120):
        west.head(rows).to_csv(folder / f"west{rows}.csv", index=False)
    west[west["outcome"] == "ill"].head(25).to_csv(folder / "ill.csv", index=False)
    west.head(0).to_csv(folder / "nobody.csv", index=False)
    return folder


def test_a_newcomer_gets_its_own_model_and_predicts(home, run):
    done = run("personalize", "outcome", "--data", "west.csv", "--json")
    result = json.loads(done.out.splitlines()[-1])
    assert done.out.startswith("west: own model trained on 120 rows\nby cross-validation in 5 folds: accuracy ")
    assert result["own"]["accuracy"] > 75
    assert (result["model"], result["alone"], result["joining"]) == ("joined", {}, None)
    assert result["personalised"]["rows"] == 120
    certificate = result["certificate"]
    assert certificate["certified"]["size"] == 120
    assert certificate["bound"] > certificate["certified"]["gibbs"]
    assert f"at most {certificate['bound']:.1%} of new rows" in done.out
    assert "its data are not here to check" in done.out
    done = run("predict", "outcome", "--client", "west", "--input", "new.csv", "-o", "west.npz", "--error", "0.2")
    with np.load(home / "west.npz") as out:
        assert (out["label"] == out["outcome"]).mean() > 0.7
    assert "calibration sets of 120" in done.err
    assert "predicted by models trained without them, in 5 folds" in done.err
    assert (STEPS, FOLDS, COMPARED) == (200, 5, 20)


def test_rows_can_be_held_out_instead(home, run):
    done = run("personalize", "outcome", "--data", "west.csv", "--client", "held", "--hold-out", "0.3")
    assert "84 rows; 36 rows held out" in done.out
    assert "on the rows held out: accuracy " in done.out
    done = run("predict", "outcome", "--client", "held", "--input", "new.csv")
    assert "calibration sets of 36" in done.err
    assert "in 5 folds" not in done.err


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


def test_without_folds_nothing_is_compared(home):
    joined = package.join(home / "outcome", home / "west.csv", steps=1, folds=0, certify=False)
    assert (joined.trained, joined.held, joined.folds, joined.own, joined.shared) == (120, 0, 0, {}, {})
    assert joined.describe() == ["west: own model trained on 120 rows", "no certificate: none was requested"]


@pytest.mark.parametrize("rows", [1, 2, 5, COMPARED - 1])
def test_few_rows_all_train_and_are_not_compared(hospitals, rows):
    joined = package.join(hospitals / "outcome", hospitals / f"west{rows}.csv", certify=False)
    folds = min(rows, FOLDS) if rows > 1 else 0
    assert (joined.trained, joined.held, joined.folds) == (rows, 0, folds)
    assert len(joined.client.own.odd) == (rows if folds else 0)
    assert (joined.personalised, joined.joining, joined.alone) == (None, None, {})
    word = "row" if rows == 1 else "rows"
    assert joined.describe()[:2] == [
        f"west{rows}: own model trained on {rows} {word}",
        "too few rows to compare its model with others: 20 are needed",
    ]


def test_what_joining_bought_is_told_by_cross_validation(hospitals):
    joined = package.join(hospitals / "outcome", hospitals / f"west{COMPARED}.csv", certify=False)
    assert joined.client.which == "personal"
    # With 20 rows, who starts alone knows little.
    assert joined.own["nll"] < joined.alone["nll"]
    assert joined.joining.alone == pytest.approx(joined.alone["nll"], rel=1e-4)
    assert joined.joining.joined == joined.personalised.joined == pytest.approx(joined.own["nll"], rel=1e-4)
    assert joined.personalised.alone == pytest.approx(joined.shared["nll"], rel=1e-4)
    lines = joined.describe()
    assert lines[1].count(" NLL ") == 3
    assert lines[1].endswith("with a model trained alone")
    assert lines[2].startswith("its own model against the shared one: ")
    assert lines[3].startswith("joining against training alone: ")


def test_folds_predict_rows_that_they_have_not_seen(hospitals, tmp_path):
    """Labels drawn at random can be learned by heart, but not predicted."""
    frame = clinics(60, ("west",), seed=4)
    frame["outcome"] = np.random.default_rng(0).choice(["ill", "well"], 60)
    frame.to_csv(tmp_path / "random.csv", index=False)
    joined = package.join(hospitals / "outcome", tmp_path / "random.csv", steps=400, zeta=0.01, certify=False)
    fitted = joined.client.predict(frame.drop(columns="outcome"))["label"] == frame["outcome"]
    assert 100 * fitted.mean() > joined.own["accuracy"] + 15
    assert joined.alone["accuracy"] < 70


def test_a_newcomer_whose_federation_is_worse_uses_the_model_that_it_trains_alone(hospitals, tmp_path):
    other = clinics(200, ("west",), seed=3)
    other["outcome"] = other["outcome"].map({"ill": "well", "well": "ill"})  # all the other way round
    other.to_csv(tmp_path / "odd.csv", index=False)
    odd = (hospitals / "outcome", tmp_path / "odd.csv")
    joined = package.join(*odd, steps=0)
    assert joined.joining.conclusion == "worse"
    assert joined.client.which == "alone"
    assert joined.without == "it bounds the error of a model that starts from the shared one"
    lines = joined.describe()
    assert lines[0] == "odd: model trained alone, on 200 rows"
    assert lines[3].endswith(" confidence: it uses the model that it trains alone")
    right = joined.client.predict(other.drop(columns="outcome"))["label"] == other["outcome"]
    assert right.mean() > 0.75
    assert package.join(*odd, steps=0, certify=False, model="joined").client.which == "personal"
    small = package.join(hospitals / "outcome", hospitals / "west5.csv", certify=False, model="alone")
    assert (small.client.which, small.joining) == ("alone", None)
    assert small.alone


def test_the_model_alone_knows_nothing_of_the_federation(hospitals, home):
    """It is trained for as many rounds as the run, and does not start from the shared model."""
    rounds = []
    before = Federation.rounds

    def count(self, until=None):
        for round in before(self, until):
            rounds.append((round, self.num_clients))
            yield round

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "rounds", count)
        package.join(hospitals / "outcome", hospitals / "west20.csv", certify=False)
    assert rounds == [(k, 1) for k in range(1, 41)]


def test_rows_of_one_label_are_named(hospitals):
    joined = package.join(hospitals / "outcome", hospitals / "ill.csv", certify=False)
    assert joined.label == "ill"
    assert "all its rows are 'ill', so they do not show how well it tells labels apart" in joined.describe()
    assert package.join(hospitals / "outcome", hospitals / "west5.csv", certify=False).label is None


def test_without_rows_there_is_the_shared_model(hospitals):
    with pytest.raises(UserError, match=r"nobody.csv has no rows: predict with the shared model \(.*--shared\)"):
        package.join(hospitals / "outcome", hospitals / "nobody.csv")


def test_a_newcomer_of_one_row_is_promised_nothing(home, tmp_path):
    clinics(1, ("west",)).to_csv(tmp_path / "one.csv", index=False)
    joined = package.join(home / "outcome", tmp_path / "one.csv")
    assert (joined.trained, joined.held, joined.own) == (1, 0, {})
    out = joined.client.predict(home / "new.csv")
    assert out["abstain"].all()
    assert set(out["conformal_set"]) == {"ill|well"}
    assert "0 calibration examples are too few" in joined.client.statements()[0]


def verdict(conclusion, alone=0.5, joined=0.4, probability=0.97):
    return Verdict("west", 40, alone, joined, joined - alone, -0.2, 0.1, probability, conclusion, "joined")


def test_the_result_in_words():
    measured = Measured(1200, 0.125, 0.1)
    posterior = torch.empty(0)
    certificate = Certificate("west", 1, "shared", 1.0, "elbo", 1.0, 3.14159, 200, 0.05, 0.25, False, measured, None,
                              0.3, measured, posterior)  # fmt: skip
    client = SimpleNamespace(name="west", which="personal")
    joined = Joined(
        client=client, trained=1000, held=2000, folds=0, own={"accuracy": 87.65432, "nll": 0.4},
        shared={"accuracy": 50.0, "nll": 0.6}, alone={}, personalised=verdict("better", 0.6), joining=None, label=None,
        certificate=certificate, without=None, unchecked=False,
    )  # fmt: skip
    assert joined.describe() == [
        "west: own model trained on 1,000 rows; 2,000 rows held out for calibration",
        "on the rows held out: accuracy 87.65 % and NLL 0.400 with its own model; accuracy 50 % and NLL 0.600 with the "
        "shared model",
        "its own model against the shared one: NLL 0.60 → 0.40, better with 97 % confidence",
        "certificate: with 95% confidence, a network drawn from its model is wrong on at most 25.0% of new rows; based "
        "on all 1,200 rows, of which 12.5% are wrong, and a KL of 3.1 nats from the shared model",
    ]
    measured = dataclasses.replace(measured, size=1)
    doubtful = dataclasses.replace(
        joined, unchecked=True, certificate=dataclasses.replace(certificate, vacuous=True, certified=measured)
    )
    assert "of new rows (vacuous: no better than guessing); based on 1 row, of" in doubtful.describe()[3]
    assert doubtful.describe()[4].startswith("it holds only if the run was not trained on these rows")
    numbers = dataclasses.replace(
        joined, held=0, folds=5, own={"rmse": 1.5, "nll": 1.0}, shared={"rmse": 2.5, "nll": 2.0},
        alone={"rmse": 3.5, "nll": 3.0}, joining=verdict("no difference shown"), certificate=None, without="why",
    )  # fmt: skip
    assert numbers.describe()[1:] == [
        "by cross-validation in 5 folds: RMSE 1.5 and NLL 1.000 with its own model; RMSE 2.5 and NLL 2.000 with the "
        "shared model; RMSE 3.5 and NLL 3.000 with a model trained alone",
        "its own model against the shared one: NLL 0.60 → 0.40, better with 97 % confidence",
        "joining against training alone: no difference that 40 rows could show",
        "no certificate: why",
    ]
    alone = dataclasses.replace(
        numbers, client=SimpleNamespace(name="west", which="alone"), joining=verdict("worse", 0.4, 0.5, 0.03)
    )
    assert alone.describe()[0] == "west: model trained alone, on 1,000 rows"
    assert alone.describe()[3] == (
        "joining against training alone: NLL 0.40 → 0.50, worse with 97 % confidence: it uses the model that it trains "
        "alone"
    )


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
        (["--data", "west.csv", "--folds", "1"], "--folds is 1: give 2 to 100, or 0 for none"),
        (["--data", "west.csv", "--folds", "101"], "--folds is 101: give 2 to 100"),
        (["--data", "west.csv", "--folds", "-1"], "--folds is -1: give 2 to 100"),
        (["--data", "west.csv", "--model", "own"], "there is no model 'own': choose joined or alone"),
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
