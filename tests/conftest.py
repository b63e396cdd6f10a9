import importlib.util
import sys
import warnings
from typing import NamedTuple

import pytest
import torch

if importlib.util.find_spec("typer"):  # `make gpu-test` needs torch and numpy alone
    with warnings.catch_warnings():  # of typer about click
        warnings.simplefilter("ignore", DeprecationWarning)
        from pfedbayes.cli import main


class Outcome(NamedTuple):
    """What a command has come to."""

    code: int
    out: str
    err: str


@pytest.fixture
def in_process(monkeypatch, capsys):
    """`pfedbayes …` in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["pfedbayes", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Outcome(caught.value.code, *capsys.readouterr())

    return call


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """Plans set torch's number of threads for the whole process; the next test shall not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
