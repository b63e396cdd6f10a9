import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import race
from command_line import SMALL, log_without_times, pfedbayes, start
from pfedbayes import runs
from pfedbayes.files.checksums import dump_json
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment


def same_state(one: Path, other: Path):
    a, b = load_file(one / runs.STATE), load_file(other / runs.STATE)
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_help_and_version_need_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['pfedbayes', '{}']; import pfedbayes.cli as c; c.main()"
    )
    for argument, words in (("--help", "run"), ("--version", "pfedbayes 0.")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(argument)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "500")),
        ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
    ],
)
def test_idle_threads_spin_for_a_moment_unless_somebody_says_otherwise(given, expected):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = f"import os, pfedbayes.cli.app; print([os.environ.get(name) for name in {names}])"
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(expected))
    if not given:  # and so do the contenders of the benchmark
        assert expected == tuple(race.ENVIRONMENT[name] for name in names)


def test_run_prints_a_table_and_the_result_as_json(tmp_path):
    done = pfedbayes("run", *SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"personal", "shared", "rounds", "seconds"}
    assert set(result["personal"]) == {"accuracy", "nll", "brier", "ece"}
    assert 0 <= result["personal"]["accuracy"] <= 100
    assert result["rounds"] == 6
    folder = tmp_path / "runs" / "blobs_small-pfedbayes"
    assert str(folder.relative_to(tmp_path) / "report.html") in done.stdout
    assert (folder / "report.html").read_text().lower().startswith("<!doctype html>")
    assert all(word in done.stdout for word in ("personal", "shared", "worst", "ECE"))
    assert "round 2/6" in done.stderr


def test_a_model_that_a_method_does_not_have_is_null_and_seeds_have_a_spread(tmp_path):
    done = pfedbayes("run", *SMALL, "--set", "method.name=fedavg", "--seeds", 3, "--json", cwd=tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["personal"] is None
    assert result["shared"]["accuracy_std"] > 0
    assert runs.read_run(next((tmp_path / "runs").iterdir())).info.seeds == [1, 2, 3]


def test_a_second_run_takes_a_new_folder(tmp_path):
    for _ in range(2):
        assert pfedbayes("run", *SMALL, cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "blobs_small-pfedbayes",
        "blobs_small-pfedbayes-2",
    ]
    assert log_without_times(tmp_path / "runs/blobs_small-pfedbayes") == log_without_times(
        tmp_path / "runs/blobs_small-pfedbayes-2"
    )


def test_dry_run_prints_the_config_and_an_estimate_and_writes_nothing(tmp_path):
    done = pfedbayes("run", *SMALL, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("[method]", "zeta = 1.0", "time: about", "memory: about"))
    assert list(tmp_path.iterdir()) == []


def test_report_compares_runs(tmp_path):
    for name in ("fedavg", "fedprox"):
        assert pfedbayes("run", *SMALL, "--set", f"method.name={name}", "--out", name, cwd=tmp_path).returncode == 0
    done = pfedbayes("report", "fedavg", "fedprox", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "FedAvg" in page
    assert "FedProx" in page


def test_methods_and_data_list_what_there_is(tmp_path):
    listed = pfedbayes("methods", cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}).stdout
    assert all(name in listed for name in ("pfedbayes", "fedavg", "fedprox", "zeta=10.0", "prox=0.001"))
    listed = pfedbayes("data", cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}).stdout
    assert all(name in listed for name in ("mnist", "fashion-mnist", "cifar10", "bundled"))
    found = json.loads(pfedbayes("methods", "--json", cwd=tmp_path).stdout)
    assert found["fedprox"]["title"] == "FedProx"
    assert found["fedprox"]["settings"]["prox"] == 0.001


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "method.zta=1"], "did you mean 'zeta'?"),
        (["--set", "method.zeta=-1"], "zeta must not be negative"),
        (["--set", "training.batch_size=0"], "batch_size must be at least 1"),
        (["--set", "training.rounds=many"], "a whole number"),
        (["--set", "data.train_per_label=5000", "--set", "data.test_per_label=5000"], "images"),
        (["--set", "data.validation=1.5"], "validation"),
        (["--set", "training.participants=99"], "participants"),
        (["missing.toml"], "missing.toml"),
        (["--device", "cuda"], "--device cpu"),
        (["--device", "tpu"], "no device 'tpu'"),
        (["--out", "/dev/null/run"], "cannot write to"),
        (["--set", "data.name=cifar10"], "PFEDBAYES_DATA"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(tmp_path, arguments, words):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
                   "XDG_CACHE_HOME": str(tmp_path / "cache")}  # fmt: skip
    environment.pop("PFEDBAYES_DATA", None)
    done = pfedbayes("run", *arguments, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("pfedbayes:")]
    assert len(error) == 1
    assert words in error[0]
    assert done.stderr.rstrip().endswith(error[0])
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_files_that_are_no_results_are_one_line_with_exit_code_2(tmp_path):
    (tmp_path / "paper.json").write_text('{"table1": [], "table2": [], "table3": []}')
    (tmp_path / "figure3.json").write_text("{}")
    (tmp_path / "wrong.json").write_text('[{"cell": "x", "seed": 1}]')
    (tmp_path / "sweep.toml").write_text('[[rows]]\nmethod = "fedavg"\n')
    before = sorted(tmp_path.iterdir())
    for arguments, words in (
        (["paper", "results", "."], "figure3.json does not hold Figure 3"),
        (
            ["sweep", "sweep.toml", "--out", "out", "--collect", "--results", "all.json", "--import", "wrong.json"],
            "wrong.json does not hold the results of a sweep",
        ),
    ):
        done = pfedbayes(*arguments, cwd=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert words in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_another_config_or_of_a_finished_run_is_refused_and_kept(tmp_path):
    assert pfedbayes("run", *SMALL, "--out", "a", cwd=tmp_path).returncode == 0
    log = (tmp_path / "a" / runs.LOG).read_bytes()
    for extra, words in (
        (["--set", "method.zeta=2"], "another config"),
        (["--set", "method.zeta=2", "--resume"], "another config"),
        ([], "add --resume"),
    ):
        done = pfedbayes("run", *SMALL, *extra, "--out", "a", cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
    assert (tmp_path / "a" / runs.LOG).read_bytes() == log
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    done = pfedbayes("run", *SMALL, "--out", "b", cwd=tmp_path)
    assert done.returncode == 2
    assert "thesis.txt" in done.stderr


def test_a_diverging_run_stops_names_the_client_and_keeps_the_last_good_state(tmp_path):
    arguments = [*SMALL, "--set", "method.name=fedavg", "--set", "method.eta=1e38", "--out", "a"]
    done = pfedbayes("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "client 0" in done.stderr.splitlines()[-1]
    assert "non-finite" in done.stderr
    state = load_file(tmp_path / "a" / runs.STATE)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


def wait_for(process, condition):
    until = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)


LONGER = [*SMALL, "--set", "training.rounds=60", "--set", "execution.checkpoint_seconds=0.05"]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    process = start("run", *LONGER, "--out", "a", cwd=tmp_path)
    log = tmp_path / "a" / runs.LOG
    wait_for(process, lambda: log.exists() and log.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "resume with: pfedbayes run --resume --out a" in errors
    assert pfedbayes("run", "--resume", "--out", "a", cwd=tmp_path).returncode == 0
    assert pfedbayes("run", *LONGER, "--out", "b", cwd=tmp_path).returncode == 0
    assert log_without_times(tmp_path / "a") == log_without_times(tmp_path / "b")
    assert same_state(tmp_path / "a", tmp_path / "b")


def test_a_run_in_progress_keeps_others_out(tmp_path):
    process = start("run", *LONGER, "--set", "training.rounds=2000", "--out", "a", cwd=tmp_path)
    log = tmp_path / "a" / runs.LOG
    wait_for(process, lambda: log.exists() and log.stat().st_size > 0)
    done = pfedbayes("run", "--resume", "--out", "a", cwd=tmp_path)
    process.kill()
    process.communicate()
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    assert pfedbayes("run", *SMALL, "--out", "a", cwd=tmp_path).returncode == 0
    longer = ["--set", "training.rounds=8"]
    assert pfedbayes("run", "--resume", "--out", "a", *longer, cwd=tmp_path).returncode == 0
    assert pfedbayes("run", *SMALL, *longer, "--out", "b", cwd=tmp_path).returncode == 0
    assert log_without_times(tmp_path / "a") == log_without_times(tmp_path / "b")
    assert same_state(tmp_path / "a", tmp_path / "b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_of_a_gpu_is_not_resumed_without_one(tmp_path):
    assert pfedbayes("run", *SMALL, "--out", "a", cwd=tmp_path).returncode == 0
    info = json.loads((tmp_path / "a" / runs.INFO).read_text())
    info["plan"]["device"] = "cuda"
    (tmp_path / "a" / runs.INFO).write_text(dump_json(info))
    done = pfedbayes("run", "--resume", "--out", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert "was run on a GPU" in done.stderr.splitlines()[-1]


def test_progress_shows_what_the_table_will_show(tmp_path):
    """Clients of unequal size: a plain mean over clients would be another number."""
    uneven = [*SMALL, "--set", "data.labels=dirichlet", "--set", "data.alpha=0.3", "--set", "method.name=fedavg"]
    done = pfedbayes("run", *uneven, "--json", cwd=tmp_path)
    accuracy = json.loads(done.stdout.splitlines()[-1])["shared"]["accuracy"]
    run = runs.read_run(next((tmp_path / "runs").iterdir()))
    assert len(set(run.info.test_sizes)) > 1
    assert f"round 6/6  shared accuracy {accuracy:.2f}" in done.stderr
    plain = sum(run.rounds[-1].shared["mean"]["accuracy"][0]) / 4
    assert abs(plain - accuracy) > 0.01


def test_certify_and_uncertainty_print_tables(tmp_path):
    settings = [text for text in SMALL if text != "--set"]
    kept = read_experiment(None, [*settings, "data.certify=0.5", "data.validation=0.2"])
    list(execute(kept, tmp_path / "kept", [1], "cpu"))
    done = pfedbayes("certify", "kept", "--steps", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("bound", "hold-out", "client 3", "certificate.json", "0.95"))
    assert "vacuous" in done.stdout  # twenty examples, ten labels and six rounds
    done = pfedbayes("uncertainty", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("ECE", "noisy", "sets cover", "scaled", "by MI"))
    done = pfedbayes("uncertainty", "kept", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["kept"]["personal"]["scaled"][0][0]["ece"] >= 0


def test_a_run_that_kept_nothing_back_is_not_certified(tmp_path):
    settings = [text for text in SMALL if text != "--set"]
    list(execute(read_experiment(None, settings), tmp_path / "all", [1], "cpu"))
    done = pfedbayes("certify", "all", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.certify=0.5" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "all" / "certificate.json").exists()
