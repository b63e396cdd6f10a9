"""Records of older sweeps are read under the names of today."""

import json

import pytest

from pfedbayes.errors import UserError
from pfedbayes.sweep.results import read_results, write_results
from pfedbayes.sweep.scores import read_records

SCORES = {"last": 91.0, "nll": 0.3, "ece": 0.02, "evaluations": 101}
RECORD = {
    "method": "fedavg", "preset": "paper", "dataset": "mnist", "size": "small", "split": "two-block",
    "variant": "default", "seed": 1, "personal": None, "device": "Some CPU", "seconds": 1.5, "commit": None,
    "cell": "x", "varied": {}, "settings": {},
}  # fmt: skip


def write(path, **scores):
    path.write_text(json.dumps([RECORD | {"shared": {"mean": SCORES | scores}}]))
    return path


def test_old_and_new_names_are_read_alike(tmp_path):
    old = read_records(write(tmp_path / "old.json", best_700_800=92.0, mean_700_800=90.0))
    new = read_records(write(tmp_path / "new.json", window_best=92.0, window_mean=90.0))
    assert old == new
    assert new[0]["shared"]["mean"] == SCORES | {"window_best": 92.0, "window_mean": 90.0}


def test_new_names_are_written(tmp_path):
    write_results(
        tmp_path / "new.json", read_results(write(tmp_path / "old.json", best_700_800=92.0, mean_700_800=90.0))
    )
    assert "700_800" not in (tmp_path / "new.json").read_text()
    assert '"window_best": 92.0' in (tmp_path / "new.json").read_text()


def test_a_missing_score_is_named(tmp_path):
    with pytest.raises(UserError, match="shared mean of record 1 has no 'window_mean'"):
        read_records(write(tmp_path / "cut.json", best_700_800=92.0))
