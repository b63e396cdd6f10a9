"""`make gpu-test` runs every test that needs a GPU, and says why if it cannot."""

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_test

TESTS = Path(__file__).parent


def test_without_a_gpu_it_fails_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_test.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpu-test: torch")
    assert "sees no GPU" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["torch", "numpy", "pytest"])
def test_a_missing_package_is_named_in_one_line(monkeypatch, capsys, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert gpu_test.main() == 2
    assert capsys.readouterr().err.startswith(f"gpu-test: {name} is missing")


@pytest.fixture
def command(monkeypatch):
    """The command that it runs on a machine with a GPU; its exit code is 7."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr("sys.argv", ["gpu_test.py", "-x"])
    monkeypatch.setattr(subprocess, "run", lambda args, **_: calls.append(args) or SimpleNamespace(returncode=7))
    assert gpu_test.main() == 7
    return calls[0]


def test_with_a_gpu_it_runs_the_marked_tests_of_every_file_that_has_some(command):
    assert command[command.index("gpu") - 1] == "-m"
    assert "-x" in command
    marked = {str(path) for path in TESTS.rglob("test_*.py") if "@needs_gpu" in path.read_text()}
    assert str(TESTS / "engine/backend/test_gpu.py") in marked
    assert marked <= set(command)


def test_tests_are_marked_in_the_way_that_the_command_looks_for():
    direct = [path.name for path in TESTS.rglob("*.py") if "mark." + "gpu" in path.read_text()]
    assert direct == ["execution_plans.py"]


def test_files_that_it_skips_are_not_imported(command):
    assert str(TESTS / "flower/test_secure.py") not in command
