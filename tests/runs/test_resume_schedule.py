"""The schedule of the learning rates fits the length of the run, and a resumed run keeps it."""

import csv
import logging

import pytest

from pfedbayes import Federation, Training, UserError, runs
from pfedbayes.methods import Hierarchical
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment


def settings_for(folder, *others):
    path = folder / "table.csv"
    if not path.exists():
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["x", "site", "y"])
            rows.writerows([[k % 7, "ab"[k % 2], "yes" if k % 7 > 3 else "no"] for k in range(40)])
    shorter = ["evaluation.folds=0", "evaluation.samples=5", 'evaluation.estimators=["mc5"]', "evaluation.alone=false"]
    own = [f'data.path="{path}"', 'data.target="y"', 'data.client_column="site"', "training.local_steps=2"]
    return read_experiment(None, [*own, *shorter, *others])


def test_the_schedule_follows_the_length_of_the_run(tmp_path):
    assert settings_for(tmp_path, "training.rounds=3").method.anneal == 6
    assert settings_for(tmp_path, "training.rounds=3", "method.anneal=50").method.anneal == 50


def test_a_resumed_run_keeps_its_schedule_and_says_so(tmp_path, caplog):
    out = tmp_path / "run"
    list(execute(settings_for(tmp_path, "training.rounds=3"), out, [1]))
    assert runs.read_run(out).sections["method"]["anneal"] == 6
    with caplog.at_level(logging.WARNING, "pfedbayes"):
        list(execute(settings_for(tmp_path, "training.rounds=4"), out, [1], resume=True))
    assert "the learning rates have already fallen to zero (method.anneal=6)" in caplog.text
    assert runs.read_run(out).sections["method"]["anneal"] == 6
    with pytest.raises(UserError, match=r"method\.anneal was 6 and is 99"):
        list(execute(settings_for(tmp_path, "training.rounds=5", "method.anneal=99"), out, [1], resume=True))


def test_python_users_get_the_same(tmp_path):
    from federations import make_model, make_shards

    training = Training(rounds=5, local_steps=3)
    assert Federation(make_shards(), make_model(), Hierarchical(), training).method.anneal == 15
    assert Federation(make_shards(), make_model(), Hierarchical(anneal=7), training).method.anneal == 7
