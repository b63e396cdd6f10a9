"""One's own data through the command line: from a file to a run folder, a report, and new rows."""

import json
from functools import partial

import numpy as np
import pytest

import pfedbayes as package
from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.runs.experiment import OWN_TABLES, read_experiment

SHORT = ["--set", "training.rounds=4", "--set", "training.evaluate_every=2", "--set", "training.local_steps=4"]


def write_clinics(path, size=90):
    rng = np.random.default_rng(0)
    lines = ["age,sex,hospital,outcome,cost"]
    for k in range(size):
        age, sex, hospital = rng.integers(20, 90), rng.choice(["m", "f"]), ("Nord", "Süd", "[West]")[k % 3]
        outcome = "krank" if age + 20 * (sex == "m") + rng.normal(0, 10) > 65 else "gesund"
        lines.append(f"{age if k % 9 else ''},{sex},{hospital},{outcome},{1000 * age + rng.normal(0, 3000):.1f}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clinics(tmp_path / "clinics.csv")
    return tmp_path


@pytest.fixture
def command(here, in_process):
    """`pfedbayes run …` in this process."""
    return partial(in_process, "run")


@pytest.fixture
def run(command):
    """The same where it has to go well: all that is printed, the result last."""

    def call(*arguments):
        done = command(*arguments)
        assert done.code == 0, done.err
        return done.err + done.out

    return call


def clinics(target, other):
    columns = ["--target", target, "--client-column", "hospital"]
    return ["--data", "clinics.csv", *columns, "--set", f"data.ignore=['{other}']"]


CLINICS = clinics("outcome", "cost")


def test_a_csv_needs_no_config(here, run):
    output = run(*CLINICS, *SHORT, "--out", "a")
    assert "data: 2 columns (1 numeric, 1 categorical) as 11 inputs, 6 of them piecewise linear; outcome:" in output
    assert "outcome: classification into gesund, krank" in output
    assert "clients: 3, with 72 train, 18 test rows" in output
    folder = runs.read_run(here / "a")
    assert folder.info.clients == ["Nord", "Süd", "[West]"]
    assert folder.info.class_names == ["gesund", "krank"]
    page = (here / "a" / "report.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("Hierarchical on clinics", "gesund, krank", "personal model:", "[West]"))
    assert "model: krank" in page or "model: gesund" in page

    back = package.load(here / "a")
    (here / "new.csv").write_text("age,sex\n80,m\n25,f\n,\n")
    x = package.read_inputs(here / "new.csv", package.read_preprocessing(here / "a"))
    assert back.predict("personal", 1, x, samples=5).shape == (5, 3, 2)


def test_a_config_can_say_the_same(here, run):
    (here / "own.toml").write_text(
        '[data]\npath = "clinics.csv"\ntarget = "outcome"\nclient_column = "hospital"\nignore = ["cost"]\n'
        '[method]\nname = "hierarchical"\n[training]\nrounds = 4\nlocal_steps = 4\nevaluate_every = 2\n'
        "[evaluation]\nsamples = 100\nfolds = 5\nalone = true\n"
    )
    run(*CLINICS, *SHORT, "--out", "a")
    run("own.toml", "--out", "b")
    a, b = runs.read_run(here / "a"), runs.read_run(here / "b")
    assert [record.personal for record in a.rounds] == [record.personal for record in b.rounds]
    assert a.info.digest == b.info.digest


def test_regression_is_told_in_the_units_of_the_target(here, run):
    few = [
        "--data",
        "clinics.csv",
        "--target",
        "cost",
        "--client-column",
        "hospital",
        "--set",
        "data.ignore=['outcome']",
    ]
    output = run(*few, *SHORT, "--json", "--out", "a")
    assert "cost: regression (mean" in output
    result = json.loads(output.splitlines()[-1])
    back = package.load(here / "a")
    target = back.shards.preprocessing.target
    errors, outputs = [], None
    for i, rows in enumerate(back.shards.test):
        outputs = back.predict("personal", i, back.shards.x[rows], samples=100)
        means, _ = back.model.likelihood.mean_and_noise(outputs)
        guess = means.mean(0) * target.deviation + target.mean
        truth = back.shards.y[rows] * target.deviation + target.mean
        errors.append(float((guess - truth).square().mean().sqrt()))
    sizes = [len(rows) for rows in back.shards.test]
    assert result["personal"]["rmse"] == pytest.approx(np.average(errors, weights=sizes), rel=1e-4)
    assert result["personal"]["rmse"] > 1000  # of tens of thousands, not of one


def test_a_run_is_resumed_with_the_same_data_from_anywhere(here, monkeypatch, run, command):
    run(*CLINICS, *SHORT, "--out", "a")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    run("--resume", "--out", "../a", "--set", "training.rounds=6")
    assert runs.read_run(here / "a").summary.rounds == 6
    write_clinics(here / "clinics.csv", 91)
    assert "are not those that" in command("--resume", "--out", "../a").err
    with pytest.raises(UserError, match="are not those that"):
        package.load(here / "a")
    (here / "clinics.csv").unlink()
    with pytest.raises(UserError, match=r"clinics\.csv does not exist"):
        package.load(here / "a")


def test_a_run_of_an_earlier_version_has_no_pieces_and_is_loaded_and_resumed(here, run, command):
    run(*CLINICS, *SHORT, "--set", "data.pieces=0", "--out", "a")
    config = (here / "a" / runs.CONFIG).read_text()
    assert "pieces = 0\n" in config
    (here / "a" / runs.CONFIG).write_text(config.replace("pieces = 0\n", ""))
    assert package.load(here / "a").shards.task_shape.pieces == 0
    run("--resume", "--out", "a", "--set", "training.rounds=6")
    assert runs.read_run(here / "a").summary.rounds == 6
    said = command("--resume", "--out", "a", "--set", "data.pieces=6").err
    assert "was made by another config (data.pieces was 0 and is 6)" in said


def test_the_preset_is_shown_before_anything_is_done(here, run):
    output = run(*CLINICS, "--dry-run")
    for section, values in OWN_TABLES.items():
        assert f"[{section}]" in output
        assert all(f"{key} = " in output for key in values)
    assert "alpha" not in output  # what has no meaning for files is left out
    assert "outcome: classification into gesund, krank" in output
    assert sorted(path.name for path in here.iterdir()) == ["clinics.csv"]


def test_images_of_ones_own_go_all_the_way(here, run):
    from PIL import Image

    rng = np.random.default_rng(0)
    for client in "ab":
        for label, low in (("dark", 0), ("light", 128)):
            (here / "tree" / client / label).mkdir(parents=True)
            for k in range(8):
                pixels = rng.integers(low, low + 128, (16, 16), dtype=np.uint8)
                Image.fromarray(pixels).save(here / "tree" / client / label / f"{k}.png")
    output = run("--data", "tree", *SHORT, "--out", "a")
    assert "images of shape 1 x 16 x 16; class: classification into dark, light" in output
    assert package.load(here / "a").model.net.convolutional


def test_a_module_of_ones_own_is_named_on_the_command_line(here, run):
    (here / "small_net.py").write_text(
        "from torch.nn import Linear, Sequential, Tanh\ndef make(shape, outputs, width=3):\n"
        "    return Sequential(Linear(*shape, width), Tanh(), Linear(width, outputs))"
    )
    run(*CLINICS, *SHORT, "--net", "small_net:make", "--set", "net.width=5", "--out", "a")
    assert runs.read_run(here / "a").info.num_params == 11 * 5 + 5 + 5 * 2 + 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "clinics.csv", "--target", "outcome"], "--client-column"),
        (["--data", "nothing.csv", "--target", "outcome"], "nothing.csv does not exist"),
        ([*CLINICS, "--task", "ranking"], "choose one of"),
        ([*CLINICS, "--task", "regression"], "holds text"),
        (["--target", "outcome"], "--data"),
        ([*CLINICS, "--set", "data.image_size=[0, 3]"], "image_size"),
    ],
)
def test_what_is_wrong_is_one_clear_line(here, command, arguments, words):
    done = command(*arguments)
    assert done.code == 2
    assert words in done.err.splitlines()[-1]
    assert not (here / "runs").exists() or not any((here / "runs").iterdir())


def test_what_is_known_of_files_is_checked():
    with pytest.raises(UserError, match="belong together"):
        read_experiment(None, ["data.name=files"])
    with pytest.raises(UserError, match="belong together"):
        read_experiment(None, ["data.path=x.csv", "data.name=mnist"])
    with pytest.raises(UserError, match=r"cannot read nowhere.preprocessing\.json"):
        package.read_preprocessing("nowhere")
