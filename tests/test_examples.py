"""The examples run, at a small size."""

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


def test_breast_cancer_goes_from_a_csv_to_predictions_of_a_hospital(tmp_path):
    output = run("breast_cancer.py", tmp_path, "--set", "training.rounds=10")
    chances = re.findall(r"^benign ([\d.]+) ± [\d.]+, malignant ([\d.]+) ± [\d.]+$", output, re.MULTILINE)
    assert len(chances) == 5
    assert all(abs(float(a) + float(b) - 1) < 0.002 for a, b in chances)
    result = runs.read(tmp_path / "run")
    assert result.info["clients"] == ["city", "town", "university", "village"]
    accuracies = result.rounds[-1]["personal"]["mc10"]["accuracy"][0]
    assert min(accuracies) > 80


def test_diabetes_is_predicted_in_its_own_units():
    output = run("diabetes.py", 5)
    errors = [float(text) for text in re.findall(r"off by (\d+)", output)]
    assert len(errors) == 4
    assert 30 < sum(errors) / 4 < 77  # the standard deviation is what a guess of the mean is off by
    low, high = map(float, re.search(r"between (-?\d+) and (\d+)", output).groups())
    assert 100 < high - low < 500
