"""From a CSV file with a client column to predictions with abstention, by the command line, once the data are gone."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import pfedbayes as package
from pfedbayes import runs
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.errors import UserError
from pfedbayes.maths.metrics import confidence, log_average
from pfedbayes.methods import METHODS
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.client import Wish
from pfedbayes.serving.export import export
from pfedbayes.trust import abstention, conformal
from pfedbayes.trust.calibration import NOTHING, Scores, promise

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_export.py"
SHORT = ["training.rounds=30", "training.evaluate_every=10", "training.local_steps=10", "method.eta_personal=0.01"]


def clinics(size=450, sites=("north", "south", "east"), seed=0):
    """Who is ill depends on age and sex, with some noise, and a little on the site."""
    rng = np.random.default_rng(seed)
    age, sex = rng.integers(20, 90, size), rng.choice(["m", "f"], size)
    site = rng.choice(sites, size)
    risk = (age - 55) / 6 + 2 * (sex == "m") + (site == sites[0]) + rng.logistic(0, 0.5, size)
    columns = {"patient": [f"p{k}" for k in range(size)], "age": age, "sex": sex, "hospital": site}
    cost = 100.0 * age + rng.normal(0, 200, size)
    return pandas.DataFrame(columns | {"outcome": np.where(risk > 0, "ill", "well"), "cost": cost})


def train(folder, target, ignore, **others):
    data = [f"data.path={folder / 'clinics.csv'}", f"data.target={target}", "data.client_column=hospital"]
    changes = [f"{key.replace('__', '.')}={value}" for key, value in others.items()]
    experiment = read_experiment(None, [*data, f"data.ignore={ignore}", *SHORT, *changes])
    for _ in execute(experiment, folder / target, [1]):
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs of one file for a label and for a number; the file is gone, as are the federations' rows."""
    folder = tmp_path_factory.mktemp("home")
    clinics().to_csv(folder / "clinics.csv", index=False)
    train(folder, "outcome", ["patient", "cost"])
    train(folder, "cost", ["patient", "outcome"])
    (folder / "clinics.csv").unlink()
    new = clinics(60, ("north",), seed=1).drop(columns=["hospital", "cost"])
    new.to_csv(folder / "new.csv", index=False)
    clinics(120, ("west",), seed=2).to_csv(folder / "west.csv", index=False)
    return folder


@pytest.fixture
def command(home, monkeypatch, in_process):
    """`pfedbayes …` in this process, in the folder of the run."""
    monkeypatch.chdir(home)
    return in_process


@pytest.fixture
def run(command):
    def call(*arguments):
        done = command(*arguments)
        assert done.code == 0, done.err
        return done

    return call


def test_new_rows_are_predicted_with_doubt_abstention_and_sets(home, run):
    done = run("predict", "outcome", "--client", "north", "--input", "new.csv", "-o", "out.csv", "--error", "0.08")
    out, new = pandas.read_csv(home / "out.csv"), pandas.read_csv(home / "new.csv")
    assert list(out)[: len(new.columns)] == list(new.columns)
    assert out[list(new.columns)].equals(new)
    columns = ["label", "p_ill", "p_well", "entropy", "aleatoric", "epistemic", "abstain", "conformal_set"]
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
    assert "sets hold the truth for at least 90% of new examples of this client" in lines[1]
    assert "at most 8.00% of the answers to all clients together are wrong, with 95% confidence" in lines[2]
    assert "also chose the round" in lines[3]


def test_the_models_are_those_of_the_run(home):
    clinics().to_csv(home / "clinics.csv", index=False)
    try:
        federation = package.load(home / "outcome")
    finally:
        (home / "clinics.csv").unlink()
    rows = federation.shards.validation[1]
    x, y = federation.shards.x[rows], federation.shards.y[rows]
    outputs = federation.predict("personal", 1, x, samples=100)
    client = package.open_client(home / "outcome", "north")
    assert federation.shards.names[1] == "north"
    log_probs = log_average(outputs)
    assert torch.from_numpy(client.ask(Wish()).columns(x)["p_ill"]) == pytest.approx(log_probs.exp()[:, 0], abs=1e-6)
    odd = conformal.true_scores(conformal.label_scores(log_probs), y)
    assert client.own.odd == pytest.approx(odd, abs=1e-6)
    assert client.own.sure == pytest.approx(confidence(log_probs), rel=1e-4)
    assert torch.equal(client.own.wrong, log_probs.argmax(-1) != y)
    assert len(client.of_all.odd) == sum(map(len, federation.shards.validation))


def test_no_rows_of_the_clients_are_kept(home):
    from safetensors.torch import load_file

    tensors = load_file(home / "outcome" / runs.CALIBRATION)
    rows = int(tensors["sizes"].sum())
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(3,), (rows,)}


def test_a_newcomer_gets_its_own_model_and_predicts(home, run):
    done = run("personalize", "outcome", "--data", "west.csv", "--json")
    result = json.loads(done.out.splitlines()[-1])
    assert "84 rows; 36 are held out" in done.out
    assert result["own"]["accuracy"] > 75
    certificate = result["certificate"]
    assert certificate["certified"]["size"] == 120
    assert certificate["bound"] > certificate["certified"]["gibbs"]
    assert f"at most {certificate['bound']:.1%} of new rows" in done.out
    assert "whose data are not here to check" in done.out
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
    assert "nothing is guaranteed of it" in done.err
    done = run("personalize", "cost", "--data", "west.csv", "--client", "far west")
    assert "rmse on the rows held out" in done.out
    assert "no certificate: a certificate bounds an error rate" in done.out


def test_the_shared_model_may_be_asked_for_anybody(home, run):
    done = run("predict", "outcome", "--shared", "--input", "new.csv", "--json", "--abstain-at", "0.9")
    *rows, last = done.out.splitlines()
    assert len(rows) == 61
    result = json.loads(last)
    assert (result["rows"], result["model"], result["abstention"]) == (60, "the shared model", None)
    assert result["conformal"]["whose"] == "federation"
    assert any("not in the run is promised nothing" in statement for statement in result["statements"])
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
    assert any("asked with 7" in line for line in client.statements(samples=7))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["outcome", "--client", "nort"], "has no client 'nort', it has east, north, south"),
        (["outcome", "--client", "nort"], "--shared, or give it a model of its own with pfedbayes personalize"),
        (["outcome"], "say whose model is asked with --client"),
        (["nowhere", "--client", "north"], "not a run folder"),
        (["outcome", "--client", "north", "--error", "2"], "error is 2.0: give a share between 0 and 1"),
        (["outcome", "--client", "north", "--coverage", "0"], "coverage is 0.0: give a share"),
        (["outcome", "--client", "north", "--error", "0.1", "--abstain-at", "0.9"], "leave one of them out"),
        (["cost", "--client", "north", "--error", "0.1"], "an error rate is about labels, and numbers are predicted"),
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
    assert "bad.csv, line 3: the column 'age' says 'old'" in done.err
    assert not list(home.glob("*bad_out*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "new.csv", "--client", "north"], "is a client of the run already"),
        (["--data", "none.csv"], "none.csv does not exist"),
        (["--data", "west.csv", "--hold-out", "1"], "--hold-out is 1.0"),
        (["--data", "west.csv", "--client", "a/b"], "cannot name a file"),
        (["--data", "west.csv", "-o", "west.csv"], "does not end in .safetensors"),
    ],
)
def test_what_is_wrong_with_a_newcomer_is_one_clear_line(home, command, arguments, words):
    before = (home / "west.csv").read_bytes()
    done = command("personalize", "outcome", *arguments)
    assert done.code == 2
    assert words in done.err.splitlines()[-1]
    assert (home / "west.csv").read_bytes() == before


def test_a_run_has_to_be_finished(tmp_path):
    clinics(60).to_csv(tmp_path / "clinics.csv", index=False)
    settings = [f"data.path={tmp_path / 'clinics.csv'}", "data.target=outcome", "data.client_column=hospital"]
    rounds = execute(
        read_experiment(None, [*settings, "data.ignore=['patient']", "training.rounds=3"]), tmp_path / "a", [1]
    )
    next(rounds)
    rounds.close()
    with pytest.raises(UserError, match="is not finished: go on with pfedbayes run --resume"):
        package.open_client(tmp_path / "a", "north")


def test_what_was_saved_without_data_is_loaded_in_python(tmp_path):
    from federations import trained

    package.save(trained(METHODS["fedavg"]()), tmp_path / "a")
    with pytest.raises(UserError, match=r"pfedbayes\.load"):
        package.open_client(tmp_path / "a", shared=True)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_what_its_federation_does(tmp_path, name):
    changes = [
        "data.name=blobs",
        "data.clients=3",
        "data.examples=60",
        "data.classes=3",
        "data.validation=0.3",
        "data.labels=iid",
    ]
    settings = ["training.rounds=2", "training.local_steps=3", "training.evaluate_every=2", "training.batch_size=8"]
    experiment = read_experiment(None, [f"method.name={name}", *changes, *settings])
    for _ in execute(experiment, tmp_path / "run", [1, 2]):
        pass
    federation = package.load(tmp_path / "run")
    x = federation.shards.x[federation.shards.test[1]]
    np.savez(tmp_path / "new.npz", x=x.numpy())
    for which in federation.models():
        samples = 20 if federation.method.about.stochastic else None
        expected = log_average(federation.predict(which, 1, x, samples)).exp()
        client = package.open_client(tmp_path / "run", federation.shards.names[1], shared=which == "shared")
        out = client.predict(tmp_path / "new.npz", samples=20)
        assert np.stack([out[f"p_{k}"] for k in range(3)], 1) == pytest.approx(expected.numpy(), abs=1e-5)
        assert len(client.own.odd) == len(federation.shards.validation[1])
    if name != "pfedbayes":
        with pytest.raises(UserError, match="a newcomer needs a run of pfedbayes"):
            package.join(tmp_path / "run", tmp_path / "new.npz")


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


def test_images_are_predicted_without_their_data_set(tmp_path):
    settings = ["data.clients=2", "data.train_per_label=4", "data.test_per_label=2", "data.validation=0.25"]
    experiment = read_experiment(None, [*settings, "training.rounds=2", "training.local_steps=2", "net.hidden=[8]"])
    for _ in execute(experiment, tmp_path / "run", [1]):
        pass
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", x=images, id=np.arange(5))
    out = package.open_client(tmp_path / "run", "client 1").predict(tmp_path / "new.npz")
    assert out["id"].tolist() == [0, 1, 2, 3, 4]
    assert [name for name in out if name.startswith("p_")] == [f"p_{k}" for k in range(10)]


def test_images_of_ones_own_are_predicted_personalised_and_exported(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for client in ("a", "b", "late"):
        for label, low in (("dark", 0), ("light", 128)):
            folder = tmp_path / ("late" if client == "late" else "tree/" + client) / label
            folder.mkdir(parents=True)
            for k in range(12):
                Image.fromarray(rng.integers(low, low + 128, (16, 16), dtype=np.uint8)).save(folder / f"{k}.png")
    settings = ["training.rounds=4", "training.local_steps=4", "training.evaluate_every=2"]
    for _ in execute(read_experiment(None, [f"data.path={tmp_path / 'tree'}", *settings]), tmp_path / "run", [1]):
        pass
    joined = package.join(tmp_path / "run", tmp_path / "late", steps=2, certify=False)
    assert "no certificate: none was asked for" in joined.words()[-1]
    assert (joined.client.name, joined.trained, joined.held) == ("late", 17, 7)
    images = tmp_path / "late" / "light"
    out = joined.client.predict(images)
    assert out["file"].tolist() == sorted(f"{k}.png" for k in range(12))
    export(joined.client, tmp_path / "late.safetensors")
    example = runpy.run_path(str(EXAMPLE))
    about, weights = example["load"](tmp_path / "late.safetensors")
    (chunk,) = read_chunks(images, joined.client.preprocessing)
    chances, _ = example["predict"](about, weights, chunk.x)
    assert chances[:, 0].numpy() == pytest.approx(out["p_dark"], abs=1e-5)


def some_scores(size, errors):
    """The least sure are wrong."""
    sure = torch.linspace(5, 0, size)
    return Scores(torch.linspace(0, 1, size), sure, torch.arange(size) >= size - errors)


def test_a_client_with_enough_examples_is_promised_something_itself():
    own, of_all = some_scores(100, 5), some_scores(1000, 0)
    sets, rule = promise(own, of_all, 0.9, 0.1)
    assert (sets.whose, sets.size, rule.whose, rule.size) == ("client", 100, "client", 100)
    assert rule == abstention.calibrate(own.sure, own.wrong, 0.1)
    sets, rule = promise(some_scores(8, 0), of_all, 0.9, 0.1)
    assert (sets.whose, sets.size, rule.whose, rule.size) == ("federation", 1000, "federation", 1000)
    assert "of the answers to all clients together are wrong" in rule.statement()
    sets, rule = promise(some_scores(8, 0), NOTHING, 0.9, 0.1)
    assert (sets.whose, rule.whose, math.isinf(rule.threshold)) == ("client", "client", True)


def test_whose_examples_count_does_not_depend_on_how_they_turned_out():
    of_all = some_scores(1000, 0)
    for errors in (0, 50, 100):
        assert promise(some_scores(100, errors), of_all, 0.9, 0.1).rule.whose == "client"
    assert promise(some_scores(100, 100), of_all, 0.9, 0.1).rule.answered == 0


def test_too_few_examples_name_the_error_that_they_could_show(home):
    client = package.open_client(home / "outcome", "north")
    (line,) = [line for line in client.statements(error=0.001) if line.startswith("abstention")]
    size = len(client.of_all.sure)
    assert f"{size} calibration examples cannot show an error of 0.10%" in line
    least = float(line.rsplit(" ", 1)[1])
    assert abstention.fewest(least, 0.05) <= size < abstention.fewest(least - 0.002, 0.05)


def test_the_example_reads_an_export_without_this_package(home, run):
    for target in ("outcome", "cost"):
        run("export", target, "--client", "north", "-o", f"{target}.safetensors")
        run("predict", f"{target}.safetensors", "--input", "new.csv", "-o", "a.csv")
        run("predict", target, "--client", "north", "--input", "new.csv", "-o", "b.csv")
        assert (home / "a.csv").read_bytes() == (home / "b.csv").read_bytes()
        blocked = "import runpy, sys; sys.modules.update(pfedbayes=None, safetensors=None, numpy=None); "
        script = f"{blocked}sys.argv[1:] = [{target + '.safetensors'!r}, 'new.csv']; runpy.run_path({str(EXAMPLE)!r}, "
        command = [sys.executable, "-W", "ignore", "-c", script + "run_name='__main__')"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home, timeout=100)
        assert done.returncode == 0, done.stderr
        said = [line.replace(",", "").split() for line in done.stdout.splitlines()]
        expected = pandas.read_csv(home / "b.csv")
        value, spread = ("p_ill", None) if target == "outcome" else ("mean", "deviation")
        assert [float(words[1]) for words in said] == pytest.approx(expected[value], rel=1e-4)
        if spread:
            assert [float(words[3]) for words in said] == pytest.approx(expected[spread], rel=1e-4)


def test_all_clients_are_exported_at_once(home, run):
    done = run("export", "outcome", "--all", "-o", "models")
    assert sorted(path.name for path in (home / "models").iterdir()) == sorted(
        Path(line).name for line in done.out.splitlines()
    )
    client = package.open_client(home / "models" / "south.safetensors")
    assert (client.name, client.which) == ("south", "personal")
    with pytest.raises(UserError, match=r"is of 'south' and not of 'north'"):
        package.open_client(home / "models" / "south.safetensors", "north")


def test_thresholds_of_an_export_are_those_of_a_prediction(home, run):
    run("export", "outcome", "--client", "north", "-o", "t.safetensors", "--error", "0.08", "--coverage", "0.8")
    header = (home / "t.safetensors").read_bytes()
    about = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["client"])
    out = package.open_client(home / "outcome", "north").predict(home / "new.csv", error=0.08, coverage=0.8)
    most = np.maximum(out["p_ill"], out["p_well"])
    assert ((-np.log1p(-most) <= about["thresholds"]["answer"]) == out["abstain"]).all()
    within = np.stack([1 - out["p_ill"], 1 - out["p_well"]]) <= about["thresholds"]["sets"]
    assert (within.sum(0) == [len(words.split("|")) if words else 0 for words in out["conformal_set"]]).all()


@pytest.fixture(params=["outcome", "cost"])
def mean_network(request, home):
    """A run, inputs, and what the mean network of north says of them, in the units of the target."""
    client = package.open_client(home / request.param, "north")
    (chunk,) = read_chunks(home / "new.csv", client.preprocessing)
    output, target = client.weights.model.outputs(client.weights.mean, chunk.x), client.preprocessing.target
    expected = output.softmax(-1) if target.classes else output[:, :1] * target.deviation + target.mean
    return request.param, chunk.x, pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)


def test_the_mean_network_runs_as_onnx(home, run, mean_network):
    import onnx
    from onnx.reference import ReferenceEvaluator

    folder, x, expected = mean_network
    run("export", folder, "--client", "north", "--onnx", "-o", "a.onnx")
    assert ReferenceEvaluator(onnx.load(home / "a.onnx")).run(None, {"x": x.numpy()})[0] == expected


def test_the_mean_network_runs_by_torch_export(home, run, mean_network):
    folder, x, expected = mean_network
    run("export", folder, "--client", "north", "--torch-export", "-o", "a.pt2")
    assert torch.export.load(home / "a.pt2").module()(x).numpy() == expected


def test_a_module_of_ones_own_is_exported_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clinics(80).to_csv(tmp_path / "clinics.csv", index=False)
    (tmp_path / "residual_net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, shape, outputs, width=3):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(*shape, width), nn.Linear(width, outputs)\n"
        "    def forward(self, x):\n        return self.b(self.a(x).tanh())\n"
    )
    train(tmp_path, "outcome", ["patient", "cost"], net__name="residual_net:Net", net__width=4, training__rounds=2)
    client = package.open_client(tmp_path / "outcome", "east")
    export(client, tmp_path / "east.safetensors")
    again = package.open_client(tmp_path / "east.safetensors")
    assert client.predict("clinics.csv")["p_ill"] == pytest.approx(again.predict("clinics.csv")["p_ill"])


def test_what_onnx_needs_is_said(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    done = command("export", "outcome", "--client", "north", "--onnx")
    assert done.code == 2
    assert "pip install 'pfedbayes[onnx]'" in done.err
