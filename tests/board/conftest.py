"""The board shows the runs that the tests of the report make up."""

import importlib.util
from pathlib import Path

REPORT = Path(__file__).parents[1] / "report" / "conftest.py"
spec = importlib.util.spec_from_file_location("runs_of_the_report", REPORT)
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
make_run, save_run = made.make_run, made.save_run
