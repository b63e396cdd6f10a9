"""Bad inputs of all kinds are accepted, or refused in one line; crashes of all kinds leave nothing broken."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pfedbayes.files.checksums import check_json, dump_json

from .damage import change_json

ROOT = Path(__file__).parents[2]
PARTS = 4
ALL = 6000


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """The folder of the good files that cases begin with; all workers of a session share it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fuzz-bases"


def fuzz(module, *arguments, timeout):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_a_sample_of_bad_inputs(bases, part):
    fuzz("tests.fuzz", "--cases", 500, "--part", f"{part}/{PARTS}", "--workers", 1, "--bases", bases, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_bad_inputs(bases):
    fuzz("tests.fuzz", "--cases", ALL, "--workers", 2, "--bases", bases, timeout=7000)


def test_changed_files_come_further_than_their_checksum(tmp_path):
    path = tmp_path / "file.json"
    outcomes = Counter()
    for seed in range(100):
        path.write_text(dump_json({"a": [1, 2, 3], "b": {"c": "text"}}, indent=1))
        change_json(random.Random(seed), path)
        try:
            outcomes[check_json(path.read_bytes())] += 1
        except ValueError:
            outcomes["refused"] += 1
    assert outcomes[True] >= 30
    assert outcomes["refused"] >= 1


def test_some_failures_of_the_disk(bases):
    some = ("--every", 17, "--scenario", "run", "--scenario", "extend, in a file")
    fuzz("tests.fuzz.crashes", "--failures", *some, "--bases", bases, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_failure_of_the_disk(bases):
    fuzz("tests.fuzz.crashes", "--failures", "--bases", bases, timeout=7000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills(bases):
    fuzz("tests.fuzz.crashes", "--kills", 200, "--bases", bases, timeout=7000)
