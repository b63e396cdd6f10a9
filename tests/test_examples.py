"""The examples run, at a small scale."""

import csv
import re
import subprocess
import sys
from pathlib import Path

from pfedbayes import runs

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_breast_cancer_goes_from_a_csv_to_predictions_that_may_abstain(tmp_path):
    output = run("breast_cancer.py", tmp_path, "--set", "training.rounds=20")
    result = runs.read_run(tmp_path / "run")
    assert result.info.clients == ["city", "town", "university", "village"]
    assert min(result.rounds[-1].personal["mc10"]["accuracy"][0]) > 80
    for name in ("town", "harbour"):
        rows = table(tmp_path / f"{name}_predicted.csv")
        assert len(rows) == len(table(tmp_path / f"{name}_new.csv")) > 15
        assert all(abs(float(row["p_benign"]) + float(row["p_malignant"]) - 1) < 1e-5 for row in rows)
        answered = sum(row["abstain"] == "false" for row in rows)
        assert re.search(rf"^{name}: {len(rows)} new tumours, {answered} of them answered", output, re.MULTILINE)
    assert re.search(r"^certificate: with 95% confidence", output, re.MULTILINE)


def test_diabetes_is_predicted_in_its_own_units(tmp_path):
    output = run("diabetes.py", tmp_path, 5)
    errors = [float(text) for text in re.findall(r"off by (\d+) with its own", output)]
    assert len(errors) == 4
    assert 30 < sum(errors) / 4 < 77  # the standard deviation is what a guess of the mean is off by
    rows = table(tmp_path / "predictions.csv")
    assert {row["age"] for row in rows} == {"under 38", "38 to 49", "50 to 59", "60 and more"}
    assert all(float(row["low"]) < float(row["predicted"]) < float(row["high"]) for row in rows)
    width = sum(float(row["high"]) - float(row["low"]) for row in rows) / len(rows)
    assert 100 < width < 500


def test_mnist_tells_how_sure_clients_are_of_digits_that_they_have_never_seen(tmp_path):
    small = ["data.train_per_label=20", "data.test_per_label=20", "data.clients=4", "training.rounds=3"]
    settings = [word for setting in small for word in ("--set", setting)]
    output = run("mnist.py", tmp_path, *settings, "--set", "execution.compile=false")
    rows = re.findall(r"^client \d +((?:\d )+) +([\d.]+) +([\d.]+) +\d+% +\d+%$", output, re.MULTILINE)
    assert [digits.split() for digits, _, _ in rows] == [list("01234"), list("56789")] * 2
    assert all(0 <= float(entropy) <= 2.31 for _, *both in rows for entropy in both)
