"""A run killed at any moment and resumed gives the same bits as one that was left alone."""

import random
import time

import pytest

from command_line import SMALL, log_without_times, pfedbayes, start
from pfedbayes import load, runs

IN_FILE = ["--set", "training.train=chosen", "--set", "execution.resting=file"]
ON_MNIST = ["--set", "training.rounds=12", "--set", "training.evaluate_every=2"]


@pytest.mark.parametrize(
    ("arguments", "longest"),
    [
        ([*SMALL, "--set", "training.rounds=150", "--set", "training.participants=2"], 4.0),
        ([*SMALL, "--set", "training.rounds=150", "--set", "training.participants=2", *IN_FILE], 4.0),
        pytest.param([*ON_MNIST, "--set", "training.participants=4", "--seeds", "2"], 25.0, marks=pytest.mark.slow),
        pytest.param([*ON_MNIST, "--set", "method.name=fedprox"], 12.0, marks=pytest.mark.slow),
        pytest.param([*ON_MNIST, "--set", "training.train=chosen", "--set", "training.participants=3"], 12.0,
                     marks=pytest.mark.slow),
        pytest.param([*ON_MNIST, "--set", "training.participants=3", *IN_FILE], 12.0, marks=pytest.mark.slow),
    ],
    ids=["small", "small-file", "mnist-two-seeds", "mnist-fedprox", "mnist-chosen", "mnist-file"],
)  # fmt: skip
def test_five_kills_change_no_bit(tmp_path, arguments, longest):
    arguments = [*arguments, "--set", "execution.checkpoint_seconds=0.2"]
    assert pfedbayes("run", *arguments, "--out", "whole", cwd=tmp_path).returncode == 0
    moments = random.Random(7)
    for _ in range(5):
        process = start("run", *arguments, "--out", "killed", "--resume", cwd=tmp_path)
        time.sleep(moments.uniform(0.5, longest))
        process.kill()
        process.communicate()
    done = pfedbayes("run", *arguments, "--out", "killed", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert log_without_times(tmp_path / "killed") == log_without_times(tmp_path / "whole")
    killed, whole = (load(tmp_path / name).tensors() for name in ("killed", "whole"))
    assert killed.keys() == whole.keys()
    assert all(killed[name].equal(whole[name]) for name in whole)
    assert (tmp_path / "killed" / runs.SUMMARY).exists()
