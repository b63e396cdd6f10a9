"""Commands that list: as tables, as JSON, and as files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pfedbayes.cli.app import app
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS

ROOT = Path(__file__).parents[2]


def call(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_json_instead_of_tables():
    found = json.loads(call("methods", "--json"))
    assert list(found) == list(METHODS)
    assert found["fedavg"]["settings"]["eta"] == METHODS["fedavg"]().eta
    assert json.loads(call("data", "--json"))["mnist"]["found"]


def test_every_experiment_says_what_it_is():
    about = json.loads(call("experiments", "--json"))
    files = [path.name for name in ("experiments", "examples") for path in (ROOT / name).glob("*.*")]
    assert sorted(about) == sorted(files)
    assert all(len(sentence) > 20 and sentence.endswith(".") for sentence in about.values())
    assert "mnist_medium.toml" in call("experiments")


def test_experiments_are_written(tmp_path):
    call("experiments", "--out", str(tmp_path / "all"))
    written = {path.name for path in (tmp_path / "all").iterdir()}
    assert {"table1.toml", "heart.csv", "four_hospitals.py"} <= written
    original = ROOT / "experiments" / "table1.toml"
    assert (tmp_path / "all" / "table1.toml").read_bytes() == original.read_bytes()
    with pytest.raises(UserError, match="exists: give another folder"):
        call("experiments", "table1.toml", "--out", str(tmp_path / "all"))
    with pytest.raises(UserError, match=r"did you mean 'table1\.toml'"):
        call("experiments", "table1", "--out", str(tmp_path))


def test_a_short_option_for_help_and_completion_of_the_shell():
    assert "--data" in call("run", "-h")
    assert "--host" in call("federation", "keys", "-h")
    assert "--install-completion" in call("-h")


def test_an_app_is_written_without_flower(tmp_path):
    script = """
        import sys
        sys.modules["flwr"] = None
        from pathlib import Path
        from typer.testing import CliRunner
        from pfedbayes.cli.app import app
        from pfedbayes.errors import UserError
        import pfedbayes.flower
        done = CliRunner().invoke(app, ["federation", "new", "app"])
        assert done.exit_code == 0, done.exception
        assert Path("app/federation/task.py").exists()
        for use in (lambda: pfedbayes.flower.client_app, lambda: pfedbayes.flower.require_flwr()):
            try:
                use()
            except UserError as error:
                assert "pip install 'pfedbayes[flower]'" in str(error)
            else:
                raise AssertionError
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
