"""The files around the package agree with it, and the wheel brings the experiments and examples."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pfedbayes

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_all_files_name_one_version():
    assert f"\nversion: {pfedbayes.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version = "{pfedbayes.__version__}"' in (ROOT / "packaging/conda/meta.yaml").read_text()


def test_the_licence_names_what_the_wheel_bundles():
    parts = PROJECT["license"].split(" AND ")
    notice = (ROOT / "NOTICE").read_text()
    assert parts == ["Apache-2.0", "CC-BY-SA-3.0", "CC-BY-4.0"]
    assert all(name in notice for name in ("CC BY-SA 3.0", "CC BY 4.0"))
    assert all(f"- {part}\n" in (ROOT / "CITATION.cff").read_text() for part in parts)


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = (ROOT / "packaging/conda/meta.yaml").read_text()
    for requirement in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)(>=[\d.]+)", requirement).groups()
        assert f"- {'pytorch' if name == 'torch' else name} {bound}\n" in recipe


def test_ranges_have_caps_in_extras_alone():
    assert not [requirement for requirement in PROJECT["dependencies"] if "<" in requirement]


def test_the_workflow_runs_what_ci_runs():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert "- run: .ci/run\n" in workflow
    versions = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert f"python: {versions}".replace("'", '"') in workflow


@pytest.mark.slow
def test_a_wheel_brings_what_the_command_lists(tmp_path):
    """From a wheel, in an empty folder: the command lists the experiments, writes one, and estimates a run of it."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        meta = next(name for name in archive.namelist() if name.endswith("METADATA"))
        assert f"License-Expression: {PROJECT['license']}" in archive.read(meta).decode()

    def call(*arguments):
        empty = tmp_path / "empty"
        empty.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "pfedbayes", *arguments],
            cwd=empty, env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    assert "mnist_medium.toml" in call("experiments")
    assert call("experiments", "heart.csv") == "heart.csv\n"
    table = ["--data", "heart.csv", "--target", "disease", "--client-column", "hospital"]
    assert "personal" in call("run", *table, "--set", "training.rounds=1", "--set", "evaluation.folds=0")
