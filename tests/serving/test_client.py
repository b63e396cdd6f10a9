"""Predictions of a client with their guarantees, by the command line and in Python, once the data are gone."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from clinics import clinics, train

import pfedbayes as package
from pfedbayes import runs
from pfedbayes.data import Preprocessing
from pfedbayes.data.own.target import Target
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.maths.metrics import confidence, log_average
from pfedbayes.runs.sections import NetConfig
from pfedbayes.serving.client import Client, Predictor, _free, predict_file
from pfedbayes.serving.options import Options
from pfedbayes.serving.portable import _thresholds
from pfedbayes.trust import abstention, conformal
from pfedbayes.trust.calibration import NO_SCORES, Scores


def test_new_rows_are_predicted_with_doubt_abstention_and_sets(home, run):
    done = run("predict", "outcome", "--client", "north", "--input", "new.csv", "-o", "out.csv", "--error", "0.08")
    out, new = pandas.read_csv(home / "out.csv"), pandas.read_csv(home / "new.csv")
    assert list(out)[: len(new.columns)] == list(new.columns)
    assert out[list(new.columns)].equals(new)
    columns = [
        "label",
        "p_ill",
        "p_well",
        "entropy",
        "aleatoric",
        "epistemic",
        "abstain",
        "conformal_set",
        "strangeness",
    ]
    assert list(out)[len(new.columns) :] == columns
    assert (out["p_ill"] + out["p_well"]).to_numpy() == pytest.approx(1)
    assert (out["aleatoric"] + out["epistemic"]).to_numpy() == pytest.approx(out["entropy"].to_numpy(), abs=1e-6)
    assert (out["label"] == np.where(out["p_ill"] > 0.5, "ill", "well")).all()
    assert (out["label"] == out["outcome"]).mean() > 0.8
    assert 0 < out["abstain"].sum() < 60
    answered = out[~out["abstain"]]
    assert answered["entropy"].max() < out[out["abstain"]]["entropy"].min()
    assert set(out["conformal_set"].fillna("")) <= {"ill", "well", "ill|well", ""}
    lines = done.err.splitlines()
    assert lines[0].startswith(f"60 rows by the model of north; it abstains on {out['abstain'].sum()} of them")
    assert "sets contain the truth for at least 90% of new examples of this client" in lines[1]
    assert "at most 8.00% of the answers to all clients together are wrong, with 95% confidence" in lines[2]
    assert lines[3].startswith("- menu: share answered by")
    assert "also chose the round" in lines[5]


def test_the_models_are_those_of_the_run(home):
    clinics().to_csv(home / "clinics.csv", index=False)
    try:
        federation = package.load(home / "outcome")
    finally:
        (home / "clinics.csv").unlink()
    rows = federation.shards.validation[1]
    x, y = federation.shards.x[rows], federation.shards.y[rows]
    outputs = federation.predict("personal", 1, x, samples=100)
    client = package.open_client(home / "outcome", "north", raw=True)
    assert federation.shards.names[1] == "north"
    log_probs = log_average(outputs)
    assert torch.from_numpy(client.predictor(Options()).columns(x)["p_ill"]) == pytest.approx(
        log_probs.exp()[:, 0], abs=1e-6
    )
    odd = conformal.true_scores(conformal.label_scores(log_probs), y)
    assert client.own.odd == pytest.approx(odd, abs=1e-6)
    assert client.own.sure == pytest.approx(confidence(log_probs), rel=1e-4)
    assert torch.equal(client.own.wrong, log_probs.argmax(-1) != y)
    assert len(client.of_all.odd) == sum(map(len, federation.shards.validation))
    # By default the predictions are calibrated: on these rows the NLL is smaller.
    calibrated = package.open_client(home / "outcome", "north")
    assert not calibrated.map.is_raw
    columns = calibrated.predictor(Options()).columns(x)
    chosen = torch.from_numpy(np.stack([columns["p_ill"], columns["p_well"]], 1))
    assert torch.allclose(chosen, calibrated.map.of_labels(log_probs).exp().to(chosen), atol=1e-6)
    assert float(chosen.log().gather(1, y[:, None]).mean()) > float(log_probs.gather(1, y[:, None]).mean())
    assert not any("cross-fitting" in line for line in client.statements())
    assert any("cross-fitting, so the guarantees hold approximately" in line for line in calibrated.statements())
    assert len(calibrated.own.odd) == len(client.own.odd)
    assert not torch.equal(calibrated.own.sure, client.own.sure)


def test_no_rows_of_the_clients_are_kept(home):
    from safetensors.torch import load_file

    tensors = load_file(home / "outcome" / runs.CALIBRATION)
    rows = int(tensors["sizes"].sum())
    of_clients = {name for name in tensors if name.startswith("inputs.")}  # a Gaussian of at most 20 directions
    # Of clients, of rows, and of maps: one number per client and one for all, and one per class.
    shapes = {tuple(tensor.shape) for name, tensor in tensors.items() if name not in of_clients}
    assert shapes == {(3,), (rows,), (0,), (4,), (2,)}
    width = tensors["inputs.mean"].shape[1]
    assert tensors["inputs.components"].shape == (int(tensors["inputs.sizes"].sum()), width)
    assert of_clients == {f"inputs.{name}" for name in ("mean", "components", "variances", "rest", "sizes")}


def test_strange_rows_are_told_from_the_clients_own(home):
    for target in ("outcome", "cost"):  # labels and numbers
        client = package.open_client(home / target, "north")
        own = clinics(300, ("north",), seed=5).drop(columns=["hospital", "cost", "outcome"])
        usual = client.predict(own)["strangeness"]
        assert (usual >= 0.9).mean() < 0.25
        for odd in ({"age": 400}, {"sex": "x"}):
            with pytest.warns(UserWarning, match="unlike the training data"):
                out = client.predict(own.assign(**odd))
            assert out["strangeness"].min() > 0.9


def test_the_shared_model_without_a_client_has_no_strangeness(home):
    frame = pandas.read_csv(home / "new.csv")
    assert "strangeness" not in package.open_client(home / "outcome", shared=True).predict(frame)
    assert "strangeness" in package.open_client(home / "outcome", "north", shared=True).predict(frame)


def test_numbers_are_predicted_in_their_own_units(home, run):
    done = run("predict", "cost", "--client", "south", "--input", "new.csv", "-o", "cost.parquet", "--coverage", "0.8")
    out = pandas.read_parquet(home / "cost.parquet")
    age = pandas.to_numeric(out["age"])
    assert np.abs(out["mean"] - 100 * age).mean() < 400
    assert (out["conformal_lower"] < out["mean"]).all()
    both = np.hypot(out["aleatoric"], out["epistemic"]).to_numpy()
    assert out["deviation"].to_numpy() == pytest.approx(both, rel=1e-4)
    assert (out["upper"] - out["mean"]).to_numpy() == pytest.approx(1.2816 * out["deviation"].to_numpy(), rel=1e-3)
    inside = (out["conformal_lower"] <= 100 * age) & (100 * age <= out["conformal_upper"])
    assert inside.mean() > 0.6
    assert "abstain" not in out
    assert "at least 80% of new examples of this client" in done.err
    deviation = float(out["deviation"].median())
    done = run("predict", "cost", "--client", "south", "--input", "new.csv", "-o", "a.csv", "--abstain-at", deviation)
    assert pandas.read_csv(home / "a.csv")["abstain"].sum() == (out["deviation"] > deviation).sum()
    assert "without a guarantee" in done.err
    done = run("personalize", "cost", "--data", "west.csv", "--client", "far west")
    assert "by cross-validation in 5 folds: RMSE " in done.out
    assert "a network drawn from its model has a root mean squared error of at most " in done.out


def test_the_shared_model_may_be_asked_for_anybody(home, run):
    done = run("predict", "outcome", "--shared", "--input", "new.csv", "--json", "--abstain-at", "0.9")
    *rows, last = done.out.splitlines()
    assert len(rows) == 61
    result = json.loads(last)
    assert (result["rows"], result["model"], result["abstention"]) == (60, "the shared model", None)
    assert result["conformal"]["whose"] == "federation"
    assert any("no guarantee for a client that was not in the run" in statement for statement in result["statements"])
    flags = [row.split(",")[-2] for row in rows[1:]]
    assert flags.count("true") == result["abstained"]


def test_the_python_api_takes_frames(home):
    client = package.open_client(home / "outcome", "north")
    frame = pandas.read_csv(home / "new.csv").rename(columns={"patient": "label"})
    out = pandas.DataFrame(client.predict(frame, coverage=0.7, error=0.15))
    assert list(out["label"]) == list(frame["label"])  # what came with the row keeps its name
    assert set(out["predicted_label"]) == {"ill", "well"}
    again = client.predict(home / "new.csv", coverage=0.7, error=0.15)
    assert out["p_ill"].to_numpy() == pytest.approx(again["p_ill"])
    assert "at least 70%" in client.statements(coverage=0.7)[0]
    assert any("predicted with 7" in line for line in client.statements(samples=7))


def test_sets_and_intervals_of_all_kinds(home, run):
    sizes = {}
    for kind in ("lac", "aps", "raps"):
        done = run("predict", "outcome", "--client", "north", "--input", "new.csv", "-o", "k.csv", "--sets", kind)
        out = pandas.read_csv(home / "k.csv")
        assert all(label in words.split("|") for label, words in zip(out["label"], out["conformal_set"], strict=True))
        sizes[kind] = [len(words.split("|")) for words in out["conformal_set"]]
        assert (
            np.mean([truth in words for truth, words in zip(out["outcome"], out["conformal_set"], strict=True)]) > 0.8
        )
    assert sizes["aps"] != sizes["lac"]
    done = run("predict", "outcome", "--client", "north", "--input", "new.csv", "--class-conditional", "--json")
    conformal = json.loads(done.out.splitlines()[-1])["conformal"]
    assert len(conformal["labels"]) == 2
    assert "of new examples of each label" in done.err
    run("predict", "cost", "--client", "south", "--input", "new.csv", "-o", "q.csv", "--intervals", "quantile")
    out = pandas.read_csv(home / "q.csv")
    truth = 100 * pandas.to_numeric(out["age"])
    assert ((out["conformal_lower"] < truth) & (truth < out["conformal_upper"])).mean() > 0.8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cost", "--client", "north", "--sets", "aps"], "--sets and --class-conditional are for labels"),
        (["cost", "--client", "north", "--class-conditional"], "--sets and --class-conditional are for labels"),
        (["outcome", "--client", "north", "--intervals", "quantile"], "--intervals is for numbers"),
        (["outcome", "--client", "nort"], "has no client 'nort', only east, north, south"),
        (["outcome", "--client", "nort"], "--shared, or train a model for it with pfedbayes personalize"),
        (["outcome"], "no client is given: add --client with one of east, north, south"),
        (["nowhere", "--client", "north"], "not a run folder"),
        (["outcome", "--client", "north", "--error", "2"], "error is 2.0: give a share between 0 and 1"),
        (["outcome", "--client", "north", "--coverage", "0"], "coverage is 0.0: give a share"),
        (["outcome", "--client", "north", "--error", "0.1", "--abstain-at", "0.9"], "leave one of them out"),
        (["cost", "--client", "north", "--error", "0.1"], "this model predicts numbers: leave --error out"),
        (["outcome", "--client", "north", "-o", "a.xls"], "a name that ends in .csv"),
        (["outcome", "--client", "north", "-o", "no/a.csv"], "the folder no does not exist"),
        (["outcome", "--client", "north", "--device", "tpu"], "tpu"),
        (["new.csv", "--client", "north"], "damaged or of another kind"),
    ],
)
def test_what_is_wrong_is_one_clear_line(command, arguments, words):
    done = command("predict", *arguments, "--input", "new.csv")
    assert done.code == 2
    assert words in done.err.splitlines()[-1]
    assert not done.out


def test_a_bad_row_leaves_no_file(home, command):
    (home / "bad.csv").write_text("age,sex\n30,m\nold,f\n")
    done = command("predict", "outcome", "--client", "north", "--input", "bad.csv", "-o", "bad_out.csv")
    assert done.code == 2
    assert "bad.csv, line 3: the column 'age' is 'old'" in done.err
    assert not list(home.glob("*bad_out*"))


def test_columns_unlike_the_training_data_are_named(home, run):
    rows = [("30", "m")] * 18 + [("900", "male"), ("", "female")] + [("40", "")] * 5
    (home / "odd.csv").write_text("age,sex\n" + "".join(f"{age},{sex}\n" for age, sex in rows))
    done = run("predict", "outcome", "--client", "north", "--input", "odd.csv", "-o", "odd_out.csv", "--json")
    warned = [line for line in done.err.splitlines() if line.startswith("- warning: ")]
    assert warned == [
        "- warning: the column 'sex' is unlike the training data: 10% of its cells hold categories that no training "
        "row has, such as 'male'",
        "- warning: so the following may not hold for these rows",
    ]
    assert done.err.index("warning") < done.err.index("conformal sets")
    result = json.loads(done.out.splitlines()[-1])
    assert result["columns"] == {"age": {"out_of_range": pytest.approx(1 / 24)}, "sex": {"unseen": 0.1}}
    assert len(result["warnings"]) == 2
    (home / "odd.csv").write_text("age,sex\n" + "700,m\n800,f\n50,f\n")
    with pytest.warns(
        UserWarning, match="'age' is unlike the training data: 67% of its cells are more than 5 standard"
    ):
        package.open_client(home / "outcome", "north").predict(home / "odd.csv")


def test_rows_like_the_training_data_raise_no_warning(home, run):
    done = run("predict", "outcome", "--client", "north", "--input", "new.csv", "-o", "plain.csv", "--json")
    assert "warning" not in done.err
    result = json.loads(done.out.splitlines()[-1])
    assert (result["columns"], result["warnings"]) == ({}, [])


def test_a_number_that_makes_a_network_overflow_is_refused(home, command):
    (home / "far.csv").write_text("age,sex\n30,m\n1e20,f\n")
    done = command("predict", "outcome", "--client", "north", "--input", "far.csv")
    assert done.code == 2
    assert "far.csv, line 3: 'age' is 1e+20, more than 1e+12 standard deviations" in done.err


def made_client(likelihood, target, outputs, own=NO_SCORES, of_all=NO_SCORES, **others):
    """A client whose outputs (K, n, ...) are given, whatever it is asked."""
    settings = {"name": "north", "which": "personal", "notes": (), "weights": None, "net": NetConfig()} | others
    preprocessing = Preprocessing((), (1,), target)
    return Client(
        preprocessing=preprocessing,
        likelihood=likelihood,
        outputs=lambda samples: lambda x: outputs[:, : len(x)],
        own=own,
        of_all=of_all,
        **settings,
    )


TITLES = [("north", "personal"), ("north", "shared"), (None, "shared")]


class TestLabelsByHand:
    target = Target("outcome", "classification", ("ill", "well"))
    # The surest label has the probability 0.5, 0.6 and 0.9.
    outputs = torch.tensor([[[0.5, 0.5], [0.6, 0.4], [0.1, 0.9]]]).double().log()
    x = torch.zeros(3, 1)

    def columns(self, **options):
        odd = torch.tensor([0.0] * 15 + [0.5] * 5).double()  # scores with ties: 90 % are at most 0.5
        client = made_client(Classification(), self.target, self.outputs, Scores(odd, odd, odd > 0.2))
        return client.predictor(Options(**options)).columns(self.x)

    def test_it_abstains_below_the_given_probability(self):
        sure = float(self.columns(abstain_at=0.9)["p_ill"][1])
        assert self.columns(abstain_at=0.75)["abstain"].tolist() == [True, True, False]
        assert self.columns(abstain_at=sure)["abstain"].tolist() == [True, False, False]

    def test_a_label_whose_score_equals_the_threshold_is_in_the_set(self):
        assert self.columns(abstain_at=0.9)["conformal_set"].tolist() == ["ill|well", "ill", "well"]

    @pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5])
    def test_thresholds_that_are_no_probability_are_refused(self, threshold):
        with pytest.raises(UserError, match="--abstain-at is"):
            self.columns(abstain_at=threshold)


class TestPredictor:
    """What a client says besides its predictions."""

    target = TestLabelsByHand.target
    outputs = TestLabelsByHand.outputs
    right = Scores(torch.linspace(0, 0.5, 100), torch.linspace(1, 5, 100), torch.zeros(100, dtype=torch.bool))

    def client(self, own=right, **others):
        return made_client(Classification(), self.target, self.outputs, own, **others)

    def test_titles(self):
        titles = [self.client(name=name, which=which).title for name, which in TITLES]
        assert titles == ["the model of north", "the shared model for north", "the shared model"]

    def test_defaults(self):
        assert Options() == (100, 0.9, None, None, (), None, "lac", False, "normalised")
        sets, rule = self.client().predictor(Options()).guarantees
        assert (sets.alpha, rule.target, rule.delta, rule.answered) == (pytest.approx(0.1), 0.05, 0.05, 100)
        assert self.client().predictor(Options(abstain_at=0.6)).guarantees.rule is None
        assert self.client().predictor(Options(error=0.2)).guarantees.rule.target == 0.2

    def test_statements(self):
        weights = SimpleNamespace(deviation=torch.ones(1))
        drawn, fixed = (
            self.client(weights=each, notes=("a note",)) for each in (weights, SimpleNamespace(deviation=None))
        )
        assert (drawn.is_stochastic, fixed.is_stochastic, self.client().is_stochastic) == (True, False, False)
        assert [line.split(":")[0] for line in drawn.statements()] == [
            "conformal sets", "abstention", "menu", "a note",
            "all of this for new rows from the same source as the calibration rows",
        ]  # fmt: skip
        few = "calibrated with 100 draws but predicted with 7, so it holds only roughly"
        assert (drawn.statements(samples=7)[3], few in fixed.statements(samples=7)) == (few, False)
        given = "abstention: at the given threshold 0.6, without a guarantee"
        assert drawn.statements(abstain_at=0.6)[1] == given
        numbers = made_client(Regression(2.0), TestNumbersByHand.target, TestNumbersByHand.outputs)
        assert [line.split(":")[0] for line in numbers.statements()[:-1]] == ["conformal intervals"]

    def test_json_has_null_for_infinite_thresholds(self):
        known, unknown = (self.client(own).predictor(Options(error=0.3)).as_json() for own in (self.right, NO_SCORES))
        for name in ("conformal", "abstention"):
            assert (known[name]["threshold"] is None, unknown[name]["threshold"]) == (name == "abstention", None)
        assert known["statements"] == self.client().statements(error=0.3)
        assert self.client().predictor(Options(abstain_at=0.6)).as_json()["abstention"] is None

    @pytest.mark.parametrize(
        ("size", "error", "hint"), [(10, 0.1, "0.259"), (7, 0.1, "0.349"), (10, 0.2589, None), (0, 0.1, None)]
    )
    def test_the_smallest_error_that_the_examples_can_show(self, size, error, hint):
        # 1 - 0.05^(1/10) = 0.2589 and 1 - 0.05^(1/7) = 0.3482, rounded up.
        few = Scores(*(part[:size] for part in self.right))
        line = self.client(few).statements(error=error)[1]
        assert line.endswith(f"; the smallest they can show is --error {hint}") == (hint is not None)
        assert ("the smallest they can show" in line) == (hint is not None)

    def test_rows_are_computed_in_passes_that_fit_into_memory(self, monkeypatch):
        asked = []

        def outputs(x):
            asked.append(len(x))
            return self.outputs[:, :1].expand(-1, len(x), -1)

        monkeypatch.setattr("pfedbayes.serving.client.OUTPUTS_AT_ONCE", 20)
        predictor = dataclasses.replace(self.client().predictor(Options(samples=5)), outputs=outputs)
        assert len(predictor.columns(torch.zeros(5, 1))["label"]) == 5
        assert asked == [2, 2, 1]  # five draws of two classes are ten numbers
        monkeypatch.setattr("pfedbayes.serving.client.OUTPUTS_AT_ONCE", 1)
        predictor.columns(torch.zeros(2, 1))
        assert asked[3:] == [1, 1]

    def test_thresholds_for_other_programs(self):
        def thresholds(own, **options):
            return _thresholds(self.client(own).predictor(Options(**options)))

        wrong = self.right._replace(wrong=torch.linspace(1, 5, 100) < 2)
        assert thresholds(self.right, error=0.3) == {
            "coverage": 0.9,
            "sets": 0.0,  # all are right, so the most probable label is enough
            "error": 0.3,
            "answer": None,
            "answers": "all",
        }
        some = thresholds(wrong, error=0.1)
        assert some["sets"] == pytest.approx(float(self.right.odd[15]))  # 10 of the 25 wrong ones may be left out
        assert (some["answer"] > 1, some["answers"]) == (True, "some")
        few = thresholds(NO_SCORES, coverage=0.8)
        assert (few["coverage"], few["sets"], few["answer"], few["answers"]) == (0.8, None, None, "none")
        assert thresholds(self.right, abstain_at=0.6)["error"] is None

    def test_columns_of_labels(self):
        found = self.client().predictor(Options()).columns(torch.zeros(3, 1))
        assert list(found) == [
            "label", "p_ill", "p_well", "entropy", "aleatoric", "epistemic", "abstain", "conformal_set",
        ]  # fmt: skip
        assert found["label"].tolist() == ["ill", "ill", "well"]
        assert found["p_well"] == pytest.approx([0.5, 0.4, 0.9])
        assert found["entropy"][0] == pytest.approx(math.log(2))
        assert (found["aleatoric"] == found["entropy"]).all()
        assert (found["epistemic"] == 0).all()

    def test_names_that_are_taken_get_a_prefix(self):
        assert [_free("label", taken) for taken in (set(), {"label"}, {"label", "predicted_label"})] == [
            "label", "predicted_label", "predicted_predicted_label",
        ]  # fmt: skip

    def test_rows_and_abstentions_of_a_file_are_counted(self, monkeypatch, tmp_path):
        chunks = [
            {
                "abstain": np.array([True] * 3),
                "label": np.array(["a"] * 3),
                "predicted_abstain": np.array([True, False, True]),
            }
        ]
        monkeypatch.setattr(Predictor, "predict", lambda *_: iter(chunks * 2))
        for options, abstained in ((Options(), 4), (Options(abstain_at=0.6), 4)):
            assert predict_file(self.client().predictor(options), tmp_path, tmp_path / "out.csv")[:2] == (6, abstained)
        numbers = made_client(Regression(2.0), TestNumbersByHand.target, TestNumbersByHand.outputs)
        assert predict_file(numbers.predictor(Options()), tmp_path, tmp_path / "out.csv")[:2] == (6, None)


class TestNumbersByHand:
    # Two draws with the means 1 and 3 and the known noise 2, in units of 10 around 50.
    target = Target("cost", "regression", None, 50.0, 10.0)
    outputs = torch.tensor([[[1.0]], [[3.0]]]).double()

    def columns(self, **options):
        odd = torch.arange(1.0, 20.0).double() / 10  # the 18th of 19 is 1.8
        client = made_client(Regression(2.0), self.target, self.outputs, Scores(odd, odd[:0], odd[:0] > 1))
        return client.predictor(Options(**options)).columns(torch.zeros(1, 1))

    def test_both_ends_of_both_intervals(self):
        found = {name: float(column[0]) for name, column in self.columns(coverage=0.9).items()}
        deviation = math.sqrt(2**2 + 1**2)
        expected = {
            "mean": 2.0,
            "lower": 2 - 1.6448536 * deviation,
            "upper": 2 + 1.6448536 * deviation,
            "conformal_lower": 2 - 1.8 * deviation,
            "conformal_upper": 2 + 1.8 * deviation,
        }
        spreads = {"deviation": deviation, "aleatoric": 2.0, "epistemic": 1.0}
        in_units = {name: 50 + 10 * value for name, value in expected.items()}
        assert found == pytest.approx(in_units | {name: 10 * value for name, value in spreads.items()}, rel=1e-6)

    def test_several_targets_have_numbers(self):
        both = torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]]).double()
        client = made_client(Regression(2.0), self.target, both)
        found = client.predictor(Options(abstain_at=21.0)).columns(torch.zeros(1, 1))
        assert [float(found[name][0]) for name in ("mean_1", "mean_2", "epistemic_1", "epistemic_2")] == [
            70,
            100,
            10,
            0,
        ]
        assert found["abstain"].tolist() == [True]  # the first target deviates by 22.4, the second by 20

    @pytest.mark.parametrize("limit", [0.0, -1.0, math.inf])
    def test_deviations_that_make_no_sense_are_refused(self, limit):
        with pytest.raises(UserError, match="--abstain-at is"):
            self.columns(abstain_at=limit)

    def test_it_abstains_above_the_given_deviation(self):
        deviation = float(self.columns()["deviation"][0])
        flags = [bool(self.columns(abstain_at=limit)["abstain"][0]) for limit in (10.0, deviation, 30.0)]
        assert flags == [True, False, False]


@pytest.mark.slow
def test_promises_of_the_command_hold_on_fresh_rows(tmp_path):
    """20 federations, each with early stopping on the very rows that calibrate; 1,500 fresh rows of every client."""
    covered, answered, wrong = [], 0, 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        clinics(900, seed=seed).to_csv(folder / "clinics.csv", index=False)
        train(folder, "outcome", ["patient", "cost"], data__seed=seed, training__rounds=100, training__patience=30)
        for site in ("north", "south", "east"):
            fresh = clinics(4500, seed=1000 + seed)
            out = package.open_client(folder / "outcome", site).predict(fresh[fresh["hospital"] == site])
            held = [
                truth in words.split("|") for truth, words in zip(out["outcome"], out["conformal_set"], strict=True)
            ]
            covered.append(np.mean(held))
            answered += int((~out["abstain"]).sum())
            wrong += int((~out["abstain"] & (out["label"] != out["outcome"])).sum())
    print(f"coverage {np.mean(covered):.4f}, answered {answered}, wrong {wrong / answered:.4f}")
    assert abs(np.mean(covered) - 0.9) <= 0.02
    assert answered > 10_000
    assert wrong / answered <= 0.05


def test_too_few_examples_name_the_error_that_they_could_show(home):
    client = package.open_client(home / "outcome", "north")
    (line,) = [line for line in client.statements(error=0.001) if line.startswith("abstention")]
    size = len(client.of_all.sure)
    assert f"{size} calibration examples cannot show an error of 0.10%" in line
    least = float(line.rsplit(" ", 1)[1])
    assert abstention.smallest_sample(least, 0.05) <= size < abstention.smallest_sample(least - 0.002, 0.05)
