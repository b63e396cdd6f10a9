"""Bad inputs of all kinds are accepted, or refused in one line; crashes of all kinds leave nothing broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
