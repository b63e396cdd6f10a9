"""The examples run, at a small scale."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

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


def test_four_hospitals_go_from_a_csv_to_predictions_that_may_abstain(tmp_path):
    output = run("four_hospitals.py", tmp_path, "--set", "training.rounds=20")
    names = ["cleveland", "hungarian", "switzerland", "va"]
    result = runs.read_run(tmp_path / "run")
    assert result.info.clients == names
    assert {record.client for record in result.summary.joining} == set(names)
    assert np.mean(result.rounds[-1].personal["mc100"]["accuracy"][0]) > 65
    assert runs.read_run(tmp_path / "three").info.clients == [name for name in names if name != "switzerland"]
    rows = table(tmp_path / "cleveland_predicted.csv")
    assert len(rows) == 61
    assert all(abs(float(row["p_no"]) + float(row["p_yes"]) - 1) < 1e-5 for row in rows)
    answered = sum(row["abstain"] == "false" for row in rows)
    found = re.findall(r"^(\w+): (\d+) new patients, (\d+) of them answered, (\d+) of these", output, re.MULTILINE)
    assert found[0][:3] == ("cleveland", "61", str(answered))
    assert found[1][:2] == ("switzerland", "41")
    assert all(int(right) <= int(answers) for *_, answers, right in found)
    assert re.search(r"^certificate: with 95% confidence", output, re.MULTILINE)


def test_schools_predict_scores_with_intervals_and_let_a_school_join(tmp_path):
    rng, source = np.random.default_rng(0), tmp_path / "school.csv"
    sizes = {"a": 30, "b": 40, "c": 50, "d": 60}
    with source.open("w", newline="") as file:
        pupils = csv.writer(file)
        pupils.writerow(["f0", "f1", "score", "school"])
        for k, (name, count) in enumerate(sizes.items()):
            for first, second in rng.normal(size=(count, 2)):
                pupils.writerow([f"{first:.3f}", f"{second:.3f}", f"{20 + 5 * first + k + rng.normal():.1f}", name])
    output = run("schools.py", source, tmp_path / "out", "--set", "training.rounds=20")
    assert runs.read_run(tmp_path / "out" / "run").info.clients == ["a", "c", "d"]
    inside, new = map(int, re.search(r"^d: (\d+) of (\d+) new pupils lie within", output, re.MULTILINE).groups())
    assert new == 10
    assert inside >= 6
    assert "b: own model trained on 40 rows" in output


def test_survival_predicts_times_and_lets_an_institution_join(tmp_path):
    output = run("survival.py", tmp_path, "--set", "training.rounds=20")
    assert len(runs.read_run(tmp_path / "run").info.clients) == 17
    rows = table(tmp_path / "patients" / "predicted.csv")
    assert len(rows) == 12
    assert all(0 < float(row["survival_365"]) < float(row["survival_180"]) < 1 for row in rows)
    past, new = map(int, re.search(r"^(\d+) of (\d+) new patients were alive", output, re.MULTILINE).groups())
    assert new == 12
    assert past >= 8
    assert "12: own model trained on 23 rows" in output


def test_mnist_tells_how_sure_clients_are_of_digits_that_they_have_never_seen(tmp_path):
    small = ["data.train_per_label=20", "data.test_per_label=20", "data.clients=4", "training.rounds=3"]
    settings = [word for setting in small for word in ("--set", setting)]
    output = run("mnist.py", tmp_path, *settings, "--set", "execution.compile=false")
    rows = re.findall(r"^client \d +((?:\d )+) +([\d.]+) +([\d.]+) +\d+% +\d+%$", output, re.MULTILINE)
    assert [digits.split() for digits, _, _ in rows] == [list("01234"), list("56789")] * 2
    assert all(0 <= float(entropy) <= 2.31 for _, *both in rows for entropy in both)
